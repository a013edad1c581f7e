"""Translate a job into options of sbatch and srun.

All options go on a command line. No value needs quoting, and none contains a line break.

Source: sbatch(1) and srun(1) of Slurm 22.05 to 26.05.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from clusterjob.backends.slurm.squeue import COMMENT
from clusterjob.core.options import Structure
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError

# Options of sbatch that take a value.
_WITH_VALUE = frozenset({
    "account", "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters",
    "comment", "constraint", "container-id", "core-spec", "cores-per-socket", "cpu-freq",
    "cpus-per-gpu", "deadline", "delay-boot", "distribution", "exclude", "extra", "extra-node-info",
    "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-socket", "gres", "gres-flags", "hint",
    "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "partition",
    "power", "prefer", "priority", "profile", "qos", "reservation", "resv-ports",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp",
    "tres-bind", "tres-per-task", "uid", "wait-all-nodes", "wckey",
})  # fmt: skip
_SWITCHES = frozenset({
    "contiguous", "get-user-env", "hold", "ignore-pbs", "oom-kill-step", "overcommit",
    "oversubscribe", "reboot", "spread-job", "use-min-nodes",
})  # fmt: skip
_WITH_OPTIONAL_VALUE = frozenset({"exclusive", "nice", "no-kill", "propagate"})
KNOWN = _WITH_VALUE | _SWITCHES | _WITH_OPTIONAL_VALUE

# Options that clusterjob sets itself, each with the way to set it. The script relies on them.
_OURS = {
    "array": "--array", "chdir": "--workdir", "container": "--container",
    "cpus-per-task": "--cpus-per-task", "dependency": "--after", "error": "the job's own logs",
    "export": "--env", "export-file": "--env", "gpus-per-node": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node", "input": "an empty stdin", "job-name": "--name",
    "mem": "--mem", "no-requeue": "--requeue", "nodes": "--nodes", "ntasks": "--nproc-per-node",
    "ntasks-per-core": "--nproc-per-node", "ntasks-per-gpu": "--nproc-per-node",
    "ntasks-per-node": "--nproc-per-node", "ntasks-per-socket": "--nproc-per-node",
    "open-mode": "the job's own logs", "output": "the job's own logs", "parsable": "the printed id",
    "quiet": "the printed id", "requeue": "--requeue", "signal": "--signal-before",
    "test-only": "--dry-run", "time": "--time", "verbose": "the printed id",
    "wait": "clusterjob run", "wrap": "-- COMMAND",
}  # fmt: skip
# Slurm 26.05 also accepts --requeue=expedite; clusterjob has no option for it.
_OURS_AS_A_SWITCH = "requeue"
_TRUE, _FALSE = ("true", "yes", "on", ""), ("false", "no", "off")
_AFTER = ("after", "afterany", "afterok", "afternotok", "aftercorr", "afterburstbuffer")


def options(given: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the sbatch options for ``--set`` and the profile, and the unknown names.

    An unknown name is a name that sbatch(1) does not document. It may be an option of a plug-in of
    the site, such as ``container-image``; `sbatch --help` lists the options of plug-ins.

    Raises:
        SpecError: clusterjob sets the option itself, the name is a misspelt option of sbatch, or
            the value is invalid.
    """
    words, unknown = [], []
    for key, value in given.items():
        name = _name(key)
        if name in _OURS and not (
            name == _OURS_AS_A_SWITCH and value.lower() not in (*_TRUE, *_FALSE)
        ):
            raise SpecError(
                f"--set {name} is not allowed: clusterjob sets this sbatch option",
                f"remove it from --set; clusterjob uses {_OURS[name]} instead",
            )
        if not name.isascii() or not name.replace("-", "").isalnum():
            raise SpecError(
                f"--set {key!r} is not an option of sbatch",
                "use the long name, such as --set constraint=a100",
            )
        if name not in KNOWN and name != _OURS_AS_A_SWITCH:
            # Options of Pyxis, such as container-image, resemble container-id but are not typos.
            near = (
                []
                if name.startswith("container-")
                else difflib.get_close_matches(name, KNOWN, 1, 0.8)
            )
            if near:
                raise SpecError(
                    f"sbatch has no option --{name} (--set)", f"did you mean {near[0]}?"
                )
            unknown.append(name)
        if word := _word(name, value):
            words.append(word)
    return words, unknown


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _given(spec: JobSpec, name: str) -> str | None:
    """Return the value given for an option of sbatch; None if it is not given."""
    return next((value for key, value in spec.options.items() if _name(key) == name), None)


def requeue(spec: JobSpec) -> list[str]:
    """Return ``--requeue`` or ``--no-requeue``; nothing if ``--set requeue=VALUE`` is given."""
    return (
        []
        if _given(spec, _OURS_AS_A_SWITCH) is not None
        else ["--requeue" if spec.requeue or spec.grows_memory else "--no-requeue"]
    )


def _word(name: str, value: str) -> str:
    if isinstance(value, Structure):
        raise SpecError(
            f"{name}: {value[:80]} is not a text or a number",
            "write a list as one text with commas",
        )
    if "\0" in value or "\n" in value:
        raise SpecError(f"--set {name}={value[:40]!r}: the value contains a line break")
    if name in _WITH_VALUE:
        if not value:
            raise SpecError(f"--set {name} needs a value", f"write --set {name}=VALUE")
        return f"--{name}={value}"
    if value.lower() in _FALSE:
        return ""
    if value.lower() in _TRUE:
        return f"--{name}"
    if name in _SWITCHES:
        raise SpecError(f"--set {name}={value!r}: it is a switch", "write true or false")
    return f"--{name}={value}"


def shape(spec: JobSpec) -> list[str]:
    """Return the options for nodes, tasks, cores, GPUs, memory and time of a homogeneous job."""
    resources = spec.resources
    tasks = tasks_per_node(spec)
    if spec.min_nodes is None:
        words = [
            f"--nodes={resources.nodes}",
            f"--ntasks={resources.nodes * tasks}",
            f"--ntasks-per-node={tasks}",
        ]
    else:  # with a number of tasks, Slurm allocates only the nodes that these tasks need
        words = [f"--nodes={least_nodes(spec)}-{resources.nodes}"]
    if survives(spec) and _given(spec, "no-kill") is None:
        words.append("--no-kill")
    if (cpus := cpus_per_task(spec)) is not None:
        words.append(f"--cpus-per-task={cpus}")
    if resources.gpus_per_node and not _in_gres(spec):
        words.append(f"--gpus-per-node={_typed(resources)}")
    if resources.mem is not None:
        words.append(f"--mem={-(-resources.mem // 1024**2)}M" if resources.mem else "--mem=0")
    if resources.time_limit is not None:
        words.append(f"--time={clock(resources.time_limit)}")
    return words


def survives(spec: JobSpec) -> bool:
    """Return whether the job goes on when Slurm loses one of its nodes."""
    return bool(spec.spares) or spec.min_nodes is not None


def least_nodes(spec: JobSpec) -> int:
    """Return the smallest number of nodes with which Slurm may start the job."""
    return spec.resources.nodes if spec.min_nodes is None else spec.min_nodes + spec.spares


def _typed(resources: Resources) -> str:
    return (
        f"{resources.gpu_type}:{resources.gpus_per_node}"
        if resources.gpu_type
        else str(resources.gpus_per_node)
    )


def _in_gres(spec: JobSpec) -> bool:
    """Return whether ``--set gres`` already requests the node's GPUs.

    Slurm 26.05 accepts only one of --gres and --gpus-per-node.

    Raises:
        SpecError: ``--set gres`` and --gpus-per-node request different GPUs.
    """
    gres = _given(spec, "gres") or ""
    asked = [
        item.partition("(")[0].removeprefix("gres:").replace("/", ":").split(":")
        for item in gres.split(",")
    ]
    if not (gpus := [item for item in asked if item[0] == "gpu"]):
        return False
    count = sum(int(item[-1]) if item[-1].isdigit() else 1 for item in gpus)
    types = {item[1] for item in gpus if len(item) > 1 and not item[1].isdigit()}
    wanted = spec.resources
    if count != wanted.gpus_per_node or (wanted.gpu_type and types != {wanted.gpu_type}):
        raise SpecError(
            f"--gpus-per-node {_typed(wanted)} and --set gres={gres[:80]} ask for different GPUs",
            "leave one of them out",
        )
    return True


def notes(spec: JobSpec) -> list[str]:
    """Return notes about options that Slurm accepts but may not apply as the user expects."""
    gpus, nodes = _given(spec, "gpus"), spec.resources.nodes
    if gpus is None or nodes == 1 or spec.resources.gpus_per_node:
        return []
    count = gpus.rpartition(":")[2]
    each = int(count) // nodes if count.isdigit() and int(count) % nodes == 0 else "N"
    return [
        (
            f"--set gpus={gpus[:80]}: Slurm may divide them unevenly among {nodes} nodes;"
            f" --gpus-per-node {each} gives each node the same number"
        )
    ]


def tasks_per_node(spec: JobSpec) -> int:
    """Return the number of Slurm tasks on each node.

    A node has one task, the agent; under ``--launcher srun`` it has one task for each worker.
    """
    return spec.nproc_per_node if spec.launcher == "srun" else 1


def cpus_per_task(spec: JobSpec) -> int | None:
    """Return the cores of one Slurm task; None if another option sets them.

    With ``exclusive=true`` the result is also None, because the job then gets whole nodes. Without
    a request, Slurm gives a task one core for all workers of the node; therefore the default is one
    core per worker. ``exclusive=user`` and similar values exclude other users from the node but do
    not give the task more cores.

    Raises:
        SpecError: --cpus-per-task and ``tres-per-task`` both set the cores.
    """
    per_worker = spec.resources.cpus_per_task
    per_task = _given(spec, "tres-per-task") or ""
    if any(re.split("[:=]", item, maxsplit=1)[0].strip() == "cpu" for item in per_task.split(",")):
        if per_worker is not None:
            raise SpecError(
                f"--cpus-per-task {per_worker} and --set tres-per-task={per_task[:80]}"
                " both give cores",
                "leave one of them out",
            )
        return None
    exclusive = _given(spec, "exclusive")
    if per_worker is None and (
        (exclusive is not None and exclusive.lower() in _TRUE)
        or _given(spec, "cpus-per-gpu") is not None
    ):
        return None
    return (per_worker or 1) * (1 if spec.launcher == "srun" else spec.nproc_per_node)


def clock(seconds: int) -> str:
    """Return a duration in Slurm's format, D-HH:MM:SS; Slurm rounds it up to minutes."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def dependency(dependencies: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the value of --dependency.

    Args:
        dependencies: the kind, such as ``afterok``, and the job ids of each dependency.
    """
    return ",".join(":".join((kind, *ids)) for kind, ids in dependencies)


def split_after(text: str) -> tuple[str, str]:
    """Return the kind and the job of an ``--after`` value; the default kind is ``afterok``.

    Raises:
        SpecError: Slurm has no such kind, or no job is named.
    """
    kind, colon, job = text.partition(":")
    if not colon:
        kind, job = "afterok", text
    if kind not in _AFTER:
        raise SpecError(
            f"--after {text!r}: {kind!r} is not a kind of dependency",
            f"it is one of {', '.join(_AFTER)}",
        )
    if not job.strip():
        raise SpecError(f"--after {text!r} names no job")
    return kind, job.strip()


def file_name(directory: str, name: str) -> str:
    """Return a file's path with the directory escaped: Slurm expands patterns such as %j.

    Args:
        directory: the directory of the file; Slurm expands nothing in it.
        name: the name of the file, in which Slurm expands patterns such as %j.

    Raises:
        SpecError: the directory contains a backslash, which stops Slurm's expansion, or a line
            break.
    """
    if "\\" in directory or "\n" in directory:
        raise SpecError(
            f"the job directory {directory!r} contains a backslash or a line break,"
            " which Slurm does not accept",
            "set CLUSTERJOB_HOME to another directory",
        )
    return f"{directory.replace('%', '%%')}/{name}"


def check_warning(resources: Resources, signal_before: int | None) -> None:
    """Refuse a ``--signal-before`` that does not fit into the time limit.

    Slurm may send the signal up to 60 s early (sbatch(1), --signal).

    Raises:
        SpecError: Slurm would send the signal before the job has started, or the number of seconds
            is above Slurm's maximum.
    """
    limit = resources.time_limit
    if signal_before is None:
        return
    if signal_before > 65535:
        raise SpecError(
            f"--signal-before {signal_before} s: must be at most 65535 s, the maximum of Slurm"
        )
    if limit is not None and limit <= signal_before + 60:
        raise SpecError(
            f"the time limit of {limit} s leaves no room for a warning {signal_before} s before it:"
            " Slurm may send it 60 s early",
            f"set --time to more than {signal_before + 60} s, or shorten --signal-before",
        )


def comment(job_id: str, spec: JobSpec | None = None) -> str:
    """Return the Slurm comment that identifies a job, followed by the user's own comment.

    Raises:
        SpecError: the user's comment contains an unprintable character.
    """
    own = spec.options.get("comment", "") if spec is not None else ""
    if not own.isprintable():
        raise SpecError(f"--set comment={own[:40]!r} contains a line break")
    return f"{COMMENT}{job_id} {own}".strip()
