"""Describe the ranks that others wait for: missing or unresponsive ranks, and wrong clocks."""

from __future__ import annotations

from typing import Any

from clusterjob.node.environments.topology import Worker
from clusterjob.worker import once_per_host
from clusterjob.worker.rank_facts import Facts, who

_MAX_NAMED = 8


def missing_ranks(store: Any, worker: Worker, key: str = "rank") -> list[int]:
    """Return the ranks whose key, such as ``rank3`` for rank 3, is not in the store."""
    return [rank for rank in range(worker.world_size) if not store.check([f"{key}{rank}"])]


def describe_unresponsive(store: Any, ranks: list[int], how: str) -> str:
    """Return a text about ranks that joined and do not answer any more."""
    known = store.multi_get([f"rank{rank}" for rank in ranks[:_MAX_NAMED]])
    named = [f"{each.rank} on {each.process()}" for each in map(Facts.of, known)]
    return f"{_waiting_for(ranks, named)}: {how}"


def describe_missing(store: Any, worker: Worker, missing: list[int], *, started: bool) -> str:
    """Return a text about missing ranks: their nodes, hosts and probable state.

    Args:
        store: the store of the rendezvous.
        worker: the own rank assignment.
        missing: the ranks.
        started: whether a launcher has started all ranks.
    """
    size = max(1, worker.local_world_size)
    hosts: dict[int, str] = {}
    for node in dict.fromkeys(rank // size for rank in missing):
        there = [
            rank
            for rank in range(node * size, min(worker.world_size, (node + 1) * size))
            if rank not in missing
        ]
        if there:
            hosts[node] = Facts.of(store.get(f"rank{there[0]}")).host
    named = [
        f"{rank} (node {rank // size}{f', {hosts[rank // size]}' if rank // size in hosts else ''})"
        for rank in missing[:_MAX_NAMED]
    ]
    known = (
        "started, and not yet at init()"
        if started
        else "not seen yet: not started, or still importing"
    )
    return f"{_waiting_for(missing, named)}: {known}"


def _waiting_for(ranks: list[int], named: list[str]) -> str:
    more = f" and {len(ranks) - len(named)} more" if len(ranks) > len(named) else ""
    return f"waiting for rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


def report_clock(store: Any, of: Facts, how: str) -> None:
    """Print that a machine's clock is off, once per machine and for up to `_MAX_NAMED` machines."""
    if store.add(f"clock {of.host} {of.boot}", 1) == 1 and store.add("clocks", 1) <= _MAX_NAMED:
        once_per_host.print_line(f"the clock of {of.process()}, rank {of.rank}, is {how}")


def whose(facts: Facts) -> str:
    """Return whose clock this is, as text."""
    return "rank 0's" if facts.rank == 0 else f"that of {who(facts)}"
