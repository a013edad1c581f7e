"""Measure goodput: the steps of a job among faults, over the steps of an undisturbed run.

The job is examples/train_resume.py with one rank on each of four machines, and a fifth machine as a
spare. Machines are network namespaces. All launchers get the same faults at the same times. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from goodput_parts import disk as disks
from goodput_parts import report
from goodput_parts.faults import Fault, Kind, schedule
from goodput_parts.launchers import Clusterjob, Torchrun
from goodput_parts.progress import Progress, differing
from goodput_parts.run import Launcher, Result, run, save
from measuring import environment
from namespaces import machines, skip_reason

_ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("clusterjob", "torchrun", "slurm", "slurm-requeues")
NODES = 4  # machines that run a rank
GOODPUT_TARGET, PEER_TARGET = 0.90, 1.5


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument(
        "launchers",
        nargs="*",
        metavar="LAUNCHER",
        help=f"what to measure: {', '.join(LAUNCHERS)} (default: all)",
    )
    found.add_argument("--minutes", type=float, default=10.0, help="length of a run (default: 10)")
    found.add_argument(
        "--reference-minutes",
        type=float,
        default=None,
        help="length of the two undisturbed runs (default: that of a run)",
    )
    # In 10 minutes, the first seed with ten faults: each kind occurs as often as planned.
    found.add_argument("--seed", type=int, default=5, help="seed of the faults (default: 5)")
    found.add_argument("--mean", type=float, default=60.0, help="mean seconds between two faults")
    found.add_argument("--spares", type=int, default=1, help="spare machines (default: 1)")
    found.add_argument("--hang-timeout", type=int, default=5, help="clusterjob's (default: 5)")
    found.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    found.add_argument(
        "--person-seconds",
        type=float,
        default=120.0,
        help="time without progress after which a person starts the job again (default: 120)",
    )
    found.add_argument(
        "--kinds",
        nargs="+",
        choices=[kind.name.lower() for kind in Kind],
        default=[kind.name.lower() for kind in Kind],
        help="kinds of faults (default: all)",
    )
    found.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    found.add_argument("--keep", type=Path, metavar="DIR", help="keep logs in this new directory")
    return found


@contextlib.contextmanager
def launcher_of(
    name: str, options: argparse.Namespace, directory: Path, checkpoint: Path
) -> Iterator[Launcher]:
    """Yield a launcher with machines of its own."""
    environ = environment(directory.parent / "home") | {"PYTHONPATH": os.environ["PYTHONPATH"]}
    program = [
        str(_ROOT / "examples" / "train_resume.py"),
        "--checkpoint",
        str(checkpoint),
        "--steps",
        str(10**9),
        "--save-every",
        str(options.save_every),
    ]
    if name.startswith("slurm"):
        from goodput_parts.slurm import slurm_launcher

        with slurm_launcher(
            directory, environ, *program, requeues=name == "slurm-requeues"
        ) as launcher:
            yield launcher
        return
    with machines(NODES + options.spares) as made:
        if name == "clusterjob":
            yield Clusterjob(
                made,
                directory,
                environ,
                *program,
                spares=options.spares,
                hang_timeout=options.hang_timeout,
            )
        else:
            yield Torchrun(made, directory, environ, *program, nnodes=NODES)


def one_run(
    name: str, options: argparse.Namespace, directory: Path, faults: list[Fault], seconds: float
) -> tuple[Result, Progress, float]:
    """Run one launcher; return the result, the progress and the time of its start."""
    with disks.mounted(Path(f"{directory}-disk")) as disk:
        progress = Progress(disk.directory / "checkpoints")
        with launcher_of(name, options, directory, progress.path) as launcher:
            begin = time.time()
            result = run(
                launcher,
                disk,
                progress,
                faults=faults,
                seconds=seconds,
                person_seconds=options.person_seconds,
            )
            return result, progress, begin


def measure(options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Run every launcher without and with faults; return the summaries."""
    seconds = 60 * options.minutes
    kinds = [Kind[name.upper()] for name in options.kinds]
    faults = schedule(options.seed, seconds, mean=options.mean, kinds=kinds, nodes=NODES)
    reference = 60 * (options.reference_minutes or options.minutes)
    rows, results = [], []
    for name in options.launchers:
        # One undisturbed run before and one after: the machine's speed may change.
        _, before, _ = one_run(name, options, directory / f"{name}-before", [], reference)
        result, progress, begin = one_run(name, options, directory / name, faults, seconds)
        _, after, _ = one_run(name, options, directory / f"{name}-after", [], reference)
        expected = statistics.mean(each.expected(seconds) for each in (before, after))
        rows.append(report.row(result, expected, begin=begin, weights=differing(progress, before)))
        results.append(result)
        print(json.dumps(rows[-1]), flush=True)
        if options.output:
            save(options.output, results, {"summary": rows, "options": str(vars(options))})
    return rows


def main() -> int:
    """Measure, and print the table."""
    command = parser()
    options = command.parse_args()
    options.launchers = options.launchers or list(LAUNCHERS)
    if unknown := set(options.launchers) - set(LAUNCHERS):
        command.error(f"there is no launcher {', '.join(sorted(unknown))}")
    if reason := skip_reason():
        print(f"goodput: {reason}", file=sys.stderr)
        return 1
    os.environ.setdefault("PYTHONPATH", str(_ROOT))
    with contextlib.ExitStack() as stack:
        if options.keep:
            options.keep.mkdir(parents=True)
            directory = options.keep.resolve()
        else:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="clusterjob-goodput-"))
            )
        rows = measure(options, directory)
    print(report.table(rows))
    ours = next((row for row in rows if row["launcher"] == "clusterjob"), None)
    peers = [row["goodput"] for row in rows if row is not ours]
    met = ours is None or (
        ours["goodput"] >= GOODPUT_TARGET
        and ours["goodput"] >= PEER_TARGET * max(peers, default=0.0)
        and not (ours["persons"] or ours["restarts named wrong"] or ours["weights differ"])
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
