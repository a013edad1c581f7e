"""Refuse what needs Linux on another system, such as macOS, which can only submit jobs."""

from __future__ import annotations

import sys

from clusterjob.errors import UsageError

_NAMES = {"darwin": "macOS"}


def require(what: str) -> None:
    """Refuse an action on a system other than Linux.

    Args:
        what: the part of the product that runs workers here.

    Raises:
        UsageError: this is not Linux.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"{what} needs Linux, and this is {_NAMES.get(sys.platform, sys.platform)}",
            "submit to Linux machines: --hosts HOST (over SSH), or --login HOST (its Slurm)",
        )
