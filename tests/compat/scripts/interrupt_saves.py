"""except KeyboardInterrupt: save: the word language model of pytorch/examples, word_language_model/main.py, and many trainers."""

import os
import time

rank = os.environ["RANK"]
try:
    open(f"ready{rank}", "w").close()
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    print("Exiting from training early")
    time.sleep(0.5)
    with open(f"saved{rank}.txt", "w") as stream:
        stream.write("checkpoint\n")
