"""The command ``clusterjob``, and ``python -m clusterjob``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    if sys.argv[1:2] == ["launch"]:
        # On a node: nothing of the submit half is loaded, and the workers are forked from as plain a process as can be.
        from clusterjob.node.launch import main as launch

        return launch(sys.argv[2:])
    from clusterjob.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
