"""Shared parts of the benchmarks: timed commands, comparisons in turns, tables of results.

Times are of CLOCK_MONOTONIC, which all processes of one machine share. The two sides of a
comparison take turns: if the machine slows down, it slows down both. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from clusterjob.node import contract
from clusterjob.node.system import processes

WORKERS = Path(__file__).resolve().parent / "workers"
COMMAND_TIMEOUT = 300.0  # seconds for one command
TERMINATE_TIMEOUT = 10.0  # seconds for a command to end after SIGTERM


class Failed(Exception):
    """A measured command failed or timed out."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        part: the part of the benchmark, as named on the command line.
        what: what was measured.
        runs: number of measurements.
        ours: median of clusterjob, in seconds unless ``what`` names another unit.
        slowest: largest value of clusterjob.
        other: median of the other side, in the same unit; None without another side.
        ratio: ours / other, if the target limits the ratio; else None.
        target: upper limit of ``ratio``, or of ``ours`` if there is no ratio; None if there is no
            target.
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
        """Whether the row has no target or reaches it."""
        measured = self.ours if self.ratio is None else self.ratio
        return self.target is None or measured <= self.target


def row_of(
    part: str, what: str, values: Sequence[float], target: float | None, other: float | None = None
) -> Row:
    """Return the row of measurements whose target limits their median."""
    return Row(part, what, len(values), statistics.median(values), max(values), other, None, target)


def option_parser(
    description: str | None, parts: Sequence[str], runs: int
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks: the parts, --runs and --json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"what to measure: {', '.join(parts)} (default: all)",
    )
    parser.add_argument(
        "--runs", type=int, default=runs, metavar="N", help=f"runs of each (default: {runs})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse_options(parser: argparse.ArgumentParser, parts: Sequence[str]) -> argparse.Namespace:
    """Return the options; an error ends the command."""
    options = parser.parse_args()
    options.parts = options.parts or list(parts)
    if unknown := set(options.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there is {', '.join(parts)}")
    if options.runs < 1:
        parser.error("--runs has to be at least 1")
    return options


def measured(
    measure: Callable[[dict[str, str], Path], list[Row]], other: str, *, as_json: bool
) -> int:
    """Measure in a new directory, and print the rows; return the exit code.

    Args:
        measure: returns the rows, from the environment of the commands and the directory.
        other: title of the other side's column.
        as_json: whether to print JSON.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="clusterjob-bench-") as directory:
            rows = measure(environment(Path(directory) / "home"), Path(directory))
    except Failed as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    return finish(rows, other, as_json=as_json)


def command(name: str) -> str:
    """Return the path of a command: beside this Python interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Failed(f"there is no {name} beside {sys.executable} nor on PATH")
    return found


def environment(home: Path) -> dict[str, str]:
    """Return the environment of both sides: the user's, without variables of launchers and jobs.

    Bytecode is written: pip compiles an installed package, and a source tree is compiled in the
    first turn, which is not counted. Temporary files, which torchrun leaves behind, are put in a
    directory beside ``home``.
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
    """Run a command to its end; return its begin, its end, its exit code and its output."""
    output = directory / "said"
    with output.open("wb") as stream:
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
            code = process.wait(COMMAND_TIMEOUT)
            end = time.monotonic()
        except subprocess.TimeoutExpired:
            raise Failed(f"{argv} had not ended after {COMMAND_TIMEOUT:g} s") from None
        finally:
            stop(process)
    return begin, end, code, output.read_text(errors="replace")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs and its descendants, by pid."""
    if process.poll() is not None:
        return
    started = {pid: processes.start_ticks(pid) for pid in processes.descendants(process.pid)}
    process.terminate()
    try:
        process.wait(TERMINATE_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, ticks in started.items():
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
    """Measure two sides in turns; the first turn of each side is not counted."""
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
    return (
        f"{len(os.sched_getaffinity(0))} cores, torch {metadata.version('torch')}, "
        f"Python {platform.python_version()}"
    )


def show(rows: list[Row], other: str) -> None:
    """Print the rows as a table; ``other`` is the title of the other side's column."""
    print(f"{machine()}; medians in seconds\n")
    print(f"{'':44}{'clusterjob':>11}{'slowest':>9}{other:>10}{'ratio':>7}{'target':>8}")
    for row in rows:
        theirs = "" if row.other is None else f"{row.other:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"{row.target:.2f}"
        missed = "" if row.met else "  MISSED"
        print(
            f"{row.what:44}{row.ours:11.2f}{row.slowest:9.2f}"
            f"{theirs:>10}{ratio:>7}{target:>8}{missed}"
        )


def finish(rows: list[Row], other: str, *, as_json: bool) -> int:
    """Print the rows; return the exit code: 1 if a target was missed, else 0."""
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
