"""What can be done with jobs, each as one function: plan, submit, ask, wait, follow, cancel. The
command line only prints.
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
from clusterjob.core.listing import Listing, place_in_list, row_of
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record, Records, home, secure_home
from clusterjob.core.spec import JobSpec, Resources
from clusterjob.core.trust import LOOK, Use
from clusterjob.doctor.engine import Check
from clusterjob.errors import (
    AmbiguousId,
    ClusterJobError,
    PlaceError,
    RecordError,
    SpecError,
    SubmitInDoubtError,
    UsageError,
)
from clusterjob.node import environments
from clusterjob.node.logs import ends, events
from clusterjob.node.logs.log_files import Line, LogReader
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs, processes
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.remote.fetch import Fetched

NAMED_OPTIONS = (
    "account",
    "partition",
    "nodelist",
    "exclude",
    "reservation",
)  # --set's most common, with names of their own
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds between two looks at a job that is waited for
_ARRAY = "an array"  # in the place of a state: each element has its own
_LONGEST_PAUSE_OF_MANY = 1.0  # ... at the directories of many


def settle(
    flags: Mapping[str, Any], cluster: str | None, directory: Path, use: Use = LOOK
) -> config.Settings:
    """Return the settings that hold for a job submitted from a directory.

    Args:
        flags: what the command line gave.
        cluster: what --cluster named, or None.
        directory: the working directory.
        use: what is about to happen with the settings; by default nothing is executed.

    Raises:
        PlaceError: this is the inside of a job, and no cluster was named.
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
    """Return the settings of a job that is submitted with a copy of the project's ssh
    configuration, if there is one.

    `status` and others read it later, when the project may hold what the user has never run or
    trusted.
    """
    options = settings.values.get("set", {})
    named = options.get("ssh_config")
    if not isinstance(named, config.OfProject):
        return settings
    try:
        content = Path(named).expanduser().read_bytes()
    except (OSError, RuntimeError):  # the backend names it
        return settings
    secure_home()
    kept = home() / "ssh_configs" / hashlib.sha256(content).hexdigest()[:32]
    try:
        private_dirs.make(kept.parent)
        files.write_atomic(kept, content)
    except OSError as error:
        raise RecordError(
            f"{kept} cannot be written: {error.strerror}",
            "CLUSTERJOB_HOME names another place for jobs",
        ) from error
    return replace(
        settings, values={**settings.values, "set": {**options, "ssh_config": str(kept)}}
    )


def _with_value(item: str) -> str:
    """Return an item of ``--env`` with its value: NAME alone is this environment's variable."""
    if "=" in item:
        return item
    if item not in os.environ:
        raise SpecError(f"--env {item}: it is not set here", f"--env {item}=VALUE gives it a value")
    return f"{item}={os.environ[item]}"


def _refuse_inside_a_job() -> None:
    """Nobody rehearses two nodes on one of them by mistake."""
    finding = environments.detect(os.environ)
    if finding.source == "none":
        return
    variables = ", ".join(sorted(set(finding.evidence.values()))) or "its variables"
    raise PlaceError(
        f"this is the inside of a job already ({finding.source}: {variables})",
        "`clusterjob launch` starts this node's part of it; --cluster names another cluster to submit to",
    )


def make_spec(program: Program, settings: config.Settings, directory: Path) -> JobSpec:
    """Return the job that a program and its settings describe.

    Args:
        program: what to run.
        settings: what holds for it.
        directory: what a relative working directory or template is relative to, and the default of
            the former.

    Raises:
        SpecError: a field makes no sense.
    """
    values = dict(settings.values)
    if values.get("gpus", "auto") != "auto":
        values.setdefault("gpus_per_node", len(values["gpus"].split(",")))
    gpu_type, gpus_per_node = _gpus(values.get("gpus_per_node"))
    options = values.pop("set", {}) | {
        key: values.pop(key) for key in NAMED_OPTIONS if key in values
    }
    chosen = _hosts(values, settings.backend, directory=directory)
    slots = max((host.slots or 1 for host in chosen), default=1)
    resources = Resources(
        nodes=values.pop("nodes", len(chosen) or 1), gpus_per_node=gpus_per_node,
        cpus_per_task=values.pop("cpus_per_task", None), mem=values.pop("mem", None),
        time_limit=values.pop("time", None), gpu_type=gpu_type,
    )  # fmt: skip
    values.pop("gpus_per_node", None)
    workdir = directory / values.pop("workdir", "")
    if "template" in values:
        values["template"] = directory / values["template"]
    return JobSpec(
        program=program,
        resources=resources,
        workdir=workdir,
        nproc_open="nproc_per_node" not in values and gpus_per_node is None,
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


def _gpus(asked: int | str | None) -> tuple[str, int | None]:
    """Return the type and the number of GPUs that are asked for as ``8`` or ``a100:8``."""
    gpu_type, _, count = asked.rpartition(":") if isinstance(asked, str) else ("", "", asked)
    return gpu_type, None if count is None else int(count)


def _hosts(values: dict[str, Any], backend: str, directory: Path) -> tuple[hosts.Host, ...]:
    """Take the hosts out of the settings: those that are named, those of a file, else those that a
    platform names.
    """
    text, file = values.pop("hosts", None), values.pop("hostfile", None)
    found = hosts.named_hosts(text, file, directory=directory)
    if not found:
        return hosts.of_platform(os.environ) if backend == "ssh" else ()
    if values.keys() & {"nproc_per_node", "gpus_per_node"}:
        return tuple(replace(host, slots=None) for host in found)  # what is said outright counts
    return found


def default_python(environ: Mapping[str, str]) -> str:
    """Return the interpreter for a job: the active virtual or conda environment's, else the one
    that runs this.

    An isolated installation (pipx, uv tool) without torch is not meant to train: there, python3 as
    PATH has it.
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
    """Carry out a plan and return the job's record.

    The intent is on disk before the backend is asked, and nothing of a job that could not start is
    left.

    Args:
        plan: what `Backend.plan` returned.
        cluster: the cluster's name, for the record.
        detach: whether the job may live on without this process.
        stdin: the descriptor that becomes rank 0's stdin, where the backend's jobs run beside this
            process; None for an empty one.

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
            "submit again: the job gets another id",
        )
    _remove_leftovers(records)
    values = job_secrets.packed(plan.spec.secret, os.environ)
    record = Record(
        plan.job_id, plan.spec.name, cluster=cluster, backend=plan.backend, job_dir=plan.job_dir, nodes=plan.spec.resources.nodes,
        submitted_at=events.now(), spec=plan.spec.to_json(), submitter=processes.ProcessIdentity.of_this_process(),
        array=plan.array,
    )  # fmt: skip
    try:
        records.save(
            record
        )  # first: a submit that is killed leaves no directory that belongs to no job
        plans.write_files(plan, values)
        for file in plan.files:
            if file.path.name == node_zip.NAME:
                node_zip.keep(file.data, node_zip.cache_directory())
        if isinstance(backend, Foreground):
            backend.stdin = stdin
        handle = backend.submit(plan)
        try:
            record = records.with_handle(record, handle)
        except ClusterJobError:  # nobody could ask for the job: it must not run
            backend.cancel(records.elements(replace(record, handle=handle)))
            raise
        except KeyboardInterrupt:  # nor need it wait in a queue for a cancel request to be read
            with contextlib.suppress(ClusterJobError):
                backend.cancel(records.elements(replace(record, handle=handle)))
            raise
    except (
        SubmitInDoubtError
    ) as error:  # it may run: the record and the directory are what it can be found by
        error.hint = (
            f"do not submit it again before `clusterjob status {plan.job_id}` has said where it is"
        )
        raise
    except KeyboardInterrupt:
        ends.cancel(
            plan.job_dir
        )  # wherever it was broken off: for whoever asks after it, and whatever of it may still start
        raise
    except ClusterJobError:
        shutil.rmtree(plan.job_dir, ignore_errors=True)
        records.remove(plan.job_id)
        raise
    if detach and record.handle is not None:
        backend.detach(record.handle)
    return record


def _remove_leftovers(records: Records) -> None:
    """Remove what killed submits have left: parts of records, and old directories without a record
    in which nothing was started.
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
            or any((job_dir / "logs").glob("*"))
            or any((job_dir / "ends").glob("*"))
        ):
            continue
        # A job that waits in a queue looks the same, and NFS may list the records as they were
        # before it.
        with contextlib.suppress(OSError):
            if files.is_old(job_dir) and not records.has(job_dir.name):
                shutil.rmtree(job_dir, ignore_errors=True)


_loaded: dict[str, Backend] = {}


def _backend(name: str) -> Backend:
    """Return the one instance of a backend in this process: it may hold connections, or the
    lifelines of its jobs.
    """
    if name not in _loaded:
        _loaded[name] = base.load(name)
    return _loaded[name]


def plan(spec: JobSpec, settings: config.Settings) -> Plan:
    """Return what submitting a job would do; runs no command and contacts nothing."""
    plan = _backend(settings.backend).plan(spec)
    job_secrets.packed(spec.secret, os.environ)  # each has a value, or the job is refused here
    wrong = spec.syntax_error()  # by this Python: the job's own may be a newer one
    return (
        replace(
            plan,
            notes=(
                *plan.notes,
                f"{wrong} (as Python {sys.version_info.major}.{sys.version_info.minor} reads it)",
            ),
        )
        if wrong
        else plan
    )


def examine(settings: config.Settings, directory: Path) -> Iterator[Check]:
    """Yield what is found of a cluster's fitness for a job with these settings, each check as it is
    done.

    Args:
        settings: what holds for the job.
        directory: as for `make_spec`.

    Raises:
        UsageError: such a job makes no sense there.
        ClusterJobError: the cluster's backend cannot be examined.
    """
    backend = _backend(settings.backend)
    if not isinstance(backend, base.Examiner):
        raise ClusterJobError(
            f"the {settings.backend} backend has no checks of its own", "it is another package's"
        )
    return backend.examine(make_spec(Program("module", "doctor"), settings, directory=directory))


def statuses(wanted: Sequence[Record]) -> list[tuple[Record, Status]]:
    """Return how jobs stand, one question to each backend for all of its jobs; ends that are news
    are noted in the records.

    An array stands for its elements, each a job of its own.
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
            status = _from_end(Verdict.from_json(record.end))  # nothing better is known
        if status.handle is not None and record.handle is None and record.index is None:
            record = records.with_handle(record, status.handle)  # noqa: PLW2901 - the same job, and where it is
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
    """Return the error with the state of each of the first jobs in its hint, as far as they can be
    asked.
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
    error.hint = f"it could be {', '.join(f'{one.job_id} ({known.get(one.job_id, _ARRAY)})' for one in shown)}{more}"
    return error


def _ask(name: str, group: Sequence[Record]) -> dict[str, Status]:
    """Ask one backend for its jobs. What is wrong with one record or directory makes that job
    UNKNOWN, and no other.
    """
    try:
        backend = _backend(name)
    except ClusterJobError as error:  # a backend of a package that is gone
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


def unended() -> list[tuple[Record, Status]]:
    """Return how the jobs stand that have not ended, the oldest first."""
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
    """Return how one job stands."""
    return statuses([record])[0][1]


def collect(record: Record) -> None:
    """Have a job's logs in its directory here, as far as they are written by now."""
    _backend(record.backend).collect(record)


def fetch(
    record: Record,
    paths: Sequence[str],
    target: Path,
    nodes: Sequence[int] | None,
    may_replace: Callable[[list[str]], bool],
    limits: FetchLimits = FETCH_LIMITS,
) -> list[Fetched]:
    """Bring results of a job from its hosts: only what has changed.

    Args:
        record: the job.
        paths: files and directories, relative to its working directory.
        target: where to; several hosts get a directory each, ``node<k>``.
        nodes: from which; None for all.
        may_replace: asked whether files that have changed here may be replaced: all of them, or
            none.
        limits: how much each host may send.

    Raises:
        ClusterJobError: its working directory is no other machine's; a host is not reached or has
            nothing at a path.
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
    """Stop jobs, an array's elements all together; for each, whether it was still to be stopped.

    One whose end is only guessed may run: its backend tries again, and notes its try in the job's
    directory.
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
    """Interrupt the worker that waits for input from this process's terminal, as at a debugger's
    prompt; return whether there is one.
    """
    backend = _backend(record.backend)
    return isinstance(backend, Foreground) and backend.interrupt_prompt(record)


def interrupt(record: Record) -> bool:
    """Have a job's workers interrupted, as Ctrl-C does; return False where it can only be
    cancelled.
    """
    backend = _backend(record.backend)
    return isinstance(backend, Interrupter) and record.array is None and backend.interrupt(record)


def follow(
    record: Record,
    show: Callable[[Iterable[list[Line]]], None],
    progress: Callable[[Status], None],
    reader: LogReader | None = None,
    *,
    logs: bool = True,
) -> Verdict:
    """Show a job's output as it is written, until the job ends; return the verdict.

    Args:
        record: the job.
        show: takes the new lines of one look, in order, as pieces of little memory; an empty piece
            where a line without an end has grown.
        progress: told how the job stands at each look.
        reader: where the lines come from; it may have read some already, or take one worker's
            alone.
        logs: whether the logs are wanted at all; fetching them from afar costs something.
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
        pause = _FIRST_PAUSE if first is not None else min(_LONGEST_PAUSE, pause * 1.3)
        time.sleep(pause)


def wait_for_all(wanted: Sequence[Record], news: Callable[[Record, Status], None]) -> int:
    """Return the exit code of several jobs, such as an array's elements, once all have ended: the
    first that is not 0, in their order.

    Args:
        wanted: the jobs.
        news: told of each end, as it is seen.
    """
    open_ = [element for record in wanted for element in Records().elements(record)]
    codes = dict.fromkeys((record.job_id for record in open_), 0)
    pause = _FIRST_PAUSE
    while True:
        pairs = statuses(open_)
        ended = [(record, now) for record, now in pairs if now.verdict is not None]
        for record, now in ended:
            news(record, now)
            codes[record.job_id] = now.verdict.exit_code if now.verdict is not None else 1
        open_ = [record for record, now in pairs if now.verdict is None]
        if not open_:
            return next((code for code in codes.values() if code), 0)
        pause = _FIRST_PAUSE if ended else min(_LONGEST_PAUSE_OF_MANY, pause * 1.3)
        time.sleep(pause)


def wait(record: Record, progress: Callable[[Status], None] = lambda _: None) -> Verdict:
    """Return the verdict of a job, once it has ended; progress is told how it stands at each look."""
    return follow(
        record,
        lambda _: None,
        progress=progress,
        reader=LogReader(record.job_dir, node=-1),
        logs=False,
    )
