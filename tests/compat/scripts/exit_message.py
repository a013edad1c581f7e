"""sys.exit("message") on one rank: scripts that check their arguments, pytorch/examples verify_min_gpu_count."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit("Unable to locate sufficient 2 gpus to run this example. Exiting.")
time.sleep(60)
