"""Run one distributed training script locally, over SSH, under Slurm or on a platform.

The public names are loaded at first use: importing the package does not import torch or other
large modules.
"""

from __future__ import annotations

# `import typing` would take most of the time of `import clusterjob.bootstrap`. Type checkers
# accept any variable of this name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterjob.api.functions import Executor, map, submit  # noqa: A004 - as Executor.map
    from clusterjob.api.jobs import Job, JobGroup, as_completed
    from clusterjob.api.results import JobCancelled
    from clusterjob.api.spawning import spawn
    from clusterjob.core.resources import Resources
    from clusterjob.core.spec import JobSpec
    from clusterjob.errors import ClusterJobError, JobFailed, RemoteError
    from clusterjob.node.environments.topology import Topology, Worker
    from clusterjob.node.program import Program
    from clusterjob.node.verdict import JobState, Verdict

__version__ = "0.1.0"

_HOMES = {
    "ClusterJobError": "clusterjob.errors",
    "Executor": "clusterjob.api.functions",
    "Job": "clusterjob.api.jobs",
    "JobCancelled": "clusterjob.api.results",
    "JobFailed": "clusterjob.errors",
    "JobGroup": "clusterjob.api.jobs",
    "JobSpec": "clusterjob.core.spec",
    "JobState": "clusterjob.node.verdict",
    "Program": "clusterjob.node.program",
    "RemoteError": "clusterjob.errors",
    "Resources": "clusterjob.core.spec",
    "Topology": "clusterjob.node.environments.topology",
    "Verdict": "clusterjob.node.verdict",
    "Worker": "clusterjob.node.environments.topology",
    "as_completed": "clusterjob.api.jobs",
    "map": "clusterjob.api.functions",
    "spawn": "clusterjob.api.spawning",
    "submit": "clusterjob.api.functions",
}

__all__ = [
    "ClusterJobError", "Executor", "Job", "JobCancelled", "JobFailed", "JobGroup", "JobSpec",
    "JobState", "Program", "RemoteError", "Resources", "Topology", "Verdict", "Worker",
    "__version__", "as_completed", "map", "spawn", "submit",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ImportError as error:
        if ".pyz/" not in __file__:
            raise
        return _absent(name, str(error))


def _absent(name: str, why: str) -> type:
    """Return a class in place of a name that the node zip does not have.

    So a module that defines and submits a function can be imported on a node without an
    installation.
    """

    def refuse(*_: Any, **__: Any) -> None:
        from clusterjob.errors import ClusterJobError

        raise ClusterJobError(f"clusterjob.{name} needs an installation of clusterjob here: {why}")

    return type(
        name, (), {"__init__": refuse, "__class_getitem__": classmethod(lambda cls, _: cls)}
    )
