"""A helper process that lives as long as the run and is asked to stop by atexit: wandb.init in wandb/examples."""

import atexit
import subprocess
import sys

import torch.distributed as dist

service = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read(); print('service stops')"], stdin=subprocess.PIPE)


def teardown():
    service.stdin.close()
    service.wait()


atexit.register(teardown)
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
print("trained")
