"""Name the ranks that do not answer while torch forms the process group.

torch may wait half an hour for a peer and prints nothing. Each process writes the key ``formed`` to
the store when it has the group. A process that waits longer than some seconds writes the key
``there``. A rank with neither key has died or is stuck. If the group forms at once, this costs one
request per rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any

from clusterjob.errors import RanksMissingError
from clusterjob.node.environments.topology import Worker
from clusterjob.worker import once_per_host, rank_facts
from clusterjob.worker.rank_facts import Facts, who
from clusterjob.worker.rendezvous import Ask
from clusterjob.worker.signed_values import SignedStore
from clusterjob.worker.store import another_connection

# Seconds after which a process that waits for the group reports that it is alive.
_ALIVE_AFTER = 3.0
_OTHERS = 1.0  # further seconds for other ranks before they count as not answering
_POLL = 0.05  # seconds between two polls for another rank's final text


class GroupFormation:
    """Context manager: report the ranks that do not answer while torch forms the group.

    Args:
        store: the prefix store of the rendezvous of ranks.
        worker: this process's rank assignment.
        number: index of the group among the groups over this store, from 0.
        ask: as for `rendezvous.join`.

    Raises:
        RanksMissingError: torch has given up because some ranks do not answer; the message names
            them.
    """

    def __init__(self, store: Any, worker: Worker, number: int, ask: Ask) -> None:
        self._store = store
        self._worker = worker
        self._number = number
        self._ask = ask
        self._over = threading.Event()
        self._is_there = False  # whether the other ranks can see that this rank is alive
        self._begin = time.monotonic()

    def __enter__(self) -> None:
        if self._worker.world_size > 1:
            threading.Thread(target=self._watch, name="clusterjob-forming", daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if error is None:
            # The process that serves the store may have formed the group and ended.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"formed{self._worker.rank}", "")
        elif isinstance(error, RuntimeError) and self._is_there:
            waited_for = self._final_probe()
            if waited_for:
                raise RanksMissingError(
                    f"{waited_for}; gave up after {self._waited():.0f} s"
                ) from error

    def _waited(self) -> float:
        return time.monotonic() - self._begin

    def _watch(self) -> None:
        if self._over.wait(_ALIVE_AFTER):
            return
        # If the store has ended, torch's own request fails too.
        with contextlib.suppress(OSError, RuntimeError):
            store = self._connect()
            store.set(f"there{self._worker.rank}", "")
            self._is_there = True
            for number, due in enumerate(once_per_host.notice_times()):
                if self._over.wait(due - self._waited()):
                    return
                if self._first(store, f"probe{number}"):
                    self._print_unresponsive(store)

    def _print_unresponsive(self, store: Any) -> None:
        """Print which ranks do not answer, or that all ranks wait for each other."""
        without, silent = self._without(store)
        if silent:
            if self._over.wait(_OTHERS):
                return
            without, silent = self._without(store)
        if silent:
            self._ask(silent, final=False)
            once_per_host.print_line(f"{self._stuck(store, silent)}; {self._waited():.0f} s so far")
        elif without:
            named = self._named(store, without)
            waiting = (
                f"{len(without)} of {self._worker.world_size} processes wait for each other, "
                f"such as {named[0]} and {named[-1]}"
            )
            hint = (
                "can their machines reach each other at every port, "
                "by the interfaces of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME?"
            )
            once_per_host.print_line(
                f"the process group is not made after {self._waited():.0f} s: {waiting}: {hint}"
            )

    def _final_probe(self) -> str:
        """Return the ranks that do not answer, as text, after torch has given up.

        All ranks get the same text; it is empty if all ranks answer.
        """
        try:
            store = self._connect()
            if self._first(store, "final probe"):
                silent = self._without(store)[1]
                text = self._stuck(store, silent) if silent else ""
                self._ask(silent, final=True)
                store.set("end", text)
                return text
            end = time.monotonic() + _OTHERS
            while not store.check(["end"]) and time.monotonic() < end:
                time.sleep(_POLL)
            return str(store.get("end").decode()) if store.check(["end"]) else ""
        except (OSError, RuntimeError):
            return ""

    def _connect(self) -> Any:
        """Open a second connection: torch's waiting request blocks the first connection."""
        import torch.distributed as dist

        return SignedStore(
            dist.PrefixStore("rendezvous", another_connection(self._worker, self._number)),
            self._number,
        )

    def _first(self, store: Any, what: str) -> bool:
        own = str(self._worker.rank)
        return bool(store.compare_set(what, "", own).decode() == own)

    def _without(self, store: Any) -> tuple[list[int], list[int]]:
        """Return the ranks that have no group, and those of them that do not answer."""
        without = rank_facts.missing_ranks(store, self._worker, key="formed")
        return without, [rank for rank in without if not store.check([f"there{rank}"])]

    def _named(self, store: Any, ranks: list[int]) -> list[str]:
        ends = [ranks[0], ranks[-1]]
        return [who(Facts.of(data)) for data in store.multi_get([f"rank{rank}" for rank in ends])]

    def _stuck(self, store: Any, silent: list[int]) -> str:
        return rank_facts.describe_unresponsive(
            store,
            silent,
            how="joined the rendezvous, no answer while the process group is made: dead or stuck",
        )
