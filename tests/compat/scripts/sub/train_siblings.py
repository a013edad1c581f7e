"""A script that imports its neighbours, run from the directory above: facebookresearch/dino, main_dino.py with utils.py."""

import sys

import neighbour

print(neighbour.greeting(), sys.path[0].rpartition("/")[2])
