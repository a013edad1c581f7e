"""Read --nodes, and count the machines of a job: those with workers and the spare ones."""

from __future__ import annotations

import re
from typing import Any

from clusterjob.errors import SpecError

_RANGE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", re.ASCII)
_COUNT = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)


def read_nodes(value: Any) -> int | str:
    """Return a number of nodes, or MIN:MAX of an elastic job as text; N:N is N.

    Raises:
        SpecError: the value has neither form.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    if isinstance(value, str) and _COUNT.fullmatch(value):
        return int(value)
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        least, most = int(found[1]), int(found[2])
        if not 1 <= least <= most:
            raise SpecError(
                f"{least}:{most}: MIN must be at least 1, and at most MAX", "write it as 2:4"
            )
        return most if least == most else f"{least}:{most}"
    shown = repr(value)
    short = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise SpecError(f"{short} is not a whole number, or a range such as 2:4")


def machines(nodes: int | str | None, spares: int, hosts: int) -> tuple[int, int | None]:
    """Return the number of all machines of a job, and the smallest number with workers.

    Args:
        nodes: the value of --nodes, as `read_nodes` returns it; None if it is not given.
        spares: the value of --spares.
        hosts: the number of hosts that the user names; 0 if the cluster chooses them.

    Returns:
        The machines, spare ones included; the minimum is None if the job is not elastic.
    """
    if nodes is None:  # all hosts, some of which are spare
        return hosts or 1 + spares, None
    if isinstance(nodes, int):
        return nodes + spares, None
    least, _, most = nodes.partition(":")
    return int(most) + spares, int(least)
