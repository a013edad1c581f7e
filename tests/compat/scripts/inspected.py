"""Python reads standard input after the script, as with PYTHONINSPECT=1 in the environment."""

import atexit
import os

os.environ["PYTHONINSPECT"] = "1"
atexit.register(print, "the end")
print("rank", os.environ["RANK"])
