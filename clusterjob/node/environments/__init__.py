"""From whatever variables a platform sets to a place in a job: one pure function over a mapping.

A family is a file with one function, ``detect(environ) -> Finding | None``. None means that none of its variables is there; a
finding whose source is ``none``, that they are there and name no place, and why. To add a family, write the file and give it
its place in `FAMILIES`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from clusterjob.node.environments import clusterjob_env, slurm_env, torch_env
from clusterjob.node.environments.reading import NOWHERE, Finding, Ignored, Reading

__all__ = ["FAMILIES", "NOWHERE", "Finding", "Ignored", "Reading", "detect"]

Detector = Callable[[Mapping[str, str]], Finding | None]

# The order is the meaning: the first family that applies wins.
FAMILIES: tuple[Detector, ...] = (
    # Whoever set a process's own variables came last: torchrun may run inside our node, Slurm or a platform.
    torch_env.detect,
    # Our rendered script knows more of this job than the platform that it runs on.
    clusterjob_env.detect,
    # A step's variables are the scheduler's own word on this very task; a platform's would be those of the machine below it.
    slurm_env.detect,
)


def detect(environ: Mapping[str, str]) -> Finding:
    """Return what the variables say of this process's place, with the evidence.

    Reads nothing but the mapping: no file, no socket, no clock.
    """
    ignored: tuple[Ignored, ...] = ()
    for family in FAMILIES:
        finding = family(environ)
        if finding is not None:
            ignored += finding.ignored
            if finding.source != NOWHERE:
                return replace(finding, ignored=ignored)
    return Finding(source=NOWHERE, place=None, ignored=ignored)
