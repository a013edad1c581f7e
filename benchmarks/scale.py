"""Measure how fast thousands of agents join and learn of a failure, and what they cost.

The coordinator is real and runs in a process of its own, which alone is measured for CPU time and
memory. The agents are connections of one other process that send and check real frames
(workers/scale_agents.py). The exit code is 1 if a target is missed. See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import WORKERS, Failed, Row, measured, option_parser, parse_options, stop

from clusterjob.node.system import network

PARTS = ("join", "failure", "cost")
# By number of agents: seconds until all have joined, and until all have the stop order.
TARGETS = {512: (0.3, 0.1), 2048: (1.5, 0.3), 8192: (8.0, 1.5)}
FLAT_TARGET = 1.5  # the cost per agent, over that of the smallest job
READY_SECONDS, RUN_SECONDS = 30.0, 180.0
IDLE_SECONDS = 6.0  # seconds for which only heartbeats are sent

Sample = dict[str, float]  # one run: seconds, microseconds and bytes by name


def sample(nnodes: int, environ: Mapping[str, str], tree: Path, directory: Path) -> Sample:
    """Run one job of simulated agents; return what was measured.

    Args:
        nnodes: number of agents, node 0's included.
        environ: the variables of the processes.
        tree: the directory that has the package `clusterjob`.
        directory: for the job directory.
    """
    with network.listen_at("127.0.0.1", 0, backlog=1) as free:
        port = free.getsockname()[1]
    variables = {
        "PYTHONPATH": str(tree),
        "SCALE_PORT": str(port),
        "SCALE_IDLE": str(IDLE_SECONDS),
    }
    token = f"{secrets.token_hex(16)}\n".encode()

    def start(name: str, argument: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(WORKERS / name), str(nnodes), argument],
            env={**environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(token)
        process.stdin.flush()
        return process

    with tempfile.TemporaryDirectory(dir=directory) as job_dir:
        coordinator = start("scale_coordinator.py", job_dir)
        agents: subprocess.Popen[bytes] | None = None
        try:
            assert coordinator.stdout is not None
            marks = [json.loads(coordinator.stdout.readline())]  # it listens
            agents = start("scale_agents.py", str(IDLE_SECONDS + 2.5))
            output, errors = agents.communicate(timeout=RUN_SECONDS)
            if agents.returncode:
                raise Failed(f"{nnodes} agents: {errors.decode()[-400:]}")
            rest, _ = coordinator.communicate(timeout=READY_SECONDS)
            marks += [json.loads(line) for line in rest.splitlines()]
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise Failed(f"{nnodes} agents: {error}") from error
        finally:
            for process in (coordinator, agents):
                if process is not None:
                    stop(process)
    return _sample(nnodes, json.loads(output), {mark["event"]: mark for mark in marks})


def _sample(nnodes: int, times: Sample, marks: Mapping[str, Any]) -> Sample:
    def used(what: str, begin: str, end: str) -> float:
        return (marks[end][what] - marks[begin][what]) / nnodes

    idle = marks["idle again"]["at"] - marks["idle"]["at"]
    return {
        "join": times["started"] - times["begin"],
        "failure": times["stopped"] - times["failing"],
        "CPU of a join, us": 1e6 * used("cpu", "listening", "started"),
        "CPU of a failure, us": 1e6 * used("cpu", "idle again", "stopping"),
        "CPU of heartbeats, us/s": 1e6 * used("cpu", "idle", "idle again") / idle,
        "memory, kB": used("bytes", "listening", "started") / 1000,
    }


def measure(
    counts: list[int], runs: int, trees: list[Path], environ: Mapping[str, str], directory: Path
) -> dict[tuple[int, int], list[Sample]]:
    """Return the samples by number of agents and index of the tree; the trees take turns."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for count in counts:
        for _ in range(runs):
            for index, tree in enumerate(trees):
                one = sample(count, environ, tree=tree, directory=directory)
                found.setdefault((count, index), []).append(one)
                shown = ", ".join(f"{name} {value:.3g}" for name, value in one.items())
                print(f"{count} agents, {tree.name}: {shown}", file=sys.stderr)
    return found


def rows_of(found: Mapping[tuple[int, int], list[Sample]], parts: list[str]) -> list[Row]:
    """Return the rows of the table; the cost is compared with that of the smallest job."""
    rows = []
    smallest = min(count for count, _ in found)

    def median(key: tuple[int, int], name: str) -> float | None:
        return statistics.median(one[name] for one in found[key]) if key in found else None

    for count in sorted({count for count, _ in found}):
        samples = found[count, 0]
        for name in samples[0]:
            part = name if name in PARTS else "cost"
            if part not in parts:
                continue
            ours, slowest = median((count, 0), name), max(one[name] for one in samples)
            assert ours is not None
            other, ratio, target = median((count, 1), name), None, None
            if part != "cost":
                target = TARGETS.get(count, (None, None))[PARTS.index(part)]
            elif other is None and count != smallest:
                other = median((smallest, 0), name)
                ratio, target = ours / (other or 1.0), FLAT_TARGET
            what = f"{count} agents: {name if part == 'cost' else f'{name}, s'}"
            rows.append(Row(part, what, len(samples), ours, slowest, other, ratio, target))
    return rows


def main() -> int:
    """Measure, and print the table."""
    parser = option_parser(__doc__, PARTS, runs=3)
    parser.add_argument(
        "--agents",
        type=int,
        nargs="+",
        default=list(TARGETS),
        metavar="N",
        help=f"agents of a job (default: {' '.join(map(str, TARGETS))})",
    )
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="another source tree to measure in turns"
    )
    options = parse_options(parser, PARTS)
    trees = [Path(__file__).resolve().parents[1]]
    trees += [options.against.resolve()] if options.against else []
    other = "against" if options.against else "smallest"
    load = f"{os.getloadavg()[0]:.1f}"
    print(f"load before: {load}", file=sys.stderr)
    return measured(
        lambda environ, directory: rows_of(
            measure(options.agents, options.runs, trees, environ=environ, directory=directory),
            options.parts,
        ),
        other,
        as_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
