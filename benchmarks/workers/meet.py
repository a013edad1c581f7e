"""Create the process group with torch or bootstrap; each rank writes its begin and end time.

Use: meet.py plain|bootstrap DIRECTORY
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

begin = time.monotonic()
if sys.argv[1] == "bootstrap":
    from clusterjob import bootstrap

    bootstrap.init("gloo")
else:
    dist.init_process_group("gloo")
end = time.monotonic()
Path(sys.argv[2], os.environ["RANK"]).write_text(f"{begin!r} {end!r}")
dist.barrier()
if sys.argv[1] == "bootstrap":
    bootstrap.shutdown()
else:
    dist.destroy_process_group()
