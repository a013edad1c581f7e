"""What the launcher says of the place: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"."""

import os
import sys

import torch.distributed as dist

NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE"
)
for name in NAMES.split():
    print(name, os.environ.get(name))
print("elastic", dist.is_torchelastic_launched(), "run id", bool(os.environ["TORCHELASTIC_RUN_ID"]))
print("address", bool(os.environ["MASTER_ADDR"]), "port", os.environ["MASTER_PORT"].isdigit())
print(sys.argv[0], __file__ == os.path.abspath(sys.argv[0]) or __file__ == sys.argv[0], __name__)
