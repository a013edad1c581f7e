"""Run the command ``clusterjob``, also as ``python -m clusterjob``."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

_INTERRUPTED = 130  # 128 + SIGINT


def main() -> int:
    """Run the command line and return its exit code."""
    for number in (0, 1, 2):  # a closed one would be taken by the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    if sys.flags.inspect and os.environ.pop("PYTHONINSPECT", ""):
        os.execv(sys.executable, sys.orig_argv)  # no prompt in each process of the job
    try:
        os.getcwd()
    except FileNotFoundError:
        print("clusterjob: error: the working directory was deleted", file=sys.stderr)
        print("  hint: change to a directory that exists", file=sys.stderr)
        return 2
    if sys.argv[1:2] == ["launch"] and not (
        sys.argv[2:3] in (["-h"], ["--help"]) and find_spec("typer")
    ):
        # This process runs on a node. It does not load the submit half, so that the workers'
        # forkserver stays small.
        if sys.platform != "linux":
            return _refuse_launch()
        try:
            from clusterjob.node.launch import main as launch
        except KeyboardInterrupt:
            return _INTERRUPTED
        # Not in the try block: a forked worker runs its program in this call, and must see its own
        # KeyboardInterrupt.
        return launch(sys.argv[2:])
    import gc

    # Imports create many objects and no garbage: collections would take 10 % of a short command.
    gc.set_threshold(50_000)
    try:
        from clusterjob.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        # Inside a job, clusterjob may exist only as the node zip, which lacks the command line.
        if error.name not in ("typer", "clusterjob.cli"):
            raise
        print("clusterjob: error: without an installation only launch works", file=sys.stderr)
        print("  hint: pip install clusterjob", file=sys.stderr)
        return 2
    finally:
        gc.freeze()  # the exiting interpreter then skips these objects in its collection
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # the command is done: Ctrl-C must not interrupt the exit


def _refuse_launch() -> int:
    from clusterjob.errors import UsageError, require_linux

    try:
        require_linux("`clusterjob launch`")
    except UsageError as error:
        print(f"clusterjob: error: {error.message}\n  hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
