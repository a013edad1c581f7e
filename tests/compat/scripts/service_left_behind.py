"""The same in a session of its own, as services of loggers are started: wandb's service process, tensorboard --logdir."""

import subprocess
import sys

process = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(25)", "service"], start_new_session=True, stdout=subprocess.DEVNULL
)
print("started")
