"""What the benchmarks share: commands that are run and timed, comparisons in turns, and the table
of results.

Times are of CLOCK_MONOTONIC, which all processes of one machine share. The two sides of a
comparison take turns, so that a machine that slows down slows both. See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from clusterjob.node import contract
from clusterjob.node.system import processes

WORKERS = Path(__file__).resolve().parent / "workers"
PATIENCE = 300.0  # seconds for one command
SETTLING = 10.0  # seconds for a command that was told to end


class Failed(Exception):
    """A command did not do what was to be measured."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        part: what was asked for on the command line.
        what: what was measured.
        runs: how often.
        ours: the median, in seconds unless ``what`` names another unit.
        slowest: the largest.
        other: the median of what it is compared with, in the same unit.
        ratio: ours / other, where that is what the target is of.
        target: the largest ratio, or the largest of ours where there is no ratio, that is good
            enough.
    """

    part: str
    what: str
    runs: int
    ours: float
    slowest: float
    other: float | None
    ratio: float | None
    target: float | None

    @property
    def met(self) -> bool:
        """Whether the target was reached, where there is one."""
        measured = self.ours if self.ratio is None else self.ratio
        return self.target is None or measured <= self.target


def command(name: str) -> str:
    """Return a command of the environment that runs this, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Failed(f"there is no {name} beside {sys.executable} nor on PATH")
    return found


def environment(home: Path) -> dict[str, str]:
    """Return the environment of both sides: the user's, without what a launcher or another job has
    set, and with bytecode.

    A package that pip has installed comes with its bytecode; a source tree gets it at the first
    turn, which does not count. Temporary files, which torchrun leaves behind, lie beside ``home``.
    """
    temporary = home.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in contract.LAUNCH_VARIABLES
        and name != "PYTHONDONTWRITEBYTECODE"
        and not name.startswith("CLUSTERJOB_")
    }
    return inherited | {"CLUSTERJOB_HOME": str(home), "TMPDIR": str(temporary)}


def run(
    argv: list[str], environ: Mapping[str, str], directory: Path
) -> tuple[float, float, int, str]:
    """Run a command to its end; return when it began, when it had ended, its exit code and what it
    said.
    """
    said = directory / "said"
    with said.open("wb") as stream:
        begin = time.monotonic()
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
        try:
            code = process.wait(PATIENCE)
            end = time.monotonic()
        except subprocess.TimeoutExpired:
            raise Failed(f"{argv} had not ended after {PATIENCE:g} s") from None
        finally:
            stop(process)
    return begin, end, code, said.read_text(errors="replace")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, and what it has started, by pid."""
    if process.poll() is not None:
        return
    below = {pid: processes.start_ticks(pid) for pid in processes.descendants(process.pid)}
    process.terminate()
    try:
        process.wait(SETTLING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, ticks in below.items():
        if ticks is not None and processes.start_ticks(pid) == ticks:  # still the same process
            processes.send_signal(pid, signal.SIGKILL)


def compare(
    part: str,
    what: str,
    runs: int,
    target: float | None,
    ours: Callable[[], float],
    theirs: Callable[[], float],
) -> Row:
    """Measure two sides in turns, after one turn of each that does not count."""
    sides = (ours, theirs)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            seconds = sides[side]()
            if turn:
                times[side].append(seconds)
    mine, other = (statistics.median(side) for side in times)
    return Row(part, what, runs, mine, max(times[0]), other, mine / other, target)


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, torch {metadata.version('torch')}, Python {platform.python_version()}"


def show(rows: list[Row], other: str) -> None:
    """Print the rows as a table; ``other`` names what ours is compared with."""
    print(f"{machine()}; medians in seconds\n")
    print(f"{'':44}{'clusterjob':>11}{'slowest':>9}{other:>10}{'ratio':>7}{'target':>8}")
    for row in rows:
        theirs = "" if row.other is None else f"{row.other:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"{row.target:.2f}"
        missed = "" if row.met else "  MISSED"
        print(
            f"{row.what:44}{row.ours:11.2f}{row.slowest:9.2f}{theirs:>10}{ratio:>7}{target:>8}{missed}"
        )


def finish(rows: list[Row], other: str, *, as_json: bool) -> int:
    """Print the rows; return the exit code, which is 1 when a target was missed."""
    if as_json:
        print(
            json.dumps(
                {
                    "schema": 2,
                    "machine": machine(),
                    "rows": [asdict(row) | {"met": row.met} for row in rows],
                },
                indent=1,
            )
        )
    else:
        show(rows, other)
    return 0 if all(row.met for row in rows) else 1
