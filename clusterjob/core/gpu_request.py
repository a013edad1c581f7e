"""Parse the value of --gpus: how many GPUs a node needs, their type, or which ones.

A plain number is a count on each node, as `sky launch --gpus` and `docker run --gpus` read it.
sbatch's --gpus counts the GPUs of the whole job, which Slurm may divide unevenly among nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from clusterjob.errors import SpecError

IDLE = "auto"
_COUNT = re.compile(r"[+-]?\d{1,18}", re.ASCII)
TYPED = re.compile(r"([A-Za-z][\w.-]*):(\d{1,9})", re.ASCII)
_ENTRY = r"(?:\d{1,4}|(?:GPU|MIG)-[\w/-]{1,100})"
_LIST = re.compile(rf"{_ENTRY}(?:\s*,\s*{_ENTRY})*", re.ASCII)
_FORMS = "write a number, a100:8, the GPUs to use as 0,1 or device=5, auto for idle ones, or auto:4"


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs of one node.

    Attributes:
        count: how many; None if the value does not say it.
        type: their type, as the cluster names it; empty for any.
        chosen: comma-separated indices and UUIDs, or ``auto`` for idle GPUs; empty for any.
    """

    count: int | None = None
    type: str = ""
    chosen: str = ""

    def __post_init__(self) -> None:
        """Refuse ``auto:0``.

        Raises:
            SpecError: no GPU is to be chosen.
        """
        if self.chosen and self.count == 0:
            raise SpecError(f"--gpus {self.chosen} with 0 GPUs", "--gpus 0 uses none")


def read_gpus(value: Any) -> int | str:
    """Return the canonical form of --gpus: 8, a100:8, auto, auto:4, device=5 or 0,1.

    A list of a configuration file chooses GPUs, also a list of one.

    Raises:
        SpecError: the value has none of these forms, or names a GPU twice.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    is_list = isinstance(value, (list, tuple))
    text = ",".join(map(str, value)) if is_list else value
    # docker's documentation writes '"device=0,1"', with both kinds of quotes.
    text = text.strip().strip('"').strip() if isinstance(text, str) else ""
    named = text.removeprefix("device=")
    if not is_list and named == text and _COUNT.fullmatch(text):
        return int(text)
    if not is_list and (text == IDLE or TYPED.fullmatch(text)):
        parse(text)  # refuses auto:0
        return text
    if not _LIST.fullmatch(named):
        shown = repr(value)
        raise SpecError(f"{shown if len(shown) < 80 else shown[:77] + '...'} names no GPUs", _FORMS)
    entries = re.split(r"\s*,\s*", named)
    if len(set(entries)) < len(entries):
        raise SpecError(f"{value!r} names a GPU twice", _FORMS)
    return f"device={entries[0]}" if len(entries) == 1 else ",".join(entries)


def shown(chosen: str) -> str:
    """Return chosen GPUs as the user writes them: a single index needs ``device=``."""
    return f"device={chosen}" if _COUNT.fullmatch(chosen) else chosen


def parse(value: int | str) -> GpuRequest:
    """Return the request of a value in the form that `read_gpus` returns."""
    if isinstance(value, int):
        return GpuRequest(value)
    if value == IDLE:
        return GpuRequest(chosen=IDLE)
    if typed := TYPED.fullmatch(value):
        count = int(typed[2])
        return GpuRequest(count, chosen=IDLE) if typed[1] == IDLE else GpuRequest(count, typed[1])
    chosen = value.removeprefix("device=")
    return GpuRequest(chosen.count(",") + 1, chosen=chosen)


def merge(gpus: int | str | None, per_node: int | str | None) -> GpuRequest:
    """Return the request of --gpus and --gpus-per-node, where both may be set.

    Raises:
        SpecError: they ask for different numbers or types of GPUs.
    """
    if gpus is None or per_node is None:
        one = per_node if gpus is None else gpus
        return GpuRequest() if one is None else parse(one)
    first, second = parse(gpus), parse(per_node)
    if first.count is None:  # --gpus auto --gpus-per-node 4
        return replace(second, chosen=first.chosen)
    if first.count != second.count or first.type != second.type:
        raise SpecError(
            f"--gpus {gpus} and --gpus-per-node {per_node} ask for different GPUs",
            "leave one of them out",
        )
    return first
