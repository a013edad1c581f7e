"""Bare hosts as a cluster: an agent a host, started over SSH, that needs neither the submitter nor a shared disk afterwards.

What the hosts write of a job is mirrored into its directory here whenever somebody asks (`clusterjob.ssh.mirror`).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob import checks, pack, plans
from clusterjob.backends import Status, directory
from clusterjob.checks import Check
from clusterjob.errors import ClusterJobError, HostError, SpecError
from clusterjob.hosts import Host
from clusterjob.node import candidates, ends, files
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.plans import Plan, PlannedCommand
from clusterjob.records import Handle, Record
from clusterjob.render import render
from clusterjob.spec import JobSpec

if TYPE_CHECKING:
    from clusterjob.ssh.fetch import Fetched

NAME = "ssh"
_SCRIPT = "ssh-node.sh"
_CODE = "code"
_OPTIONS = ("ssh_config", "connect_timeout", "sync_limit", "remote_home", "need_torch")
_LOOK_PATIENCE = 1.0  # seconds that hosts which answer wait for one that does not
_LONGEST_SILENCE = 15.0  # seconds between two tries at a host that is not reached
_CANCEL_PATIENCE = 12.0  # seconds beyond the job's grace for a host to say that a job has stopped


@dataclass
class _Node:
    """What is known of one node of a job that is asked after."""

    mirror: Any
    look: Mapping[str, Any] | None = None
    error: HostError | None = None
    asking: Future[Any] | None = None
    failures: int = 0
    next_try: float = 0.0


@dataclass
class _Job:
    """A job that is asked after, once or again and again."""

    place: Any
    nodes: list[_Node]
    followed: bool = False
    looked: bool = False


@dataclass(frozen=True)
class _Options:
    """What --set says to this backend."""

    sync_limit: int
    remote_home: str
    need_torch: bool

    @classmethod
    def of(cls, spec: JobSpec) -> _Options:
        from clusterjob.ssh.options import Options

        options = spec.options
        unknown = next((key for key in options if key not in _OPTIONS), None)
        if unknown is not None:
            raise SpecError(f"the ssh cluster knows no option {unknown!r} (--set)", f"there is {', '.join(_OPTIONS)}")
        common = Options.of(options)
        torch = options.get("need_torch", "true").lower()
        if torch not in ("true", "false"):
            raise SpecError(f"need_torch: {torch!r} is neither true nor false")
        return cls(common.sync_limit, common.remote_home, torch == "true")


class SshBackend:
    """Runs jobs on hosts that are reached over SSH."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._visits_held: Any = None

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return what submitting the job would do. No host is asked.

        Raises:
            SpecError: there are no hosts, or fewer than nodes; or an option makes no sense here.
            TemplateError: the user's template cannot be rendered.
        """
        spec, options = _settled(spec), _Options.of(spec)
        job_id, job_dir = directory.new_directory(spec.name)
        script = render(spec.template or f"{_SCRIPT}.j2", self._values(spec, job_id, job_dir))
        remote = f"{options.remote_home}/jobs/{job_id}"
        notes = ["--mem is not enforced on bare hosts"] if spec.resources.mem is not None else []
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(*directory.common_files(spec, job_dir), directory.script_file(job_dir / _SCRIPT, script)),
            commands=tuple(
                PlannedCommand(("ssh", str(host), "bash", f"{remote}/{_SCRIPT}"), _environment(spec, node), node)
                for node, host in enumerate(spec.hosts)
            ),
            notes=tuple(notes),
        )

    def _values(self, spec: JobSpec, job_id: str, job_dir: Path) -> dict[str, Any]:
        options = spec.launch_options(echo=False)
        if _uneven(spec):
            options = replace(options, nproc_per_node=None)
        return {
            **directory.common_values(spec, job_id, job_dir),
            "token_file": plans.token_file(Path()).name,
            "workdir": _CODE if spec.sync else str(spec.workdir),
            "launch_arguments": options.arguments(),
        }

    # -- submitting ----------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Bring the job to its hosts and start it; from then on it needs nobody.

        Raises:
            SubmitError: hosts are unfit, each of which is named; nothing is left on any of them.
        """
        from clusterjob.ssh import snapshot
        from clusterjob.ssh.progress import Sending
        from clusterjob.ssh.submission import Consignment, Submission

        spec, options = plan.spec, _Options.of(plan.spec)
        place = place_of(spec.to_json(), spec.hosts)
        code = snapshot.take(spec.workdir, options.sync_limit) if spec.sync else None
        token = plans.token_file(plan.job_dir)
        goods = Consignment(
            job_id=plan.job_id,
            files=(
                *((file.path.name, file.mode, file.data) for file in plan.files),
                (token.name, 0o600, token.read_bytes()),
            ),
            script=_SCRIPT,
            environments=tuple(dict(command.env) for command in plan.commands),
            workdir=_CODE if spec.sync else str(spec.workdir),
            snapshot=code,
            needs_torch=options.need_torch and spec.program.is_python,
            ports=candidates.candidates(plan.job_id, 0),
            patience=spec.join_timeout,
            grace=spec.grace,
            gpus=spec.gpus,
            gpus_per_node=spec.resources.gpus_per_node,
            require_gpus=spec.require_gpus,
        )
        data: dict[str, Any] = place.to_json()
        if code is not None:
            data["code"] = {
                "digest": code.digest,
                "files": code.files,
                "bytes": code.size,
                "git": snapshot.keep_git(spec.workdir, plan.job_dir),
            }
        with Sending([str(host) for host in spec.hosts]) as progress:
            submission = Submission(self._visits(), place, goods, progress, _warn, partial(ends.cancelled, plan.job_dir))
            try:
                data["address"] = submission.run()
            except BaseException:
                ends.cancel(plan.job_dir)  # for whoever asks after a job that was broken off here
                raise
        return Handle(NAME, plan.job_id, data)

    def detach(self, handle: Handle) -> None:
        """Do nothing: the agents never needed this process."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand: every host of theirs is asked, all at once."""
        for record in records:
            self._look(record)
        self._hear([self._job(record) for record in records])
        return {record.job_id: self._status(record) for record in records}

    def collect(self, record: Record) -> None:
        """Bring the logs as far as they are written; from then on every look at the job brings them."""
        job = self._job(record)
        ended = record.end is not None or files.read_json(record.job_dir / "result.json") is not None
        if job.followed and not ended:
            return
        job.followed = True
        whole = record.job_dir / "logs" / "whole"  # there when the logs of a job that has ended are all here
        if whole.exists() or not record.job_dir.is_dir():
            return
        while True:
            self._look(record, at_once=True)
            self._hear([job], patient=True)
            if not any(node.look is not None and node.look["more"] and node.error is None for node in job.nodes):
                break
        absent = [node.error.message for node in job.nodes if node.error is not None]
        if not ended:
            return
        if absent:
            _warn(f"some logs are not here: {'; '.join(absent)}")
        else:
            whole.touch()

    def cancel(self, records: Sequence[Record]) -> None:
        """Have every agent stop its workers; kill the agents that do not within the job's grace.

        Raises:
            ClusterJobError: hosts are not reached; what runs there ends when its agents miss the others.
        """
        from clusterjob.ssh.pool import complaint, for_each

        for record in records:
            ends.cancel(record.job_dir)
            place, grace = self._job(record).place, float(record.spec.get("grace", 3.0))

            def work(node: int, record: Record = record, place: Any = place, grace: float = grace) -> None:
                session = self._visits().session(place, node)
                session.ask("cancel", job=record.job_id, node=node, grace=grace, timeout=grace + _CANCEL_PATIENCE)

            outcome = for_each(range(len(place.hosts)), work)
            if outcome.errors:
                message, hint = complaint(outcome.errors, len(place.hosts))
                raise ClusterJobError(f"{message} (job {record.job_id})", hint or "its agents end there when they miss the others")

    def fetch(
        self, record: Record, paths: Sequence[str], target: Path, nodes: Sequence[int] | None, may_replace: Callable[[list[str]], bool]
    ) -> list[Fetched]:
        """Bring results from hosts; see `clusterjob.jobs.fetch`.

        Raises:
            ClusterJobError: a host is not reached, has nothing at a path, or it cannot be written here.
        """
        from clusterjob.ssh.fetch import Fetch
        from clusterjob.ssh.pool import complaint, for_each

        place = self._job(record).place
        workdir = _CODE if record.spec.get("sync", True) else str(record.spec["workdir"])
        asked = range(len(place.hosts)) if nodes is None else nodes
        alone = threading.Lock()

        def one_at_a_time(names: list[str]) -> bool:
            with alone:
                return may_replace(names)

        def work(node: int) -> Fetched:
            folder = target if len(asked) == 1 else target / f"node{node}"
            return Fetch(self._visits().session(place, node), record.job_id, workdir, folder, one_at_a_time).run(paths)

        outcome = for_each(asked, work)
        if outcome.errors:
            raise ClusterJobError(*complaint(outcome.errors, len(asked)))
        return [outcome.results[node] for node in asked]

    def examine(self, spec: JobSpec) -> Iterator[Check]:
        """Yield what is found of the hosts' fitness for a job.

        Raises:
            SpecError: there are no hosts, or an option makes no sense here.
        """
        from clusterjob.backends.here import directory_looks
        from clusterjob.ssh.examination import Hosts

        spec, options = _settled(spec), _Options.of(spec)
        hosts = Hosts(self._visits(), place_of(spec.to_json(), spec.hosts), spec, need_torch=options.need_torch)
        job = checks.Look("job", lambda: directory.plannable(self.plan, spec))
        return checks.examine([job, *directory_looks(), *hosts.looks()])

    def close(self) -> None:
        """Hang up on all hosts; jobs live on."""
        if self._visits_held is not None:
            self._visits_held.close()
            self._visits_held = None
        self._jobs.clear()

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _visits(self) -> Any:
        from clusterjob.ssh.visits import Visits

        if self._visits_held is None:
            self._visits_held = Visits(_warn, lambda: pack.node_zip(pack.cache_directory()))
        return self._visits_held

    def _job(self, record: Record) -> _Job:
        from clusterjob.ssh.mirror import Mirror
        from clusterjob.ssh.visits import Place

        if record.job_id not in self._jobs:
            if record.handle is not None:
                place = Place.from_json(record.handle.data)
            else:
                place = place_of(record.spec, tuple(Host(**host) for host in record.spec["hosts"]))
            nodes = [_Node(Mirror(record.job_id, record.job_dir, node)) for node in range(len(place.hosts))]
            self._jobs[record.job_id] = _Job(place, nodes)
        return self._jobs[record.job_id]

    def _look(self, record: Record, *, at_once: bool = False) -> None:
        """Begin to ask every host of a job that is not being asked already, and was not a moment ago."""
        from clusterjob.ssh.pool import in_background

        job = self._job(record)
        for index, node in enumerate(job.nodes):
            if node.asking is None and (at_once or time.monotonic() >= node.next_try):
                node.asking = in_background(partial(self._ask, job, index))

    def _ask(self, job: _Job, index: int) -> Mapping[str, Any]:
        session = self._visits().session(job.place, index)
        look: Mapping[str, Any] = job.nodes[index].mirror.look(session, logs=job.followed)
        return look

    def _hear(self, asked: Sequence[_Job], *, patient: bool = False) -> None:
        """Take in the answers: all of them the first time, later those that come soon."""
        waiting = [node.asking for job in asked for node in job.nodes if node.asking is not None]
        wait(waiting, None if patient or not all(job.looked for job in asked) else _LOOK_PATIENCE)
        for job in asked:
            job.looked = True
            for node in job.nodes:
                if node.asking is None or not node.asking.done():
                    continue
                asking, node.asking = node.asking, None
                try:
                    node.look, node.error, node.failures = asking.result(), None, 0
                    # Many hosts are asked less often, so that following a job costs the same.
                    node.next_try = time.monotonic() + min(2.0, 0.02 * len(job.nodes))
                except HostError as error:
                    node.error = error
                    node.failures += 1
                    node.next_try = time.monotonic() + min(_LONGEST_SILENCE, 0.25 * 2**node.failures)

    def _status(self, record: Record) -> Status:
        job_dir, job = record.job_dir, self._job(record)
        told = _verdict(files.read_json(job_dir / "result.json"))
        if told is not None:
            return directory.ended(told)
        started_at, restarts, waiting = directory.progress(job_dir)
        errors = [node.error.message for node in job.nodes if node.error is not None]
        alive = [bool(node.look and node.look["alive"]) for node in job.nodes]
        being_submitted = record.handle is None and record.submitter is not None and record.submitter.alive()
        if being_submitted:
            return Status(JobState.PENDING, "it is being submitted", None, started_at, restarts)
        adopted = _verdict_of_members(job_dir)
        if adopted is not None:
            return directory.ended(adopted)
        lead = job.nodes[0]
        if lead.error is None and lead.look is not None:
            if alive[0]:
                state = JobState.RUNNING if started_at else JobState.PENDING
                return Status(state, "; ".join([*errors, *([waiting] if waiting else [])]), None, started_at, restarts)
        elif any(alive[1:]) or any(node.error is not None or node.look is None for node in job.nodes[1:]) or len(job.nodes) == 1:
            return Status(JobState.UNKNOWN, "; ".join(errors) or "its hosts have not answered yet", None, started_at, restarts)
        if lead.error is not None:
            others = next((str(end["reason"]) for end in ends.written(job_dir) if end.get("reason")), "they ended without a verdict")
            text = f"{lead.error.message}; the other nodes have ended: {others}"
            verdict = directory.end_without_lead(job_dir, started_at, restarts, text)
            return directory.ended(replace(verdict, reason=text) if verdict.state is JobState.LOST else verdict)
        if any(alive):
            return Status(JobState.RUNNING, "node 0 has ended; the others are ending", None, started_at, restarts)
        if record.handle is None:
            why = "the command that submitted it died before the job had started"
        elif not all(node.look and node.look["known"] for node in job.nodes):
            why = "its directory is gone from its hosts"
        else:
            why = "its agents ended without a verdict: they were killed, or the hosts were restarted"
        return directory.ended(directory.end_without_lead(job_dir, started_at, restarts, why))


def _verdict_of_members(job_dir: Path) -> Verdict | None:
    """Return the lead's verdict as another node wrote it down, where node 0's own word has not come through."""
    for end in ends.written(job_dir):
        if end.get("state") in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED) and "exit_code" in end and "restarts" in end:
            return _verdict(end)
    return None


def _verdict(data: Any) -> Verdict | None:
    """Return a verdict that a host has sent; None for what is none."""
    try:
        return Verdict.from_json(data) if data is not None else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _settled(spec: JobSpec) -> JobSpec:
    """Return the job with as many hosts as nodes, and its script relative to what is sent.

    Raises:
        SpecError: there are too few hosts, or something that bare hosts do not have.
    """
    if not spec.hosts:
        raise SpecError("the ssh cluster needs hosts", "--hosts a,b[1-4] or --hostfile FILE names them")
    directory.refuse_queue(spec, NAME)
    nodes = spec.resources.nodes
    if nodes > len(spec.hosts):
        raise SpecError(f"{nodes} nodes need as many hosts, and there are {len(spec.hosts)}", "name more with --hosts, or fewer --nodes")
    _check_gpus(spec)
    return replace(spec, program=directory.sent_program(spec), hosts=spec.hosts[:nodes])


def _check_gpus(spec: JobSpec) -> None:
    asked = spec.resources.gpus_per_node
    if spec.gpus == "auto" and not asked:
        raise SpecError("--gpus auto does not say how many", "--gpus-per-node N does")
    if spec.gpus and spec.gpus != "auto":
        listed = spec.gpus.split(",")
        if not all(re.fullmatch(r"\d{1,4}|GPU-[\w-]+", entry, re.ASCII) for entry in listed) or len(set(listed)) < len(listed):
            raise SpecError(f"--gpus {spec.gpus!r} is no list of GPUs", "write it as 0,1,4, or auto for idle ones")
        if asked != len(listed):
            raise SpecError(f"--gpus {spec.gpus} are {len(listed)} on each host, --gpus-per-node says {asked}", "leave one of them out")


def _uneven(spec: JobSpec) -> bool:
    return len({host.slots for host in spec.hosts}) > 1


def _environment(spec: JobSpec, node: int) -> dict[str, str]:
    """Return the variables that the script of a node is started with; its master's address is added when it is known."""
    env = {"CLUSTERJOB_NODE_RANK": str(node), "CLUSTERJOB_HOST": str(spec.hosts[node])}
    if _uneven(spec):
        env["CLUSTERJOB_NPROC_PER_NODE"] = str(spec.hosts[node].slots or 1)
    if spec.resources.gpus_per_node == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def place_of(spec: Mapping[str, Any], hosts: tuple[Host, ...]) -> Any:
    """Return where a job's nodes are, from what was asked for."""
    from clusterjob.ssh import visits
    from clusterjob.ssh.connect import DEFAULT_TIMEOUT

    options = spec.get("options") or {}
    config = Path(options["ssh_config"]).expanduser().absolute() if "ssh_config" in options else None
    timeout = float(options.get("connect_timeout", DEFAULT_TIMEOUT))
    return visits.Place(hosts, str(spec["python"]), tuple(spec["setup"]), options.get("remote_home", visits.HOME), config, timeout)


def _warn(text: str) -> None:
    """Say a line to the user: the library's own logger shows warnings on stderr unless a program wants them elsewhere."""
    logging.getLogger("clusterjob").warning("clusterjob: %s", text)
