"""Shared code of the backends: files that every node needs, progress and end of a job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends.base import FetchLimits, Leftover, Status
from clusterjob.backends.job_progress import Progress
from clusterjob.core import arrays, node_zip, plans, python_env
from clusterjob.core.live import live
from clusterjob.core.records import FORMAT, Record, home
from clusterjob.core.render import sh_line
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import CheckFinding, ok
from clusterjob.errors import ClusterJobError, SpecError
from clusterjob.node import contract, inside
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import now
from clusterjob.node.logs.job_dir import CODE, SPEC
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.core.python_env import PythonEnv
    from clusterjob.remote.cleaning import JobsOnHost
    from clusterjob.remote.fetch import Request
    from clusterjob.remote.sessions import Sessions

SWEEP = "sweep.args"  # arguments of each array element, in the job directory
# Python code that calls a function; sys.argv[1] is the directory or the node zip with the package.
# It runs with -I and -S, so that no file of the job is imported.
_CALL = "import sys; sys.path.append(sys.argv[1]); from clusterjob.node.{0} import {1}; {1}()"
START_INSIDE = _CALL.format("inside", "main")
SUPERVISE = _CALL.format("host_server.server", "supervise")  # the same on a login host
LOG_SPACE = 50_000_000  # free bytes that a host needs for logs, beyond the size of the sent files


def new_directory(name: str) -> tuple[str, Path]:
    """Return the id and the directory of a new job; create nothing.

    Raises:
        SpecError: the directory contains a colon, so it cannot be on PYTHONPATH.
    """
    job_id = plans.new_id(name)
    job_dir = home() / "jobs" / job_id
    if ":" in str(job_dir):
        raise SpecError(
            f"the job directory {job_dir} contains a colon, which PYTHONPATH cannot hold",
            "set CLUSTERJOB_HOME to another directory",
        )
    return job_id, job_dir


def sent_program(spec: JobSpec) -> Program:
    """Return the program with a script's path relative to the sent working directory.

    Raises:
        SpecError: the script is outside of the working directory.
    """
    program = spec.program
    if not spec.sync or program.kind != "script":
        return program
    path = os.path.relpath(os.path.join(spec.workdir, program.target), spec.workdir)
    if path.startswith(".."):
        raise SpecError(
            f"the script {program.target!r} is outside of the sent directory {spec.workdir}",
            "choose another directory with --workdir",
        )
    return Program(program.kind, path, args=program.args)


def beside(
    request: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of `clusterjob.node.inside` on this machine.

    Args:
        request: what it does. With ``run``, it supervises ssh or srun.
        environ: the environment.
    """
    if sys.platform != "linux" and "run" in request:  # the supervision needs Linux
        return request["run"], {**environ, **request.get("env", {})}
    package = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-I", "-S", "-c", START_INSIDE, package]
    return argv, {**environ, inside.REQUEST: inside.encoded(request)}


def common_files(
    spec: JobSpec, job_dir: Path, env: PythonEnv | None = None
) -> tuple[plans.PlannedFile, ...]:
    """Return the files that every job has: spec.json, the node zip, and those of a uv project."""
    data = {"format": FORMAT, **spec.to_json()}
    found = [
        plans.PlannedFile(job_dir / SPEC, (json.dumps(data, indent=1) + "\n").encode()),
        plans.PlannedFile(job_dir / node_zip.NAME, node_zip.node_zip(node_zip.cache_directory())),
    ]
    if env is not None and env.name:
        found.append(plans.PlannedFile(job_dir / env.name, env.data))
    return tuple(found)


def script_file(path: Path, text: str) -> plans.PlannedFile:
    """Return a rendered script as an executable file."""
    return plans.PlannedFile(path, text.encode(errors="surrogateescape"), mode=0o700)


def sweep_file(spec: JobSpec, array: arrays.Array, job_dir: Path) -> plans.PlannedFile:
    """Return the file with one line of shell-quoted arguments per array element."""
    return plans.PlannedFile(
        job_dir / SWEEP,
        "".join(
            sh_line(arrays.program_of(spec.program, values).args) + "\n" for values in array.values
        ).encode(errors="surrogateescape"),
    )


def common_values(spec: JobSpec, job_id: str, job_dir: Path) -> dict[str, Any]:
    """Return the variables of every template."""
    return {
        "job_id": job_id,
        "job_dir": str(job_dir),
        "name": spec.name,
        "token_file": str(plans.token_file(job_dir)),
        "nnodes": spec.resources.nodes,
        "env": dict(spec.env),
        "workdir": str(spec.workdir),
        "setup": list(spec.setup),
        "python": python_env.interpreter(spec),
        "notifies": spec.notifies,
    }


def private_variables(plan: plans.Plan) -> dict[str, str]:
    """Return the variables that a backend adds at submission: the job's token and ``--secret``.

    Their values must be in no plan, record, argument or log.

    Raises:
        SpecError: a secret has no value.
    """
    values = {contract.TOKEN: plans.token_file(plan.job_dir).read_text()}
    for name, value in plan.spec.private_values(os.environ, plan.backend).items():
        values[name] = os.fsdecode(value)
    return values


def element_program(spec: JobSpec, array: arrays.Array | None) -> Program:
    """Return the program; without arguments if each array element has its own arguments."""
    if array is None or not array.values:
        return spec.program
    return Program(spec.program.kind, spec.program.target)


def sent_files(plan: plans.Plan) -> list[tuple[str, int, bytes]]:
    """Return the files for the job directory on a host, as (name, mode, content).

    They include the token and the secrets. This function deletes the local file of the secrets.
    """
    return [
        *((file.path.name, file.mode, file.data) for file in plan.files),
        *plans.carried_elsewhere(plan.job_dir),
    ]


def new_sessions() -> Sessions:
    """Return the holder of this process's sessions with hosts; no session is open yet."""
    from clusterjob.remote.sessions import Sessions

    return Sessions(warn, lambda: node_zip.node_zip(node_zip.cache_directory()))


def warn(text: str) -> None:
    """Show one line to the user through the library's logger, which writes to stderr by default."""
    live.clear()
    logging.getLogger("clusterjob").warning("clusterjob: %s", sanitize(text))


def check_plan(plan: Callable[[JobSpec], plans.Plan], spec: JobSpec) -> Iterator[CheckFinding]:
    """Check that a job can be planned; a check function of `doctor.engine.CheckStep`."""
    plan(spec)
    nodes, workers = spec.resources.nodes, spec.nproc_per_node
    yield ok(
        f"{nodes} node{'s' if nodes > 1 else ''} with {workers} worker"
        f"{'s' if workers > 1 else ''}{' each' if nodes > 1 else ''}"
    )


def ended(verdict: Verdict) -> Status:
    """Return the status of a job that ended with this verdict."""
    return Status(
        verdict.state,
        verdict.reason,
        verdict=verdict,
        started_at=verdict.started_at,
        restarts=verdict.restarts,
    )


def epoch(time: str) -> float:
    """Return an RFC 3339 time in seconds since the epoch."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def being_submitted(record: Record) -> bool:
    """Return whether the process that submits a job is still alive."""
    return record.submitter is not None and record.submitter.alive()


def fetch_request(
    record: Record,
    paths: Sequence[str],
    target: Path,
    may_replace: Callable[[list[str]], bool],
    limits: FetchLimits,
) -> Request:
    """Return the request for the results on one host; see `clusterjob.core.jobs.fetch`."""
    from clusterjob.core.snapshot import sent_digests
    from clusterjob.remote.fetch import Request

    synced, workdir = record.job.sync, str(record.job.workdir)
    place = target.resolve()
    return Request(
        record.whole_id,
        CODE if synced else workdir,
        paths=paths,
        target=target,
        may_replace=may_replace,
        max_files=limits.files,
        max_bytes=limits.size,
        sent=sent_digests(record.whole_dir) if synced and place == Path(workdir).resolve() else {},
        notes=home() / "fetched" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json",
    )


def clean_hosts(hosts: Sequence[JobsOnHost], *, remove: bool) -> tuple[dict[str, Leftover], int]:
    """Measure or remove ended jobs on hosts; see `clusterjob.backends.base.Cleaner`."""
    from clusterjob.remote import cleaning

    jobs, code = cleaning.clean_hosts(hosts, remove=remove)
    return {job_id: Leftover(job.size, job.kept) for job_id, job in jobs.items()}, code


def nothing_to_fetch(record: Record) -> ClusterJobError:
    """Return the error for a job whose working directory is on this machine."""
    return ClusterJobError(
        f"there is nothing to fetch: job {record.job_id} ran in {record.job.workdir}",
        "its results are in that directory",
    )


def switch(options: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Return a value of --set that is true or false.

    Raises:
        SpecError: it is neither.
    """
    text = options.get(key, str(default)).lower()
    if text not in ("true", "false"):
        raise SpecError(f"{key}: {text!r} is neither true nor false")
    return text == "true"


def request_cancel(record: Record) -> None:
    """Write a cancel request into a job's directory.

    An array element that has not started has no directory yet; this function creates it.
    """
    if record.index is not None and record.whole_dir.is_dir():
        try:
            private_dirs.make(record.job_dir)
        except OSError:
            pass  # the disk may be full: only the record of this request is lost
    ends.cancel(record.job_dir)


def refused(job_dir: Path, attempt: int = 0, **more: Any) -> Verdict | None:
    """Return the verdict of an attempt if one of its nodes could not start its agent; else None.

    Args:
        job_dir: the job's directory.
        attempt: the number of the attempt, from 0.
        more: other fields of the verdict, such as its times.
    """
    for failure in ends.refusals(job_dir, attempt):
        return Verdict(
            JobState.FAILED,
            failure.exit_code,
            reason=f"{failure.who}: {failure.message}",
            failure=failure,
            attempt=attempt,
            **more,
        )
    return None


def verdict_without_coordinator(
    job_dir: Path, progress: Progress, otherwise: Verdict | str
) -> Verdict:
    """Return the verdict from the nodes' files if the coordinator wrote no verdict.

    A missing verdict never counts as a success.

    Args:
        job_dir: the job's directory.
        progress: the job's progress before its end.
        otherwise: the verdict if no node wrote an end, or the reason of a LOST verdict.
    """
    common: dict[str, Any] = {
        "restarts": progress.restarts,
        "started_at": progress.started_at,
        "ended_at": now(),
    }
    if ends.cancelled(job_dir):
        when = "its agents confirmed it" if progress.started_at else "it started"
        return Verdict(
            JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=f"cancelled before {when}", **common
        )
    if (verdict := refused(job_dir, **common)) is not None:
        return verdict
    reasons = dict.fromkeys(end["reason"] for end in ends.written(job_dir) if end["reason"])
    if reasons:  # two nodes: each may know nothing of the other
        return Verdict(JobState.LOST, 1, reason="; ".join(list(reasons)[:2]), **common)
    if not job_dir.exists() and (isinstance(otherwise, str) or otherwise.state is JobState.LOST):
        return Verdict(JobState.LOST, 1, reason=f"its directory {job_dir} is gone", **common)
    if isinstance(otherwise, Verdict):
        return otherwise
    return Verdict(
        JobState.LOST,
        1,
        reason="; ".join(filter(None, (otherwise, _last_seen(job_dir), files.why_full(job_dir)))),
        **common,
    )


def _last_seen(job_dir: Path) -> str:
    """Return when each node has written its last file; of many, the first four. Empty if none."""
    seen = []
    for node in log_files.nodes(job_dir)[:4]:
        with contextlib.suppress(OSError):  # a file or the directory was just removed
            folder = log_files.node_directory(job_dir, node)
            at = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
            seen.append(f"node {node} at {datetime.fromtimestamp(at, timezone.utc):%H:%M:%S}")
    return f"last written (UTC): {', '.join(seen)}" if seen else ""
