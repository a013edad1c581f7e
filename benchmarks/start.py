"""How quickly a job starts and how quickly it ends when a worker dies, beside torchrun where that can do the same.

Times are of CLOCK_MONOTONIC, which all processes of one machine share. The two sides of a comparison take turns, so that a
machine that slows down slows both. Ends with exit code 1 when a target is missed. See benchmarks/README.md.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from clusterjob.node import contract, processes

WORKERS = Path(__file__).resolve().parent / "workers"
PARTS = ("start", "help", "death")
START_TARGETS = {8: 0.30, 16: 0.20}  # ours / torchrun's, by ranks
HELP_TARGET = 0.25  # ours / torchrun's
DEATH_TARGET = 1.0  # seconds
DEATHS = {"raise": 1, "exit": 3, "SIGKILL": 137, "SIGSEGV": 139}  # how a worker dies, and the job's exit code then
PATIENCE = 300.0  # seconds for one command
SETTLING = 10.0  # seconds for a command that was told to end


class Failed(Exception):
    """A command did not do what was to be measured."""


@dataclass(frozen=True)
class Row:
    """One line of the result. Times are medians in seconds; target is of the ratio, or of ours where nothing is compared."""

    part: str
    what: str
    runs: int
    ours: float
    slowest: float
    torchrun: float | None
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
    """Return the environment of both sides: the user's, without what a launcher or another job has set."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in contract.LAUNCH_VARIABLES and not name.startswith("CLUSTERJOB_")
    }
    return inherited | {"CLUSTERJOB_HOME": str(home)}


def run(argv: list[str], environ: Mapping[str, str], directory: Path) -> tuple[float, float, int, str]:
    """Run a command to its end; return when it began, when it had ended, its exit code and what it said."""
    said = directory / "said"
    with said.open("wb") as stream:
        begin = time.monotonic()
        process = subprocess.Popen(argv, env=dict(environ), cwd=directory, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
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


def first_all_reduce(argv: list[str], environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds from a command's start to rank 0's first all-reduce."""
    file = directory / "done"
    file.unlink(missing_ok=True)
    begin, _, code, said = run([*argv, str(WORKERS / "first_all_reduce.py"), str(file)], environ, directory)
    if code != 0:
        raise Failed(f"{argv} ended with exit code {code}:\n{said}")
    return float(file.read_text()) - begin


def help_text(argv: list[str], environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds that a command takes to print its help."""
    begin, end, code, said = run(argv, environ, directory)
    if code != 0:
        raise Failed(f"{argv} ended with exit code {code}:\n{said}")
    return end - begin


def death(how: str, collective: str, environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds from a worker's death to the return of the job's command, which has to blame that worker."""
    file = directory / "died"
    file.unlink(missing_ok=True)
    argv = [command("clusterjob"), "run", "--cluster", "local", "--nodes", "2", "--nproc-per-node", "2"]
    _, end, code, said = run([*argv, str(WORKERS / "die.py"), how, collective, str(file)], environ, directory)
    if code != DEATHS[how] or "FAILED: rank 3 (node 1, local rank 1," not in said:
        raise Failed(f"the worker that died by {how} was not blamed, or the exit code was not {DEATHS[how]} ({code}):\n{said}")
    return end - float(file.read_text())


def compare(part: str, what: str, runs: int, target: float | None, ours: Callable[[], float], theirs: Callable[[], float]) -> Row:
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


def measure(options: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> list[Row]:
    """Return all rows that were asked for."""
    rows = []
    if "start" in options.parts:
        for ranks in options.ranks:
            count = ["--nproc-per-node", str(ranks)]
            ours = [command("clusterjob"), "run", "--cluster", "local", "--nodes", "1", *count]
            sides = [lambda argv=argv: first_all_reduce(argv, environ, directory) for argv in (ours, [command("torchrun"), *count])]
            rows.append(compare("start", f"{ranks} ranks to the first all-reduce", options.runs, START_TARGETS.get(ranks), *sides))
    if "help" in options.parts:
        sides = [lambda name=name: help_text([command(name), "--help"], environ, directory) for name in ("clusterjob", "torchrun")]
        rows.append(compare("help", "--help", options.runs, HELP_TARGET, *sides))
    if "death" in options.parts:
        for how in DEATHS:
            for collective in ("all_reduce", "barrier"):
                times = [death(how, collective, environ, directory) for _ in range(options.runs)]
                what = f"{how} while 3 ranks wait in {collective}"
                rows.append(Row("death", what, options.runs, statistics.median(times), max(times), None, None, DEATH_TARGET))
    return rows


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, torch {metadata.version('torch')}, Python {platform.python_version()}"


def show(rows: list[Row]) -> None:
    """Print the rows as a table."""
    print(f"{machine()}; medians in seconds\n")
    print(f"{'':44}{'clusterjob':>11}{'slowest':>9}{'torchrun':>10}{'ratio':>7}{'target':>8}")
    for row in rows:
        other = "" if row.torchrun is None else f"{row.torchrun:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"{row.target:.2f}"
        missed = "" if row.met else "  MISSED"
        print(f"{row.what:44}{row.ours:11.2f}{row.slowest:9.2f}{other:>10}{ratio:>7}{target:>8}{missed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure: {', '.join(PARTS)}; default: all")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each command (default 5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], metavar="R", help="ranks for the part start (default 8 16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    if options.runs < 1 or min(options.ranks) < 1:
        parser.error("--runs and --ranks have to be at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix="clusterjob-bench-") as directory:
            rows = measure(options, environment(Path(directory) / "home"), Path(directory))
    except Failed as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"schema": 1, "machine": machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}, indent=1))
    else:
        show(rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
