"""A non-daemon thread that writes the checkpoint after main has returned: asynchronous checkpoint writers, Megatron-LM dist_checkpointing."""

import os
import threading
import time


def write():
    time.sleep(0.5)
    with open(f"written{os.environ['RANK']}.txt", "w") as stream:
        stream.write("late\n")


threading.Thread(target=write).start()
print("main returns")
