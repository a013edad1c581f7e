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
from typing import Any

from clusterjob.errors import RanksMissingError, RendezvousError
from clusterjob.node.environments import this_node
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system.sanitize import sanitize
from clusterjob.worker import process
from clusterjob.worker.store import GroupStore, SignedStore, notice_time, print_notice

DEFAULT_TIMEOUT = 1800.0  # seconds, torch's default for gloo
_GRACE = 5.0  # seconds that a rank waits after its own timeout for the answer of another rank
_DEFERENCE = 1.0  # seconds by which other ranks print later than rank 0, which may be missing
_REFUSAL = 1.0  # seconds for which a rank 0 that serves the store lets others read the refusal
_MAX_NAMED = 8  # ranks that one text names
_MAX_NAME, _MAX_ANSWER = 300, 4000  # characters of a text that another process wrote
# While torch forms the group: seconds after which a process reports that it is alive, which is
# before the first notice, and seconds for the text of another rank after torch has given up.
_ALIVE_AFTER, _OTHERS, _POLL = 2.0, 1.0, 0.05


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
    host: str
    pid: int
    world_size: int
    job: str
    versions: str
    gpu: str

    @classmethod
    def of(cls, data: bytes) -> Facts:
        """Parse the facts of another process; texts are made safe to show on a terminal.

        Raises:
            RendezvousError: the data is not in the format that `data` returns.
        """
        try:
            fields = json.loads(data)
            for name in ("host", "job", "versions", "gpu"):
                fields[name] = sanitize(fields[name])[:_MAX_NAME]
            if all(type(fields[name]) is int for name in ("rank", "pid", "world_size")):
                return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise RendezvousError(
            "torch's store holds a value that no process of a job writes",
            "another program uses MASTER_ADDR:MASTER_PORT",
        )

    def data(self) -> str:
        """Return the facts in the format that `of` parses."""
        return json.dumps(asdict(self))

    @property
    def process(self) -> str:
        """The process's host and pid, as text."""
        return f"{self.host} (pid {self.pid})"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.process}"


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
    own, other = sorted(
        (own, other), key=lambda each: (each.rank, each.host, each.pid), reverse=True
    )
    if own.rank == other.rank:
        return (
            f"rank {own.rank} is claimed twice: by {other.process} and by {own.process}",
            "two processes have the same RANK, or two jobs the same MASTER_PORT",
        )
    if own.world_size != other.world_size:
        return (
            f"{own} counts {own.world_size} processes, {other} counts {other.world_size}",
            "WORLD_SIZE differs among them, or two jobs have the same MASTER_PORT",
        )
    if own.job != other.job:
        return (
            f"{own} is of job {own.job or '(unnamed)'}, {other} of job {other.job or '(unnamed)'}",
            "two jobs have the same MASTER_ADDR and MASTER_PORT: one of them needs another port",
        )
    if own.versions != other.versions:
        return (
            f"{own} has {own.versions}, {other} has {other.versions}",
            "all nodes need the same installation of torch",
        )
    if own.gpu and own.gpu == other.gpu:
        return (
            f"{own} and {other} have the same GPU, {own.gpu}",
            "LOCAL_RANK and CUDA_VISIBLE_DEVICES choose it",
        )
    return "", ""


# -- join ------------------------------------------------------------------------------------------


def join(store: SignedStore, worker: Worker, own: Facts, timeout: float, *, started: bool) -> None:
    """Wait until all ranks have joined the rendezvous.

    Args:
        store: a prefix of torch's store for this process group only.
        worker: this process's rank assignment.
        own: this process's facts.
        timeout: seconds to wait for the other ranks.
        started: whether a launcher on each node has started all ranks, so that a missing rank is
            running but has not called init(). It then serves the store too.

    Raises:
        RanksMissingError: a rank is missing, or the store has ended with the rank that serves it.
        RendezvousError: a rank is claimed twice, of another job, or has other versions. All ranks
            get the same message. A wrong rank is refused at once, without waiting for missing
            ranks.
    """
    try:
        _enter(store, own)
        _await_answer(store, worker, own, timeout, started=started)
        answer = json.loads(store.read("go")[0])
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        reason = str(error).strip().partition("\n")[0]
        raise RanksMissingError(
            f"{own} has joined, and the store of the rendezvous has ended: {reason}"
        ) from error
    if not answer["refused"]:
        return
    if worker.rank == 0 and not started:
        time.sleep(_REFUSAL)  # the store ends with this process
    kind = RanksMissingError if answer.get("late") else RendezvousError
    raise kind(
        sanitize(str(answer["refused"]))[:_MAX_ANSWER],
        sanitize(str(answer["hint"]))[:_MAX_ANSWER],
    )


def _enter(store: SignedStore, own: Facts) -> None:
    """Write this rank's facts, compare them with those of others, and count this rank."""
    keys = [f"rank{own.rank}", "first", *([f"gpu {own.gpu}"] if own.gpu else [])]
    others = [Facts.of(store.offer(key, own.data())) for key in keys]
    found = [disagreement(own, other) for other in others]
    refused, hint = next((each for each in found if each[0]), ("", ""))
    if refused:
        _answer(store, refused, hint)
    # A process that joins a second time is counted once. A full count means that no refusal is
    # missing: it is written before the rank is counted.
    elif store.add(f"joined{own.rank}", 1) == 1 and store.add("count", 1) == own.world_size:
        _answer(store)


def _answer(store: SignedStore, refused: str = "", hint: str = "", *, late: bool = False) -> None:
    """Give the answer to all ranks, unless one was given before; `late`: ranks are missing."""
    store.offer("go", json.dumps({"refused": refused, "hint": hint, "late": late}))


def _await_answer(
    store: SignedStore, worker: Worker, own: Facts, timeout: float, *, started: bool
) -> None:
    """Wait for the answer to all ranks; name the missing ones, and give up after the timeout.

    It polls, because torch's store.wait() prints C++ frames at a timeout and ignores Ctrl-C.
    """
    # The store handles some thousands of requests a second.
    pause, longest = 0.001, min(1.0, max(0.05, worker.world_size / 4096))
    begin = time.monotonic()
    notices, deference = 0, _DEFERENCE if worker.rank else 0.0
    while not store.has("go"):
        waited = time.monotonic() - begin
        if waited > timeout + _GRACE:
            raise RanksMissingError(
                f"{own} has joined, and the rank that ends the rendezvous does not answer; "
                f"gave up after {waited:.0f} s"
            )
        final = waited > timeout
        if final or waited > notice_time(notices) + deference:
            task = "gave up" if final else f"notice{notices}"
            if store.claim(task, own.rank) and (missing := _without(store, worker, "rank")):
                process.ask_agents(worker.local_rank, missing, final=final)
                text = _describe_missing(store, worker, missing, started=started)
                if final:
                    _answer(store, f"{text}; gave up after {waited:.0f} s", late=True)
                else:
                    print_notice(f"{text}; {waited:.0f} s so far")
            notices += 1
        time.sleep(pause)
        pause = min(longest, pause * 1.5)


def _without(store: SignedStore, worker: Worker, key: str) -> list[int]:
    """Return the ranks whose key, such as ``rank3`` for rank 3, is not in the store."""
    return [rank for rank in range(worker.world_size) if not store.has(f"{key}{rank}")]


def _describe_missing(
    store: SignedStore, worker: Worker, missing: list[int], *, started: bool
) -> str:
    """Return a text about missing ranks: their nodes, hosts and probable state."""
    size = max(1, worker.local_world_size)
    named = []
    for rank in missing[:_MAX_NAMED]:
        node = rank // size
        of_node = range(node * size, min(worker.world_size, (node + 1) * size))
        there = [f"rank{each}" for each in of_node if each not in missing]
        host = f", {Facts.of(store.read(there[0])[0]).host}" if there else ""
        named.append(f"{rank} (node {node}{host})")
    state = (
        "started, and not yet at init()"
        if started
        else "not seen yet: not started, or still importing"
    )
    return f"{_waiting_for(missing, named)}: {state}"


def _waiting_for(ranks: list[int], named: Sequence[str]) -> str:
    more = f" and {len(ranks) - len(named)} more" if len(ranks) > len(named) else ""
    return f"waiting for rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


# -- form the group --------------------------------------------------------------------------------


@contextlib.contextmanager
def forming(place: GroupStore) -> Iterator[None]:
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
        target=_watch_formation, args=(place, over.wait), name="clusterjob-forming", daemon=True
    )
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - begin
        text = _unresponsive_at_end(place) if waited > _ALIVE_AFTER else ""
        if not text:
            raise
        raise RanksMissingError(f"{text}; gave up after {waited:.0f} s") from error
    finally:
        over.set()
        watcher.join(_OTHERS)  # it holds the store, whose port the next group needs
    # The process that serves the store may have formed the group and ended.
    with contextlib.suppress(RuntimeError):
        place.signed.offer(f"formed{place.worker.rank}")


def _watch_formation(place: GroupStore, over: Callable[[float], bool]) -> None:
    """Report that this rank is alive; print which ranks do not answer until the wait is over."""
    if over(_ALIVE_AFTER):
        return
    begin = time.monotonic() - _ALIVE_AFTER
    worker = place.worker
    with contextlib.suppress(OSError, RuntimeError):  # torch's own request fails too
        store = place.reconnect()
        store.offer(f"there{worker.rank}")
        for number in itertools.count():
            if over(begin + notice_time(number) - time.monotonic()):
                return
            if not store.claim(f"probe{number}", worker.rank):
                continue
            without, silent = _unresponsive(store, worker)
            waited = f"{time.monotonic() - begin:.0f} s"
            if silent:
                process.ask_agents(worker.local_rank, silent, final=False)
                print_notice(f"{_describe_unresponsive(store, silent)}; {waited} so far")
            elif without:
                ends = store.read(f"rank{without[0]}", f"rank{without[-1]}")
                one, other = map(Facts.of, ends)
                print_notice(
                    f"the process group is not made after {waited}: {len(without)} of "
                    f"{worker.world_size} processes wait for each other, such as {one} and "
                    f"{other}: can their machines reach each other at every port, "
                    "by the interfaces of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME?"
                )


def _unresponsive_at_end(place: GroupStore) -> str:
    """Return the ranks that do not answer, as text, after torch has given up.

    All ranks get the same text; it is empty if all ranks answer.
    """
    worker = place.worker
    with contextlib.suppress(OSError, RuntimeError):
        store = place.reconnect()
        store.offer(f"there{worker.rank}")  # its own thread may not have done so yet
        if store.claim("last probe", worker.rank):
            silent = _unresponsive(store, worker)[1]
            process.ask_agents(worker.local_rank, silent, final=True)
            store.offer("end", _describe_unresponsive(store, silent) if silent else "")
        end = time.monotonic() + _OTHERS
        while not store.has("end") and time.monotonic() < end:
            time.sleep(_POLL)
        if store.has("end"):
            return store.read("end")[0].decode()
    return ""


def _unresponsive(store: SignedStore, worker: Worker) -> tuple[list[int], list[int]]:
    """Return the ranks that have no group, and those of them that do not answer."""
    without = _without(store, worker, "formed")
    return without, [rank for rank in without if not store.has(f"there{rank}")]


def _describe_unresponsive(store: SignedStore, ranks: list[int]) -> str:
    known = map(Facts.of, store.read(*(f"rank{rank}" for rank in ranks[:_MAX_NAMED])))
    named = [f"{each.rank} on {each.process}" for each in known]
    how = "joined the rendezvous, no answer while the process group is made: dead or stuck"
    return f"{_waiting_for(ranks, named)}: {how}"
