"""atexit handlers that finish a run's files, also after an error: wandb and tensorboard templates."""

import atexit
import os

rank = os.environ["RANK"]


def finish(stream):
    stream.write("finished\n")
    stream.close()


log = open(f"summary{rank}.txt", "w")
atexit.register(finish, log)
atexit.register(print, "said last", rank)
log.write("loss 1.0\n")
