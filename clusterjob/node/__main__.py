"""Run `clusterjob launch` without the submit half: ``python -m clusterjob.node``."""

import sys

from clusterjob.node.launch import main

if __name__ == "__main__":
    sys.exit(main())
