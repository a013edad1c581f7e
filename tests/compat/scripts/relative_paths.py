"""Data by a path relative to the working directory, results by one relative to the script: karpathy/nanoGPT, data/shakespeare/prepare.py."""

import os

with open(os.path.join("data", "input.txt")) as stream:
    text = stream.read()
with open(os.path.join(os.path.dirname(__file__), f"length{os.environ['RANK']}.txt"), "w") as stream:
    stream.write(f"{len(text)}\n")
print("characters", len(text), "cwd is", os.path.basename(os.getcwd()))
