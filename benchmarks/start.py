"""Measure how fast a job starts, and how fast it ends after a worker's death.

Where torchrun can do the same, it is measured too. Times are of CLOCK_MONOTONIC, which all
processes of one machine share. The two sides of a comparison take turns: if the machine slows down,
it slows down both. The exit code is 1 if a target is missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from measuring import (
    WORKERS,
    Failed,
    Row,
    command,
    compare,
    measured,
    option_parser,
    parse_options,
    row_of,
    run,
)

PARTS = ("start", "step", "help", "death")
START_TARGETS = {8: 0.30, 16: 0.20}  # ours / torchrun's, by ranks
# By part: the script, and what rank 0 has done when it writes the time.
SCRIPTS = {
    "start": ("first_all_reduce.py", "the first all-reduce"),
    "step": ("first_step.py", "the first step"),
}
HELP_TARGET = 0.25  # ours / torchrun's
DEATH_TARGET = 1.0  # seconds
# How a worker dies, and the exit code of its job.
DEATHS = {"raise": 1, "exit": 3, "SIGKILL": 137, "SIGSEGV": 139}


def until_written(
    argv: list[str], script: str, environ: Mapping[str, str], directory: Path
) -> float:
    """Return the seconds from a command's start to the time that rank 0 of a script writes."""
    file = directory / "done"
    file.unlink(missing_ok=True)
    begin, _, code, output = run([*argv, str(WORKERS / script), str(file)], environ, directory)
    if code != 0:
        raise Failed(f"{argv} ended with exit code {code}:\n{output}")
    return float(file.read_text()) - begin


def help_text(argv: list[str], environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds that a command takes to print its help."""
    begin, end, code, output = run(argv, environ, directory)
    if code != 0:
        raise Failed(f"{argv} ended with exit code {code}:\n{output}")
    return end - begin


def death(how: str, collective: str, environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds from a worker's death to the end of the job's command.

    The command must name that worker as the cause.
    """
    file = directory / "died"
    file.unlink(missing_ok=True)
    job = ["run", "--cluster", "local", "--nodes", "2", "--nproc-per-node", "2"]
    argv = [command("clusterjob"), *job, str(WORKERS / "die.py"), how, collective, str(file)]
    _, end, code, output = run(argv, environ, directory)
    if code != DEATHS[how] or "FAILED: rank 3 (node 1, local rank 1," not in output:
        raise Failed(
            f"the worker that died by {how} was not blamed, "
            f"or the exit code was not {DEATHS[how]} ({code}):\n{output}"
        )
    return end - float(file.read_text())


def measure(options: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> list[Row]:
    """Return the rows of the requested parts."""
    rows = []
    for part in [part for part in SCRIPTS if part in options.parts]:
        script, what = SCRIPTS[part]
        for ranks in options.ranks:
            count = ["--nproc-per-node", str(ranks)]
            ours = [command("clusterjob"), "run", "--cluster", "local", "--nodes", "1", *count]
            sides = [
                lambda argv=argv, script=script: until_written(argv, script, environ, directory)
                for argv in (ours, [command("torchrun"), *count])
            ]
            rows.append(
                compare(
                    part,
                    f"{ranks} ranks to {what}",
                    options.runs,
                    START_TARGETS.get(ranks),
                    *sides,
                )
            )
    if "help" in options.parts:
        sides = [
            lambda name=name: help_text([command(name), "--help"], environ, directory)
            for name in ("clusterjob", "torchrun")
        ]
        rows.append(compare("help", "--help", options.runs, HELP_TARGET, *sides))
    if "death" in options.parts:
        for how in DEATHS:
            for collective in ("all_reduce", "barrier"):
                times = [death(how, collective, environ, directory) for _ in range(options.runs)]
                what = f"{how} while 3 ranks wait in {collective}"
                rows.append(row_of("death", what, times, DEATH_TARGET))
    return rows


def main() -> int:
    parser = option_parser(__doc__, PARTS, 5)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[8, 16],
        metavar="R",
        help="ranks for the parts start and step (default: 8 16)",
    )
    options = parse_options(parser, PARTS)
    if min(options.ranks) < 1:
        parser.error("--ranks has to be at least 1")
    return measured(partial(measure, options), "torchrun", as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
