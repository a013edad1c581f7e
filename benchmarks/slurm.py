"""Measure clusterjob against plain Slurm, on a real Slurm of four nodes on this machine.

The benchmark starts the Slurm of the tests (tests/support/slurm_cluster.py; `make packages`
installs its packages) and stops it at the end. The exit code is 1 if a target is missed. See
benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from measuring import (
    COMMAND_TIMEOUT,
    WORKERS,
    Failed,
    Row,
    command,
    compare,
    environment,
    finish,
    option_parser,
    parse_options,
    row_of,
    run,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from slurm_cluster import ClusterError, SlurmCluster

SUBMIT_TARGET = 0.150  # seconds over bare sbatch
SNAPSHOT_TARGET = 0.200  # seconds over --no-snapshot
FILES = 2000  # in the working directory
START_TARGET = 0.45  # ours / srun torchrun's
STATUS_TARGET = 1.0  # seconds
DEATH_TARGET = 2.0  # seconds
MANY = 500  # jobs
# Seconds between two status commands: clusterjob queries a cluster at most once in 5 s.
STATUS_INTERVAL = 6.0
# How a worker dies, and the exit code of its job.
DEATHS = {"raise": 1, "exit": 3, "SIGKILL": 137, "SIGSEGV": 139}
NODES, RANKS = 2, 4
LATER = "begin=now+1hour"  # for jobs that are submitted and never run
T = TypeVar("T")

# The script of the torchrun tutorials without two of their costs: no srun that finds the first
# node's address, and no guessed port.
TORCHRUN = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task={ranks} --output={output}
srun --kill-on-bad-exit=1 {torchrun} --nnodes={nodes} --nproc-per-node={ranks} \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} {worker} {file}
"""


class Bench:
    """Run client commands against a cluster; some runs count the calls of Slurm's commands.

    Args:
        cluster: a running cluster.
        directory: directory for scripts, logs and files that jobs write.
    """

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.calls = directory / "calls"
        self._counting = _wrappers(directory, self.calls)

    def environ(self, home: str, *, counted: bool = False) -> dict[str, str]:
        """Return a client's environment; each ``home`` has its own job records."""
        environ = environment(self.directory / home) | self.cluster.environment
        if counted:
            environ["PATH"] = f"{self._counting}:{environ['PATH']}"
        return environ

    def call(self, argv: list[str], environ: Mapping[str, str]) -> tuple[float, float, str]:
        """Run a command that must succeed; return its begin, its duration and its output."""
        begin, end, code, output_text = run(argv, environ, self.directory)
        if code != 0:
            raise Failed(f"{shlex.join(argv)} ended with exit code {code}:\n{output_text}")
        return begin, end - begin, output_text

    def counted(self) -> list[str]:
        """Return the names of the Slurm commands called since the last call of this method."""
        names = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return names

    def clear(self) -> None:
        """Cancel all jobs and wait until they have ended."""
        self.cluster.cancel_all()
        self.cluster.wait_idle()


def _wrappers(directory: Path, calls: Path) -> Path:
    """Make a directory of Slurm commands that log their name before they run.

    A call of `sbatch --test-only` is not logged.
    """
    wrappers = directory / "counted"
    wrappers.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "scancel"):
        skip_test_only = (
            f'case " $* " in *" --test-only "*) exec {shutil.which(name)} "$@" ;; esac\n'
            if name == "sbatch"
            else ""
        )
        path = wrappers / name
        path.write_text(
            f"#!/bin/sh\n{skip_test_only}echo {name} >> {shlex.quote(str(calls))}\n"
            f'exec {shutil.which(name)} "$@"\n'
        )
        path.chmod(0o755)
    return wrappers


def _submit(*options: str) -> list[str]:
    return [command("clusterjob"), "submit", "--cluster", "slurm", *options]


def _wait_for(predicate: Callable[[], T], what: str) -> T:
    end = time.monotonic() + COMMAND_TIMEOUT
    while not (value := predicate()):
        if time.monotonic() > end:
            raise Failed(f"{what} did not happen within {COMMAND_TIMEOUT:g} s")
        time.sleep(0.01)
    return value


def measure_submit(bench: Bench, runs: int) -> list[Row]:
    """Measure how much longer `clusterjob submit` takes than sbatch of a job of the same size."""
    environ = bench.environ("submit")
    script = bench.directory / "bare.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes={NODES} --ntasks-per-node=1 --cpus-per-task={RANKS} "
        "--output=/dev/null\nsrun true\n"
    )
    bare = [command("sbatch"), "--parsable", f"--{LATER}", str(script)]
    ours = _submit(
        "--nodes", str(NODES), "--nproc-per-node", str(RANKS), "--set", LATER, "--", "true"
    )
    sides = [lambda argv=argv: bench.call(argv, environ)[1] for argv in (ours, bare)]
    row = compare("submit", "submit, over bare sbatch", runs, SUBMIT_TARGET, *sides)
    bench.clear()
    assert row.other is not None
    return [
        Row(
            row.part,
            row.what,
            runs,
            row.ours - row.other,
            row.slowest - row.other,
            row.other,
            None,
            SUBMIT_TARGET,
        )
    ]


def measure_snapshot(bench: Bench, runs: int) -> list[Row]:
    """Measure how much longer a submission with a snapshot of unchanged files takes."""
    environ = bench.environ("snapshot")
    project = bench.directory / "project"
    for number in range(FILES):
        path = project / f"package{number // 50}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NUMBER = {number}\n" * 100)
    (project / "train.py").touch()
    for words in (["init", "-q"], ["add", "."]):
        bench.call([command("git"), "-C", str(project), *words], environ)
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    bench.call([command("git"), "-C", str(project), *identity, "commit", "-qm", "x"], environ)
    time.sleep(3.0)  # until the new files count as unchanged
    options = ("--workdir", str(project), "--set", LATER)
    sides = [
        lambda more=more: bench.call(_submit(*options, *more, "train.py"), environ)[1]
        for more in ((), ("--no-snapshot",))
    ]
    row = compare("snapshot", "", runs, SNAPSHOT_TARGET, *sides)
    bench.clear()
    assert row.other is not None
    added, slowest = row.ours - row.other, row.slowest - row.other
    what = f"{FILES:,} unchanged files, over --no-snapshot"
    return [Row(row.part, what, runs, added, slowest, row.other, None, SNAPSHOT_TARGET)]


def measure_start(bench: Bench, runs: int) -> list[Row]:
    """Measure the time from the start of the submit command to rank 0's first all-reduce."""
    environ = bench.environ("start")
    worker, file, output = (
        WORKERS / "first_all_reduce.py",
        bench.directory / "done",
        bench.directory / "torchrun.out",
    )

    def until_done(argv: list[str]) -> float:
        file.unlink(missing_ok=True)
        begin, _, output_text = bench.call(argv, environ)
        jobs = bench.cluster.run(
            "squeue", "--noheader", "--states=all", "--sort=-i", "--format=%A"
        ).stdout.split()
        job = bench.cluster.wait_for_job(jobs[0], timeout=COMMAND_TIMEOUT)
        if job["JobState"] != "COMPLETED" or not file.exists():
            log = output.read_text() if output.exists() else ""
            raise Failed(f"{shlex.join(argv)}: {job['JobState']}\n{output_text}{log}")
        bench.cluster.wait_idle()
        return float(file.read_text()) - begin

    def ours() -> float:
        return until_done(
            _submit("--nodes", str(NODES), "--nproc-per-node", str(RANKS), str(worker), str(file))
        )

    def theirs() -> float:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        script = bench.directory / "torchrun.sh"
        values = {
            "nodes": NODES,
            "ranks": RANKS,
            "output": output,
            "torchrun": command("torchrun"),
            "port": port,
        }
        script.write_text(TORCHRUN.format(**values, worker=worker, file=file))
        return until_done([command("sbatch"), "--parsable", str(script)])

    return [
        compare(
            "start",
            f"submit to first all-reduce, {NODES} x {RANKS} ranks",
            runs,
            START_TARGET,
            ours,
            theirs,
        )
    ]


def measure_status(bench: Bench, runs: int) -> list[Row]:
    """Measure `clusterjob status` of many jobs, and count its calls of Slurm commands."""
    environ = bench.environ("status", counted=True)
    bench.call(_submit("--sweep", f"x=0-{MANY - 1}", "--set", LATER, "--", "true"), environ)
    times, calls = [], []
    for _ in range(runs + 1):  # the first run is not counted
        time.sleep(STATUS_INTERVAL)
        bench.counted()
        _, seconds, output_text = bench.call([command("clusterjob"), "status", "--json"], environ)
        jobs = json.loads(output_text)["jobs"]
        if len(jobs) != MANY or {job["state"] for job in jobs} != {"PENDING"}:
            raise Failed(
                f"status shows {len(jobs)} jobs, {sorted({job['state'] for job in jobs})}, "
                f"where {MANY} are PENDING"
            )
        times.append(seconds)
        calls.append(len(bench.counted()))
    bench.clear()
    return [
        row_of("status", f"status of {MANY} jobs", times[1:], STATUS_TARGET),
        row_of("status", "its calls of Slurm (number)", calls[1:], 1),
    ]


def measure_death(bench: Bench, runs: int) -> list[Row]:
    """Measure the time from the death of a rank on the last node to the job's end on all nodes."""
    environ = bench.environ("death")
    file = bench.directory / "died"
    last = NODES * RANKS - 1

    def seconds(how: str) -> float:
        file.unlink(missing_ok=True)
        program = [str(WORKERS / "die.py"), how, "all_reduce", str(file)]
        _, _, output_text = bench.call(
            [*_submit("--nodes", str(NODES), "--nproc-per-node", str(RANKS), "--json"), *program],
            environ,
        )
        name = json.loads(output_text)["id"]
        (job_id,) = bench.cluster.run(
            "squeue", "--noheader", "--states=pending,running", "--format=%A"
        ).stdout.split()
        _wait_for(file.exists, "the death of a rank")
        state = bench.cluster.wait_for_job(job_id)["JobState"]
        mark = f"SLURM_JOB_ID={job_id}".encode()
        _wait_for(
            lambda: not any(mark in _environ(pid) for pid in bench.cluster.processes()),
            "the end of the job's processes",
        )
        end = time.monotonic()
        (job,) = json.loads(
            bench.call([command("clusterjob"), "status", "--json", name], environ)[2]
        )["jobs"]
        failure = job["failure"] or {}
        reported = (
            state,
            job["state"],
            job["exit_code"],
            failure.get("rank"),
            failure.get("node_rank"),
        )
        if reported != ("FAILED", "FAILED", DEATHS[how], last, NODES - 1):
            raise Failed(
                f"rank {last} died by {how}; Slurm reports {state}, clusterjob reports:\n"
                f"{json.dumps(job, indent=1)}"
            )
        bench.cluster.wait_idle()
        return end - float(file.read_text())

    rows = []
    for how in DEATHS:
        times = [seconds(how) for _ in range(runs)]
        what = f"{how} on node 2, to the end on both"
        rows.append(row_of("death", what, times, DEATH_TARGET))
    return rows


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def measure_sweep(bench: Bench, runs: int) -> list[Row]:
    """Measure sweeps of two sizes, and count their calls of sbatch.

    MaxArraySize is 1001: a sweep of 2500 needs three calls.
    """
    rows = []
    for size, needed in ((MANY, 1), (2500, 3)):
        environ = bench.environ(f"sweep{size}", counted=True)
        argv = _submit("--sweep", f"x=0-{size - 1}", "--set", LATER, "--", "true")
        times, calls = [], []
        for _ in range(runs):
            bench.counted()
            times.append(bench.call(argv, environ)[1])
            calls.append(bench.counted().count("sbatch"))
            queued = len(
                bench.cluster.run("squeue", "--noheader", "--array", "--format=%i").stdout.split()
            )
            if queued != size:
                raise Failed(f"{queued} jobs are in the queue after a sweep of {size}")
            bench.clear()
        rows.append(row_of("sweep", f"sweep of {size}", times, None))
        rows.append(row_of("sweep", "its calls of sbatch that submit (number)", calls, needed))
    return rows


MEASURES = {
    "submit": measure_submit,
    "snapshot": measure_snapshot,
    "start": measure_start,
    "status": measure_status,
    "death": measure_death,
    "sweep": measure_sweep,
}


def main() -> int:
    parser = option_parser(__doc__, tuple(MEASURES), 5)
    parser.add_argument(
        "--accounting", action="store_true", help="on a Slurm with slurmdbd and MariaDB"
    )
    options = parse_options(parser, tuple(MEASURES))
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that SIGTERM stops the cluster, too
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="clusterjob-bench-") as directory:
        cluster = SlurmCluster(Path(directory) / "slurm", accounting=options.accounting)
        try:
            cluster.start()
            bench = Bench(cluster, Path(directory))
            rows = [
                row
                for part in MEASURES
                if part in options.parts
                for row in MEASURES[part](bench, options.runs)
            ]
        except (Failed, ClusterError) as error:
            print(f"benchmark: {error}", file=sys.stderr)
            return 1
        finally:
            cluster.stop()
    return finish(rows, "sbatch", as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
