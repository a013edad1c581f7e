"""Measure what metrics and hang detection cost a job on this machine.

The two sides take turns: with --hang-timeout and the samples of the default, and with --no-metrics.
The exit code is 1 if a target is missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from measuring import Failed, Row, compare, measured, option_parser, parse_options, row_of, run
from start import until_written

PARTS = ("start", "steps", "agent")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_digits.py"
AT_MOST = 1.01  # with / without
AGENT_TARGET = 0.5  # percent of a core
WITHOUT = ["--no-metrics"]
WITH = ["--hang-timeout", "10m"]
_START_LIMIT = 60.0  # seconds until the workers run


def job(ranks: int, options: list[str]) -> list[str]:
    """Return the command of a local job with one node."""
    command = [sys.executable, "-m", "clusterjob", "run", "--cluster", "local"]
    return [*command, "--nproc-per-node", str(ranks), *options]


def step(
    ranks: int, epochs: int, options: list[str], environ: Mapping[str, str], directory: Path
) -> float:
    """Return the milliseconds of one step of the example."""
    words = ["--epochs", str(epochs), "--target", "0"]
    argv = [*job(ranks, options), str(EXAMPLE), *words]
    _, _, code, output = run(argv, environ, directory)
    found = re.search(r"(\d+) samples per second", output)
    if code != 0 or found is None:
        raise Failed(f"{argv} ended with exit code {code}:\n{output}")
    return 1000 * 64 / int(found[1])


def agent_use(
    ranks: int, seconds: float, options: list[str], environ: Mapping[str, str], directory: Path
) -> tuple[float, float]:
    """Return the agent's CPU (percent of a core) and memory (MB) while its workers sleep."""
    argv = [*job(ranks, options), "--", "sleep", "1000"]
    known = set(Path(environ["CLUSTERJOB_HOME"]).glob("jobs/*"))
    with subprocess.Popen(argv, env=dict(environ), cwd=directory, stdin=subprocess.DEVNULL) as ours:
        try:
            pid = agent_of(Path(environ["CLUSTERJOB_HOME"]), known)
            time.sleep(5.0)  # the end of the start is not counted
            before, begin = cpu_seconds(pid), time.monotonic()
            time.sleep(seconds)
            used = (cpu_seconds(pid) - before) / (time.monotonic() - begin)
            status = Path(f"/proc/{pid}/status").read_text()
            return 100 * used, int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000
        finally:
            ours.terminate()


def agent_of(home: Path, known: set[Path]) -> int:
    """Return the pid of the agent of a job that has just been started."""
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline:
        for file in home.glob("jobs/*/events.jsonl"):
            lines = file.read_text().splitlines() if file.parent not in known else []
            joined = [json.loads(line) for line in lines if '"joined"' in line]
            if joined and any('"running"' in line or '"started"' in line for line in lines):
                return int(joined[0]["pid"])
        time.sleep(0.1)
    raise Failed("the job did not start")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in nanoseconds unlike /proc/PID/stat."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(options: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> list[Row]:
    """Return the rows of the requested parts."""
    rows, where = [], (environ, directory)
    if "start" in options.parts:
        what = f"{options.ranks} ranks to the first all-reduce"
        sides = [
            lambda o=o: until_written(job(options.ranks, o), "first_all_reduce.py", *where)
            for o in (WITH, WITHOUT)
        ]
        rows.append(compare("start", what, options.runs, AT_MOST, *sides))
    if "steps" in options.parts:
        what = f"one step of train_digits.py, {options.ranks} ranks, ms"
        sides = [
            lambda o=o: step(options.ranks, options.epochs, o, *where) for o in (WITH, WITHOUT)
        ]
        rows.append(compare("steps", what, options.runs, AT_MOST, *sides))
    if "agent" in options.parts:
        pairs = [
            [agent_use(options.ranks, options.seconds, o, *where) for o in (WITH, WITHOUT)]
            for _ in range(options.agent_runs)
        ]
        for place, name, target in (
            (0, "CPU, % of a core more", AGENT_TARGET),
            (1, "MB more", None),
        ):
            more = [ours[place] - theirs[place] for ours, theirs in pairs]
            other = statistics.median(theirs[place] for _, theirs in pairs)
            what = f"agent of {options.ranks} ranks: {name}"
            rows.append(row_of("agent", what, more, target, other))
    return rows


def main() -> int:
    parser = option_parser(__doc__, PARTS, 9)
    parser.add_argument("--agent-runs", type=int, default=2, metavar="N", help="runs (default: 2)")
    parser.add_argument("--ranks", type=int, default=8, metavar="R", help="ranks (default: 8)")
    parser.add_argument("--epochs", type=int, default=60, metavar="N", help="epochs (default: 60)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="of the part agent (default: 60)"
    )
    options = parse_options(parser, PARTS)
    return measured(partial(measure, options), "without", as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
