"""Measure what `bootstrap` adds to a process's start.

The parts are: detection of the rank assignment, import, creation of the process group, and the
rendezvous of 1,024 ranks. The sides of a comparison take turns. The exit code is 1 if a target is
missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import textwrap
import timeit
from collections.abc import Mapping
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

sys.path.extend(
    str(Path(__file__).parents[1] / "tests" / each) for each in ("support", "unit", "worker")
)

from test_families import EVERY  # the documented variables of every platform
from test_rank_rendezvous import SIMULATED

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments.this_node import detect

PARTS = ("detect", "import", "init", "roll")
DETECT_TARGET = 1.0  # milliseconds
IMPORT_TARGET = 15.0  # milliseconds over bare Python
INIT_TARGET = 50.0  # milliseconds over init_process_group
RENDEZVOUS_TARGET = 5.0  # seconds
RANKS, SIMULATED_RANKS = 16, 1024


def environments() -> dict[str, dict[str, str]]:
    """Return the environments for `detect`: one per platform and one of a clusterjob worker.

    Each contains the variables of this process, too.
    """
    endpoints = [f"10.0.0.{rank // 8}:{40000 + rank}" for rank in range(512)]
    world = World(
        0,
        "10.0.0.1",
        master_port=29500,
        agent_store=True,
        node_rank=3,
        nnodes=64,
        nproc=8,
        first_rank=24,
        world_size=512,
        gpus=8,
        endpoints_master="10.0.0.1:5000",
        endpoints=",".join(endpoints),
        own_endpoints=",".join(endpoints[24:32]),
    )
    ours = contract.worker_variables(world, 3, job_id="job", max_restarts=0) | {
        contract.JOB_ID: "job",
        contract.REPORT_FD: "5:77",
    }
    found = {name: dict(row[0]) for name, row in EVERY.items()} | {
        "a worker of ours": ours,
        "nothing": {},
    }
    return {name: dict(os.environ) | variables for name, variables in found.items()}


def measure_detect(runs: int) -> Row:
    """Measure one call of `detect` in the environment where it takes longest."""
    costs: dict[str, list[float]] = {}
    for name, environ in environments().items():
        costs[name] = [
            1e3 * seconds / 50
            for seconds in timeit.repeat(
                lambda environ=environ: detect(environ), number=50, repeat=runs
            )
        ]
    worst = max(costs, key=lambda name: statistics.median(costs[name]))
    return row_of("detect", f"detect: {worst} (ms)", costs[worst], DETECT_TARGET)


def difference_in_ms(row: Row, what: str, target: float) -> Row:
    """Return the row with the difference of both sides in milliseconds instead of the ratio."""
    assert row.other is not None
    return Row(
        row.part,
        what,
        row.runs,
        1e3 * (row.ours - row.other),
        1e3 * (row.slowest - row.other),
        1e3 * row.other,
        None,
        target,
    )


def python_seconds(code: str, environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds that a Python process takes for one line of code."""
    begin, end, exit_code, output = run([sys.executable, "-c", code], environ, directory)
    if exit_code:
        raise Failed(f"{code!r} ended with exit code {exit_code}: {output[-600:]}")
    return end - begin


def init_seconds(how: str, environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds from the first rank's call until the last rank has the group."""
    argv = [
        command("clusterjob"),
        "run",
        "--cluster",
        "local",
        "--nproc-per-node",
        str(RANKS),
        str(WORKERS / "meet.py"),
        how,
        str(directory),
    ]
    _, _, exit_code, output = run(argv, environ, directory)
    if exit_code:
        raise Failed(f"{argv} ended with exit code {exit_code}: {output[-600:]}")
    times = [
        tuple(map(float, (directory / str(rank)).read_text().split())) for rank in range(RANKS)
    ]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def rendezvous_seconds(environ: Mapping[str, str], directory: Path) -> float:
    """Return the seconds of a rendezvous of simulated ranks, from first call to last answer."""
    script = directory / "roll.py"
    script.write_text(textwrap.dedent(SIMULATED))
    argv = [
        "sh",
        "-c",
        'ulimit -n 4096 && exec "$@"',
        "sh",
        sys.executable,
        str(script),
        str(SIMULATED_RANKS),
    ]
    _, _, exit_code, output = run(argv, environ, directory)
    if exit_code:
        raise Failed(f"the rendezvous ended with exit code {exit_code}: {output[-600:]}")
    return float(output.splitlines()[-1])


def measure(options: argparse.Namespace, environ: Mapping[str, str], directory: Path) -> list[Row]:
    """Return the rows of the requested parts."""
    rows = []
    if "detect" in options.parts:
        rows.append(measure_detect(options.runs))
    if "import" in options.parts:
        sides = [
            lambda code=code: python_seconds(code, environ, directory)
            for code in ("import clusterjob.bootstrap", "pass")
        ]
        row = compare("import", "", options.runs, None, *sides)
        rows.append(
            difference_in_ms(row, "import clusterjob.bootstrap, over pass (ms)", IMPORT_TARGET)
        )
    if "init" in options.parts:
        sides = [
            lambda how=how: init_seconds(how, environ, directory) for how in ("bootstrap", "plain")
        ]
        row = compare("init", "", options.runs, None, *sides)
        rows.append(
            difference_in_ms(row, f"init of {RANKS}, over init_process_group (ms)", INIT_TARGET)
        )
    if "roll" in options.parts:
        times = [rendezvous_seconds(environ, directory) for _ in range(options.runs)]
        what = f"rendezvous of {SIMULATED_RANKS} simulated ranks"
        rows.append(row_of("roll", what, times, RENDEZVOUS_TARGET))
    return rows


def main() -> int:
    options = parse_options(option_parser(__doc__, PARTS, 9), PARTS)

    def measure_source(environ: Mapping[str, str], directory: Path) -> list[Row]:
        own = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        return measure(options, {**environ, **own}, directory)

    return measured(measure_source, "without", as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
