"""A SIGTERM handler that sets a flag, the loop saves and leaves: facebookresearch/fairseq and preemptible clusters' trainers."""

import os
import signal
import sys
import time

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
rank = os.environ["RANK"]
open(f"ready{rank}", "w").close()
while not asked:
    time.sleep(0.05)
with open(f"saved{rank}.txt", "w") as stream:
    stream.write("checkpoint\n")
sys.exit(0)
