"""The program of a directory: `python app`."""

import os
import sys

import helper

print(helper.WORD, __name__, os.path.basename(sys.argv[0]), sys.argv[1:])
print(os.path.basename(sys.path[0]), "rank", os.environ["RANK"])
