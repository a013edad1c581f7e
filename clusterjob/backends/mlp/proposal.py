"""The profile of the platform, for `clusterjob init`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from clusterjob.backends.mlp.client import COMMAND
from clusterjob.core.proposals import Proposal, Question


def propose() -> Iterator[Proposal]:
    """Yield the profile of an account; its queue, image and machines are not known here."""
    found = ""
    if os.environ.get("MLP_WORKER_NUM"):
        found = (
            f"a task of the platform with {os.environ['MLP_WORKER_NUM']} workers: `clusterjob"
            " launch SCRIPT` starts each worker's part"
        )
    elif shutil.which(COMMAND) or Path("~/.volc/credentials").expanduser().is_file():
        found = f"the platform's command {COMMAND}"
    examples = (
        ("set.queue", "train", "resource queue, by name or id"),
        ("set.image", "cr-cn-beijing.example.com/team/torch:2.8", "image with Python and torch"),
        ("set.flavor", "ml.hpcpni2l", "kind of machine"),
    )
    yield Proposal(
        "mlp",
        "mlp",
        found=found,
        examples=examples,
        questions=(
            Question("set.queue", "Resource queue, by name or id", required=True),
            Question("set.image", "Image with Python and torch", required=True),
            Question("set.flavor", "Kind of machine, such as ml.hpcpni2l", required=True),
        ),
    )
