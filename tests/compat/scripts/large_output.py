"""50 MB of output from each rank: verbose data pipelines, NCCL_DEBUG=TRACE."""

import os

line = "x" * 99 + os.environ["RANK"]
for _ in range(500):
    print("\n".join([line] * 1000))
