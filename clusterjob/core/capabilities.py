"""Refuse options that a backend does not support, in one place for all backends."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from clusterjob.core import gpu_request, options
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError


class Capability(enum.Enum):
    """A feature that not every backend has."""

    HOSTS = "hosts"  # the user names the hosts
    GPU_LIST = "gpu_list"  # the user lists the GPUs of each host
    GPU_TYPES = "gpu_types"
    COUNTED_WORKERS = "counted_workers"  # each node counts its GPUs or cores, one worker for each
    SHARED_DIRECTORY = "shared_directory"  # the working directory is on the hosts already
    BACKEND_OPTIONS = "backend_options"  # the backend's own options, given with --set
    CONTAINERS = "containers"
    ARRAYS = "arrays"
    ARRAY_LIMITS = "array_limits"  # a maximum of running elements
    DEPENDENCIES = "dependencies"
    REQUEUE = "requeue"
    MORE_MEMORY = "more_memory"  # the job can be queued again with more memory
    PREEMPTION_WARNINGS = "preemption_warnings"
    UNTIL_DONE = "until_done"  # queued again after each time limit
    LOGIN_HOSTS = "login_hosts"
    PYTHON_ENVIRONMENTS = "python_environments"  # each node prepares the job's environment
    SPARES = "spares"  # nodes may be lost, join and return while the job runs
    SRUN = "srun"  # one Slurm task per worker
    SCRIPT_ON_STDIN = "script_on_stdin"  # the files of the job's directory reach each node


@dataclass(frozen=True)
class _Feature:
    """One optional feature: the jobs that need it, and the error if the backend lacks it.

    Attributes:
        used: returns whether a job needs the feature; any true value means yes.
        refusal: the error: a format string, which `check` fills in.
        hint: what to use instead: a format string, which `check` fills in.
    """

    used: Callable[[JobSpec], object]
    refusal: str
    hint: str


_QUEUE = "use a cluster with a queue, such as --cluster slurm"
_FEATURES = {
    Capability.HOSTS: _Feature(
        lambda spec: spec.hosts, "the {cluster} cluster takes no hosts", "use --cluster ssh"
    ),
    Capability.GPU_LIST: _Feature(
        lambda spec: spec.gpus,
        "--gpus {gpus}: the {cluster} cluster cannot choose GPUs",
        "--gpus {gpu_count} is their number on each node",
    ),
    Capability.GPU_TYPES: _Feature(
        lambda spec: spec.resources.gpu_type,
        "--gpus {spec.resources.gpu_type}:{spec.resources.gpus_per_node}:"
        " the {cluster} cluster cannot choose GPUs by their type",
        "--gpus {spec.resources.gpus_per_node}",
    ),
    Capability.COUNTED_WORKERS: _Feature(
        lambda spec: spec.nproc_word,
        "--nproc-per-node {spec.nproc_word}: the number of workers must be known before the"
        " {cluster} cluster starts the job",
        "--gpus N starts one worker per GPU; or write --nproc-per-node N",
    ),
    Capability.SHARED_DIRECTORY: _Feature(
        lambda spec: not spec.sync and not spec.login,
        "the {cluster} cluster has no --no-sync",
        "use --cluster ssh",
    ),
    Capability.BACKEND_OPTIONS: _Feature(
        lambda spec: spec.options,
        "unknown option {option!r} for the {cluster} cluster ({option_flags})",
        "{option_hint}",
    ),
    Capability.CONTAINERS: _Feature(
        lambda spec: spec.container, "the {cluster} cluster has no --container", _QUEUE
    ),
    Capability.ARRAYS: _Feature(
        lambda spec: spec.array or spec.sweep, "the {cluster} cluster has no {array_flag}", _QUEUE
    ),
    Capability.ARRAY_LIMITS: _Feature(
        lambda spec: (array := spec.elements()) and array.at_once,
        "the {cluster} cluster does not limit how many elements run at a time",
        "remove the % part",
    ),
    Capability.DEPENDENCIES: _Feature(
        lambda spec: spec.after, "the {cluster} cluster has no --after", _QUEUE
    ),
    Capability.REQUEUE: _Feature(
        lambda spec: spec.requeue, "the {cluster} cluster has no --requeue", _QUEUE
    ),
    Capability.MORE_MEMORY: _Feature(
        lambda spec: spec.grows_memory,
        "--retry {retry}: the {cluster} cluster cannot grow the memory of a job",
        _QUEUE,
    ),
    Capability.PREEMPTION_WARNINGS: _Feature(
        lambda spec: spec.signal_before, "the {cluster} cluster has no --signal-before", _QUEUE
    ),
    Capability.UNTIL_DONE: _Feature(
        lambda spec: spec.until_done,
        "the {cluster} cluster has no --until-done: it would not queue the job again",
        "leave it out; --max-restarts N starts the workers again after a failure",
    ),
    Capability.LOGIN_HOSTS: _Feature(
        lambda spec: spec.login, "the {cluster} cluster has no --login", _QUEUE
    ),
    Capability.PYTHON_ENVIRONMENTS: _Feature(
        lambda spec: spec.uv or spec.env_archive is not None,
        "the {cluster} cluster has no {environment_flag}",
        "use an image that has the packages, or --cluster local, ssh or slurm",
    ),
    Capability.SPARES: _Feature(
        lambda spec: spec.spares or spec.min_nodes is not None,
        "{nodes_flag}: a job of the {cluster} cluster ends with its first lost node",
        "use --cluster local, ssh or slurm",
    ),
    Capability.SRUN: _Feature(
        lambda spec: spec.launcher == "srun",
        "--launcher srun needs Slurm",
        "use --cluster slurm",
    ),
    Capability.SCRIPT_ON_STDIN: _Feature(
        lambda spec: spec.program.on_stdin,
        "the {cluster} cluster takes no script on standard input",
        "save it as a file, and give its name",
    ),
}


def check(spec: JobSpec, cluster: str, backend: object) -> None:
    """Refuse a job that uses a feature which its backend does not have.

    Args:
        spec: the job.
        cluster: the backend's name, for the error.
        backend: the backend. Its attribute `capabilities` lists its features; a backend without
            this attribute has none of them. Its attribute `hints` may replace the hints of errors,
            and `options` may name single options of --set that it has.

    Raises:
        SpecError: the job uses a missing feature; the message names the option.
    """
    supported: Collection[Capability] = getattr(backend, "capabilities", ())
    hints: Mapping[Capability, str] = getattr(backend, "hints", {})
    unknown = "N" if spec.gpus == gpu_request.IDLE else spec.gpus.count(",") + 1
    accepted: Collection[str] = getattr(backend, "options", ())
    option = next((name for name in spec.options if name not in accepted), "")
    values = {
        "spec": spec,
        "cluster": cluster,
        "option": option,
        "option_flags": options.flags_of_backend_option(option),
        "option_hint": "use --hosts or --login"
        if option == "transport"
        else "for options of Slurm, use --cluster slurm",
        "environment_flag": "--uv" if spec.uv else "--env-archive",
        "nodes_flag": "--spares" if spec.spares else "--nodes MIN:MAX",
        "array_flag": "--array" if spec.array else "--sweep",
        "retry": next((text for text in spec.retry if "*" in text), ""),
        "gpus": gpu_request.shown(spec.gpus),
        "gpu_count": spec.resources.gpus_per_node or unknown,
    }
    if not option:
        supported = {*supported, Capability.BACKEND_OPTIONS}
    for capability, feature in _FEATURES.items():
        if capability not in supported and feature.used(spec):
            hint = hints.get(capability) or feature.hint.format(**values)
            raise SpecError(feature.refusal.format(**values), hint)
