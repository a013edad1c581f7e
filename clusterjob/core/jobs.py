"""Plan, submit, poll, wait for, follow, fetch and cancel jobs, one function for each.

The command line only prints their results.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import base
from clusterjob.backends.base import (
    FETCH_LIMITS,
    Backend,
    FetchLimits,
    Foreground,
    Interrupter,
    Status,
)
from clusterjob.backends.shared import nothing_to_fetch
from clusterjob.core import config, hosts, job_secrets, node_zip, plans
from clusterjob.core.capabilities import check as check_capabilities
from clusterjob.core.listing import Listing, place_in_list, row_of
from clusterjob.core.options import OPTIONS, Target
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record, Records, home, secure_home
from clusterjob.core.spec import JobSpec, Resources
from clusterjob.core.trust import LOOK, Usage
from clusterjob.doctor.engine import Check, CheckState
from clusterjob.errors import (
    AmbiguousId,
    ClusterJobError,
    PlacementError,
    RecordError,
    SpecError,
    SubmitInDoubtError,
    UsageError,
)
from clusterjob.node import environments
from clusterjob.node.logs import ends, events
from clusterjob.node.logs.job_dir import ENDS, LOGS
from clusterjob.node.logs.log_files import LogLine, LogReader
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs, processes
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.remote.fetch import Fetched

_FIRST_PAUSE, _MAX_PAUSE = 0.02, 0.25  # first and maximum seconds between two polls of one job
_ARRAY = "an array"  # shown instead of a state: each element has a state of its own
_MAX_PAUSE_OF_MANY = 1.0  # maximum seconds between two polls of many jobs


def resolve_settings(
    flags: Mapping[str, Any], cluster: str | None, directory: Path, use: Usage = LOOK
) -> config.Settings:
    """Return the settings of a job that is submitted from a directory.

    Args:
        flags: options of the command line.
        cluster: value of --cluster, or None.
        directory: the working directory.
        use: how the caller will use the settings; by default nothing is executed.

    Raises:
        PlacementError: this process runs inside a job, and no cluster was named.
        Untrusted: a project's file would execute something, and the user has not trusted it.
    """
    if isinstance(flags.get("env"), list):
        flags = {**flags, "env": [_with_value(item) for item in flags["env"]]}
    named = (
        "hosts" in flags
        or "hostfile" in flags
        or any(os.environ.get(f"CLUSTERJOB_{key}") for key in ("HOSTS", "HOSTFILE"))
    )
    has_hosts = named or bool(hosts.of_platform(os.environ))
    has_login = "login" in flags or bool(os.environ.get("CLUSTERJOB_LOGIN"))
    if cluster is None and not has_hosts and not has_login:
        _refuse_inside_a_job()
    preferred = (lambda: "slurm") if has_login else (lambda: "ssh") if has_hosts else base.preferred
    settings = config.resolve(
        flags,
        cluster,
        environ=os.environ,
        directory=directory,
        backends=base.names(),
        fallback=preferred,
        use=use,
    )
    return _with_kept_ssh_config(settings) if use.program is not None or use.sources else settings


def _with_kept_ssh_config(settings: config.Settings) -> config.Settings:
    """Return the settings with the project's ssh configuration replaced by a private copy.

    `status` and other commands read the configuration later. By then the project's file may contain
    lines that the user has neither run nor trusted. Settings without such a file stay unchanged.
    """
    options = settings.values.get("set", {})
    named = options.get("ssh_config")
    if not isinstance(named, config.ProjectSshConfig):
        return settings
    try:
        content = Path(named).expanduser().read_bytes()
    except (OSError, RuntimeError):  # the backend reports the unreadable file
        return settings
    secure_home()
    kept = home() / "ssh_configs" / hashlib.sha256(content).hexdigest()[:32]
    try:
        private_dirs.make(kept.parent)
        files.write_atomic(kept, content)
    except OSError as error:
        raise RecordError(
            f"{kept} cannot be written: {error.strerror}",
            "set CLUSTERJOB_HOME to another directory",
        ) from error
    return replace(
        settings, values={**settings.values, "set": {**options, "ssh_config": str(kept)}}
    )


def _with_value(item: str) -> str:
    """Return NAME=VALUE for an item of ``--env``; add this process's value to NAME alone."""
    if "=" in item:
        return item
    if item not in os.environ:
        raise SpecError(f"--env {item}: it is not set here", f"--env {item}=VALUE sets it")
    return f"{item}={os.environ[item]}"


def _refuse_inside_a_job() -> None:
    """Refuse to submit from inside a job: the new job might use that job's nodes by mistake.

    Raises:
        PlacementError: the environment is that of a job's node.
    """
    finding = environments.detect(os.environ)
    if finding.source == "none":
        return
    variables = ", ".join(sorted(set(finding.evidence.values()))) or "its variables"
    raise PlacementError(
        f"this process already runs inside a job ({finding.source}: {variables})",
        "`clusterjob launch` starts this node's part of it; "
        "--cluster NAME submits to another cluster",
    )


def make_spec(program: Program, settings: config.Settings, directory: Path) -> JobSpec:
    """Return the job spec for a program and its settings.

    Args:
        program: the program to run.
        settings: the job's settings.
        directory: default working directory; relative paths of a working directory or template
            start here.

    Raises:
        SpecError: a field is invalid.
    """
    values = dict(settings.values)
    if values.get("gpus", "auto") != "auto":
        values.setdefault("gpus_per_node", len(values["gpus"].split(",")))
    gpu_type, gpus_per_node = _gpus(values.get("gpus_per_node"))
    options = values.pop("set", {}) | _pop(values, Target.BACKEND)
    chosen = _hosts(values, settings.backend, directory=directory)
    slots = max((host.slots or 1 for host in chosen), default=1)
    resources = Resources(
        **({"nodes": len(chosen) or 1} | _pop(values, Target.RESOURCES)),
        gpus_per_node=gpus_per_node,
        time_limit=values.pop("time", None),
        gpu_type=gpu_type,
    )
    values.pop("gpus_per_node", None)
    workdir = directory / values.pop("workdir", "")
    if "template" in values:
        values["template"] = directory / values["template"]
    return JobSpec(
        program=program,
        resources=resources,
        workdir=workdir,
        nproc_is_default="nproc_per_node" not in values and gpus_per_node is None,
        nproc_per_node=values.pop("nproc_per_node", gpus_per_node or slots),
        python=values.pop("python", None)
        or (
            "python3"
            if chosen or values.get("container") or values.get("login")
            else default_python(os.environ)
        ),
        hosts=chosen,
        options=options,
        **values,
    )


def _pop(values: dict[str, Any], target: Target) -> dict[str, Any]:
    """Remove the options with this target from the values, and return them by key."""
    keys = [key for key in values if OPTIONS[key].target is target]
    return {key: values.pop(key) for key in keys}


def _gpus(asked: int | str | None) -> tuple[str, int | None]:
    """Return the type and number of GPUs from ``8`` or ``a100:8``; the type may be empty."""
    gpu_type, _, count = asked.rpartition(":") if isinstance(asked, str) else ("", "", asked)
    return gpu_type, None if count is None else int(count)


def _hosts(values: dict[str, Any], backend: str, directory: Path) -> tuple[hosts.Host, ...]:
    """Remove the hosts from the settings and return them.

    The hosts are those of --hosts or --hostfile. If neither is set, the ssh backend reads the hosts
    from the platform's variables.
    """
    text, file = values.pop("hosts", None), values.pop("hostfile", None)
    found = hosts.named_hosts(text, file, directory=directory)
    if not found:
        return hosts.of_platform(os.environ) if backend == "ssh" else ()
    if values.keys() & {"nproc_per_node", "gpus_per_node"}:
        # An explicit number of workers or GPUs overrides the slots of the host file.
        return tuple(replace(host, slots=None) for host in found)
    return found


def default_python(environ: Mapping[str, str]) -> str:
    """Return the default Python interpreter of a job.

    The default is the interpreter of the active virtual or conda environment, else the interpreter
    that runs clusterjob. An isolated installation (pipx, uv tool) usually has no torch: its default
    is python3 from PATH.
    """
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = Path(environ.get(variable) or "/nonexistent") / "bin" / "python"
        if candidate.is_file():
            return str(candidate)
    isolated = any(
        (Path(sys.prefix) / mark).is_file() for mark in ("pipx_metadata.json", "uv-receipt.toml")
    )
    if isolated:
        return shutil.which("python3") or sys.executable
    return sys.executable


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
    backend = _backend(plan.backend)
    if plan.job_dir.exists():
        raise RecordError(
            f"the job directory {plan.job_dir} cannot be made: File exists",
            "submit again: the job gets a new id",
        )
    _remove_leftovers(records)
    values = job_secrets.packed(plan.spec.secret, os.environ)
    record = Record(
        plan.job_id, plan.spec.name, cluster=cluster, backend=plan.backend, job_dir=plan.job_dir,
        nodes=plan.spec.resources.nodes, submitted_at=events.now(), spec=plan.spec.to_json(),
        submitter=processes.ProcessIdentity.of_this_process(), array=plan.array,
    )  # fmt: skip
    try:
        # Save the record first: a killed submit then leaves no job directory without a record.
        records.save(record)
        plans.write_files(plan, values)
        for file in plan.files:
            if file.path.name == node_zip.NAME:
                node_zip.keep(file.data, node_zip.cache_directory())
        if isinstance(backend, Foreground):
            backend.stdin = stdin
        handle = backend.submit(plan)
        try:
            record = records.with_handle(record, handle)
        except ClusterJobError:  # without a saved handle the job cannot be found: stop it
            backend.cancel(records.elements(replace(record, handle=handle)))
            raise
        except KeyboardInterrupt:
            # The job reads the cancel request below only after its start. This call also cancels a
            # job that waits in a queue.
            with contextlib.suppress(ClusterJobError):
                backend.cancel(records.elements(replace(record, handle=handle)))
            raise
    except SubmitInDoubtError as error:  # the job may run: keep its record and directory
        error.hint = (
            f"do not submit it again before `clusterjob status {plan.job_id}` shows its state"
        )
        raise
    except KeyboardInterrupt:
        # Ctrl-C may stop the submit at any point. `status` shows this request, and a part of the
        # job that still starts reads it and ends.
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
    """Remove partial records and old, unused job directories that killed submits left.

    A directory is unused if it has no record and no process was started in it.
    """
    files.remove_leftovers(records.directory)
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
        # The directory of a queued job also looks unused, and NFS may not list its record yet.
        with contextlib.suppress(OSError):
            if files.is_old(job_dir) and not records.has(job_dir.name):
                shutil.rmtree(job_dir, ignore_errors=True)


_loaded: dict[str, Backend] = {}


def _backend(name: str) -> Backend:
    """Return this process's only instance of a backend.

    The instance may hold connections, or the lifelines of its jobs.
    """
    if name not in _loaded:
        _loaded[name] = base.load(name)
    return _loaded[name]


def plan(spec: JobSpec, settings: config.Settings) -> Plan:
    """Return the plan of a job; runs no command and contacts no host."""
    backend = _backend(settings.backend)
    check_capabilities(spec, settings.backend, backend)
    plan = backend.plan(spec)
    job_secrets.packed(spec.secret, os.environ)  # raises if a secret has no value
    wrong = spec.syntax_error()  # only a note: the job's Python may be newer than this one
    return (
        replace(
            plan,
            notes=(
                *plan.notes,
                f"{wrong} (checked with Python {sys.version_info.major}.{sys.version_info.minor})",
            ),
        )
        if wrong
        else plan
    )


def doctor_checks(settings: config.Settings, directory: Path) -> Iterator[Check]:
    """Check whether a cluster can run a job with these settings; yield each check.

    Args:
        settings: the job's settings.
        directory: the default working directory, as in `make_spec`.

    Raises:
        UsageError: the cluster cannot run a job with these settings.
        ClusterJobError: the cluster's backend has no checks.
    """
    backend = _backend(settings.backend)
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


def statuses(wanted: Sequence[Record]) -> list[tuple[Record, Status]]:
    """Return the status of jobs, with one query to each backend; save new ends in the records.

    An array is replaced by its elements, each a job of its own.
    """
    records = Records()
    wanted = [element for record in wanted for element in records.elements(record)]
    found: dict[str, Status] = {}
    asked: dict[str, list[Record]] = {}
    for record in wanted:
        if record.end is not None and not record.may_be_corrected:
            found[record.job_id] = _from_end(
                Verdict.from_json(record.end)
            )  # `Record.from_json` has checked it
        else:
            asked.setdefault(record.backend, []).append(record)
    for name, group in asked.items():
        found |= _ask(name, group)
    pairs = []
    arrays: dict[str, Handle] = {}
    for record in wanted:
        status = found.get(record.job_id, Status(JobState.UNKNOWN))
        if record.end is not None and (status.provisional or status.state is JobState.UNKNOWN):
            status = _from_end(Verdict.from_json(record.end))  # the recorded, provisional end
        if status.handle is not None and record.handle is None and record.index is None:
            record = records.with_handle(record, status.handle)  # noqa: PLW2901 - the same job
        elif status.handle is not None and record.handle is None:
            arrays[record.whole_id] = status.handle
        if (
            status.verdict is not None
            and status.state.final
            and status.verdict.to_json() != record.end
        ):
            record = records.with_end(  # noqa: PLW2901
                record, status.verdict.to_json(), provisional=status.provisional
            )
        pairs.append((record, status))
    for whole_id, handle in arrays.items():
        records.with_handle(records.find(whole_id), replace(handle, id=handle.data["ids"][0]))
    return pairs


def with_states(error: AmbiguousId) -> AmbiguousId:
    """Add the states of the first 5 jobs to the error's hint and return the error.

    The error is unchanged if the states cannot be read.
    """
    records = Records()
    try:
        shown = [records.find(job_id) for job_id in error.ids[:5]]
        known = {
            record.whole_id: str(status.state)
            for record, status in statuses([one for one in shown if one.array is None])
        }
    except ClusterJobError:
        return error
    more = (
        f" and {len(error.ids) - len(shown)} more: `clusterjob list` shows them"
        if len(error.ids) > len(shown)
        else ""
    )
    error.hint = (
        "it could be "
        f"{', '.join(f'{one.job_id} ({known.get(one.job_id, _ARRAY)})' for one in shown)}"
        f"{more}"
    )
    return error


def _ask(name: str, group: Sequence[Record]) -> dict[str, Status]:
    """Query one backend for the status of jobs.

    A broken record or directory makes only its own job UNKNOWN.
    """
    try:
        backend = _backend(name)
    except ClusterJobError as error:  # the backend's package is not installed any more
        return {record.job_id: Status(JobState.UNKNOWN, error.message) for record in group}
    try:
        return backend.status(group)
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        if len(group) > 1:
            return {
                job_id: status
                for record in group
                for job_id, status in _ask(name, [record]).items()
            }
        what = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError)
            else f"{type(error).__name__}: {error}"
        )
        return {
            group[0].job_id: Status(
                JobState.UNKNOWN,
                f"its record or its directory {group[0].job_dir} cannot be read ({what})",
            )
        }


def unfinished() -> list[tuple[Record, Status]]:
    """Return the jobs that have not ended, with their status, oldest first."""
    found = Listing(Records())
    pairs = [(record, status) for record, status in statuses(found.open) if not status.state.final]
    return sorted(pairs, key=lambda pair: place_in_list(row_of(*pair)))


def _from_end(verdict: Verdict) -> Status:
    return Status(
        verdict.state,
        verdict.reason,
        verdict=verdict,
        started_at=verdict.started_at,
        restarts=verdict.restarts,
    )


def status(record: Record) -> Status:
    """Return the status of one job."""
    return statuses([record])[0][1]


def collect(record: Record) -> None:
    """Copy the logs that a job has written so far into its directory on this machine."""
    _backend(record.backend).collect(record)


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
    backend = _backend(record.backend)
    if not isinstance(backend, base.Fetcher):
        raise nothing_to_fetch(record)
    if nodes is not None and not all(node < record.nodes for node in nodes):
        raise UsageError(
            f"job {record.job_id} has no node {max(nodes)}",
            f"its nodes are 0 to {record.nodes - 1}",
        )
    return backend.fetch(record, paths, target, nodes, may_replace, limits)


def cancel(wanted: Iterable[Record]) -> list[tuple[Record, bool]]:
    """Stop jobs; return each job, and whether it still had to be stopped.

    The elements of an array are stopped together. A job whose recorded end is provisional may still
    run: its backend tries again and notes the attempt in the job's directory.
    """
    pairs = statuses(list(wanted))
    running: dict[str, list[Record]] = {}
    for record, status in pairs:
        if not status.state.final or record.provisional:
            running.setdefault(record.backend, []).append(record)
    for name, group in running.items():
        _backend(name).cancel(group)
    return [
        (record, not status.state.final or (record.provisional and ends.cancelled(record.job_dir)))
        for record, status in pairs
    ]


def interrupt_prompt(record: Record) -> bool:
    """Interrupt the worker that waits for input from this process's terminal.

    Such a worker is, for example, at a debugger's prompt. Return False if there is none.
    """
    backend = _backend(record.backend)
    return isinstance(backend, Foreground) and backend.interrupt_prompt(record)


def interrupt(record: Record) -> bool:
    """Interrupt a job's workers as Ctrl-C does; return False if it can only be cancelled."""
    backend = _backend(record.backend)
    return isinstance(backend, Interrupter) and record.array is None and backend.interrupt(record)


def follow(
    record: Record,
    show: Callable[[Iterable[list[LogLine]]], None],
    progress: Callable[[Status], None],
    reader: LogReader | None = None,
    *,
    logs: bool = True,
) -> Verdict:
    """Show a job's output while it is written, until the job ends; return the verdict.

    Args:
        record: the job.
        show: receives the new lines of one poll, in order, in small batches; a batch is empty if
            only an unfinished line has grown.
        progress: called with the status at each poll.
        reader: source of the lines; it may have read some lines already, or may read only the lines
            of one worker.
        logs: whether to fetch the logs, which takes time if they are on another machine.
    """
    reader = reader or LogReader(record.job_dir)
    pause = _FIRST_PAUSE
    while True:
        now = status(record)
        if logs:
            collect(record)
        batches = reader.batches(end=now.verdict is not None)
        first = next(batches, None)
        if first is not None:
            show(itertools.chain([first], batches))
        if now.verdict is not None:
            return now.verdict
        progress(now)
        pause = _FIRST_PAUSE if first is not None else min(_MAX_PAUSE, pause * 1.3)
        time.sleep(pause)


def wait_for_all(wanted: Sequence[Record], on_end: Callable[[Record, Status], None]) -> int:
    """Wait until all jobs have ended; return the first exit code that is not 0, else 0.

    Args:
        wanted: the jobs, such as an array's elements; "first" means the first in this order.
        on_end: called with each job when its end is seen.
    """
    open_ = [element for record in wanted for element in Records().elements(record)]
    codes = dict.fromkeys((record.job_id for record in open_), 0)
    pause = _FIRST_PAUSE
    while True:
        pairs = statuses(open_)
        ended = [(record, now) for record, now in pairs if now.verdict is not None]
        for record, now in ended:
            on_end(record, now)
            codes[record.job_id] = now.verdict.exit_code if now.verdict is not None else 1
        open_ = [record for record, now in pairs if now.verdict is None]
        if not open_:
            return next((code for code in codes.values() if code), 0)
        pause = _FIRST_PAUSE if ended else min(_MAX_PAUSE_OF_MANY, pause * 1.3)
        time.sleep(pause)


def wait(record: Record, progress: Callable[[Status], None] = lambda _: None) -> Verdict:
    """Wait until a job has ended and return its verdict.

    Args:
        record: the job.
        progress: called with the status at each poll.
    """
    return follow(
        record,
        lambda _: None,
        progress=progress,
        reader=LogReader(record.job_dir, node=-1),
        logs=False,
    )
