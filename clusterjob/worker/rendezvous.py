"""Rendezvous of ranks over torch's store: check all ranks, and name missing or wrong ones.

Each rank compares its facts with those of the first rank that joined, and the last one to join lets
all go on. So each rank sends only a few requests to the store in a job of any size. Texts for all
ranks are composed by the rank that claims a key first. An error is one line: torch alone waits half
an hour or prints pages of C++ frames (pytorch#41665, nccl#1260).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from clusterjob.errors import RanksMissingError, RendezvousError
from clusterjob.node.environments import this_node
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import codec
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.sanitize import sanitize
from clusterjob.worker import process
from clusterjob.worker.store import GroupStore, notice_time, polls, print_notice

DEFAULT_TIMEOUT = 1800.0  # seconds, torch's default for gloo
# Seconds by which a rank speaks later than the rank before it, which may be missing, and the most.
_DEFERENCE, _MOST_DEFERENCE = 1.0, 5.0
_REFUSAL = 1.0  # seconds for which a rank 0 that serves the store lets others read the refusal
_MAX_NAMED = 8  # ranks that one text names
_MAX_ANSWER = 4000  # characters of a text that another process wrote
# While torch forms the group: seconds after which a process reports that it is alive, which is
# before the first notice, and seconds for the text of another rank after torch has given up.
_ALIVE_AFTER, _OTHERS = 2.0, 1.0
_Text = Annotated[str, Limit(300, cuts=True)]


@dataclass(frozen=True)
class Facts:
    """The facts that a process writes to the store in the rendezvous.

    Attributes:
        rank: its rank.
        host, pid: its host name and its pid.
        world_size: its world size.
        job: its job id; empty if it is unknown.
        versions: versions of torch and of the backend.
        gpu: the UUID of its GPU; empty without one.
    """

    rank: int
    host: _Text
    pid: int
    world_size: int
    job: _Text
    versions: _Text
    gpu: _Text

    @classmethod
    def of(cls, data: str) -> Facts:
        """Parse the facts of another process, in the format that `data` returns.

        Raises:
            RendezvousError: the data is not in this format.
        """
        try:
            return codec.read(cls, json.loads(data))
        except ValueError as error:
            raise RendezvousError(
                "torch's store holds a value that no process of a job writes",
                "another program uses MASTER_ADDR:MASTER_PORT",
            ) from error

    def data(self) -> str:
        """Return the facts in the format that `of` parses."""
        return json.dumps(asdict(self))

    @property
    def process(self) -> str:
        """The process's host and pid, as text."""
        return f"{self.host} (pid {self.pid})"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.process}"


# Facts that are equal in all processes: the field, a text about its value, a hint.
_EQUAL_FACTS = (
    (
        "world_size",
        "counts {} processes",
        "WORLD_SIZE differs among them, or two jobs have the same MASTER_PORT",
    ),
    (
        "job",
        "is of job {}",
        "two jobs have the same MASTER_ADDR and MASTER_PORT: one of them needs another port",
    ),
    ("versions", "has {}", "all nodes need the same installation of torch"),
)


def own_facts(worker: Worker, device: Any, backend: str) -> Facts:
    """Return this process's facts.

    Args:
        worker: its rank assignment.
        device: its torch device.
        backend: the backend of the process group that will be made.
    """
    import torch

    versions = f"torch {torch.__version__}"
    gpu = ""
    if device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if backend == "nccl":
            versions += f" with NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Facts(
        worker.rank,
        socket.gethostname(),
        pid=os.getpid(),
        world_size=worker.world_size,
        job=this_node.job_id(worker.topology.source, os.environ),
        versions=versions,
        gpu=gpu,
    )


def disagreement(own: Facts, other: Facts) -> tuple[str, str]:
    """Return why two processes cannot be in one job, and a hint; both are empty if they can.

    The result is the same in both processes.
    """
    if own == other:
        return "", ""
    other, own = sorted((own, other), key=lambda each: (each.rank, each.host, each.pid))
    if own.rank == other.rank:
        return (
            f"rank {own.rank} is claimed twice: by {other.process} and by {own.process}",
            "two processes have the same RANK, or two jobs the same MASTER_PORT",
        )
    for name, text, hint in _EQUAL_FACTS:
        first, second = (getattr(each, name) or "(unnamed)" for each in (own, other))
        if first != second:
            return f"{own} {text.format(first)}, {other} {text.format(second)}", hint
    if own.gpu and own.gpu == other.gpu:
        return (
            f"{own} and {other} have the same GPU, {own.gpu}",
            "LOCAL_RANK and CUDA_VISIBLE_DEVICES choose it",
        )
    return "", ""


# -- join ------------------------------------------------------------------------------------------


def join(store: GroupStore, own: Facts, timeout: float) -> None:
    """Wait until all ranks have joined the rendezvous.

    Args:
        store: the store of this process group. If a launcher serves it, it has started all ranks,
            so that a missing rank is running but has not called init().
        own: this process's facts.
        timeout: seconds to wait for the other ranks.

    Raises:
        RanksMissingError: a rank is missing, or the store has ended with the rank that serves it.
        RendezvousError: a rank is claimed twice, of another job, or has other versions. All ranks
            get the same message. A wrong rank is refused at once, without waiting for missing
            ranks.
    """
    try:
        _enter(store, own)
        _await_answer(store, own, timeout)
        answer = json.loads(store.read("go"))
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        reason = str(error).strip().partition("\n")[0]
        raise RanksMissingError(
            f"{own} has joined, and the store of the rendezvous has ended: {reason}"
        ) from error
    if answer["refused"]:
        if own.rank == 0 and not store.served:
            time.sleep(_REFUSAL)  # the store ends with this process
        kind = RanksMissingError if answer["late"] else RendezvousError
        raise kind(*(sanitize(answer[name])[:_MAX_ANSWER] for name in ("refused", "hint")))


def _enter(store: GroupStore, own: Facts) -> None:
    """Write this rank's facts, compare them with those of others, and count this rank."""
    keys = [f"rank{own.rank}", "first", *([f"gpu {own.gpu}"] if own.gpu else [])]
    others = [Facts.of(store.offer(key, own.data())) for key in keys]
    found = [disagreement(own, other) for other in others]
    refused, hint = next((each for each in found if each[0]), ("", ""))
    if refused:
        _answer(store, refused, hint)
    # A process that joins a second time is counted once. A full count means that no refusal is
    # missing: it is written before the rank is counted.
    elif store.count(f"joined{own.rank}") == 1 and store.count("all joined") == own.world_size:
        _answer(store)


def _answer(store: GroupStore, refused: str = "", hint: str = "", *, late: bool = False) -> None:
    """Give the answer to all ranks, unless one was given before; `late`: ranks are missing."""
    store.offer("go", json.dumps({"refused": refused, "hint": hint, "late": late}))


def _await_answer(store: GroupStore, own: Facts, timeout: float) -> None:
    """Wait for the answer to all ranks; name the missing ones, and give up after the timeout.

    It polls, because torch's store.wait() prints C++ frames at a timeout and ignores Ctrl-C.
    """
    notices, deference = 0, min(_DEFERENCE * own.rank, _MOST_DEFERENCE)
    # The store handles some thousands of requests a second.
    for waited in polls(min(1.0, max(0.05, own.world_size / 4096))):
        if store.has("go"):
            return
        final = waited > timeout + deference
        if not final and waited <= notice_time(notices) + deference:
            continue
        if final or store.claim(f"notice{notices}"):
            missing = _without(store, "rank")
            text = f"{own} has joined, and the rank that ends the rendezvous does not answer"
            if missing:
                process.report("WorkerWaiting", ranks=missing[:_MAX_NAMED], final=final)
                text = _describe_missing(store, missing)
            if final:
                _answer(store, f"{text}; gave up after {waited:.0f} s", late=True)
            elif missing:
                print_notice(f"{text}; {waited:.0f} s so far")
        notices += 1


def _without(store: GroupStore, key: str) -> list[int]:
    """Return the ranks whose key, such as ``rank3`` for rank 3, is not in the store."""
    return [rank for rank in range(store.worker.world_size) if not store.has(f"{key}{rank}")]


def _describe_missing(store: GroupStore, missing: list[int]) -> str:
    """Return a text about missing ranks: their nodes, hosts and probable state."""
    size = max(1, store.worker.local_world_size)
    named = []
    for rank in missing[:_MAX_NAMED]:
        node = rank // size
        of_node = range(node * size, min(store.worker.world_size, (node + 1) * size))
        there = [each for each in of_node if each not in missing]
        host = f", {_facts(store, there[0]).host}" if there else ""
        named.append(f"{rank} (node {node}{host})")
    state = (
        "started, and not yet at init()"
        if store.served
        else "not seen yet: not started, or still importing"
    )
    return f"{_waiting_for(missing, named)}: {state}"


def _facts(store: GroupStore, rank: int) -> Facts:
    """Return the facts of a rank that has joined."""
    return Facts.of(store.read(f"rank{rank}"))


def _waiting_for(ranks: list[int], named: Sequence[str]) -> str:
    more = f" and {len(ranks) - len(named)} more" if len(ranks) > len(named) else ""
    return f"waiting for rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


# -- form the group --------------------------------------------------------------------------------


@contextlib.contextmanager
def forming(store: GroupStore) -> Iterator[None]:
    """Name the ranks that do not answer while torch forms the process group in this block.

    torch may wait half an hour for a peer and prints nothing. Each process writes the key
    ``formed`` to the store when it has the group. A process that waits longer than some seconds
    writes the key ``there``. A rank with neither key has died or is stuck.

    Raises:
        RanksMissingError: torch has given up because some ranks do not answer; the message names
            them.
    """
    over, begin = threading.Event(), time.monotonic()
    watcher = threading.Thread(
        target=_watch_formation, args=(store, over.wait), name="clusterjob-forming", daemon=True
    )
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - begin
        text = _blame(store) if waited > _ALIVE_AFTER else ""
        if not text:
            raise
        raise RanksMissingError(f"{sanitize(text)}; gave up after {waited:.0f} s") from error
    finally:
        over.set()
        watcher.join(_OTHERS)  # it holds the store, whose port the next group needs
    # The process that serves the store may have formed the group and ended.
    with contextlib.suppress(RuntimeError):
        store.offer(f"formed{store.worker.rank}")


def _watch_formation(store: GroupStore, over: Callable[[float], bool]) -> None:
    """Report that this rank is alive; print which ranks do not answer until the wait is over."""
    if over(_ALIVE_AFTER):
        return
    begin = time.monotonic() - _ALIVE_AFTER
    with contextlib.suppress(OSError, RuntimeError):  # torch's own request fails too
        store = store.reconnect()
        store.offer(f"there{store.worker.rank}")
        for number in itertools.count():
            if over(begin + notice_time(number) - time.monotonic()):
                return
            if not store.claim(f"probe{number}"):
                continue
            without = _without(store, "formed")
            text = _describe_silent(store, without, final=False)
            if without and not text:
                text = (
                    f"the process group is not made: {len(without)} of {store.worker.world_size} "
                    f"processes wait for each other, such as {_facts(store, without[0])} and "
                    f"{_facts(store, without[-1])}: can their machines reach each other at every "
                    "port, by the interfaces of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME?"
                )
            if text:
                print_notice(f"{text}; {time.monotonic() - begin:.0f} s so far")


def _blame(store: GroupStore) -> str:
    """Return the ranks that do not answer, as text, after torch has given up.

    All ranks get the same text; it is empty if all ranks answer.
    """
    with contextlib.suppress(OSError, RuntimeError):
        store = store.reconnect()
        store.offer(f"there{store.worker.rank}")  # its own thread may not have done so yet
        if store.claim("last probe"):
            store.offer("end", _describe_silent(store, _without(store, "formed"), final=True))
        for waited in polls(longest=0.05):
            if store.has("end"):
                return store.read("end")
            if waited > _OTHERS:
                break
    return ""


def _describe_silent(store: GroupStore, without: list[int], *, final: bool) -> str:
    """Return which of the ranks that have no group do not answer, and report them to the agents."""
    silent = [rank for rank in without if not store.has(f"there{rank}")]
    if not silent:
        return ""
    process.report("WorkerWaiting", ranks=silent[:_MAX_NAMED], final=final)
    named = [f"{rank} on {_facts(store, rank).process}" for rank in silent[:_MAX_NAMED]]
    how = "joined the rendezvous, no answer while the process group is made: dead or stuck"
    return f"{_waiting_for(silent, named)}: {how}"
