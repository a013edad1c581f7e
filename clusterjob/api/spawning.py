"""``clusterjob.spawn(train, args=(True,), nprocs=2, gpus="4,5")``: a function of this very program
in processes of this machine.

The processes are the workers of a node's own agent, as `clusterjob launch` has them: warm start,
supervision and verdict are the same. The call travels as that of a function's job, in a directory
that lives as long as the call.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError, JobFailed, UsageError
from clusterjob.node import contract
from clusterjob.node.logs.folding import fold
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, files
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict
from clusterjob.worker import call

_LOOK = 0.1  # seconds between two looks at the workers' output


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int | None = None,
    gpus: str | Sequence[int | str] | None = None,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in worker processes of this machine, and return when all
    have ended.

    Each process has its place in RANK, LOCAL_RANK, MASTER_ADDR and their kin. The process group is
    left to the function: `clusterjob.bootstrap.init()` in it makes one and gives the context; so
    does torch's own ``init_process_group``. What the processes print is shown on sys.stdout and
    sys.stderr, each line with its rank. When one fails the others are stopped, and when the calling
    process ends, even by SIGKILL, its workers end too.

    Args:
        function: what cloudpickle can pickle: functions of ``__main__``, of a notebook, lambdas and
            closures included.
        args: its arguments.
        kwargs: its arguments by name.
        nprocs: how many processes; by default one for each GPU, or one where there is none.
        gpus: the GPUs that they see, as CUDA_VISIBLE_DEVICES names them: ``"4,5"`` or ``[4, 5]``;
            None for all visible ones, ``""`` for none.

    Returns:
        What the function returned, by rank.

    Raises:
        Exception: what the function raised on the rank that failed first, with the rank and its
            traceback as the cause.
        JobFailed: a process was killed, or ended otherwise without a result.
        UsageError: a GPU is not visible here, or the arguments make no sense.
        PlaceError: this is one process of a job already, or one of several nodes.
        ClusterJobError: the call cannot be pickled.
    """
    if not callable(function):
        raise UsageError(
            f"{function!r} is not a function",
            "a script is started by the command `clusterjob run SCRIPT`",
        )
    environ = _environment(gpus)
    count = _count(nprocs, gpus, environ=environ)
    paths = [os.path.abspath(entry) for entry in sys.path]
    payload = call.pickled(
        paths, call.PlainCall(function, tuple(args), kwargs=dict(kwargs or {}), argv=list(sys.argv))
    )
    job_dir = Path(tempfile.mkdtemp(prefix="clusterjob-spawn-"))
    try:
        call.call_file(job_dir, 0).write_bytes(payload)
        code = _run(job_dir, count, environ=environ)
        ended = files.read_json(job_dir / "result.json")
        if ended is None:
            said = _last_words(job_dir)
            raise JobFailed(
                f"the process that starts the workers ended with {code}{': ' if said else ''}{said}"
            )
        return call.results(
            job_dir, Verdict.from_json(ended), world_size=count, name=f"spawn of {_name(function)}"
        )
    finally:
        shutil.rmtree(job_dir, ignore_errors=True)


def _environment(gpus: str | Sequence[int | str] | None) -> dict[str, str]:
    """Return the agent's environment, which the workers inherit."""
    from clusterjob.node.launch import find_node, node_of

    topology = node_of(find_node(os.environ))
    if topology.nnodes > 1:
        raise UsageError(
            f"spawn starts processes of this machine alone, and it is one of {topology.nnodes} nodes ({topology.source})",
            "`clusterjob launch SCRIPT` starts this node's part of the job",
        )
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("CLUSTERJOB_")
    }
    # A place of its own: a platform's port is for one job, and several spawns may run at once.
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
        raise UsageError(f"nprocs is {nprocs!r}: it is a whole number from 1")
    return nprocs


def _run(job_dir: Path, count: int, environ: dict[str, str]) -> int:
    """Run the agent until it ends, and return its exit code. It holds a lifeline: whatever ends
    this process ends the workers too.
    """
    options = LaunchOptions(
        Program("module", call.__name__), nproc_per_node=count, lifeline=True, echo=False
    )
    reader = LogReader(job_dir)
    with (job_dir / "agent.log").open("wb") as log:
        try:
            agent = subprocess.Popen(
                [sys.executable, "-m", "clusterjob.node", *options.arguments()],
                env=environ | {contract.JOB_DIR: str(job_dir)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C is this process's: it lets the agent end in its own order.
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
                agent.wait(_LOOK)
            except subprocess.TimeoutExpired:
                _show(reader)
    except BaseException:
        agent.stdin.close()  # the lifeline: the workers are stopped
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
        agent.kill()  # and the kernel kills its workers
        agent.wait()
        raise


def _show(reader: LogReader, *, last: bool = False) -> None:
    for line in fold(reader.finish() if last else reader.read()):
        stream = sys.stdout if line.stream == "out" else sys.stderr
        print(f"[{line.label}] {sanitize(line.text, colours=True)}", file=stream, flush=True)


def _last_words(job_dir: Path) -> str:
    lines = (job_dir / "agent.log").read_text(errors="replace").splitlines()
    return " ".join(line.strip() for line in lines).removeprefix("clusterjob: ")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
