"""The profile of this machine, for `clusterjob init`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from clusterjob.core import gpus
from clusterjob.core.proposals import Proposal, Question
from clusterjob.node.system.devices import usable_cores


def propose() -> Iterator[Proposal]:
    """Yield a profile that runs jobs on this machine."""
    count = len(gpus.visible_gpus(os.environ))
    cores = usable_cores()
    ask = (Question("gpus", f"GPUs of a job, at most {count}", default=str(count)),)
    yield Proposal(
        "local",
        "local",
        found=f"this machine: {cores} cores, {count or 'no'} GPU{'s' if count != 1 else ''}",
        ready=True,
        here=True,
        values={"gpus": count} if count else {},
        comments={"gpus": "one worker on each; --gpus N overrides it"},
        questions=ask if count else (),
    )
