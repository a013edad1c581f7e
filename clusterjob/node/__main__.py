"""``python -m clusterjob.node``: the launch command without the submit half."""

import sys

from clusterjob.node.launch import main

if __name__ == "__main__":
    sys.exit(main())
