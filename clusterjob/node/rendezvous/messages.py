"""What an agent may say to node 0: each message is checked before anything is done with it.

The token tells an agent from a stranger. It does not tell a sound agent from one on a compromised
host, and no message of that one may raise an exception in the coordinator or speak for another
node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterjob.node.rendezvous.protocol import Message
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure

_MOST_RANKS = 1 << 24
_MOST_PROCESSES = 1 << 12  # workers of one node
_LONGEST_TEXT = 65_536
_LONGEST_NAME = 300
_MOST_ITEMS = 256

Check = Callable[[Any, int], bool]  # (value, the speaker's node_rank)


class MalformedMessageError(ValueError):
    """No agent of ours says this; the text says what is wrong with it."""


@dataclass(frozen=True)
class Hello:
    """How an agent introduces itself."""

    node_rank: int
    host: str
    pid: int
    attempt: int
    nnodes: int
    nproc: int
    counted_by: str
    endpoints: tuple[str, ...]
    wants_endpoints: bool


def read_hello(message: Message) -> Hello:
    """Return an agent's introduction.

    Raises:
        MalformedMessageError: it is none.
    """
    for name, limit in (
        ("node_rank", _MOST_RANKS),
        ("pid", 1 << 31),
        ("attempt", _MOST_RANKS),
        ("nnodes", _MOST_RANKS),
    ):
        if not _whole(message.get(name), limit):
            raise MalformedMessageError(f"its {name} is no number of this kind")
    nproc, endpoints = message.get("nproc"), message.get("endpoints", [])
    if type(nproc) is not int or not 0 < nproc <= _MOST_PROCESSES:
        raise MalformedMessageError("its nproc is no number of processes")
    if (
        not isinstance(endpoints, list)
        or len(endpoints) > nproc + 1
        or not all(_text(each, _LONGEST_NAME) for each in endpoints)
    ):
        raise MalformedMessageError("its endpoints are no list of addresses")
    names = {name: message.get(name, "") for name in ("host", "counted_by")}
    if not all(_text(name, _LONGEST_NAME) for name in names.values()):
        raise MalformedMessageError("its host is no name")
    return Hello(
        message["node_rank"], sanitize(names["host"]), pid=message["pid"], attempt=message["attempt"],
        nnodes=message["nnodes"], nproc=nproc, counted_by=sanitize(names["counted_by"]), endpoints=tuple(map(sanitize, endpoints)),
        wants_endpoints=message.get("wants_endpoints") is True,
    )  # fmt: skip


def check(message: Message, node_rank: int) -> None:
    """Check what an agent that has joined says.

    Args:
        message: its words.
        node_rank: its own.

    Raises:
        MalformedMessageError: no agent says this.
    """
    kind = message.get("t")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise MalformedMessageError("a message of no known kind")
    for name, is_right in fields.items():
        if not is_right(message.get(name), node_rank):
            raise MalformedMessageError(f"{kind} with a wrong {name}")


def _whole(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _text(value: Any, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit


def _flag(value: Any, _: int) -> bool:
    return isinstance(value, bool)


def _rank(value: Any, _: int) -> bool:
    return _whole(value, _MOST_RANKS)


def _why(value: Any, _: int) -> bool:
    return _text(value, _LONGEST_TEXT)


def _age(value: Any, _: int) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value < 1e9
    )


def _ranks(value: Any, node_rank: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_ITEMS
        and all(_rank(each, node_rank) for each in value)
    )


def _lines(value: Any, node_rank: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_ITEMS
        and all(_why(each, node_rank) for each in value)
    )


def _failure(value: Any, node_rank: int) -> bool:
    """A failure of the speaker's own node: no agent speaks for another."""
    return (
        isinstance(value, dict)
        and value.keys() == Failure.__dataclass_fields__.keys()
        and type(value["node_rank"]) is int
        and value["node_rank"] == node_rank
        and all(
            value[name] is None or _rank(value[name], node_rank) for name in ("rank", "local_rank")
        )
        and (value["rank"] is None) == (value["local_rank"] is None)
        and _whole(value["exit_code"], 256)
        and _text(value["host"], _LONGEST_NAME)
        and all(
            value[name] is None or _text(value[name], _LONGEST_NAME) for name in ("signal", "kind")
        )
        and _why(value["message"], node_rank)
        and _lines(value["last_lines"], node_rank)
        and _flag(value["effect"], node_rank)
    )


def _failures(value: Any, node_rank: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_ITEMS
        and all(_failure(each, node_rank) for each in value)
    )


def _process(value: Any, node_rank: int) -> bool:  # noqa: ARG001
    return _whole(value, _MOST_PROCESSES)


def _exits(value: Any, node_rank: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_ITEMS
        and all(
            isinstance(each, dict)
            and each.keys() == {"failure", "age"}
            and _failure(each["failure"], node_rank)
            and each["failure"]["rank"] is not None
            and _age(each["age"], node_rank)
            for each in value
        )
    )


_FIELDS: dict[str, dict[str, Check]] = {
    "beat": {},
    "running": {},
    "done": {},
    "stopped": {},
    "exec": {"why": _why},
    "cancel": {"why": _why},
    "interrupt": {"why": _why},
    "succeeded": {"local_rank": _process},
    "at_once": {},
    "warned": {"why": _why},
    "gave_up": {"why": _why},
    "failing": {"failure": _failure, "age": _age, "exited": _flag},
    "missing": {"restart": _rank, "local_rank": _rank, "ranks": _ranks, "final": _flag},
    "where": {"restart": _rank, "final": _flag, "lines": _lines, "failures": _failures},
    "checked": {"restart": _rank, "exits": _exits},
}
