"""Rendezvous of ranks over torch's store: check all ranks, and name missing or wrong ones.

A launcher serves the store, or rank 0 serves it and the other ranks wait until rank 0 listens. Each
rank compares its facts with those of the first rank that joined, and the last one to join lets all
go on. So each rank sends only a few requests to the store in a job of any size. Texts for all ranks
are composed by the rank that claims a key first. An error is one line: torch alone waits half an
hour or prints pages of C++ frames (pytorch#41665, nccl#1260).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

from clusterjob.errors import PlacementError, RanksMissingError, RendezvousError
from clusterjob.node.environments import this_node
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import codec, network
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.workers import torch_patches

DEFAULT_TIMEOUT = 1800.0  # seconds, torch's default for gloo
_ANSWER = 2.0  # seconds for a connection to the store, and for an answer to a new one
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_NO_ROUTE_GRACE = 3.0  # seconds to wait for a network that starts, or a busy resolver
_PARTING = 5.0  # seconds that a rank waits at its end until all ranks have the group
_SHORTEST_PAUSE, _SHORT_PAUSE = 0.001, 0.04  # seconds between two polls
# Seconds before the first notice of a process that waits, and between later notices.
_FIRST_NOTICE, _LATER_NOTICES = 4.0, 30.0
# Rank 3 speaks 3 s later than rank 0, and so on: the ranks before it may give the answer.
_MOST_DEFERENCE = 5.0
_REFUSAL = 1.0  # seconds for which a rank 0 that serves the store lets others read the refusal
_MAX_NAMED = 8  # ranks that one text names
_MAX_ANSWER = 4000  # characters of a text that another process wrote
# Seconds after which a process reports that it is alive, before the first notice.
_ALIVE_AFTER = 2.0
_Text = Annotated[str, Limit(300, cuts=True)]
_own: dict[tuple[int, str, int], Any] = {}  # rank 0's stores, by pid and address


def print_notice(text: str) -> None:
    """Write one line of clusterjob to stderr."""
    print(f"clusterjob: {sanitize(text)}", file=sys.stderr, flush=True)


def polls(longest: float, delay: float = 0.0) -> Iterator[tuple[float, int]]:
    """Yield the seconds of a wait, and the number of a notice that is due, again and again.

    Notices have the numbers 1, 2 and so on; 0 means that none is due.

    Args:
        longest: seconds of the longest pause between two polls.
        delay: seconds from now to the begin of the wait.
    """
    begin, pause, notices = time.monotonic() + delay, _SHORTEST_PAUSE, 0
    while True:
        waited = time.monotonic() - begin
        is_due = waited > _FIRST_NOTICE + notices * _LATER_NOTICES
        notices += is_due
        yield waited, notices if is_due else 0
        time.sleep(pause)
        pause = min(longest, pause * 1.5)


# -- torch's store ---------------------------------------------------------------------------------


class GroupStore:
    """torch's store for one process group: torch's addresses, and values of the ranks.

    torch's store lets any client write any value: `join` checks each one, and cuts texts.

    Args:
        whole: a client of the store.
        worker: this process's rank assignment.
        served: whether a launcher's agents serve the store.
        number: index of the group among the groups over this store, from 0. The next group does
            not accept the values of this group.

    Attributes:
        torch_store: the group's prefix of the store, in which torch exchanges addresses.
    """

    def __init__(self, whole: Any, worker: Worker, *, served: bool, number: int) -> None:
        import torch.distributed as dist

        # A launcher's store outlives a group and still holds its addresses. With the same keys
        # torch would connect to them, so every group has its own prefix.
        self.torch_store = dist.PrefixStore(f"clusterjob/{number}", whole)
        self._values = dist.PrefixStore("rendezvous", self.torch_store)
        self.worker, self.served = worker, served
        self._whole, self._number = whole, number

    def has(self, name: str) -> bool:
        """Return whether a value was written."""
        return bool(self._values.check([name]))

    def count(self, name: str, more: int = 1) -> int:
        """Increase a counter, and return it."""
        return int(self._values.add(name, more))

    def read(self, name: str) -> str:
        """Return a value that was written.

        Raises:
            ValueError: another program has written it, and it is no text.
        """
        return str(self._values.get(name), "utf-8")

    def offer(self, name: str, value: str = "") -> str:
        """Write a value if there is none; return the stored value; see `read` for errors."""
        return str(self._values.compare_set(name, "", value), "utf-8")

    def claim(self, name: str) -> bool:
        """Return whether this rank is the first that claims a task."""
        return self.offer(name, str(self.worker.rank)) == str(self.worker.rank)

    def note(self, name: str) -> None:
        """Add this rank to a list of ranks."""
        self._values.append(name, f"{self.worker.rank} ")

    def without(self, name: str) -> list[int]:
        """Return the ranks that are not in a list."""
        noted = {*self._values.get(name).split()} if self.has(name) else set()
        return [rank for rank in range(self.worker.world_size) if b"%d" % rank not in noted]

    def reconnect(self) -> GroupStore:
        """Return the same over a new connection: torch's waiting request blocks the first one.

        Raises:
            OSError: the store cannot be reached any more.
            RuntimeError: torch's error.
        """
        network.connect(
            *address_of(self.worker), timeout=_ANSWER
        ).close()  # torch's error is a page
        connect = _launcher_store if self.served else _client
        whole = connect(self.worker, timedelta(seconds=_ANSWER))
        return GroupStore(whole, self.worker, served=self.served, number=self._number)

    def note_formed(self) -> None:
        """Count the group, so that the next group gets another prefix in all processes."""
        counter = _counter(self.worker.rank)
        with contextlib.suppress(RuntimeError):  # rank 0 may have the group too, and have ended
            self._whole.add(counter, self._number + 1 - self._whole.add(counter, 0))
            self.note("formed")
            self.count("all formed")

    def await_formed(self) -> None:
        """Wait up to 5 s until all ranks have the group, which needs this rank and the store.

        A rank that left would break the connections of one that still forms the group.
        """
        with contextlib.suppress(RuntimeError):  # torch's error for a store that has ended
            for waited, _ in polls(_SHORT_PAUSE):
                if self.count("all formed", 0) >= self.worker.world_size or waited > _PARTING:
                    return


def open_store(worker: Worker, timeout: float) -> GroupStore:
    """Return the store in which the processes exchange their addresses.

    Args:
        worker: this process's rank assignment.
        timeout: seconds to wait for rank 0.

    Raises:
        PlacementError: the environment has no port of rank 0.
        RendezvousError: the address does not resolve, there is no route to it, its port is taken,
            or rank 0 does not listen in time.
        RuntimeError: torch's error about a launcher's store.
    """
    if worker.topology.master_port is None:
        raise PlacementError(
            f"the environment ({worker.topology.source}) has no port of rank 0: set MASTER_PORT"
        )
    served, wait = _is_served(worker), timedelta(seconds=timeout)
    if served:
        store = _launcher_store(worker, wait)
    elif worker.rank:
        _await_listener(worker, timeout)
        store = _client(worker, wait)
    else:
        store = _serve(worker, wait)
    # The store counts the groups, because a process may be newer than the first group, such as the
    # children of one trial of a sweep. Rank 0 is in every group; other ranks use its count.
    number = max(store.add(_counter(rank), 0) for rank in (worker.rank, 0))
    return GroupStore(store, worker, served=served, number=number)


def address_of(worker: Worker) -> tuple[str, int]:
    """Return host and port of the store; port 0 if it is unknown."""
    return worker.topology.master_addr, worker.topology.master_port or 0


def _counter(rank: int) -> str:
    """Return the key of the store that holds the number of a rank's next group."""
    return f"clusterjob/next/{rank}"


def _client(worker: Worker, wait: timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(*address_of(worker), is_master=False, wait_for_workers=False, timeout=wait)


def _serve(worker: Worker, wait: timedelta) -> Any:
    """Return rank 0's store; its socket is bound before, because torch's own errors are pages."""
    import torch.distributed as dist

    host, port = address_of(worker)
    address = os.getpid(), host, port
    if address in _own:
        _own[address].set_timeout(wait)
        return _own[address]
    try:
        listener = network.listen_at(host, port, backlog=4096)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 on {socket.gethostname()} (pid {os.getpid()}) "
            f"cannot listen at {network.with_port(host, port)}: {error.strerror or error}",
            "set MASTER_PORT to another port"
            if error.errno == errno.EADDRINUSE
            else "set MASTER_ADDR to rank 0's machine",
        ) from error
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=listener.detach(),
    )
    if torch_patches.has_agent_variables():
        # Under clusterjob's agents a destroyed group keeps its store, so the port stays in use.
        _own[address] = store
    return store


def _is_served(worker: Worker) -> bool:
    """Return whether a launcher's agents serve a store at the master's port."""
    host, port = address_of(worker)
    named = os.environ.get("MASTER_ADDR", "").strip(" []"), os.environ.get("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or named != (host, str(port)):
        return False
    # A script may set another master than clusterjob's agents.
    return not torch_patches.has_agent_variables() or torch_patches.served_at(port) is not None


def _launcher_store(worker: Worker, wait: timedelta) -> Any:
    """Return a connection to the launcher's store, with the prefix that an older torch adds."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", worker.rank, worker.world_size, timeout=wait))[0]


def _await_listener(worker: Worker, timeout: float) -> None:
    """Wait until rank 0 listens at its port; one rank of each node prints the error meanwhile.

    Raises:
        RendezvousError: rank 0 cannot be reached.
    """
    host, port = address_of(worker)
    for waited, notice in polls(_SHORT_PAUSE):
        try:
            network.connect(host, port, timeout=_ANSWER).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            lost = isinstance(error, socket.gaierror) or error.errno in _NO_ROUTE
        text = (
            f"rank {worker.rank} on {socket.gethostname()} "
            f"cannot reach rank 0 at {network.with_port(host, port)}: {reason}"
        )
        if waited > timeout or (lost and waited > _NO_ROUTE_GRACE):
            raise RendezvousError(
                f"{text}; gave up after {waited:.0f} s",
                "check MASTER_ADDR and MASTER_PORT: they must be rank 0's",
            )
        # All wait for rank 0, which is the first of its node.
        if notice and (worker.local_rank == 0 or worker.rank == 1):
            print_notice(f"{text}; {waited:.0f} s so far")


# -- facts ----------------------------------------------------------------------------------------


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
            ValueError: the data is not in this format.
        """
        return codec.read(cls, json.loads(data))

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
            ranks. Or the store holds a value of another program.
    """
    try:
        _enter(store, own)
        _await_answer(store, own, timeout)
        refused, hint = json.loads(store.read("go"))
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        reason = str(error).strip().partition("\n")[0]
        raise RanksMissingError(
            f"{own} has joined, and the store of the rendezvous has ended: {reason}"
        ) from error
    except ValueError as error:
        raise RendezvousError(
            "torch's store holds a value that no process of a job writes",
            "another program uses MASTER_ADDR:MASTER_PORT",
        ) from error
    if refused:
        if own.rank == 0 and not store.served:
            time.sleep(_REFUSAL)  # the store ends with this process
        kind = RendezvousError if hint else RanksMissingError
        raise kind(sanitize(refused)[:_MAX_ANSWER], sanitize(hint)[:_MAX_ANSWER])


def _enter(store: GroupStore, own: Facts) -> None:
    """Write this rank's facts, compare them with those of others, and count this rank.

    The answer to all ranks is the reason why they cannot go on, and a hint: empty if they can.
    """
    keys = [f"rank{own.rank}", "first", *([f"gpu {own.gpu}"] if own.gpu else [])]
    found = [disagreement(own, Facts.of(store.offer(key, own.data()))) for key in keys]
    answer = next(filter(any, found), ("", ""))
    store.note("joined")
    # A full count means that no refusal is missing: a refused rank is not counted. A process that
    # joins again, such as after Ctrl-C in a notebook, is counted once.
    if any(answer) or (
        store.count(f"joined{own.rank}") == 1 and store.count("all joined") == own.world_size
    ):
        store.offer("go", json.dumps(answer))


def _await_answer(store: GroupStore, own: Facts, timeout: float) -> None:
    """Wait for the answer to all ranks; name the missing ones, and give up after the timeout.

    It polls, because torch's store.wait() prints C++ frames at a timeout and ignores Ctrl-C.
    """
    # The store handles some thousands of requests a second.
    longest = min(1.0, max(0.05, own.world_size / 4096))
    for waited, notice in polls(longest, delay=min(own.rank, _MOST_DEFERENCE)):
        if store.has("go"):
            return
        final = waited > timeout
        if not final and not (notice and store.claim(f"notice{notice}")):
            continue
        missing = store.without("joined")
        text = f"{own} has joined, and the rank that ends the rendezvous does not answer"
        if missing:
            torch_patches.send("Missing", ranks=missing[:_MAX_NAMED], gave_up=final)
            text = _describe_missing(store, missing)
        if final:
            store.offer("go", json.dumps([f"{text}; gave up after {waited:.0f} s", ""]))
        else:
            print_notice(f"{text}; {waited:.0f} s so far")


def _describe_missing(store: GroupStore, missing: list[int]) -> str:
    """Return a text about missing ranks: their nodes, hosts and probable state."""
    world_size, size = store.worker.world_size, store.worker.local_world_size
    named = []
    for rank in missing[:_MAX_NAMED]:
        node = rank // size
        of_node = range(node * size, min(world_size, (node + 1) * size))
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

    torch may wait half an hour for a peer and prints nothing. The store has a list of the ranks
    that have the group, and one of those that have waited for it for some seconds. A rank in
    neither list has died or is stuck.

    Raises:
        RanksMissingError: torch has given up because some ranks do not answer; the message names
            them.
    """
    over, begin = threading.Event(), time.monotonic()
    watcher = threading.Thread(
        target=_watch_formation, args=(store, over), name="clusterjob-forming", daemon=True
    )
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - begin
        text = _blame(store) if waited > _ALIVE_AFTER else ""
        if not text:
            raise
        raise RanksMissingError(
            f"{sanitize(text)[:_MAX_ANSWER]}; gave up after {waited:.0f} s"
        ) from error
    finally:
        over.set()
        watcher.join(1.0)  # it holds the store, whose port the next group needs
    store.note_formed()


def _watch_formation(store: GroupStore, over: threading.Event) -> None:
    """Report that this rank is alive; print which ranks do not answer until the wait is over."""
    if over.wait(_ALIVE_AFTER):
        return
    # torch's own request fails too; or another program has written into the store.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        store = store.reconnect()
        store.note("alive")
        for waited, notice in polls(_SHORT_PAUSE, delay=-_ALIVE_AFTER):
            if over.is_set():
                return
            if notice and store.claim(f"forming{notice}"):
                text = _describe_silent(store, final=False) or _describe_unconnected(store)
                print_notice(f"{text}; {waited:.0f} s so far")


def _blame(store: GroupStore) -> str:
    """Return the ranks that do not answer, as text, after torch has given up.

    All ranks get the same text; it is empty if all ranks answer.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        store = store.reconnect()
        store.note("alive")  # its own thread may not have done so yet
        # The first rank composes the text.
        text = "" if store.has("end") else _describe_silent(store, final=True)
        return store.offer("end", text)
    return ""


def _describe_silent(store: GroupStore, *, final: bool) -> str:
    """Return which ranks do not answer, as text, and report them to the agents."""
    silent = sorted({*store.without("formed")} & {*store.without("alive")})
    if not silent:
        return ""
    torch_patches.send("Missing", ranks=silent[:_MAX_NAMED], gave_up=final)
    named = [f"{rank} on {_facts(store, rank).process}" for rank in silent[:_MAX_NAMED]]
    how = "joined the rendezvous, no answer while the process group is made: dead or stuck"
    return f"{_waiting_for(silent, named)}: {how}"


def _describe_unconnected(store: GroupStore) -> str:
    waiting = store.without("formed")
    return (
        f"the process group is not made: {len(waiting)} of {store.worker.world_size} "
        f"processes wait for each other, such as {_facts(store, waiting[0])} and "
        f"{_facts(store, waiting[-1])}: can their machines reach each other at every "
        "port, by the interfaces of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME?"
    )
