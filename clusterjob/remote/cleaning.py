"""Measure and remove ended jobs on hosts, with few requests to each host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clusterjob.errors import HostError
from clusterjob.remote.pool import for_each
from clusterjob.remote.session import Session

_SLOW = 600.0  # seconds for an answer: large trees on a slow disk
_BATCH = 500  # maximum number of jobs in one request


@dataclass
class JobsOnHost:
    """The jobs to clean on one host.

    Attributes:
        session: returns the session with the host; raises `HostError`.
        jobs: ids of the jobs.
    """

    session: Callable[[], Session]
    jobs: list[str] = field(default_factory=list)


@dataclass
class CleanedJob:
    """One job on all its hosts.

    Attributes:
        size: bytes of its files there.
        kept: why it is not removed; empty if it is.
        stamps: the directories that are counted: hosts may share one.
    """

    size: int = 0
    kept: str = ""
    stamps: set[str] = field(default_factory=set)


def clean_hosts(hosts: Sequence[JobsOnHost], *, remove: bool) -> tuple[dict[str, CleanedJob], int]:
    """Ask all hosts in parallel; return each job by its id, and the bytes of unused code.

    Args:
        hosts: the jobs on each host.
        remove: whether the hosts remove the jobs and the code.
    """

    def ask(number: int) -> tuple[list[dict[str, object]], int]:
        host, answers, code = hosts[number], [], 0
        session = host.session()
        for begin in range(0, len(host.jobs), _BATCH):
            batch = host.jobs[begin : begin + _BATCH]
            answer, _ = session.ask("clean", jobs=batch, remove=remove, timeout=_SLOW)
            if len(answer["jobs"]) != len(batch):
                raise HostError(session.label, "it answers about other jobs")
            answers += answer["jobs"]
            code = answer["code"] if not remove else code + answer["code"]
        return answers, code

    outcome = for_each(range(len(hosts)), ask)
    found = {job: CleanedJob() for host in hosts for job in host.jobs}
    for number, host in enumerate(hosts):
        if (error := outcome.errors.get(number)) is not None:
            for job in host.jobs:
                found[job].kept = found[job].kept or error.message
            continue
        for job, answer in zip(host.jobs, outcome.results[number][0], strict=True):
            cleaned = found[job]
            if answer["kept"]:
                cleaned.kept = cleaned.kept or f"{answer['kept']}"
            elif answer["stamp"] not in cleaned.stamps:
                cleaned.stamps.add(str(answer["stamp"]))
                cleaned.size += int(str(answer["size"]))
    return found, sum(code for _, code in outcome.results.values())
