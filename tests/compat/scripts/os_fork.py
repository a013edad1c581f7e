"""os.fork in the script, the child works and is waited for: evaluation in a child, karpathy/llm.c helpers and fairseq tasks."""

import os

import torch

rank = os.environ["RANK"]
pid = os.fork()
if pid == 0:
    with open(f"eval{rank}.txt", "w") as stream:
        stream.write(f"{torch.ones(3).sum().item()}\n")
    os._exit(5)
_, status = os.waitpid(pid, 0)
print("child ended with", os.waitstatus_to_exitcode(status))
