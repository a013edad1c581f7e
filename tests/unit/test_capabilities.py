"""Capabilities: core refuses every option that a backend does not declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterjob.backends import base
from clusterjob.core import capabilities
from clusterjob.core.capabilities import Capability
from clusterjob.core.hosts import Host
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.program import Program

USES: dict[Capability, dict[str, Any]] = {
    Capability.HOSTS: {"hosts": (Host("gpu1"),)},
    Capability.GPU_LIST: {"gpus": "0,1"},
    Capability.GPU_TYPES: {"resources": Resources(gpus_per_node=8, gpu_type="a100")},
    Capability.SHARED_DIRECTORY: {"sync": False},
    Capability.BACKEND_OPTIONS: {"options": {"qos": "high"}},
    Capability.CONTAINERS: {"container": "pyxis:image"},
    Capability.ARRAYS: {"array": "0-3"},
    Capability.ARRAY_LIMITS: {"array": "0-3%2"},
    Capability.DEPENDENCIES: {"after": ("x-1",)},
    Capability.REQUEUE: {"requeue": True},
    Capability.MORE_MEMORY: {
        "retry": ("oom_host:2:mem*1.5",),
        "resources": Resources(mem=1 << 30),
    },
    Capability.PREEMPTION_WARNINGS: {"signal_before": 90},
    Capability.UNTIL_DONE: {"until_done": True},
    Capability.LOGIN_HOSTS: {"login": "login1"},
    Capability.PYTHON_ENVIRONMENTS: {"uv": True},
    Capability.SPARES: {"resources": Resources(nodes=2), "spares": 1},
    Capability.SRUN: {"launcher": "srun"},
    Capability.COUNTED_WORKERS: {"nproc_word": "gpu"},
    Capability.SCRIPT_ON_STDIN: {"program": Program("script", "-")},
}
NEEDED_TOO = {Capability.ARRAY_LIMITS: {Capability.ARRAYS}}


def job(tmp_path: Path, **fields: Any) -> JobSpec:
    return replace(JobSpec(Program("command", "true"), tmp_path), **fields)


class Plugin:
    """A backend of another package that declares nothing."""


@pytest.mark.parametrize("capability", Capability)
def test_feature_is_refused_until_the_backend_declares_it(
    tmp_path: Path, capability: Capability
) -> None:
    spec = job(tmp_path, **USES[capability])
    backend = Plugin()
    with pytest.raises(SpecError, match=r"the plugin cluster|--launcher srun needs Slurm"):
        capabilities.check(spec, "plugin", backend)
    backend.capabilities = {capability} | NEEDED_TOO.get(capability, set())  # type: ignore[attr-defined]
    capabilities.check(spec, "plugin", backend)


def test_hint_of_the_backend_replaces_the_general_hint(tmp_path: Path) -> None:
    backend = Plugin()
    backend.hints = {Capability.CONTAINERS: "use --set image=URL"}  # type: ignore[attr-defined]
    with pytest.raises(SpecError) as refused:
        capabilities.check(job(tmp_path, container="x"), "plugin", backend)
    assert (refused.value.message, refused.value.hint) == (
        "the plugin cluster has no --container",
        "use --set image=URL",
    )


def test_local_backend_has_the_limit_of_a_snapshot_and_no_other_option(tmp_path: Path) -> None:
    local = base.load("local")
    capabilities.check(job(tmp_path, options={"sync_limit": "1k"}), "local", local)
    with pytest.raises(SpecError, match="unknown option 'qos' for the local cluster"):
        capabilities.check(job(tmp_path, options={"qos": "high"}), "local", local)
