"""Worker side: the processes of a job find each other over torch's store, and whoever is missing, or twice there, is named.

Each rank costs the store a few requests, whatever the size of the job; rank 0 alone looks at all. What torch would answer
with a wait of half an hour, or with pages of C++ frames, is one line here: FIELD notes such as pytorch#41665 and nccl#1260.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from clusterjob import siblings
from clusterjob.errors import GangError
from clusterjob.node import network, processes
from clusterjob.node.topology import Worker

DEFAULT_TIMEOUT = 1800.0  # seconds, as torch's own for gloo
_FIRST_NOTICE, _LATER_NOTICES = 4.0, 30.0  # seconds before the first line that says who is missing, and between later ones
_NO_WAY = 3.0  # seconds for which a network may be coming up, or a resolver be busy
_GRACE = 5.0  # seconds that the others give rank 0 beyond their own patience
_FARTHEST_CLOCK = 60.0  # seconds between two hosts' clocks that nobody needs to hear of
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
_MOST_NAMED = 8
_BACKLOG = 4096
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
Ask = Callable[..., None]  # (missing ranks, final=whether one gives up)


@dataclass(frozen=True)
class Facts:
    """What a process says of itself when the roll is called.

    Attributes:
        host, pid, boot: which process of which machine it is.
        world_size: how many processes it counts.
        job: which job it thinks it is of; empty where nothing says.
        versions: torch's and the backend's.
        gpu: the UUID of its GPU; empty without one.
    """

    host: str
    pid: int
    boot: str
    world_size: int
    job: str
    versions: str
    gpu: str

    @classmethod
    def of(cls, data: bytes) -> Facts:
        """Read what another process has left in the store."""
        return cls(**json.loads(data))

    def data(self) -> str:
        """Return what `of` reads."""
        return json.dumps(asdict(self))

    def process(self) -> str:
        """Return which process it is, for people."""
        return f"{self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Roll:
    """What rank 0 has found once all were there.

    Attributes:
        nodes: the index of the machine of each rank, in the order of their first ranks.
    """

    nodes: Sequence[int]


def own_facts(worker: Worker, device: Any, backend: str) -> Facts:
    """Return this process's facts.

    Args:
        worker: its place.
        device: its torch device.
        backend: the backend of the process group to come.
    """
    import torch

    versions = f"torch {torch.__version__}"
    gpu = ""
    if device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if backend == "nccl":
            versions += f" with NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    # Whoever sets ranks by hand may well join two allocations of Slurm's; its own steps are of one.
    own_name = "SLURM_JOB_ID" if worker.topology.source == "slurm" else "TORCHELASTIC_RUN_ID"
    job = os.environ.get("CLUSTERJOB_JOB_ID") or os.environ.get(own_name) or ""
    return Facts(socket.gethostname(), os.getpid(), processes.boot_id() or "", worker.world_size, job, versions, gpu)


# -- the store ---------------------------------------------------------------------------------------------------------


def open_store(worker: Worker, timeout: float) -> Any:
    """Return a TCPStore of the job's own, where no agent serves one: rank 0 does, on a socket that it has bound before.

    Args:
        worker: this process's place.
        timeout: seconds to wait for rank 0, and of the store's requests.

    Raises:
        GangError: the address does not resolve, there is no way to it, its port is taken, or rank 0 does not come.
    """
    from torch.distributed import TCPStore

    host, port = worker.topology.master_addr, worker.topology.master_port
    assert port is not None
    wait = timedelta(seconds=timeout)
    if worker.rank:
        _await_listener(worker, host, port, timeout)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    try:
        listener = siblings.take_listener(port) or network.listen_at(host, port, _BACKLOG)
    except OSError as error:
        why = f"rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot listen at {where(host, port)}: {error.strerror or error}"
        hint = "MASTER_PORT names another port" if error.errno == errno.EADDRINUSE else "MASTER_ADDR names rank 0's machine"
        raise GangError(why, hint) from error
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach())


def where(host: str, port: int) -> str:
    """Return an address and a port as one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _await_listener(worker: Worker, host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens at rank 0's port, and say what the kernel says meanwhile."""
    notices = _notices()
    begin = time.monotonic()
    due, pause = next(notices), _SHORTEST_PAUSE
    while True:
        try:
            socket.create_connection((host, port), timeout=_FIRST_NOTICE / 2).close()
            return
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            lost = isinstance(error, (socket.gaierror, UnicodeError)) or getattr(error, "errno", None) in _NO_ROUTE
        waited = time.monotonic() - begin
        text = f"rank {worker.rank} on {socket.gethostname()} cannot reach rank 0 at {where(host, port)}: {reason}"
        if waited > timeout or (lost and waited > _NO_WAY):
            raise GangError(f"{text}; gave up after {waited:.0f} s")
        if waited > due and worker.local_rank == 0:
            due = next(notices)
            _say(f"{text}; {waited:.0f} s so far")
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE * 4, pause * 1.5)


# -- the roll ----------------------------------------------------------------------------------------------------------


def call(store: Any, worker: Worker, own: Facts, timeout: float, *, started: bool, ask: Ask | None = None) -> Roll:
    """Return once all processes are there.

    Args:
        store: a corner of torch's store that is this process group's alone.
        worker: this process's place.
        own: what it says of itself.
        timeout: seconds to wait for the others.
        started: whether a launcher on each node has started all of them, so that whoever is missing has only not come so far.
        ask: told the missing ranks, and whether this is the end, whenever this process says that it waits for them.

    Raises:
        GangError: somebody is missing, twice there, of another job, or of another version; all processes hear the same.
    """
    ask = ask or _ask_nobody
    _claim(store, worker.rank, own)
    if worker.rank == 0:
        answer = _call_all(store, worker, own, timeout, started=started, ask=ask)
        store.set("go", json.dumps(answer))
        if answer["refused"]:
            _await_hearing(store)
    else:
        try:
            # Rank 0 says who is missing, and needs its own time for that.
            _await_rank_0(store, worker, timeout + _GRACE, started=started, ask=ask)
            answer = json.loads(store.get("go"))
            store.add("heard", 1)
        except RuntimeError as error:  # torch's DistError is one
            raise GangError(
                f"rank {worker.rank} on {own.process()} was at the roll-call, and rank 0 does not end it: {_first(error)}"
            ) from error
        ahead = time.time() - float(answer["time"])
        if abs(ahead) > _FARTHEST_CLOCK and worker.local_rank == 0:
            _say(
                f"the clock of {own.process()}, rank {worker.rank}, is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's"
            )
    if answer["refused"]:
        raise GangError(answer["refused"])
    return Roll(answer["nodes"])


def _claim(store: Any, rank: int, own: Facts) -> None:
    if store.add(f"claim{rank}", 1) > 1:
        store.wait([f"rank{rank}"], timedelta(seconds=_FIRST_NOTICE))
        first = Facts.of(store.get(f"rank{rank}"))
        if (first.host, first.pid, first.boot) == (own.host, own.pid, own.boot):
            return  # it tries again
        message = f"rank {rank} is claimed twice: by {first.process()} and by {own.process()}"
        store.set("refused", message)
        raise GangError(message, "two processes have the same RANK, or two jobs the same MASTER_PORT")
    store.set(f"rank{rank}", own.data())
    store.add("count", 1)


def _await_rank_0(store: Any, worker: Worker, timeout: float, *, started: bool, ask: Ask) -> None:
    """Wait for rank 0's answer. While rank 0 itself is missing, the first to notice speaks in its place.

    Raises:
        RuntimeError: torch's own, when rank 0 does not answer in time.
    """
    notices = _notices()
    begin = time.monotonic()
    speaks = False
    while True:
        due = min(next(notices), timeout)
        try:
            store.wait(["go"], timedelta(seconds=max(_SHORTEST_PAUSE, due - (time.monotonic() - begin))))
            return
        except RuntimeError:
            waited = time.monotonic() - begin
            if waited < due - _LONGEST_PAUSE * 10:
                raise  # the store is gone
            if not store.check(["rank0"]):
                speaks = speaks or store.add("speaker", 1) == 1
                if speaks:
                    _say_missing(store, worker, waited, started=started, ask=ask, final=due >= timeout)
            if due >= timeout:
                raise


def _say_missing(store: Any, worker: Worker, waited: float, *, started: bool, ask: Ask, final: bool = False) -> None:
    absent = _absent(store, worker)
    if not final:
        _say(f"{_missing(store, worker, absent, started=started)}; {waited:.0f} s so far")
    ask(absent, final=final)


def _call_all(store: Any, worker: Worker, own: Facts, timeout: float, *, started: bool, ask: Ask) -> dict[str, Any]:
    """Return rank 0's answer to all, as plain data."""
    notices = _notices()
    begin = time.monotonic()
    due, pause = next(notices), _SHORTEST_PAUSE
    refused = ""
    while not refused and store.add("count", 0) < worker.world_size:
        waited = time.monotonic() - begin
        if store.check(["refused"]):
            refused = store.get("refused").decode(errors="replace")
        elif waited > timeout:
            absent = _absent(store, worker)
            ask(absent, final=True)
            refused = f"{_missing(store, worker, absent, started=started)}; gave up after {waited:.0f} s"
        elif waited > due:
            due = next(notices)
            _say_missing(store, worker, waited, started=started, ask=ask)
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, pause * 1.5)
    everybody: list[Facts] = []
    if not refused:
        everybody = [Facts.of(data) for data in store.multi_get([f"rank{rank}" for rank in range(worker.world_size)])]
        refused = contradiction(everybody, own)
    machines = list(dict.fromkeys((each.host, each.boot) for each in everybody))
    index = {machine: number for number, machine in enumerate(machines)}
    return {"refused": refused, "time": time.time(), "nodes": [index[each.host, each.boot] for each in everybody]}


def contradiction(everybody: Sequence[Facts], own: Facts) -> str:
    """Return in one line why these processes cannot be one job; empty if they can.

    Args:
        everybody: all processes, by rank.
        own: rank 0's.
    """
    gpus: dict[str, int] = {}
    for rank, each in enumerate(everybody):
        who = f"rank {rank} on {each.process()}"
        if each.world_size != own.world_size:
            return f"{who} counts {each.world_size} processes, rank 0 on {own.process()} counts {own.world_size}"
        if each.job != own.job:
            return f"{who} is of job {each.job or '(unnamed)'}, rank 0 on {own.process()} of job {own.job or '(unnamed)'}"
        if each.versions != own.versions:
            return f"{who} has {each.versions}, rank 0 on {own.process()} has {own.versions}"
        if each.gpu and each.gpu in gpus:
            return f"{who} and rank {gpus[each.gpu]} on {everybody[gpus[each.gpu]].process()} have the same GPU, {each.gpu}"
        if each.gpu:
            gpus[each.gpu] = rank
    return ""


def _await_hearing(store: Any) -> None:
    """Let those who are there hear why it ends before the store ends with this process."""
    end = time.monotonic() + _GRACE / 5
    while store.add("heard", 0) < store.add("count", 0) - 1 and time.monotonic() < end:
        time.sleep(_LONGEST_PAUSE)


def _absent(store: Any, worker: Worker) -> list[int]:
    return [rank for rank in range(worker.world_size) if not store.check([f"rank{rank}"])]


def _missing(store: Any, worker: Worker, absent: list[int], *, started: bool) -> str:
    """Return who is missing, and what is known of them."""
    size = max(1, worker.local_world_size)
    hosts: dict[int, str] = {}
    for node in dict.fromkeys(rank // size for rank in absent):
        there = [rank for rank in range(node * size, min(worker.world_size, (node + 1) * size)) if rank not in absent]
        if there:
            hosts[node] = Facts.of(store.get(f"rank{there[0]}")).host
    named = [f"{rank} (node {rank // size}{f', {hosts[rank // size]}' if rank // size in hosts else ''})" for rank in absent[:_MOST_NAMED]]
    more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
    known = "started, and not yet at init()" if started else "not heard of: not started, or still importing"
    return f"waiting for rank{'s' if len(absent) > 1 else ''} {', '.join(named)}{more}: {known}"


def _notices() -> Iterator[float]:
    """Return when to say that one waits, in seconds from the beginning."""
    due = _FIRST_NOTICE
    while True:
        yield due
        due += _LATER_NOTICES if due > _FIRST_NOTICE else _LATER_NOTICES - _FIRST_NOTICE


def _ask_nobody(_missing: list[int], *, final: bool) -> None:
    """Leave it at that: no agent of ours looks after the processes."""


def _say(text: str) -> None:
    print(f"clusterjob: {text}", file=sys.stderr, flush=True)


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
