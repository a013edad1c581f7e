"""The command ``clusterjob``, and ``python -m clusterjob``."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

_INTERRUPTED = 130  # 128 + SIGINT


def main() -> int:
    """Run the command line; returns the exit code."""
    if sys.argv[1:2] == ["launch"]:
        # On a node: nothing of the submit half is loaded, and the workers are forked from as plain
        # a process as can be.
        try:
            from clusterjob.node.launch import main as launch
        except KeyboardInterrupt:
            return _INTERRUPTED
        return launch(
            sys.argv[2:]
        )  # in a worker that it forks, the program's own KeyboardInterrupt passes here
    if sys.argv[1:2] == ["env"] and find_spec("typer") is None:
        # Inside a job there may be no more than the node zip.
        from clusterjob.node.environments.show import main as env

        return env(sys.argv[2:])
    import gc

    gc.set_threshold(
        50_000
    )  # imports make many objects and no garbage: looking for it takes a tenth of a short command
    try:
        from clusterjob.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        gc.freeze()  # the interpreter's end does not go through all of them for garbage then
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nor is it interrupted: all is done


if __name__ == "__main__":
    sys.exit(main())
