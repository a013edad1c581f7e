"""Arguments with spaces, dashes, empty words and options that the launcher has too: argparse.REMAINDER of torchrun."""

import sys

print(sys.argv[1:])
