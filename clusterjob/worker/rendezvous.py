"""The processes of a job find each other over torch's store, and whoever is missing, or does not
belong, is named.

Each rank costs the store a few requests, whatever the size of the job: it compares itself with the
first that came. Rank 0 alone looks at all. What torch would answer with a wait of half an hour, or
with pages of C++ frames, is one line here: FIELD notes such as pytorch#41665 and nccl#1260.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from clusterjob.errors import GangError
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.worker import once_per_host

DEFAULT_TIMEOUT = 1800.0  # seconds, as torch's own for gloo
_GRACE = 5.0  # seconds that the others give rank 0 beyond their own patience
_FARTHEST_CLOCK = 60.0  # seconds between two hosts' clocks that nobody needs to hear of
_QUICK = 3.0  # seconds in which a start that goes well is over
_SHORTEST_PAUSE, _LONGEST_PAUSE = (
    0.001,
    0.01,
)  # seconds between two looks of whoever oversees the roll-call
_EAGER_PAUSE = 0.002  # ... while the start may still be a quick one: all wait for that one look
_MOST_NAMED = 8
_LONGEST_ANSWER = 4000
_LONGEST_NAME = 300  # characters of what another process says of itself
Ask = Callable[..., None]  # (missing ranks, final=whether one gives up)


@dataclass(frozen=True)
class Facts:
    """What a process says of itself when the roll is called.

    Attributes:
        rank: its own.
        host, pid, boot: which process of which machine it is.
        world_size: how many processes it counts.
        job: which job it thinks it is of; empty where nothing says.
        versions: torch's and the backend's.
        gpu: the UUID of its GPU; empty without one.
        time: its machine's clock, in seconds since 1970.
    """

    rank: int
    host: str
    pid: int
    boot: str
    world_size: int
    job: str
    versions: str
    gpu: str
    time: float

    @classmethod
    def of(cls, data: bytes) -> Facts:
        """Read what another process has left in the store; nothing of it moves a terminal's cursor.

        Raises:
            GangError: it is not what our processes leave there.
        """
        try:
            fields = json.loads(data)
            for name in ("host", "boot", "job", "versions", "gpu"):
                fields[name] = sanitize(fields[name])[:_LONGEST_NAME]
            if all(type(fields[name]) is int for name in ("rank", "pid", "world_size")):
                return cls(**fields | {"time": float(fields["time"])})
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            pass
        raise GangError(
            "torch's store holds what no process of a job leaves there",
            "another program uses MASTER_ADDR:MASTER_PORT",
        )

    def data(self) -> str:
        """Return what `of` reads."""
        return json.dumps(asdict(self))

    def process(self) -> str:
        """Return which process it is, for people."""
        return f"{self.host} (pid {self.pid})"

    def is_same_process(self, other: Facts) -> bool:
        """Return whether both were said by one process."""
        return (self.host, self.pid, self.boot) == (other.host, other.pid, other.boot)


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
    host, boot = socket.gethostname(), processes.boot_id() or ""
    return Facts(
        worker.rank,
        host,
        pid=os.getpid(),
        boot=boot,
        world_size=worker.world_size,
        job=job,
        versions=versions,
        gpu=gpu,
        time=time.time(),
    )


@dataclass(frozen=True)
class _Call:
    """One process's part of a roll-call: the arguments of `call`."""

    store: Any
    worker: Worker
    own: Facts
    started: bool
    ask: Ask


def call(
    store: Any, worker: Worker, own: Facts, timeout: float, *, started: bool, ask: Ask | None = None
) -> Roll:
    """Return once all processes are there.

    Args:
        store: a corner of torch's store that is this process group's alone.
        worker: this process's place.
        own: what it says of itself.
        timeout: seconds to wait for the others.
        started: whether a launcher on each node has started all of them, so that whoever is missing
            has only not come so far.
        ask: told the missing ranks, and whether this is the end, whenever this process says that it
            waits for them.

    Raises:
        GangError: somebody is missing, twice there, of another job, or of another version; all
            processes hear the same, and whoever does not belong is refused without waiting for
            those who are missing.
    """
    mine = _Call(store, worker, own=own, started=started, ask=ask or _ask_nobody)
    try:
        first = _enter(mine)
        _await_answer(mine, timeout, oversees=first or worker.rank == 0)
        answer = json.loads(store.get("go"))
        if not answer["refused"]:
            ahead = time.time() - float(answer["time"])
            if abs(ahead) > _FARTHEST_CLOCK and worker.rank:
                _tell_clock(
                    store,
                    own,
                    how=f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's",
                )
            return Roll(answer["nodes"])
        if worker.rank == 0:
            _await_hearing(store, worker)
        else:
            with contextlib.suppress(
                RuntimeError
            ):  # the answer is known, and the store may be gone with rank 0
                store.add("heard", 1)
    except RuntimeError as error:  # torch's DistError is one
        raise GangError(
            f"{who(own)} was at the roll-call, and rank 0 does not end it: {_first(error)}"
        ) from error
    raise GangError(
        sanitize(str(answer["refused"]))[:_LONGEST_ANSWER],
        sanitize(str(answer["hint"]))[:_LONGEST_ANSWER],
    )


def _enter(call: _Call) -> bool:
    """Leave this process's facts in the store, and see whether they agree with those of the first
    that came.

    Returns:
        Whether this process is the first.

    Raises:
        GangError: another process has come as this rank.
    """
    store, own = call.store, call.own
    data = own.data()
    holder = Facts.of(store.compare_set(f"rank{own.rank}", "", data))
    if not holder.is_same_process(own):
        refused = f"rank {own.rank} is claimed twice: by {holder.process()} and by {own.process()}"
        hint = "two processes have the same RANK, or two jobs the same MASTER_PORT"
        _answer(store, refused, hint=hint)
        raise GangError(refused, hint)
    if holder != own:
        return False  # it tries again
    first = Facts.of(store.compare_set("first", "", data))
    refused, hint = disagreement(own, first)
    if own.gpu and not refused:
        user = Facts.of(store.compare_set(f"gpu {own.gpu}", "", data))
        if user != own:
            refused, hint = (
                f"{who(own)} and {who(user)} have the same GPU, {own.gpu}",
                "LOCAL_RANK and CUDA_VISIBLE_DEVICES choose it",
            )
    if refused:
        _answer(store, refused, hint=hint)
    if first.time - own.time > _FARTHEST_CLOCK:  # the other way round it may only have come later
        off = f"at least {first.time - own.time:.0f} s"
        if own.rank == 0:
            _tell_clock(store, first, how=f"{off} ahead of rank 0's")
        else:
            _tell_clock(store, own, how=f"{off} behind {_whose(first)}")
    # Whoever is refused has said so before it is counted: nobody then takes the number for a full
    # house.
    if store.add("count", 1) == own.world_size:
        store.set("full", "")
    return first == own


def disagreement(own: Facts, first: Facts) -> tuple[str, str]:
    """Return in one line why two processes cannot be of one job, and a hint; empty if they can. It
    is the same for both.
    """
    if own.rank < first.rank:
        own, first = first, own
    if own.world_size != first.world_size:
        return (
            f"{who(own)} counts {own.world_size} processes, {who(first)} counts {first.world_size}",
            "WORLD_SIZE differs among them, or two jobs have the same MASTER_PORT",
        )
    if own.job != first.job:
        return (
            f"{who(own)} is of job {own.job or '(unnamed)'}, {who(first)} of job {first.job or '(unnamed)'}",
            "two jobs have the same MASTER_ADDR and MASTER_PORT: one of them needs another port",
        )
    if own.versions != first.versions:
        return (
            f"{who(own)} has {own.versions}, {who(first)} has {first.versions}",
            "all nodes need the same installation of torch",
        )
    return "", ""


def _await_answer(call: _Call, timeout: float, *, oversees: bool) -> None:
    """Wait for the answer to all. Rank 0 gives it; while rank 0 itself is missing, the first that
    came oversees in its place.

    A wait of torch's that times out writes two lines of C++ into stderr and hears no Ctrl-C. So the
    others wait by it as long as a good start takes and no longer: whoever oversees ends that wait
    in time, and from then on each looks now and then.

    Raises:
        GangError: nobody oversees, and nothing is heard of rank 0.
        RuntimeError: torch's own, when the store is gone.
    """
    store, worker = call.store, call.worker
    notices = once_per_host.notices()
    begin = time.monotonic()
    due, pause = next(notices), _SHORTEST_PAUSE
    longest = _LONGEST_PAUSE if oversees else _idle_pause(worker.world_size)
    all_wait, repeated = True, False
    if not oversees:
        _await_good_start(store, min(timeout, _QUICK) + _GRACE)
    while not store.check(["go"]):
        if worker.rank == 0 and store.check(["full"]):
            _answer_all(call, timeout - (time.monotonic() - begin))
            return
        if not repeated and store.check(["again"]):
            repeated, pause = True, _SHORTEST_PAUSE
            _repeat(call)
        waited = time.monotonic() - begin
        if oversees and all_wait and waited > _QUICK:
            all_wait = False
            store.set("look", "")
        if waited > min(due, timeout):
            in_charge = worker.rank == 0 or (oversees and not store.check(["rank0"]))
            if in_charge and waited > timeout:
                missing = absent(store, worker)
                call.ask(missing, final=True)
                _answer(store, f"{_missing(call, missing)}; gave up after {waited:.0f} s")
                return
            if waited > timeout + _GRACE:
                raise GangError(
                    f"{who(call.own)} was at the roll-call, and rank 0 does not end it; gave up after {waited:.0f} s"
                )
            if waited > due:
                due = next(notices)
                if in_charge:
                    _say_missing(call, waited)
        time.sleep(pause)
        pause = min(_EAGER_PAUSE if oversees and waited < _QUICK else longest, pause * 1.5)


def _await_good_start(store: Any, patience: float) -> None:
    """Wait, some seconds (patience) at most, until the start is over or no good one; RuntimeError,
    torch's own, if the store goes.
    """
    begin = time.monotonic()
    try:
        store.wait(["look"], timedelta(seconds=patience))
    except RuntimeError:
        if time.monotonic() - begin < patience - _LONGEST_PAUSE:
            raise  # the store is gone


def _answer_all(call: _Call, patience: float) -> None:
    """Give rank 0's answer once all have come: after a start that took long all have to say so
    again, in the seconds that are left.
    """
    store, ranks = call.store, range(call.worker.world_size)
    everybody = [Facts.of(data) for data in store.multi_get([f"rank{rank}" for rank in ranks])]
    took = max(each.time for each in everybody) - min(each.time for each in everybody)
    if store.check(["look"]) or took > _QUICK:  # a clock that is off costs a question more
        _call_again(call, patience)
    _answer(store, nodes=_machines(everybody))


def _call_again(call: _Call, patience: float) -> None:
    """Wait until all have said once more that they are there: where the last came late, others may
    have gone meanwhile.

    torch would wait for them without a word. Who does not answer is named, and refused in the end,
    as whoever never came.

    Args:
        call: rank 0's part.
        patience: seconds, of which the others have as many as they need to look.
    """
    store, worker = call.store, call.worker
    begin, notices = time.monotonic(), once_per_host.notices()
    due, patience = next(notices), max(patience, _GRACE / 2)
    store.set("again", "")
    store.set("look", "")
    _repeat(call)
    while store.add("repeated", 0) < worker.world_size and not store.check(["go"]):
        waited = time.monotonic() - begin
        if waited > min(due, patience):
            silent = absent(store, worker, sign="again")
            if not silent:
                return  # the last is between its sign and its count
            call.ask(silent, final=waited > patience)
            text = gone(
                store, silent, how="at the roll-call before, and no answer now: died, or stuck"
            )
            if waited > patience:
                _answer(store, f"{text}; gave up after {waited:.0f} s")
                return
            due = next(notices)
            once_per_host.say(f"{text}; {waited:.0f} s so far")
        time.sleep(_LONGEST_PAUSE)


def _repeat(call: _Call) -> None:
    """Say once more that this process is there."""
    call.store.set(f"again{call.own.rank}", "")
    call.store.add("repeated", 1)


def _idle_pause(world_size: int) -> float:
    """Return the seconds between two looks of a rank that does not oversee: the store answers some
    thousands a second.
    """
    return min(1.0, max(0.25, world_size / 4096))


def _answer(store: Any, refused: str = "", hint: str = "", nodes: Sequence[int] = ()) -> None:
    """Give the answer to all, unless one was given before."""
    store.compare_set(
        "go",
        "",
        json.dumps({"refused": refused, "hint": hint, "time": time.time(), "nodes": nodes}),
    )
    store.set("look", "")


def _machines(everybody: Sequence[Facts]) -> list[int]:
    """Return the index of each process's machine, in the order in which they come."""
    machines = list(dict.fromkeys((each.host, each.boot) for each in everybody))
    index = {machine: number for number, machine in enumerate(machines)}
    return [index[each.host, each.boot] for each in everybody]


def _await_hearing(store: Any, worker: Worker) -> None:
    """Let those who are there hear why it ends before the store ends with this process."""
    end = time.monotonic() + _GRACE / 5
    # Who is refused says so before it adds itself to the count.
    others = worker.world_size - len(absent(store, worker)) - 1
    while store.add("heard", 0) < others and time.monotonic() < end:
        time.sleep(_LONGEST_PAUSE)


def _say_missing(call: _Call, waited: float) -> None:
    missing = absent(call.store, call.worker)
    once_per_host.say(f"{_missing(call, missing)}; {waited:.0f} s so far")
    call.ask(missing, final=False)
    there = [f"rank{rank}" for rank in set(range(call.worker.world_size)).difference(missing)]
    now = time.time()
    for each in map(Facts.of, call.store.multi_get(there)):
        if each.time - now > _FARTHEST_CLOCK:  # it has come before now
            _tell_clock(
                call.store,
                each,
                how=f"at least {each.time - now:.0f} s ahead of {_whose(call.own)}",
            )


def _tell_clock(store: Any, of: Facts, how: str) -> None:
    """Say that the clock of a process's machine is off, once for the machine; of many machines
    some.
    """
    if store.add(f"clock {of.host} {of.boot}", 1) == 1 and store.add("clocks", 1) <= _MOST_NAMED:
        once_per_host.say(f"the clock of {of.process()}, rank {of.rank}, is {how}")


def _whose(facts: Facts) -> str:
    return "rank 0's" if facts.rank == 0 else f"that of {who(facts)}"


def who(facts: Facts) -> str:
    """Return which rank it is, in which process."""
    return f"rank {facts.rank} on {facts.process()}"


def absent(store: Any, worker: Worker, sign: str = "rank") -> list[int]:
    """Return the ranks that have not left a sign in the corner of the store."""
    return [rank for rank in range(worker.world_size) if not store.check([f"{sign}{rank}"])]


def gone(store: Any, ranks: list[int], how: str) -> str:
    """Return who was there and does not answer any more, and how."""
    known = store.multi_get([f"rank{rank}" for rank in ranks[:_MOST_NAMED]])
    named = [f"{each.rank} on {each.process()}" for each in map(Facts.of, known)]
    return f"{_waiting_for(ranks, named)}: {how}"


def _missing(call: _Call, missing: list[int]) -> str:
    """Return who is missing, and what is known of them."""
    store, worker = call.store, call.worker
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
        for rank in missing[:_MOST_NAMED]
    ]
    known = (
        "started, and not yet at init()"
        if call.started
        else "not heard of: not started, or still importing"
    )
    return f"{_waiting_for(missing, named)}: {known}"


def _waiting_for(ranks: list[int], named: list[str]) -> str:
    more = f" and {len(ranks) - len(named)} more" if len(ranks) > len(named) else ""
    return f"waiting for rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


def _ask_nobody(_missing: list[int], *, final: bool) -> None:
    """Leave it at that: no agent of ours looks after the processes."""


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
