"""A tqdm bar on each rank, disabled on all but the main process: huggingface examples, `disable=not accelerator.is_local_main_process`."""

import os
import time

from tqdm.auto import tqdm

rank = int(os.environ["RANK"])
total = 0
for item in tqdm(range(20), disable=rank != 0, desc="train"):
    total += item
    time.sleep(0.01)
tqdm.write(f"total {total}")
