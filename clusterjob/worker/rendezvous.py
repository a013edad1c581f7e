"""Rendezvous of ranks over torch's store: check all ranks, and name missing or wrong ones.

Each rank compares its facts with those of the first rank that joined. Only rank 0 reads the facts
of all ranks, so the other ranks send only a few requests to the store in a job of any size. An
error is one line. torch alone waits half an hour or prints pages of C++ frames (pytorch#41665,
nccl#1260).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from clusterjob.errors import RanksMissingError, RendezvousError
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system.sanitize import sanitize
from clusterjob.worker import once_per_host
from clusterjob.worker.rank_facts import (
    Facts,
    describe_missing,
    describe_unresponsive,
    disagreement,
    missing_ranks,
    report_clock,
    who,
    whose,
)

DEFAULT_TIMEOUT = 1800.0  # seconds, torch's default for gloo
_GRACE = 5.0  # seconds that the other ranks wait for rank 0 after their own timeout
_FARTHEST_CLOCK = 60.0  # seconds; a larger difference of two hosts' clocks is reported
_QUICK = 3.0  # maximum seconds of a normal start
# Seconds between two polls of the overseeing rank: the first pause and the longest.
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.01
# The longest pause in a normal start, when all ranks wait for the poll.
_EAGER_PAUSE = 0.002
_MAX_ANSWER = 4000
Ask = Callable[..., None]  # (missing ranks, final=whether the caller gives up)


@dataclass(frozen=True)
class _Call:
    """The arguments of `join` for one process."""

    store: Any
    worker: Worker
    own: Facts
    started: bool
    ask: Ask


def join(
    store: Any,
    worker: Worker,
    own: Facts,
    timeout: float,
    *,
    started: bool,
    ask: Ask | None = None,
) -> list[int]:
    """Wait until all ranks have joined the rendezvous.

    Args:
        store: a prefix of torch's store for this process group only.
        worker: this process's rank assignment.
        own: this process's facts.
        timeout: seconds to wait for the other ranks.
        started: whether a launcher on each node has started all ranks, so that a missing rank is
            running but has not called init().
        ask: called with the missing ranks each time this process reports that it waits for them;
            ``final`` says whether it gives up.

    Returns:
        The index of each rank's machine; machines are ordered by their lowest rank.

    Raises:
        RendezvousError: a rank is missing, claimed twice, of another job, or has other versions.
            All ranks get the same message. A wrong rank is refused at once, without waiting for
            missing ranks.
    """
    mine = _Call(store, worker, own=own, started=started, ask=ask or (lambda *_, **__: None))
    try:
        first = _enter(mine)
        _await_answer(mine, timeout, oversees=first or worker.rank == 0)
        answer = json.loads(store.get("go"))
        if not answer["refused"]:
            ahead = time.time() - float(answer["time"])
            if abs(ahead) > _FARTHEST_CLOCK and worker.rank:
                report_clock(
                    store,
                    own,
                    how=f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's",
                )
            return list(answer["nodes"])
        if worker.rank == 0:
            _await_readers(store, worker)
        else:
            with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
                store.add("heard", 1)
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        reason = str(error).strip().partition("\n")[0]
        raise RanksMissingError(
            f"{who(own)} has joined, and rank 0 does not end the rendezvous: {reason}"
        ) from error
    kind = RanksMissingError if answer.get("timed_out") else RendezvousError
    raise kind(
        sanitize(str(answer["refused"]))[:_MAX_ANSWER],
        sanitize(str(answer["hint"]))[:_MAX_ANSWER],
    )


def _enter(call: _Call) -> bool:
    """Write this process's facts to the store and compare them with those of the first rank.

    Returns:
        Whether this process is the first.

    Raises:
        RendezvousError: another process has joined as this rank.
    """
    store, own = call.store, call.own
    data = own.data()
    holder = Facts.of(store.compare_set(f"rank{own.rank}", "", data))
    if not holder.is_same_process(own):
        refused = f"rank {own.rank} is claimed twice: by {holder.process()} and by {own.process()}"
        hint = "two processes have the same RANK, or two jobs the same MASTER_PORT"
        _answer(store, refused, hint=hint)
        raise RendezvousError(refused, hint)
    if holder != own:
        return False  # the same process joins a second time
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
    if (
        first.time - own.time > _FARTHEST_CLOCK
    ):  # an earlier time is normal: the first rank started before
        off = f"at least {first.time - own.time:.0f} s"
        if own.rank == 0:
            report_clock(store, first, how=f"{off} ahead of rank 0's")
        else:
            report_clock(store, own, how=f"{off} behind {whose(first)}")
    # Count this rank after its refusal is written: then a full count means that no refusal is
    # missing.
    if store.add("count", 1) == own.world_size:
        store.set("full", "")
    return first == own


def _await_answer(call: _Call, timeout: float, *, oversees: bool) -> None:
    """Wait for the answer to all ranks, and give it if this process oversees the rendezvous.

    Rank 0 gives the answer. While rank 0 is missing, the first rank that joined oversees.

    torch's store.wait() prints two lines of C++ to stderr when it times out, and ignores Ctrl-C.
    So the other ranks use it only as long as a normal start takes. The overseeing rank ends that
    wait before its timeout, and from then on each rank polls.

    Raises:
        RendezvousError: no rank oversees, and rank 0 does not answer.
        RuntimeError: torch's error, if the store has ended.
    """
    store, worker = call.store, call.worker
    notices = once_per_host.notice_times()
    begin = time.monotonic()
    due, pause = next(notices), _MIN_PAUSE
    longest = _MAX_PAUSE if oversees else _idle_pause(worker.world_size)
    all_wait, repeated = True, False
    if not oversees:
        _await_good_start(store, min(timeout, _QUICK) + _GRACE)
    while not store.check(["go"]):
        if worker.rank == 0 and store.check(["full"]):
            _answer_all(call, timeout - (time.monotonic() - begin))
            return
        if not repeated and store.check(["again"]):
            repeated, pause = True, _MIN_PAUSE
            _confirm(call)
        waited = time.monotonic() - begin
        if oversees and all_wait and waited > _QUICK:
            all_wait = False
            store.set("end_wait", "")
        if waited > min(due, timeout):
            in_charge = worker.rank == 0 or (oversees and not store.check(["rank0"]))
            if in_charge and waited > timeout:
                missing = missing_ranks(store, worker)
                call.ask(missing, final=True)
                text = _describe(call, missing)
                _answer(store, f"{text}; gave up after {waited:.0f} s", timed_out=True)
                return
            if waited > timeout + _GRACE:
                raise RanksMissingError(
                    f"{who(call.own)} has joined, and rank 0 does not end the rendezvous; "
                    f"gave up after {waited:.0f} s"
                )
            if waited > due:
                due = next(notices)
                if in_charge:
                    _print_missing(call, waited)
        time.sleep(pause)
        pause = min(_EAGER_PAUSE if oversees and waited < _QUICK else longest, pause * 1.5)


def _await_good_start(store: Any, seconds: float) -> None:
    """Wait until a normal start is over or the overseeing rank ends the wait.

    Args:
        store: the store of the rendezvous.
        seconds: maximum seconds to wait.

    Raises:
        RuntimeError: torch's error, if the store has ended.
    """
    begin = time.monotonic()
    try:
        store.wait(["end_wait"], timedelta(seconds=seconds))
    except RuntimeError:
        if time.monotonic() - begin < seconds - _MAX_PAUSE:
            raise  # the store has ended


def _answer_all(call: _Call, seconds: float) -> None:
    """Give rank 0's answer once all ranks have joined.

    After a slow start, all ranks must first confirm within `seconds` that they still run.
    """
    store, ranks = call.store, range(call.worker.world_size)
    everybody = [Facts.of(data) for data in store.multi_get([f"rank{rank}" for rank in ranks])]
    took = max(each.time for each in everybody) - min(each.time for each in everybody)
    # If the clocks of the machines differ, this only causes an unneeded confirmation.
    if store.check(["end_wait"]) or took > _QUICK:
        _await_confirmations(call, seconds)
    _answer(store, nodes=_machines(everybody))


def _await_confirmations(call: _Call, seconds: float) -> None:
    """Wait until all ranks have confirmed: if the last rank joined late, others may have died.

    torch would wait for them without a message. A rank that does not answer is named, and at the
    timeout the rendezvous fails as for a missing rank.

    Args:
        call: rank 0's arguments of `join`.
        seconds: seconds to wait; at least as long as the other ranks need for one poll.
    """
    store, worker = call.store, call.worker
    begin, notices = time.monotonic(), once_per_host.notice_times()
    due, seconds = next(notices), max(seconds, _GRACE / 2)
    store.set("again", "")
    store.set("end_wait", "")
    _confirm(call)
    while store.add("repeated", 0) < worker.world_size and not store.check(["go"]):
        waited = time.monotonic() - begin
        if waited > min(due, seconds):
            silent = missing_ranks(store, worker, key="again")
            if not silent:
                return  # the last rank has written its key and not yet increased the count
            call.ask(silent, final=waited > seconds)
            text = describe_unresponsive(
                store, silent, how="joined the rendezvous, no answer since: dead or stuck"
            )
            if waited > seconds:
                _answer(store, f"{text}; gave up after {waited:.0f} s", timed_out=True)
                return
            due = next(notices)
            once_per_host.print_line(f"{text}; {waited:.0f} s so far")
        time.sleep(_MAX_PAUSE)


def _confirm(call: _Call) -> None:
    """Tell rank 0 that this process is still alive."""
    call.store.set(f"again{call.own.rank}", "")
    call.store.add("repeated", 1)


def _idle_pause(world_size: int) -> float:
    """Return the seconds between two polls of a rank that does not oversee.

    The store handles some thousands of requests a second.
    """
    return min(1.0, max(0.25, world_size / 4096))


def _answer(
    store: Any,
    refused: str = "",
    *,
    hint: str = "",
    nodes: Sequence[int] = (),
    timed_out: bool = False,
) -> None:
    """Give the answer to all ranks, unless one was given before.

    Args:
        store: the store of the rendezvous.
        refused: why the rendezvous fails; empty if it succeeds.
        hint: advice for the user.
        nodes: the index of each rank's machine.
        timed_out: whether it fails because ranks are missing.
    """
    answer = {
        "refused": refused,
        "hint": hint,
        "time": time.time(),
        "nodes": nodes,
        "timed_out": timed_out,
    }
    store.compare_set("go", "", json.dumps(answer))
    store.set("end_wait", "")


def _machines(everybody: Sequence[Facts]) -> list[int]:
    """Return the index of each process's machine, in order of first appearance."""
    machines = list(dict.fromkeys((each.host, each.boot) for each in everybody))
    index = {machine: number for number, machine in enumerate(machines)}
    return [index[each.host, each.boot] for each in everybody]


def _await_readers(store: Any, worker: Worker) -> None:
    """Wait until the joined ranks have read the refusal: the store ends with this process."""
    end = time.monotonic() + _GRACE / 5
    others = worker.world_size - len(missing_ranks(store, worker)) - 1
    while store.add("heard", 0) < others and time.monotonic() < end:
        time.sleep(_MAX_PAUSE)


def _describe(call: _Call, missing: list[int]) -> str:
    return describe_missing(call.store, call.worker, missing, started=call.started)


def _print_missing(call: _Call, waited: float) -> None:
    missing = missing_ranks(call.store, call.worker)
    once_per_host.print_line(f"{_describe(call, missing)}; {waited:.0f} s so far")
    call.ask(missing, final=False)
    there = [f"rank{rank}" for rank in set(range(call.worker.world_size)).difference(missing)]
    now = time.time()
    for each in map(Facts.of, call.store.multi_get(there)):
        if each.time - now > _FARTHEST_CLOCK:  # it has joined already, so its clock is ahead
            report_clock(
                call.store,
                each,
                how=f"at least {each.time - now:.0f} s ahead of {whose(call.own)}",
            )
