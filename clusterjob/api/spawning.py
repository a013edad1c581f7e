"""Run a function of this program in several processes of this machine: `clusterjob.spawn`.

For example ``clusterjob.spawn(train, args=(True,), nprocs=2, gpus="4,5")``. The processes are the
workers of an agent, as under `clusterjob launch`, with the same preload, supervision and verdict.
The call is pickled into a temporary directory, which is removed when `spawn` returns.
"""

from __future__ import annotations

import itertools
import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.api import outcomes
from clusterjob.core.spec import launch_arguments
from clusterjob.errors import ClusterJobError, JobFailed, UsageError, require_linux
from clusterjob.node import contract
from clusterjob.node.logs.job_dir import AGENT_LOG, RESULT
from clusterjob.node.logs.log_files import LogReader, fold
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, files
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import call

_POLL = 0.1  # seconds between two polls of the workers' output


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int | None = None,
    gpus: str | Sequence[int | str] | None = None,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in worker processes of this machine; wait for all.

    Each process finds its rank assignment in RANK, LOCAL_RANK, MASTER_ADDR and the related
    variables. The function creates the process group: `clusterjob.bootstrap.init()` creates one and
    returns the context, and torch's ``init_process_group`` works too. The output of the processes
    is printed on sys.stdout and sys.stderr, each line with its rank. If one process fails, the
    others are stopped. If the calling process ends, even by SIGKILL, its workers end too.

    Args:
        function: a function that cloudpickle can pickle, including functions of ``__main__`` or of
            a notebook, lambdas and closures.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        nprocs: number of processes; by default one per GPU, or one if there is no GPU.
        gpus: the GPUs that the processes see, in CUDA_VISIBLE_DEVICES format: ``"4,5"`` or
            ``[4, 5]``; None for all visible GPUs, ``""`` for no GPU.

    Returns:
        The function's results, in rank order.

    Raises:
        Exception: the function's exception on the rank that failed first, with the rank and its
            traceback as the cause.
        JobFailed: a process was killed, or ended without a result.
        UsageError: this is not Linux, a GPU is not visible to this process, an argument is
            invalid, or this machine is one of several nodes of a job.
        PlacementError: this process already belongs to a job, or the environment's variables for
            the rank are incomplete or contradictory.
        ClusterJobError: the call cannot be pickled.
    """
    if not callable(function):
        raise UsageError(
            f"{function!r} is not a function",
            "to start a script: `clusterjob run SCRIPT`",
        )
    require_linux("spawn")
    environ = _environment(gpus)
    count = _count(nprocs, gpus, environ=environ)
    payload = call.pickled(
        [os.path.abspath(entry) for entry in sys.path],
        call.FunctionCall(function, tuple(args), kwargs=dict(kwargs or {}), argv=list(sys.argv)),
    )
    job_dir = Path(tempfile.mkdtemp(prefix="clusterjob-spawn-"))
    try:
        call.call_file(job_dir, 0).write_bytes(payload)
        code = _run(job_dir, count, environ=environ)
        ended = files.read_json(job_dir / RESULT)
        if ended is None:
            lines = (job_dir / AGENT_LOG).read_text(errors="replace").splitlines()
            output = " ".join(line.strip() for line in lines).removeprefix("clusterjob: ")
            raise JobFailed(
                f"the agent of the workers ended with {code}{': ' if output else ''}{output}"
            )
        name = getattr(function, "__name__", type(function).__name__)
        return _results(job_dir, Verdict.from_json(ended), count, name=f"spawn of {name}")
    finally:
        shutil.rmtree(job_dir, ignore_errors=True)


def _results(job_dir: Path, verdict: Verdict, count: int, name: str) -> list[Any]:
    """Return the values of all ranks; raise the error of a failed call."""
    if verdict.state is not JobState.SUCCEEDED:
        rank = verdict.failure.rank if verdict.failure is not None else None
        outcome = (
            None if rank is None else outcomes.read_outcome(job_dir, rank, attempt=verdict.attempt)
        )
        raise outcomes.error_of(verdict, outcome, name=name)
    found = {
        rank: outcomes.read_outcome(job_dir, rank, attempt=verdict.attempt) for rank in range(count)
    }
    return outcomes.complete(found, name)


def _environment(gpus: str | Sequence[int | str] | None) -> dict[str, str]:
    """Return the environment of the agent, which the workers inherit."""
    from clusterjob.node.environments.this_node import find_node, node_of

    topology = node_of(find_node(os.environ))
    if topology.nnodes > 1:
        raise UsageError(
            f"spawn starts processes only on this machine, which is one of {topology.nnodes} nodes"
            f" ({topology.source})",
            "`clusterjob launch SCRIPT` starts this node's part of the job",
        )
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("CLUSTERJOB_")
    }
    # Do not use a platform's master address: several calls of `spawn` may run at the same time, and
    # a port can serve only one of them.
    environ |= {
        "CLUSTERJOB_NNODES": "1",
        "CLUSTERJOB_NODE_RANK": "0",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
    }
    if gpus is not None:
        wanted = gpus.split(",") if isinstance(gpus, str) else [str(gpu) for gpu in gpus]
        chosen = devices.choose_gpus(wanted, os.environ) if gpus else []
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if own not in (*site.getsitepackages(), site.getusersitepackages()):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), own)))
    return environ


def _count(nprocs: int | None, gpus: object, environ: Mapping[str, str]) -> int:
    if nprocs is None:
        listed = environ["CUDA_VISIBLE_DEVICES"] if gpus is not None else ""
        return len(listed.split(",")) if listed else devices.visible_gpus(environ) or 1
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise UsageError(f"nprocs={nprocs!r}: must be a whole number of at least 1")
    return nprocs


def _run(job_dir: Path, count: int, environ: dict[str, str]) -> int:
    """Run the agent until it ends, and return its exit code.

    The agent's stdin is a lifeline: when this process ends for any reason, the workers end too.
    """
    options = LaunchOptions(
        Program("module", call.__name__), nproc_per_node=count, lifeline=True, echo=False
    )
    reader = LogReader(job_dir)
    with (job_dir / AGENT_LOG).open("wb") as log:
        try:
            agent = subprocess.Popen(
                [sys.executable, "-m", "clusterjob.node", *launch_arguments(options)],
                env=environ | {contract.JOB_DIR: str(job_dir)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only this process, which closes the lifeline. The agent then stops
                # the workers.
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterJobError(
                f"{sys.executable} cannot be started: {error.strerror}"
            ) from error
    assert agent.stdin is not None
    try:
        while agent.returncode is None:
            try:
                agent.wait(_POLL)
            except subprocess.TimeoutExpired:
                _show(reader)
    except BaseException:
        agent.stdin.close()  # closes the lifeline, which stops the workers
        _wait_or_kill(agent)
        raise
    finally:
        agent.stdin.close()
        _show(reader, last=True)
    return agent.returncode


def _wait_or_kill(agent: subprocess.Popen[bytes]) -> None:
    try:
        agent.wait()
    except BaseException:  # a second Ctrl-C
        agent.kill()  # the kernel then kills its workers
        agent.wait()
        raise


def _show(reader: LogReader, *, last: bool = False) -> None:
    for label, line in itertools.chain.from_iterable(fold(reader.batches(end=last))):
        stream = sys.stdout if line.stream == "out" else sys.stderr
        print(f"[{label}] {sanitize(line.text, colours=True)}", file=stream, flush=True)
