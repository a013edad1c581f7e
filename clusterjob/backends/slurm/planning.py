"""Plan a Slurm job: sbatch's command line, the script, its other files, and the container."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import job_code, shared
from clusterjob.backends.slurm import flags, submit
from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.status import NAME, by_directory, cluster_of
from clusterjob.core import arrays, python_env
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Record, Records
from clusterjob.core.render import in_shell, render, sh
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import SpecError
from clusterjob.node.logs.job_dir import CODE, SLURM_LOG
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import Login
    from clusterjob.core.snapshot.source import CodeSource

_SCRIPT = "slurm.sh"
_DEFAULT_ARRAY_SIZE = 1001  # Slurm's own default of MaxArraySize
_UNTIL_DONE_WARNING = 60  # default seconds of --signal-before with --until-done
_STRAGGLERS = 60  # maximum seconds that tasks run after the first task's end (srun --wait)
_KILL_WAIT = 30  # seconds between Slurm's SIGTERM and SIGKILL (default of KillWait)
_ENGINES = ("pyxis", "apptainer")
_APPTAINER_SOURCES = (
    "docker://",
    "docker-archive://",
    "docker-daemon://",
    "library://",
    "oci://",
    "oci-archive://",
    "oras://",
    "shub://",
    "http://",
    "https://",
)


def plan(spec: JobSpec) -> Plan:
    """Return the plan of a job; query the cluster only for an array (MaxArraySize).

    Raises:
        SpecError: an option is invalid, or sbatch has no such option.
        TemplateError: the user's template cannot be rendered.
    """
    login, spec = login_of(spec), replace(spec, nproc_is_default=False)
    if spec.until_done:
        warning = spec.signal_before or _UNTIL_DONE_WARNING
        spec = replace(spec, requeue=True, signal_before=warning)
    flags.check_warning(spec.resources, spec.signal_before)
    shared.switch(spec.options, "need_torch", default=True)  # refuse it before anything is written
    code = None if login is not None else job_code.source_of(spec)
    job_id, job_dir = shared.new_directory(spec.name)
    array, env = spec.elements(), python_env.read(spec)
    pieces = _pieces(array, spec)
    own = {"comment", "need_torch"}  # keys of --set that are not options of sbatch
    output = "slurm-%A_%a.out" if array else SLURM_LOG
    remote: dict[str, Any] = {}
    if login is None:
        script = str(job_dir / _SCRIPT)
        place = [f"--chdir={job_dir}", f"--output={flags.file_name(str(job_dir / 'logs'), output)}"]
        values = _values(spec, job_id, job_dir=job_dir, array=array, code=code)
        values |= python_env.values(env, spec, sh(str(job_dir)), sent=False)
        own |= {"sync_limit"}
    else:  # the host's home directory is not known yet: sbatch runs in the job's directory
        from clusterjob.backends.slurm.login_host import OPTIONS

        own |= {*OPTIONS}
        spec = replace(spec, program=shared.sent_program(spec))
        script, place = f"./{_SCRIPT}", [f"--output=logs/{output}"]
        remote = {"host": str(login.host), "directory": f"{login.home}/jobs/{job_id}"}
        values = _values_there(spec, job_id, array=array)
        values |= python_env.values(env, spec, '"$SLURM_SUBMIT_DIR"', sent=spec.sync)
    options, unknown = flags.options(
        {key: value for key, value in spec.options.items() if key not in own}
    )
    common = [
        "--parsable", f"--job-name={job_id}", f"--comment={flags.comment(job_id, spec)}", *place,
        "--open-mode=append", "--export=ALL", *flags.requeue(spec), *flags.shape(spec), *options,
    ]  # fmt: skip
    if spec.signal_before is not None:
        common.append(f"--signal=B:USR1@{spec.signal_before}")
    if spec.until_done and array is None:
        values["next_attempt"] = [*(word for word in common if word != "--hold"), script]
    common += _dependencies(spec, login)
    text = render(spec.template or f"{_SCRIPT}.j2", values)
    return Plan(
        job_id=job_id,
        backend=NAME,
        job_dir=job_dir,
        spec=spec,
        files=(
            *shared.common_files(spec, job_dir, env),
            *([shared.sweep_file(spec, array, job_dir=job_dir)] if array and array.values else []),
            shared.script_file(job_dir / _SCRIPT, text),
        ),
        commands=tuple(
            PlannedCommand(
                (
                    "sbatch",
                    *common,
                    *_array_option(piece),
                    script,
                    *([str(piece.offset)] if piece is not None and piece.offset else []),
                ),
                **remote,
            )
            for piece in pieces
        ),
        notes=(
            *flags.notes(spec),
            *_notes(spec),
            *job_code.notes(spec, sent=login is not None),
            *(env.notes if env is not None else ()),
            *(
                f"--{name} is not an option of sbatch: Slurm refuses it unless a plug-in has it"
                for name in unknown
            ),
        ),
        sends_code=login is not None and spec.sync,
        code=code,
        array={
            "indices": list(array.indices),
            "pieces": [piece.offset for piece in pieces if piece],
        }
        if array
        else None,
    )


def _notes(spec: JobSpec) -> list[str]:
    if not spec.until_done or spec.checkpoint_dir:
        return []
    return [
        (
            "--until-done without --checkpoint-dir: a script that does not resume from a checkpoint"
            " is queued again for ever"
        )
    ]


def _dependencies(spec: JobSpec, login: Login | None) -> list[str]:
    """Return sbatch's options for `--after`, without dependencies that are already met."""
    dependencies: list[tuple[str, Sequence[str]]] = []
    for text in spec.after:
        kind, job = flags.split_after(text)
        if job.isascii() and job.replace("_", "").isdigit():
            dependencies.append((kind, [job]))
            continue
        record = Records().find(job)
        if record.backend != NAME or record.handle is None or cluster_of(record).login != login:
            raise SpecError(
                f"--after {text!r}: job {record.job_id} is not a Slurm job of this cluster",
                "name a job of the same cluster: `clusterjob list` shows your jobs",
            )
        if not _met(kind, record):
            handle, is_element = record.handle, record.index is not None
            dependencies.append((kind, [handle.id] if is_element else handle.data["ids"]))
    if not dependencies:
        return []
    return [f"--dependency={flags.dependency(dependencies)}", "--kill-on-invalid-dep=yes"]


def _met(kind: str, record: Record) -> bool:
    """Return whether a dependency is already met, from the records and the job directories.

    If Slurm has forgotten a job, it treats a dependency on the job as a success.

    Raises:
        SpecError: the job has ended in a state with which the dependent job would never run.
    """
    ended = [(element, _known_end(element)) for element in Records().elements(record)]
    wrong = [
        (element, state)
        for element, state in ended
        if state is not None and (state is JobState.SUCCEEDED) is not (kind == "afterok")
    ]
    # For an array, afterok needs the success of all elements; afternotok needs one failed element.
    if (kind == "afterok" and wrong) or (kind == "afternotok" and len(wrong) == len(ended)):
        raise SpecError(
            f"--after {kind}:{record.job_id}: job {wrong[0][0].job_id} has ended {wrong[0][1]},"
            " so it would never run",
            f"`--after afterany:{record.job_id}` waits for any end",
        )
    return all(state is not None for _, state in ended) and kind in (
        "after",
        "afterany",
        "afterok",
        "afternotok",
    )


def _known_end(record: Record) -> JobState | None:
    """Return the state in which a job has ended; None if no file on this machine shows its end."""
    if record.end is not None:
        return Verdict.from_json(record.end).state
    ended, _ = by_directory([record])
    return ended[record.job_id].state if ended else None


def _pieces(array: arrays.Array | None, spec: JobSpec) -> list[arrays.Piece | None]:
    if array is None:
        return [None]
    if not spec.login:
        return [*arrays.pieces(array, submit.largest_array(Client()) or _DEFAULT_ARRAY_SIZE)]
    # The login host is not asked for MaxArraySize: more pieces than necessary do no harm.
    text = spec.options.get("max_array_size", str(_DEFAULT_ARRAY_SIZE))
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise SpecError(
            f"max_array_size: {text!r} is not a number of at least 1",
            "`scontrol show config` on the login host shows MaxArraySize",
        )
    return [*arrays.pieces(array, int(text))]


def login_of(spec: JobSpec) -> Login | None:
    """Return the login host of a job; None if this machine runs Slurm's commands."""
    if not spec.login:
        return None
    from clusterjob.backends.slurm.login_host import Login

    return Login.named(spec.login, spec.options, setup=spec.setup)


def _array_option(piece: arrays.Piece | None) -> list[str]:
    if piece is None:
        return []
    limit = f"%{piece.at_once}" if piece.at_once is not None else ""
    return [f"--array={arrays.ranges_text(piece.indices)}{limit}"]


def _values(
    spec: JobSpec,
    job_id: str,
    job_dir: Path,
    array: arrays.Array | None,
    workdir: Path | None = None,
    code: CodeSource | None = None,
) -> dict[str, Any]:
    workdir = workdir or spec.workdir
    program = shared.element_program(spec, array)
    if code is not None:
        program = code.program(program, spec.workdir, job_dir=job_dir)
    by_srun = spec.launcher == "srun"
    container = container_options(spec, job_dir, workdir=workdir, code=code)
    return {
        **shared.common_values(spec, job_id, job_dir=job_dir),
        **job_code.template_values(code, job_dir),
        "workdir": str(workdir),
        "script": str(job_dir / _SCRIPT),
        "launcher": spec.launcher,
        "elements": array is not None,
        "sweep": str(job_dir / shared.SWEEP) if array is not None and array.values else "",
        "requeue": spec.requeue or spec.grows_memory,
        "grows_memory": spec.grows_memory,
        "survives": flags.survives(spec),
        "least_nodes": flags.least_nodes(spec),
        "next_attempt": [],
        "warning": spec.signal_before is not None or spec.requeue,
        "apptainer": container.prefix,
        "srun_options": [*_srun_options(spec), *container.srun_options],
        "program": program.argv(python_env.interpreter(spec)) if by_srun else [],
        # A task may see only its own GPUs.
        "task_gpus": -(-(spec.promised_gpus or 0) // spec.nproc_per_node),
        "launch_arguments": [] if by_srun else _launch(spec, program),
    }


def _values_there(spec: JobSpec, job_id: str, array: arrays.Array | None) -> dict[str, Any]:
    """Return the template's values for a login host, with SLURM_SUBMIT_DIR as job directory.

    sbatch runs in the job's directory on the login host, whose path is not known yet.
    """
    place = Path(f"/{secrets.token_hex(16)}")
    values = _values(
        spec,
        job_id,
        job_dir=place,
        array=array,
        workdir=place / CODE if spec.sync else None,
    )
    return {
        key: in_shell(value, str(place), variable='"$SLURM_SUBMIT_DIR"')
        for key, value in values.items()
    }


def _launch(spec: JobSpec, program: Program) -> list[str]:
    more: dict[str, Any] = {"echo": False, "program": program}
    if spec.signal_before is not None or spec.requeue:
        # Slurm must end the job at its time limit, so that Slurm can queue the job again.
        more |= {"time_limit": None, "warning": float(spec.signal_before or _KILL_WAIT)}
    return launch_arguments(spec.launch_options(**more))


def _srun_options(spec: JobSpec) -> list[str]:
    tasks, survives = flags.tasks_per_node(spec), flags.survives(spec)
    words = [
        *(
            []  # the step has all nodes that Slurm has allocated
            if spec.min_nodes is not None
            else [f"--nodes={spec.resources.nodes}", f"--ntasks={spec.resources.nodes * tasks}"]
        ),
        f"--ntasks-per-node={tasks}",
        *(["--no-kill"] if survives else []),
        # Agents stop each other; with --launcher srun only srun can stop the other workers.
        f"--kill-on-bad-exit={1 if spec.launcher == 'srun' else 0}",
        f"--wait={0 if survives else _STRAGGLERS}",
        "--input=none",
        "--export=ALL",
        "--mpi=none",
    ]
    cpus = flags.cpus_per_task(spec)
    # srun does not inherit --cpus-per-task since Slurm 22.05.
    return words if cpus is None else [*words, f"--cpus-per-task={cpus}"]


@dataclass(frozen=True)
class Container:
    """The options and arguments that run a node's part of a job in a container.

    Attributes:
        srun_options: the options of srun, for Pyxis.
        prefix: the arguments before the command that runs inside, for apptainer.
    """

    srun_options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


def container_options(
    spec: JobSpec, job_dir: Path, workdir: Path | None = None, code: CodeSource | None = None
) -> Container:
    """Return the options that run the nodes in a container; empty without ``--container``.

    ``pyxis:IMAGE`` and ``apptainer:IMAGE`` name the engine. Otherwise apptainer runs a .sif file, a
    directory and a source such as ``docker://``, and Pyxis runs any other image. The container
    mounts the job's directory, the working directory and the code.

    Args:
        spec: the job.
        job_dir: path of the job's directory on the nodes.
        workdir: path of the working directory on the nodes; None for the one in the spec.
        code: the code of which the job runs a snapshot; None without a snapshot.

    Raises:
        SpecError: ``--container`` names no image, or a directory cannot be mounted.
    """
    if not spec.container:
        return Container()
    workdir = workdir or spec.workdir
    engine, _, image = spec.container.partition(":")
    if engine not in _ENGINES:
        image = spec.container
        is_file = image.endswith(".sif") or (spec.workdir / image).exists()
        engine = "apptainer" if is_file or image.startswith(_APPTAINER_SOURCES) else "pyxis"
    if not image or "\n" in image:
        raise SpecError(
            f"--container {spec.container!r} names no image",
            "write it as pyxis:IMAGE, apptainer:IMAGE or FILE.sif",
        )
    top = () if code is None else (str(code.top),)
    mounts = list(dict.fromkeys((str(job_dir), str(workdir), *top)))
    for path in mounts:
        if "," in path or ":" in path or '"' in path:
            raise SpecError(
                f"{path} contains a comma, a colon or a quote:"
                " it cannot be mounted into a container"
            )
    if engine == "apptainer":
        image = str(workdir / image) if (spec.workdir / image).exists() else image
        gpus = ("--nv",) if spec.resources.gpus_per_node else ()
        binds = tuple(word for path in mounts for word in ("--bind", f"{path}:{path}"))
        return Container(prefix=("apptainer", "exec", *gpus, *binds, "--pwd", str(workdir), image))
    return Container(
        srun_options=(
            f"--container-image={image}",
            f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
            f"--container-workdir={workdir}",
        )
    )
