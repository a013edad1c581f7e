"""What can be done with jobs, each as one function: plan, submit, ask, wait, follow, cancel. The command line only prints."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob import backends, config, hosts, pack, plans
from clusterjob.backends import Backend, Status
from clusterjob.backends.directory import nothing_to_fetch
from clusterjob.checks import Check
from clusterjob.errors import ClusterJobError, PlaceError, SpecError, SubmitInDoubtError, UsageError
from clusterjob.node import ends, environments, events, processes
from clusterjob.node.logs import Line, LogReader
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.plans import Plan
from clusterjob.records import Handle, Record, Records
from clusterjob.spec import JobSpec, Resources

if TYPE_CHECKING:
    from clusterjob.ssh.fetch import Fetched

NAMED_OPTIONS = ("account", "partition", "nodelist", "exclude", "reservation")  # --set's most common, with names of their own
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds between two looks at a job that is waited for
_LONGEST_PAUSE_OF_MANY = 1.0  # ... at the directories of many


def settle(flags: Mapping[str, Any], cluster: str | None, directory: Path) -> config.Settings:
    """Return the settings that hold for a job submitted from a directory.

    Raises:
        PlaceError: this is the inside of a job, and no cluster was named.
    """
    named = "hosts" in flags or "hostfile" in flags or any(os.environ.get(f"CLUSTERJOB_{key}") for key in ("HOSTS", "HOSTFILE"))
    has_hosts = named or bool(hosts.of_platform(os.environ))
    has_login = "login" in flags or bool(os.environ.get("CLUSTERJOB_LOGIN"))
    if cluster is None and not has_hosts and not has_login:
        _refuse_inside_a_job()
    preferred = "slurm" if has_login else "ssh" if has_hosts else backends.preferred()
    return config.resolve(flags, cluster, os.environ, directory, backends.names(), preferred)


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
        directory: what a relative working directory or template is relative to, and the default of the former.

    Raises:
        SpecError: a field makes no sense.
    """
    values = dict(settings.values)
    if values.get("gpus", "auto") != "auto":
        values.setdefault("gpus_per_node", len(values["gpus"].split(",")))
    gpus_per_node = values.get("gpus_per_node")
    options = values.pop("set", {}) | {key: values.pop(key) for key in NAMED_OPTIONS if key in values}
    chosen = _hosts(values, settings.backend, directory)
    slots = max((host.slots or 1 for host in chosen), default=1)
    resources = Resources(
        nodes=values.pop("nodes", len(chosen) or 1), gpus_per_node=values.pop("gpus_per_node", None),
        cpus_per_task=values.pop("cpus_per_task", None), mem=values.pop("mem", None), time_limit=values.pop("time", None),
    )  # fmt: skip
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
        or ("python3" if chosen or values.get("container") or values.get("login") else default_python(os.environ)),
        hosts=chosen,
        options=options,
        **values,
    )


def _hosts(values: dict[str, Any], backend: str, directory: Path) -> tuple[hosts.Host, ...]:
    """Take the hosts out of the settings: those that are named, those of a file, else those that a platform names."""
    text, file = values.pop("hosts", None), values.pop("hostfile", None)
    if text is not None and file is not None:
        raise SpecError("there are both --hosts and --hostfile", "one of them names the hosts")
    if text is not None:
        found = hosts.parse_hosts(text)
    elif file is not None:
        found = hosts.read_hostfile(directory / file)
    else:
        return hosts.of_platform(os.environ) if backend == "ssh" else ()
    if values.keys() & {"nproc_per_node", "gpus_per_node"}:
        return tuple(replace(host, slots=None) for host in found)  # what is said outright counts
    return found


def default_python(environ: Mapping[str, str]) -> str:
    """Return the interpreter for a job: the active virtual or conda environment's, else the one that runs this.

    An isolated installation (pipx, uv tool) without torch is not meant to train: there, python3 as PATH has it.
    """
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = Path(environ.get(variable) or "/nonexistent") / "bin" / "python"
        if candidate.is_file():
            return str(candidate)
    isolated = any((Path(sys.prefix) / mark).is_file() for mark in ("pipx_metadata.json", "uv-receipt.toml"))
    if isolated:
        return shutil.which("python3") or sys.executable
    return sys.executable


def submit(plan: Plan, cluster: str, *, detach: bool) -> Record:
    """Carry out a plan and return the job's record.

    The intent is on disk before the backend is asked, and nothing of a job that could not start is left.

    Args:
        plan: what `Backend.plan` returned.
        cluster: the cluster's name, for the record.
        detach: whether the job may live on without this process.

    Raises:
        ClusterJobError: the job's directory or record cannot be written, or the backend cannot start it.
    """
    records = Records()
    backend = _backend(plan.backend)
    plans.write_files(plan)
    for file in plan.files:
        if file.path.name == pack.NAME:
            pack.keep(file.data, pack.cache_directory())
    record = Record(
        plan.job_id, plan.spec.name, cluster, plan.backend, plan.job_dir, plan.spec.resources.nodes, events.now(), plan.spec.to_json(),
        submitter=processes.ProcessIdentity.of_this_process(), array=plan.array,
    )  # fmt: skip
    try:
        records.save(record)
        handle = backend.submit(plan)
        try:
            record = records.with_handle(record, handle)
        except ClusterJobError:  # nobody could ask for the job: it must not run
            backend.cancel(records.elements(replace(record, handle=handle)))
            raise
    except SubmitInDoubtError as error:  # it may run: the record and the directory are what it can be found by
        error.hint = f"do not submit it again before `clusterjob status {plan.job_id}` has said where it is"
        raise
    except KeyboardInterrupt:
        ends.cancel(plan.job_dir)  # wherever it was broken off: for whoever asks after it, and whatever of it may still start
        raise
    except ClusterJobError:
        records.remove(plan.job_id)
        shutil.rmtree(plan.job_dir, ignore_errors=True)
        raise
    if detach and record.handle is not None:
        backend.detach(record.handle)
    return record


_loaded: dict[str, Backend] = {}


def _backend(name: str) -> Backend:
    """Return the one instance of a backend in this process: it may hold connections, or the lifelines of its jobs."""
    if name not in _loaded:
        _loaded[name] = backends.load(name)
    return _loaded[name]


def plan(spec: JobSpec, settings: config.Settings) -> Plan:
    """Return what submitting a job would do; runs no command and contacts nothing."""
    return _backend(settings.backend).plan(spec)


def examine(settings: config.Settings, directory: Path) -> Iterator[Check]:
    """Yield what is found of a cluster's fitness for a job with these settings, each check as it is done.

    Args:
        settings: what holds for the job.
        directory: as for `make_spec`.

    Raises:
        UsageError: such a job makes no sense there.
        ClusterJobError: the cluster's backend cannot be examined.
    """
    backend = _backend(settings.backend)
    if not isinstance(backend, backends.Examiner):
        raise ClusterJobError(f"the {settings.backend} backend has no checks of its own", "it is another package's")
    return backend.examine(make_spec(Program("module", "doctor"), settings, directory))


def statuses(wanted: Sequence[Record]) -> list[tuple[Record, Status]]:
    """Return how jobs stand, one question to each backend for all of its jobs; ends that are news are noted in the records.

    An array stands for its elements, each a job of its own.
    """
    records = Records()
    wanted = [element for record in wanted for element in records.elements(record)]
    found: dict[str, Status] = {}
    asked: dict[str, list[Record]] = {}
    for record in wanted:
        if record.end is not None:
            found[record.job_id] = _from_end(Verdict.from_json(record.end))
        else:
            asked.setdefault(record.backend, []).append(record)
    for name, group in asked.items():
        found |= _backend(name).status(group)
    pairs = []
    arrays: dict[str, Handle] = {}
    for record in wanted:
        status = found.get(record.job_id, Status(JobState.UNKNOWN))
        if status.handle is not None and record.handle is None and record.index is None:
            record = records.with_handle(record, status.handle)  # noqa: PLW2901 - the same job, and where it is
        elif status.handle is not None and record.handle is None:
            arrays[record.whole_id] = status.handle
        news = record.end is None and status.verdict is not None and status.state.final
        pairs.append((records.with_end(record, status.verdict.to_json()) if news and status.verdict else record, status))
    for whole_id, handle in arrays.items():
        records.with_handle(records.find(whole_id), replace(handle, id=handle.data["ids"][0]))
    return pairs


def _from_end(verdict: Verdict) -> Status:
    return Status(verdict.state, verdict.reason, verdict, verdict.started_at, verdict.restarts)


def status(record: Record) -> Status:
    """Return how one job stands."""
    return statuses([record])[0][1]


def collect(record: Record) -> None:
    """Have a job's logs in its directory here, as far as they are written by now."""
    _backend(record.backend).collect(record)


def fetch(
    record: Record, paths: Sequence[str], target: Path, nodes: Sequence[int] | None, may_replace: Callable[[list[str]], bool]
) -> list[Fetched]:
    """Bring results of a job from its hosts: only what has changed.

    Args:
        record: the job.
        paths: files and directories, relative to its working directory.
        target: where to; several hosts get a directory each, ``node<k>``.
        nodes: from which; None for all.
        may_replace: asked whether files that are newer here may be replaced: all of them, or none.

    Raises:
        ClusterJobError: its working directory is no other machine's; a host is not reached or has nothing at a path.
    """
    backend = _backend(record.backend)
    if not isinstance(backend, backends.Fetcher):
        raise nothing_to_fetch(record)
    if nodes is not None and not all(node < record.nodes for node in nodes):
        raise UsageError(f"job {record.job_id} has no node {max(nodes)}", f"its nodes are 0 to {record.nodes - 1}")
    return backend.fetch(record, paths, target, nodes, may_replace)


def cancel(wanted: Iterable[Record]) -> list[tuple[Record, bool]]:
    """Stop jobs, an array's elements all together; for each, whether it was still to be stopped."""
    done = [(record, not status.state.final) for record, status in statuses(list(wanted))]
    running: dict[str, list[Record]] = {}
    for record, is_running in done:
        if is_running:
            running.setdefault(record.backend, []).append(record)
    for name, group in running.items():
        _backend(name).cancel(group)
    return done


def follow(
    record: Record,
    show: Callable[[list[Line]], None],
    progress: Callable[[Status], None],
    reader: LogReader | None = None,
    *,
    logs: bool = True,
) -> Verdict:
    """Show a job's output as it is written, until the job ends; return the verdict.

    Args:
        record: the job.
        show: takes the new lines, in order.
        progress: told how the job stands at each look.
        reader: where the lines come from; it may have read some already, or take one worker's alone.
        logs: whether the logs are wanted at all; fetching them from afar costs something.
    """
    reader = reader or LogReader(record.job_dir)
    pause = _FIRST_PAUSE
    while True:
        now = status(record)
        if logs:
            collect(record)
        lines = reader.finish() if now.verdict is not None else reader.read()
        if lines:
            show(lines)
        if now.verdict is not None:
            return now.verdict
        progress(now)
        pause = _FIRST_PAUSE if lines else min(_LONGEST_PAUSE, pause * 1.3)
        time.sleep(pause)


def wait_for_all(wanted: Sequence[Record], news: Callable[[Record, Status], None]) -> int:
    """Return the exit code of several jobs, such as an array's elements, once all have ended: the first that is not 0, in their order.

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
    return follow(record, lambda _: None, progress, LogReader(record.job_dir, node=-1), logs=False)
