"""The main process prepares the data, the others wait and then read it: huggingface/transformers, TrainingArguments.main_process_first."""

import contextlib
import json
import os

import torch.distributed as dist


@contextlib.contextmanager
def main_process_first():
    main = dist.get_rank() == 0
    try:
        if not main:
            dist.barrier()
        yield
    finally:
        if main:
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    with main_process_first():
        if not os.path.exists("cache.json"):
            assert dist.get_rank() == 0
            with open("cache.json", "w") as stream:
                json.dump({"rows": 3}, stream)
        rows = json.load(open("cache.json"))["rows"]
    print("rows", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
