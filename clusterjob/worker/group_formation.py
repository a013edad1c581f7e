"""torch makes a process group without a word, and may wait half an hour for a peer: those who wait
tell each other, and one says so.

Each process leaves one sign once it has the group. Whoever has none after some seconds says that it
is there; whoever does not even say that has died, or is stuck. Nothing of this costs more than that
one request where the group is made at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any

from clusterjob.errors import GangError
from clusterjob.node.environments.topology import Worker
from clusterjob.worker import once_per_host, rendezvous
from clusterjob.worker.rendezvous import Ask, Facts
from clusterjob.worker.signed_values import SignedStore
from clusterjob.worker.store import another_connection

# Seconds after which whoever has no group says that it is there; one that was called late says so
# later.
_SIGN = 3.0
_OTHERS = 1.0  # seconds that are left to others before they are said not to answer
_LOOK = 0.05  # seconds between two looks for what another one has found at the end


class Forming:
    """A process group in the making, as a context around the call that makes it.

    Args:
        store: the corner of the store in which the roll was called.
        worker: this process's place.
        number: which of the groups over this store it is, from 0.
        ask: as for `rollcall.call`.

    Raises:
        GangError: torch has given up, because of processes that do not answer; their names are in
            it.
    """

    def __init__(self, store: Any, worker: Worker, number: int, ask: Ask) -> None:
        self._store = store
        self._worker = worker
        self._number = number
        self._ask = ask
        self._over = threading.Event()
        self._is_there = False  # as the others know
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
            with contextlib.suppress(
                RuntimeError
            ):  # whoever serves the store has the group, and may have left
                self._store.set(f"formed{self._worker.rank}", "")
        elif isinstance(error, RuntimeError) and self._is_there:
            waited_for = self._last_look()
            if waited_for:
                raise GangError(f"{waited_for}; gave up after {self._waited():.0f} s") from error

    def _waited(self) -> float:
        return time.monotonic() - self._begin

    def _watch(self) -> None:
        if self._over.wait(_SIGN):
            return
        try:
            store = self._connect()
            store.set(f"there{self._worker.rank}", "")
            self._is_there = True
            for number, due in enumerate(once_per_host.notices()):
                if self._over.wait(due - self._waited()):
                    return
                if self._first(store, f"looks{number}"):
                    self._look(store)
        except (OSError, RuntimeError):
            pass  # the store is gone, as torch's own request finds out too

    def _look(self, store: Any) -> None:
        """Say, for all, who does not answer, or that all do."""
        without, silent = self._without(store)
        if silent:
            if self._over.wait(_OTHERS):
                return
            without, silent = self._without(store)
        if silent:
            self._ask(silent, final=False)
            once_per_host.say(f"{self._stuck(store, silent)}; {self._waited():.0f} s so far")
        elif without:
            named = self._named(store, without)
            who = f"{len(without)} of {self._worker.world_size} processes wait for each other, such as {named[0]} and {named[-1]}"
            hint = "can their machines reach each other at every port, by the interfaces of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME?"
            once_per_host.say(
                f"the process group is not made after {self._waited():.0f} s: {who}: {hint}"
            )

    def _last_look(self) -> str:
        """Return who does not answer, now that torch has given up; the same for all, and empty if
        all answer.
        """
        try:
            store = self._connect()
            if self._first(store, "looks at the end"):
                silent = self._without(store)[1]
                text = self._stuck(store, silent) if silent else ""
                self._ask(silent, final=True)
                store.set("end", text)
                return text
            end = time.monotonic() + _OTHERS
            while not store.check(["end"]) and time.monotonic() < end:
                time.sleep(_LOOK)
            return str(store.get("end").decode()) if store.check(["end"]) else ""
        except (OSError, RuntimeError):
            return ""

    def _connect(self) -> Any:
        """A request of torch's that waits holds its connection: nothing else comes through there
        meanwhile.
        """
        import torch.distributed as dist

        return SignedStore(
            dist.PrefixStore("roll", another_connection(self._worker, self._number)), self._number
        )

    def _first(self, store: Any, what: str) -> bool:
        own = str(self._worker.rank)
        return bool(store.compare_set(what, "", own).decode() == own)

    def _without(self, store: Any) -> tuple[list[int], list[int]]:
        """Return the ranks that have no group, and those of them that do not answer."""
        without = rendezvous.absent(store, self._worker, sign="formed")
        return without, [rank for rank in without if not store.check([f"there{rank}"])]

    def _named(self, store: Any, ranks: list[int]) -> list[str]:
        ends = [ranks[0], ranks[-1]]
        return [
            rendezvous.who(Facts.of(data))
            for data in store.multi_get([f"rank{rank}" for rank in ends])
        ]

    def _stuck(self, store: Any, silent: list[int]) -> str:
        return rendezvous.gone(
            store,
            silent,
            how="at the roll-call, and no answer while the process group is made: died, or stuck",
        )
