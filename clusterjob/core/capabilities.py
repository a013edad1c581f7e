"""Refuse options that a backend does not support, in one place for all backends.

A backend lists its features in `capabilities`. A backend without this list supports only the
options that every backend supports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError


class Capability(enum.Enum):
    """A feature that not every backend has."""

    HOSTS = "hosts"  # the user names the hosts
    GPU_LIST = "gpu_list"  # the user lists the GPUs of each host
    GPU_TYPES = "gpu_types"
    SHARED_DIRECTORY = "shared_directory"  # run where the working directory exists already
    BACKEND_OPTIONS = "backend_options"  # --set
    CONTAINERS = "containers"
    ARRAYS = "arrays"
    ARRAY_LIMITS = "array_limits"  # a maximum of running elements
    DEPENDENCIES = "dependencies"
    REQUEUE = "requeue"
    PREEMPTION_WARNINGS = "preemption_warnings"
    LOGIN_HOSTS = "login_hosts"
    SRUN = "srun"  # one Slurm task per worker


@dataclass(frozen=True)
class _Feature:
    """The test whether a job needs a capability, and the error if the backend lacks it.

    Attributes:
        used: whether a job needs it.
        refusal: the error, with the job and the name of the cluster.
        hint: a command or option to use instead.
    """

    used: Callable[[JobSpec], object]
    refusal: Callable[[JobSpec, str], str]
    hint: Callable[[JobSpec], str]


def _flag(flag: str) -> Callable[[JobSpec, str], str]:
    return lambda _, name: f"the {name} cluster has no {flag}"


def _use(text: str) -> Callable[[JobSpec], str]:
    return lambda _: text


def _gpu_count(spec: JobSpec) -> str:
    count = spec.gpus if spec.gpus.isdigit() else str(len(spec.gpus.split(",")))
    return f"did you mean --gpus-per-node {'N' if spec.gpus == 'auto' else count}?"


def _array_is_limited(spec: JobSpec) -> bool:
    array = spec.elements()
    return array is not None and array.at_once is not None


_QUEUE = _use("use a cluster with a queue, such as --cluster slurm")
_FEATURES = {
    Capability.HOSTS: _Feature(
        lambda spec: spec.hosts,
        lambda _, name: f"the {name} cluster takes no hosts",
        _use("use --cluster ssh"),
    ),
    Capability.GPU_LIST: _Feature(
        lambda spec: spec.gpus,
        lambda spec, name: f"--gpus {spec.gpus} lists GPUs, which the {name} cluster cannot choose",
        _gpu_count,
    ),
    Capability.GPU_TYPES: _Feature(
        lambda spec: spec.resources.gpu_type,
        lambda spec, name: (
            f"--gpus-per-node {spec.resources.gpu_type}:{spec.resources.gpus_per_node}:"
            f" the {name} cluster cannot choose GPUs by their type"
        ),
        lambda spec: f"--gpus-per-node {spec.resources.gpus_per_node}",
    ),
    Capability.SHARED_DIRECTORY: _Feature(
        lambda spec: not spec.sync and not spec.login,
        _flag("--no-sync"),
        _use("use --cluster ssh"),
    ),
    Capability.BACKEND_OPTIONS: _Feature(
        lambda spec: spec.options,
        lambda spec, name: (
            f"unknown option {next(iter(spec.options))!r} for the {name} cluster (--set)"
        ),
        _use("for options of Slurm, use --cluster slurm"),
    ),
    Capability.CONTAINERS: _Feature(lambda spec: spec.container, _flag("--container"), _QUEUE),
    Capability.ARRAYS: _Feature(
        lambda spec: spec.array or spec.sweep,
        lambda spec, name: f"the {name} cluster has no {'--array' if spec.array else '--sweep'}",
        _QUEUE,
    ),
    Capability.ARRAY_LIMITS: _Feature(
        _array_is_limited,
        lambda _, name: f"the {name} cluster does not limit how many elements run at a time",
        _use("remove the % part"),
    ),
    Capability.DEPENDENCIES: _Feature(lambda spec: spec.after, _flag("--after"), _QUEUE),
    Capability.REQUEUE: _Feature(lambda spec: spec.requeue, _flag("--requeue"), _QUEUE),
    Capability.PREEMPTION_WARNINGS: _Feature(
        lambda spec: spec.signal_before, _flag("--signal-before"), _QUEUE
    ),
    Capability.LOGIN_HOSTS: _Feature(lambda spec: spec.login, _flag("--login"), _QUEUE),
    Capability.SRUN: _Feature(
        lambda spec: spec.launcher == "srun",
        lambda _spec, _name: "--launcher srun needs Slurm",
        _use("use --cluster slurm"),
    ),
}


class Declares(Protocol):
    """The attributes with which a backend declares the features that it supports.

    Attributes:
        capabilities: the supported features.
        hints: the backend's own advice for a missing feature, if the general hint does not fit.
    """

    capabilities: Collection[Capability]
    hints: Mapping[Capability, str]


def check(spec: JobSpec, cluster: str, backend: object) -> None:
    """Refuse a job that uses a feature which its backend does not have.

    Args:
        spec: the job.
        cluster: the backend's name, for the error.
        backend: the backend, with the attributes of `Declares`; a backend without these attributes
            supports none of the features.

    Raises:
        SpecError: the job uses a missing feature; the message names the option.
    """
    supported: Collection[Capability] = getattr(backend, "capabilities", ())
    hints: Mapping[Capability, str] = getattr(backend, "hints", {})
    for capability, feature in _FEATURES.items():
        if capability not in supported and feature.used(spec):
            hint = hints.get(capability) or feature.hint(spec)
            raise SpecError(feature.refusal(spec, cluster), hint)
