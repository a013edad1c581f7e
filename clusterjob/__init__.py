"""Write a distributed training script once; one command runs it here, over SSH, under Slurm or inside a platform.

The public names are loaded when they are first used: importing the package imports nothing heavy, and no torch.
"""

from __future__ import annotations

# Not typing's: importing that would be most of what `import clusterjob.bootstrap` costs. Type checkers take the name for theirs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterjob.errors import ClusterJobError, JobFailed
    from clusterjob.functions import FunctionJob, map, submit  # noqa: A004 - as Executor.map
    from clusterjob.node.program import Program
    from clusterjob.node.topology import Topology, Worker
    from clusterjob.node.verdict import JobState, Verdict
    from clusterjob.spawning import spawn
    from clusterjob.spec import JobSpec, Resources

__version__ = "0.1.0"

_HOMES = {
    "ClusterJobError": "clusterjob.errors",
    "FunctionJob": "clusterjob.functions",
    "JobFailed": "clusterjob.errors",
    "JobSpec": "clusterjob.spec",
    "JobState": "clusterjob.node.verdict",
    "Program": "clusterjob.node.program",
    "Resources": "clusterjob.spec",
    "Topology": "clusterjob.node.topology",
    "Verdict": "clusterjob.node.verdict",
    "Worker": "clusterjob.node.topology",
    "map": "clusterjob.functions",
    "spawn": "clusterjob.spawning",
    "submit": "clusterjob.functions",
}

__all__ = [
    "ClusterJobError", "FunctionJob", "JobFailed", "JobSpec", "JobState", "Program", "Resources", "Topology", "Verdict", "Worker",
    "__version__", "map", "spawn", "submit",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
