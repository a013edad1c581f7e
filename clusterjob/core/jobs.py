"""Plan, submit, check, fetch, interrupt and cancel jobs, one function for each.

The command line only prints their results. `polling` waits for jobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterjob.backends import base
from clusterjob.backends.base import FETCH_LIMITS, FetchLimits, Foreground, Interrupter
from clusterjob.backends.shared import nothing_to_fetch
from clusterjob.core import (
    bad_hosts,
    config,
    job_parts,
    job_secrets,
    node_zip,
    notifications,
    option_conflicts,
    plans,
    polling,
    program_check,
)
from clusterjob.core.capabilities import check as check_capabilities
from clusterjob.core.job_settings import make_spec
from clusterjob.core.plans import Plan
from clusterjob.core.records import ProcessIdentity, Record, Records, home, secure_home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import Check, CheckState
from clusterjob.errors import (
    ClusterJobError,
    RecordError,
    SpecError,
    SubmitInDoubtError,
)
from clusterjob.node.logs import ends, events
from clusterjob.node.logs.job_dir import ENDS, LOGS
from clusterjob.node.program import Program
from clusterjob.node.system import files

if TYPE_CHECKING:
    from clusterjob.remote.fetch import Fetched

_SURELY_KILLED = 3600.0  # seconds without a change after which the writer must be dead


def submit(plan: Plan, cluster: str, *, detach: bool, stdin: int | None = None) -> Record:
    """Submit a plan's job and return its record.

    The record is on disk before the backend is called. If the job cannot start, its record and
    directory are removed.

    Args:
        plan: the result of `Backend.plan`.
        cluster: the cluster's name, for the record.
        detach: whether the job continues after this process ends.
        stdin: file descriptor that becomes rank 0's stdin, if the backend runs jobs in the
            foreground; None for an empty stdin.

    Raises:
        ClusterJobError: the job's directory or record cannot be written, or the backend cannot
            start it.
    """
    secure_home()
    records = Records()
    backend = base.instance(plan.backend)
    if plan.job_dir.exists():
        raise RecordError(
            f"the job directory {plan.job_dir} cannot be made: File exists",
            "submit again: the job gets a new id",
        )
    _remove_leftovers(records)
    values = job_secrets.packed(plan.spec.private_values(os.environ, cluster))
    code = plans.keep_code(plan, home())
    record = Record(
        plan.job_id,
        plan.spec.name,
        cluster=cluster,
        backend=plan.backend,
        job_dir=plan.job_dir,
        nodes=plan.spec.resources.nodes,
        submitted_at=events.now(),
        spec=plan.spec.to_json(),
        submitter=ProcessIdentity.of_this_process(),
        array=plan.array,
        code=None if code is None else code.data,
    )
    try:
        # Save the record first: a killed submit then leaves no job directory without a record.
        records.save(record)
        plans.write_files(plan, values)
        for file in plan.files:
            if file.path.name == node_zip.NAME:
                node_zip.keep(file.data, node_zip.cache_directory())
        if isinstance(backend, Foreground):
            backend.stdin = stdin
        if code is not None:
            code.place(plan, home())
        bad = {each.host: str(each) for each in bad_hosts.BadHosts(cluster).listed()}
        handle = backend.submit(replace(plan, avoid=bad))
        try:
            record = replace(record, code=handle.data.get("code", record.code))
            record = records.with_handle(record, handle)
        except (ClusterJobError, KeyboardInterrupt):
            # Cancel the job: without a saved handle, no command could find it. The file that
            # `ends.cancel` writes below cannot stop a job that waits in a queue.
            with contextlib.suppress(ClusterJobError):
                backend.cancel(records.elements(replace(record, handle=handle)))
            raise
    except SubmitInDoubtError as error:  # the job may run: keep its record and directory
        error.hint = (
            f"do not submit it again before `clusterjob status {plan.job_id}` shows its state"
        )
        raise
    except KeyboardInterrupt:
        # Ctrl-C may stop the submit at any point. This request makes the state CANCELLED; an agent
        # that still starts reads it and ends.
        ends.cancel(plan.job_dir)
        raise
    except ClusterJobError:
        shutil.rmtree(plan.job_dir, ignore_errors=True)
        records.remove(plan.job_id)
        raise
    if detach and record.handle is not None:
        backend.detach(record.handle)
    return record


def _remove_leftovers(records: Records) -> None:
    """Remove the partial records and old job directories of submits that were killed.

    A directory is removed only if it has no record and no process was started in it.
    """
    _remove_temporary_files(records.directory)
    try:
        found = [Path(entry) for entry in os.scandir(home() / "jobs")]
    except OSError:
        return
    known = {entry.name.removesuffix(".json") for entry in records.entries()}
    for job_dir in found:
        if (
            job_dir.name in known
            or any((job_dir / LOGS).glob("*"))
            or any((job_dir / ENDS).glob("*"))
        ):
            continue
        # A queued job's directory looks unused too, and its record may be missing from `known`:
        # NFS lists new files late.
        with contextlib.suppress(OSError):
            if _is_old(job_dir) and not records.has(job_dir.name):
                shutil.rmtree(job_dir, ignore_errors=True)


def _remove_temporary_files(directory: Path) -> None:
    """Remove the files of `files.write_atomic` calls that were killed over an hour ago."""
    for path in directory.glob(f".*{files.TEMPORARY}"):
        with contextlib.suppress(OSError):
            if _is_old(path):
                path.unlink()


def _is_old(path: Path) -> bool:
    """Return whether a file has not changed for an hour, so that its writer must be dead.

    Raises:
        OSError: the file's status cannot be read.
    """
    return time.time() - path.stat().st_mtime > _SURELY_KILLED


def plan(spec: JobSpec, settings: config.Settings, *, foreground: bool = False) -> Plan:
    """Return the plan of a job; runs no command and contacts no host.

    Args:
        spec: the job.
        settings: the job's settings.
        foreground: whether the caller shows the job until its end. On this machine, such a job runs
            the current files: it starts at once, and a debugger opens the files by their paths.
    """
    backend = base.instance(settings.backend)
    asked = spec.snapshot and settings.origins.get("snapshot") == "--snapshot"
    foreground = foreground and isinstance(backend, Foreground)
    if foreground:
        spec = replace(spec, snapshot=False)
    check_capabilities(spec, settings.backend, backend)
    spec, avoided = bad_hosts.hosts_last(spec, settings.cluster)
    plan = backend.plan(spec)
    spec.private_values(os.environ, settings.cluster)  # raises if a secret has no value
    # On this machine, the job sends with this very Python, unless another one is prepared.
    own = isinstance(backend, Foreground) and not (spec.setup or spec.uv or spec.env_archive)
    unchecked = notifications.check_urls(spec.notify, os.environ, spec.python if own else "")
    # A note, no error: the Python of the job may be newer than this one.
    wrong = program_check.syntax_error(spec)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    notes = [f"{wrong} (checked with Python {version})"] if wrong else []
    notes += [*unchecked, *option_conflicts.without_effect(settings.values, settings.origins)]
    if asked and foreground:
        notes.append("--snapshot: `run` on this machine uses the current files; use `submit`")
    if avoided:
        notes.append(bad_hosts.text(avoided))
    nodes, per_node = spec.resources.nodes, spec.resources.gpus_per_node
    if settings.origins.get("gpus") == "--gpus" and nodes > 1 and per_node and not spec.gpus:
        # sbatch's --gpus counts the GPUs of the whole job.
        notes.append(f"--gpus: {per_node} on each of {nodes} nodes, {nodes * per_node} in total")
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def doctor_checks(settings: config.Settings, directory: Path) -> Iterator[Check]:
    """Check whether a cluster can run a job with these settings; yield each check.

    Args:
        settings: the job's settings.
        directory: the default working directory, as in `make_spec`.

    Raises:
        UsageError: the cluster cannot run a job with these settings.
        ClusterJobError: the cluster's backend has no checks.
    """
    backend = base.instance(settings.backend)
    if not isinstance(backend, base.Checker):
        raise ClusterJobError(
            f"the {settings.backend} backend has no checks of its own",
            "another package provides this backend",
        )
    spec = make_spec(Program("module", "doctor"), settings, directory=directory)
    try:
        check_capabilities(spec, settings.backend, backend)
    except SpecError as error:
        refused = Check("job", CheckState.FAILED, message=error.message, hint=error.hint)
        return (refused if each.name == "job" else each for each in backend.doctor_checks(spec))
    return backend.doctor_checks(spec)


def fetch(
    record: Record,
    paths: Sequence[str],
    target: Path,
    nodes: Sequence[int] | None,
    may_replace: Callable[[list[str]], bool],
    limits: FetchLimits = FETCH_LIMITS,
) -> list[Fetched]:
    """Copy results of a job from its hosts; unchanged files are not sent.

    Args:
        record: the job.
        paths: files and directories, relative to the job's working directory.
        target: destination directory; with several hosts, each gets a directory ``node<k>`` in it.
        nodes: nodes to copy from; None for all.
        may_replace: receives the names of the files that have changed on this machine; returns
            whether to replace all of them or none.
        limits: how much each host may send.

    Raises:
        ClusterJobError: the working directory is on this machine, a host cannot be reached, or a
            host has no file at a path.
        UsageError: the job has no such node.
    """
    backend = base.instance(record.backend)
    if not isinstance(backend, base.Fetcher):
        raise nothing_to_fetch(record)
    job_parts.check_nodes(record, nodes)
    return backend.fetch(record, paths, target, nodes, may_replace, limits)


def cancel(
    wanted: Iterable[Record],
    on_error: Callable[[Record, ClusterJobError], None] | None = None,
    *,
    stacks: bool = False,
) -> list[tuple[Record, bool]]:
    """Cancel jobs; return each job, and False if it had already ended.

    The elements of an array are cancelled together. A job with a provisional end may still run, so
    its backend cancels it too and notes this in the job's directory.

    Args:
        wanted: the jobs.
        on_error: called with each job that cannot be cancelled; the other jobs are cancelled.
        stacks: whether to save the stacks of the workers into the logs first.

    Raises:
        ClusterJobError: a job cannot be cancelled, and there is no `on_error`.
    """
    pairs = polling.statuses(list(wanted))
    running: dict[str, list[Record]] = {}
    for record, status in pairs:
        if not status.state.final or record.provisional:
            running.setdefault(record.backend, []).append(record)
            if stacks:
                ends.want_stacks(record.job_dir)
    for name, group in running.items():
        _cancel(name, group, on_error)
    return [
        (record, not status.state.final or (record.provisional and ends.cancelled(record.job_dir)))
        for record, status in pairs
    ]


def _cancel(
    name: str, group: list[Record], on_error: Callable[[Record, ClusterJobError], None] | None
) -> None:
    try:
        base.instance(name).cancel(group)
    except ClusterJobError as error:
        if on_error is None:
            raise
        wholes: dict[str, list[Record]] = {}
        for record in group:
            wholes.setdefault(record.whole_id, []).append(record)
        if len(wholes) > 1:  # one unreachable host must not keep the other jobs running
            for members in wholes.values():
                _cancel(name, members, on_error)
        else:
            for record in group:
                on_error(record, error)


def interrupt(record: Record) -> bool:
    """Interrupt a job's workers as Ctrl-C does; return False if it can only be cancelled."""
    backend = base.instance(record.backend)
    return isinstance(backend, Interrupter) and record.array is None and backend.interrupt(record)
