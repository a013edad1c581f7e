"""Slurm as a cluster: one homogeneous job, one agent a node through srun, and the queue asked for all jobs at once."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterjob import arrays
from clusterjob.arrays import Array, Piece
from clusterjob.backends import Status, directory
from clusterjob.errors import SpecError, SubmitError, SubmitInDoubtError
from clusterjob.node import ends
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.plans import Plan, PlannedCommand, PlannedFile
from clusterjob.records import Handle, Record, Records, home
from clusterjob.render import in_shell, render, sh_words
from clusterjob.slurm import containers, flags, submission
from clusterjob.slurm import ends as slurm_ends
from clusterjob.slurm.client import Client
from clusterjob.slurm.mirror import directory_name
from clusterjob.slurm.queue import Accounting, Queue, Row, Snapshot, by_comment
from clusterjob.spec import JobSpec

if TYPE_CHECKING:
    from clusterjob.slurm.login import Login, LoginHost, LoginHosts
    from clusterjob.ssh.fetch import Fetched

NAME = "slurm"
_SCRIPT = "slurm.sh"
_CODE = "code"  # where a login host has the working directory, in the job's own
_DEFAULT_ARRAY_SIZE = 1001  # Slurm's own default of MaxArraySize
_STRAGGLERS = 60  # seconds that srun lets tasks outlive the first that ended: agents end together
_UNSEEN = 120.0  # seconds after which a job that Slurm has never shown did not get there
_KILL_WAIT = 30  # seconds between Slurm's SIGTERM and its SIGKILL (KillWait), as it is by default
_SETTLING = 2.0  # seconds that an accepted job may take to be shown by squeue
_SCANCEL_WORDS = 1000  # ids on one command line


class _Cluster(NamedTuple):
    """What tells the clusters of jobs apart: the configuration, the name in a federation, the login host."""

    conf: str | None
    cluster: str | None
    login: Login | None


class SlurmBackend:
    """Runs jobs under the Slurm whose client commands this machine has, or a login host that it reaches over SSH."""

    def __init__(self) -> None:
        self._clients: dict[_Cluster, tuple[Client, Queue, Accounting]] = {}
        self._logins: LoginHosts | None = None

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return what submitting the job would do. Only an array asks the cluster, for its MaxArraySize.

        Raises:
            SpecError: an option makes no sense, or is not sbatch's.
            TemplateError: the user's template cannot be rendered.
        """
        directory.refuse_hosts(spec, NAME)
        flags.check_warning(spec.resources, spec.signal_before)
        login = _login_of(spec)
        job_id, job_dir = directory.new_directory(spec.name)
        array = spec.elements()
        pieces = _pieces(array, spec)
        given = {key: value for key, value in spec.options.items() if key != "comment" and not (login and key in _login_options())}
        options, unknown = flags.options(given)
        output = "slurm-%A_%a.out" if array else "slurm.out"
        there: dict[str, Any] = {}
        if login is None:
            script = str(job_dir / _SCRIPT)
            place = [f"--chdir={job_dir}", f"--output={flags.file_name(str(job_dir / 'logs'), output)}"]
        else:  # whose home directory is not known here: sbatch is run in the job's directory
            spec = replace(spec, program=directory.sent_program(spec))
            script, place = f"./{_SCRIPT}", [f"--output=logs/{output}"]
            there = {"host": str(login.host), "directory": f"{login.home}/jobs/{job_id}"}
        common = [
            "--parsable", f"--job-name={spec.name}", f"--comment={_comment(job_id, spec)}", *place,
            "--open-mode=append", "--export=ALL", "--requeue" if spec.requeue else "--no-requeue", *flags.shape(spec), *options,
            *self._dependencies(spec, login),
        ]  # fmt: skip
        if spec.signal_before is not None:
            common.append(f"--signal=B:USR1@{spec.signal_before}")
        files = [*directory.common_files(spec, job_dir)]
        if array is not None and array.values:
            files.append(_sweep_file(spec, array, job_dir))
        values = _values(spec, job_id, job_dir, array) if login is None else _values_there(spec, job_id, array)
        files.append(directory.script_file(job_dir / _SCRIPT, render(spec.template or f"{_SCRIPT}.j2", values)))
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=tuple(files),
            commands=tuple(PlannedCommand(("sbatch", *common, *_array_words(piece), script, *_offset(piece)), **there) for piece in pieces),
            notes=tuple(f"--{name} is no option of sbatch's own: Slurm will say whether a plug-in here has it" for name in unknown),
            array={"indices": list(array.indices), "pieces": [piece.offset for piece in pieces if piece]} if array else None,
        )

    def _dependencies(self, spec: JobSpec, login: Login | None) -> list[str]:
        wishes = []
        for text in spec.after:
            kind, job = flags.split_after(text)
            if job.isascii() and job.replace("_", "").isdigit():
                wishes.append((kind, [job]))
                continue
            record = Records().find(job)
            if record.backend != NAME or record.handle is None or _place(record).login != login:
                raise SpecError(f"--after {text!r}: job {record.job_id} is not in Slurm's hands", "it has to be a job of the same cluster")
            if not _met(kind, record):
                wishes.append((kind, [record.handle.id] if record.index is not None else list(record.handle.data["ids"])))
        return [f"--dependency={flags.dependency(wishes)}", "--kill-on-invalid-dep=yes"] if wishes else []

    # -- submitting ----------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Hand the planned script to Slurm, each piece of an array once.

        Raises:
            SubmitError: Slurm refuses it; what it had taken of it is cancelled.
            SubmitInDoubtError: Slurm did not answer, and the job may run.
        """
        login = _login_of(plan.spec)
        if login is not None:
            return self._submit_there(plan, login)
        client = Client()
        _preflight(client, plan)
        ids, cluster = _submit_pieces(plan, client)
        return Handle(NAME, ids[0], {"ids": ids, "cluster": cluster, "conf": os.environ.get("SLURM_CONF"), "at": time.time()})

    def _submit_there(self, plan: Plan, login: Login) -> Handle:
        """Bring the job to a login host, and hand it to Slurm there."""
        host = self._host(login)
        client = Client(shell=host.within(plan.job_id))
        data: dict[str, Any] = {"conf": None, "login": login.to_json()}
        asked = False
        try:
            data |= host.put(plan)
            _preflight(client, plan)
            data["code"] = host.send_code(plan)
            asked = True
            ids, cluster = _submit_pieces(plan, client, host)
        except SubmitInDoubtError:
            raise
        except BaseException as error:
            if not asked or isinstance(error, SubmitError):
                host.remove(plan.job_id)
            raise
        return Handle(NAME, ids[0], {"ids": ids, "cluster": cluster, "at": time.time(), **data})

    def detach(self, handle: Handle) -> None:
        """Nothing to let go: a job of Slurm's needs nobody."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand: from their directories, then from one squeue for all, then from accounting."""
        found, open_ = _by_directory(records)
        distant = [record for record in open_ if record.spec.get("login")]
        if distant:
            troubles = self._login_hosts().look(distant)
            told, still = _by_directory(distant)
            found |= told
            found |= {record.job_id: _unreached(record, troubles[record.job_id]) for record in still if record.job_id in troubles}
        clusters: dict[_Cluster, list[Record]] = {}
        for record in open_:
            if record.job_id not in found:
                clusters.setdefault(_place(record), []).append(record)
        for place, group in clusters.items():
            found |= self._ask(place, group)
        return found

    def _at(self, place: _Cluster) -> tuple[Client, Queue, Accounting]:
        if place not in self._clients:
            shell = self._host(place.login) if place.login is not None else None
            client = Client(place.conf, place.cluster, shell)
            self._clients[place] = (client, Queue(client, home() / "slurm"), Accounting(client))
        return self._clients[place]

    def _login_hosts(self) -> LoginHosts:
        from clusterjob.slurm.login import LoginHosts

        self._logins = self._logins or LoginHosts()
        return self._logins

    def _host(self, login: Login) -> LoginHost:
        return self._login_hosts().host(login)

    def close(self) -> None:
        """Hang up on login hosts; jobs live on."""
        for _, queue, _ in self._clients.values():
            queue.close()
        self._clients.clear()
        if self._logins is not None:
            self._logins.close()
            self._logins = None

    def _ask(self, place: _Cluster, records: Sequence[Record]) -> dict[str, Status]:
        _, queue, accounting = self._at(place)
        snapshot = queue.look(urgent=any(_has_news(record) for record in records))
        found: dict[str, Status] = {}
        forgotten: dict[str, tuple[Record, Handle]] = {}
        wholes: dict[str, Record] = {}
        for record in records:
            handle = record.handle or _adopt(record, snapshot, wholes)
            if handle is None:
                found[record.job_id] = _unseen(record, snapshot)
                continue
            row = snapshot.rows.get(handle.id)
            if row is not None and _is_of(row, record):
                found[record.job_id] = _with_trouble(_from_row(record, handle, row), snapshot)
            elif snapshot.taken_at < handle.data["at"] + _SETTLING:
                found[record.job_id] = _not_yet(record, snapshot)
            else:
                forgotten[handle.id] = (record, handle)
        if forgotten:
            # By the cluster's clock, which may be another than this machine's.
            submitted = {
                key: (handle.data["at"] + handle.data.get("ahead", 0.0), _submitted_in(record))
                for key, (record, handle) in forgotten.items()
            }
            rows = accounting.ended(submitted)
            for key, (record, handle) in forgotten.items():
                found[record.job_id] = _not_yet(record, snapshot) if rows is None else _forgotten(record, handle, rows.get(key))
        return found

    # -- cancelling ----------------------------------------------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Bring the logs from the login host; where there is none, the job writes into `record.job_dir` itself."""
        login = _place(record).login
        if login is not None:
            self._host(login).collect(record, ended=record.end is not None or not _by_directory([record])[1])

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,  # noqa: ARG002 - all of them share what the login host sees
        may_replace: Callable[[list[str]], bool],
    ) -> list[Fetched]:
        """Bring results from the login host; see `clusterjob.jobs.fetch`.

        Raises:
            ClusterJobError: the job has none; it is not reached, has nothing at a path, or it cannot be written here.
        """
        login = _place(record).login
        if login is None:
            raise directory.nothing_to_fetch(record)
        workdir = _CODE if record.spec.get("sync", True) else str(record.spec["workdir"])
        return [self._host(login).fetch(record.whole_id, workdir, target, may_replace, paths)]

    def cancel(self, records: Sequence[Record]) -> None:
        """Have Slurm stop jobs, with one command for all of a cluster.

        Raises:
            ClusterJobError: Slurm refuses or does not answer, or its login host is not reached.
        """
        wanted: dict[_Cluster, list[str]] = {}
        wholes: dict[str, Record] = {}
        distant: dict[Login, list[Record]] = {}
        for record in records:
            directory.wish_to_cancel(record)
            if (login := _place(record).login) is not None:
                distant.setdefault(login, []).append(record)
        for login, group in distant.items():
            self._host(login).wish_to_cancel([directory_name(record) for record in group])
        for record in records:
            place = _place(record)
            handle = record.handle or _adopt(record, self._at(place)[1].look(urgent=True), wholes)
            if handle is not None:
                wanted.setdefault(place, []).append(handle.id)
        for place, keys in wanted.items():
            words = _scancel_words(keys)
            for begin in range(0, len(words), _SCANCEL_WORDS):
                answer = self._at(place)[0].run(["scancel", *words[begin : begin + _SCANCEL_WORDS]])
                if answer.code != 0 and "Invalid job id" not in answer.err and "already completing" not in answer.err:
                    raise SubmitError(f"Slurm does not cancel the job: {answer.words}")


# -- planning ----------------------------------------------------------------------------------------------------------


def _met(kind: str, record: Record) -> bool:
    """Return whether a job that another waits for has ended as it should, as far as records and directories tell.

    Slurm takes a job that it has forgotten for one that succeeded.

    Raises:
        SpecError: it has ended otherwise, and the other would never run.
    """
    ended = [(element, _known_end(element)) for element in Records().elements(record)]
    over = all(state is not None for _, state in ended)
    wrong = [(element, state) for element, state in ended if state is not None and (state is JobState.SUCCEEDED) is not (kind == "afterok")]
    # Of an array, afterok wants every element's success, afternotok one that has failed.
    if (kind == "afterok" and wrong) or (kind == "afternotok" and len(wrong) == len(ended)):
        raise SpecError(f"--after {kind}:{record.job_id}: job {wrong[0][0].job_id} has ended {wrong[0][1]}, so it would never run",
                        "afterany: waits for the end alone")  # fmt: skip
    return over and kind in ("after", "afterany", "afterok", "afternotok")


def _known_end(record: Record) -> JobState | None:
    if record.end is not None:
        return Verdict.from_json(record.end).state
    verdict = _told(record)
    return verdict.state if verdict is not None and slurm_ends.settled(verdict, record.job_dir) else None


def _pieces(array: Array | None, spec: JobSpec) -> list[Piece | None]:
    if array is None:
        return [None]
    if spec.login:  # which is not asked: more pieces than there have to be do no harm
        text = spec.options.get("max_array_size", str(_DEFAULT_ARRAY_SIZE))
        if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
            raise SpecError(f"max_array_size: {text!r} is no number of elements", "`scontrol show config` shows MaxArraySize there")
        return [*arrays.pieces(array, int(text))]
    return [*arrays.pieces(array, submission.largest_array(Client()) or _DEFAULT_ARRAY_SIZE)]


def _login_of(spec: JobSpec) -> Login | None:
    if not spec.login:
        return None
    from clusterjob.slurm.login import Login

    return Login.of(spec)


def _login_options() -> Sequence[str]:
    """Return what --set says of the way to a login host, and is none of sbatch's."""
    from clusterjob.slurm.login import OPTIONS

    return OPTIONS


def _array_words(piece: Piece | None) -> list[str]:
    if piece is None:
        return []
    limit = f"%{piece.at_once}" if piece.at_once is not None else ""
    return [f"--array={arrays.ranges_text(piece.indices)}{limit}"]


def _offset(piece: Piece | None) -> list[str]:
    return [str(piece.offset)] if piece is not None and piece.offset else []


def _comment(job_id: str, spec: JobSpec | None = None) -> str:
    """Return what a job can be found by, and after it the user's own comment."""
    own = spec.options.get("comment", "") if spec is not None else ""
    if not own.isprintable():
        raise SpecError(f"--set comment={own[:40]!r} holds a line break")
    return f"clusterjob:{job_id} {own}".strip()


def _sweep_file(spec: JobSpec, array: Array, job_dir: Path) -> PlannedFile:
    """Return each element's arguments, one line an element, as bash reads them."""
    lines = [shell_line(arrays.program_of(spec.program, values).args) for values in array.values]
    return PlannedFile(job_dir / "sweep.args", ("\n".join(lines) + "\n").encode(errors="surrogateescape"))


def shell_line(words: Sequence[str]) -> str:
    """Return words as bash reads them, on one line: a line break within one would begin another element's."""
    return sh_words(words).replace("\n", "'$'\\n''")  # which quotes it in single quotes, and nowhere else


def _values(spec: JobSpec, job_id: str, job_dir: Path, array: Array | None, workdir: Path | None = None) -> dict[str, Any]:
    workdir = workdir or spec.workdir
    program = spec.program if array is None or not array.values else Program(spec.program.kind, spec.program.target)
    warning = spec.signal_before is not None or spec.requeue
    launch = [] if spec.launcher == "srun" else _launch(spec, program)
    container = containers.choose(spec, job_dir, workdir)
    return {
        **directory.common_values(spec, job_id, job_dir),
        "workdir": str(workdir),
        "script": str(job_dir / _SCRIPT),
        "launcher": spec.launcher,
        "elements": array is not None,
        "sweep": str(job_dir / "sweep.args") if array is not None and array.values else "",
        "requeue": spec.requeue,
        "warning": warning,
        "apptainer": container.prefix,
        "srun_options": [*_srun_options(spec), *container.srun_options],
        "program": program.argv(spec.python) if spec.launcher == "srun" else [],
        "launch_arguments": launch,
    }


def _values_there(spec: JobSpec, job_id: str, array: Array | None) -> dict[str, Any]:
    """Return the template's values where the job's directory is not known: the one that sbatch is run in, which Slurm tells the job."""
    place = Path(f"/{secrets.token_hex(16)}")
    values = _values(spec, job_id, place, array, place / _CODE if spec.sync else None)
    return {key: in_shell(value, str(place), '"$SLURM_SUBMIT_DIR"') for key, value in values.items()}


def _launch(spec: JobSpec, program: Program) -> list[str]:
    more: dict[str, Any] = {"echo": False, "program": program}
    if spec.signal_before is not None or spec.requeue:
        more["time_limit"] = None  # the warning and Slurm's own limit end the job, which is to be queued again
        more["warning"] = float(spec.signal_before or _KILL_WAIT)
    return spec.launch_options(**more).arguments()


def _srun_options(spec: JobSpec) -> list[str]:
    tasks = flags.tasks_per_node(spec)
    words = [
        f"--nodes={spec.resources.nodes}", f"--ntasks={spec.resources.nodes * tasks}", f"--ntasks-per-node={tasks}",
        # Agents see to each other's end; bare workers have only srun.
        f"--kill-on-bad-exit={1 if spec.launcher == 'srun' else 0}", f"--wait={_STRAGGLERS}", "--input=none", "--export=ALL", "--mpi=none",
    ]  # fmt: skip
    cpus = flags.cpus_per_task(spec)
    return [*words, f"--cpus-per-task={cpus}"] if cpus is not None else words  # not inherited since Slurm 22.05


# -- submitting --------------------------------------------------------------------------------------------------------


def _preflight(client: Client, plan: Plan) -> None:
    submission.preflight(client, plan.commands[0].argv)
    if "qos" not in plan.spec.options:
        submission.check_time(client, plan.spec.options.get("partition"), plan.spec.resources.time_limit)


def _submit_pieces(plan: Plan, client: Client, host: LoginHost | None = None) -> tuple[list[str], str | None]:
    """Hand each piece to Slurm; return the ids, and in a federation the cluster that took them.

    Raises:
        SubmitError: Slurm refuses one; what it had taken is cancelled.
    """
    comment = _comment(plan.job_id)
    ids: list[str] = []
    cluster: str | None = None
    for command in plan.commands:
        try:
            job, cluster = submission.submit(client, command.argv, comment, ids)
        except SubmitError:
            if ids:
                Client(cluster=cluster, shell=host).run(["scancel", *ids])
            raise
        except KeyboardInterrupt:  # sbatch heard it too, and may have been quicker
            ends.cancel(plan.job_dir)  # which the script looks for, should the job be on its way
            if host is not None:
                host.wish_to_cancel([plan.job_id])
            taken = sorted({*ids, *submission.find(client, comment)})
            if taken:
                Client(cluster=cluster, shell=host).run(["scancel", *taken])
            raise
        ids.append(job)
    return ids, cluster


# -- asking ------------------------------------------------------------------------------------------------------------


def _place(record: Record) -> _Cluster:
    data: Mapping[str, Any] = record.handle.data if record.handle is not None else {}
    login = None
    if record.spec.get("login"):
        from clusterjob.slurm.login import of_record

        login = of_record(record)
    return _Cluster(data.get("conf"), data.get("cluster"), login)


def _by_directory(records: Sequence[Record]) -> tuple[dict[str, Status], list[Record]]:
    """Return the ends of the jobs whose directories tell them for good, and the other jobs."""
    found: dict[str, Status] = {}
    others = []
    for record in records:
        verdict = _told(record)
        if verdict is not None and slurm_ends.settled(verdict, record.job_dir):
            found[record.job_id] = directory.ended(verdict)
        else:
            others.append(record)
    return found, others


def _unreached(record: Record, why: str) -> Status:
    started_at, restarts, _ = directory.progress(record.job_dir)
    return Status(JobState.UNKNOWN, why, None, started_at, restarts)


def _is_of(row: Row, record: Record) -> bool:
    """Return whether a row is this very job's: Slurm may give an id again to another (submitit#1660)."""
    comment = _comment(record.whole_id)
    return row.comment == comment or row.comment.startswith(f"{comment} ")


def _adopt(record: Record, snapshot: Snapshot, wholes: dict[str, Record]) -> Handle | None:
    """Return the handle of a job whose submitter could not note it: found by its comment.

    Args:
        record: the job.
        snapshot: the queue.
        wholes: the arrays that were looked for already, for all of their elements.
    """
    if record.index is None:
        return _adopted(record, snapshot).handle
    whole = record.whole_id
    if whole not in wholes:
        wholes[whole] = _adopted(Records().find(whole), snapshot)
    return wholes[whole].element(record.index).handle


def _adopted(record: Record, snapshot: Snapshot) -> Record:
    bases = sorted({row.base for row in by_comment(snapshot, _comment(record.job_id))}, key=int)  # in the order of submission
    if not bases:
        return record
    login = _place(record).login
    more = {"login": login.to_json()} if login is not None else {}
    data = {"ids": bases, "cluster": None, "conf": None, "at": _epoch(record.submitted_at), **more}
    return replace(record, handle=Handle(NAME, bases[0], data))


def _has_news(record: Record) -> bool:
    """Return whether the job's directory tells of an end that only Slurm can explain."""
    by_srun = _started_by_srun(record) and slurm_ends.step_code(record.job_dir) is not None
    return by_srun or ends.cancelled(record.job_dir) or slurm_ends.verdict_of(record.job_dir) is not None


def _told(record: Record) -> Verdict | None:
    """Return how the job ended as its directory tells it: the agents' verdict; where srun started the workers, its success."""
    if _started_by_srun(record):
        return slurm_ends.of_step(record.job_dir, 0, None) if slurm_ends.step_code(record.job_dir) == 0 else None
    return slurm_ends.verdict_of(record.job_dir)


def _unseen(record: Record, snapshot: Snapshot) -> Status:
    if record.submitter is not None and record.submitter.alive():
        return Status(JobState.PENDING, "it is being submitted")
    if snapshot.trouble:
        return Status(JobState.UNKNOWN, _unanswered(snapshot))
    started_at, restarts, _ = directory.progress(record.job_dir)
    newest = max(_epoch(record.submitted_at) + _UNSEEN, _epoch(started_at) + _SETTLING if started_at else 0.0)
    if started_at is not None and snapshot.taken_at < newest:
        return Status(JobState.RUNNING, "", None, started_at, restarts)
    if _ran(record, started_at):
        return _with_handle(_from_directory(record, started_at, restarts), None)
    if snapshot.taken_at < newest:
        return Status(JobState.UNKNOWN, "Slurm does not show it (yet): it was not known whether it had been taken")
    why = "the command that submitted it died before Slurm had taken the job"
    return directory.ended(directory.end_without_lead(record.job_dir, None, 0, why))


def _ran(record: Record, started_at: str | None) -> bool:
    return started_at is not None or slurm_ends.step_code(record.job_dir) is not None or bool(ends.refusals(record.job_dir))


def _not_yet(record: Record, snapshot: Snapshot) -> Status:
    """Return the status of a job of which Slurm was not, or could not be, asked since it was submitted."""
    started_at, restarts, waiting = directory.progress(record.job_dir)
    trouble = _unanswered(snapshot) if snapshot.trouble else ""
    state = JobState.RUNNING if started_at else JobState.UNKNOWN if trouble else JobState.PENDING
    return Status(state, trouble or waiting, None, started_at, restarts)


def _from_row(record: Record, handle: Handle, row: Row) -> Status:
    started_at, restarts, waiting = directory.progress(record.job_dir)
    own = slurm_ends.verdict_of(record.job_dir)
    if row.waiting:
        again = f"queued again, it was {own.state.value.lower()} before; " if own is not None else ""
        if ends.cancelled(record.job_dir):
            return Status(JobState.PENDING, "it is being cancelled", None, started_at, restarts, handle)
        when = f"; expected to start at {row.start}" if row.start else ""
        return Status(JobState.PENDING, f"{again}{row.reason or 'queued'}{when}", None, started_at, restarts, handle)
    if row.active:
        return Status(JobState.RUNNING, waiting, None, started_at, restarts, handle)
    if own is None:
        code = slurm_ends.step_code(record.job_dir)
        if code is not None and _started_by_srun(record) and row.state in ("COMPLETED", "FAILED"):
            own = slurm_ends.of_step(record.job_dir, code, started_at)
    verdict = slurm_ends.of_slurm(row, own, record.job_dir, started_at)
    if own is None:
        verdict = directory.end_without_lead(record.job_dir, started_at, restarts, verdict)
    return _with_handle(verdict, handle)


def _with_trouble(status: Status, snapshot: Snapshot) -> Status:
    """Say of a job that has not ended, as Slurm had it a while ago, that Slurm does not answer now."""
    if status.verdict is not None or not snapshot.trouble:
        return status
    return replace(status, reason="; ".join(filter(None, (status.reason, _unanswered(snapshot)))))


def _unanswered(snapshot: Snapshot) -> str:
    return f"Slurm does not answer: {snapshot.trouble}"


def _with_handle(verdict: Verdict, handle: Handle | None) -> Status:
    return Status(verdict.state, verdict.reason, verdict, verdict.started_at, verdict.restarts, handle)


def _started_by_srun(record: Record) -> bool:
    return bool(record.spec.get("launcher") == "srun")


def _submitted_in(record: Record) -> str:
    if record.spec.get("login"):
        return f"/jobs/{record.whole_id}"  # below what only the cluster knows
    return str(record.job_dir if record.index is None else record.job_dir.parent.parent)


def _forgotten(record: Record, handle: Handle, accounted: Row | None) -> Status:
    """Return the status of a job that squeue does not know any more: what it wrote itself, then what accounting has."""
    if accounted is not None:
        return _from_row(record, handle, accounted)
    started_at, restarts, _ = directory.progress(record.job_dir)
    return _with_handle(_from_directory(record, started_at, restarts), handle)


def _from_directory(record: Record, started_at: str | None, restarts: int) -> Verdict:
    own = slurm_ends.verdict_of(record.job_dir)
    code = slurm_ends.step_code(record.job_dir)
    if own is None and code is not None and _started_by_srun(record):
        own = slurm_ends.of_step(record.job_dir, code, started_at)
    if own is None:
        why = "Slurm does not know it any more, and it left no verdict: it was killed, or lost by Slurm"
        own = directory.end_without_lead(record.job_dir, started_at, restarts, why)
    return own


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc).timestamp()


def _scancel_words(keys: Sequence[str]) -> list[str]:
    """Return ids as scancel takes them: the elements of one array as ``12_[0-3,7]``."""
    words = [key for key in keys if "_" not in key]
    elements: dict[str, list[int]] = {}
    for key in keys:
        base, separator, index = key.partition("_")
        if separator:
            elements.setdefault(base, []).append(int(index))
    for base, indices in elements.items():
        words += [f"{base}_[{part}]" for part in arrays.ranges_text(sorted(indices)).split(",")]
    return words
