"""python -m with relative imports: facebookresearch/fairseq, python -m fairseq_cli.train; mlfoundations/open_clip, -m training.main."""

import sys

from .model import build

if __name__ == "__main__":
    print(build(), __package__, sys.argv[1:])
