"""A Hydra callback that writes the function's value into the job directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.worker import outcomes


class ReturnValue:
    """Write the return value of each rank; Hydra calls `on_job_end`.

    It has no base class, so that this module does not import Hydra.
    """

    def on_job_end(self, job_return: Any, **_: Any) -> None:
        """Write the value that the function returned; an exception ends the worker anyway."""
        job_dir = os.environ.get(contract.JOB_DIR)
        if job_dir and job_return.status.name == "COMPLETED":
            outcomes.write_value(
                Path(job_dir),
                int(os.environ.get("RANK", "0")),
                attempt=scheduler.read_attempt(os.environ),
                value=job_return.return_value,
            )

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda **_: None
        raise AttributeError(name)
