"""python -m PACKAGE: huggingface/accelerate-like packages with a __main__."""

from .model import build

print("package", build())
