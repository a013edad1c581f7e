"""The signals that an agent heeds, from before there is an event loop that it could hear them with."""

from __future__ import annotations

import signal


def heeded(*, preemptible: bool) -> list[int]:
    """Return the numbers of the signals that are a wish of somebody's.

    Args:
        preemptible: whether the job may be preempted; SIGUSR1 then warns of it.
    """
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    # One that is ignored was asked to be, by nohup or a shell's background job. SIGUSR1 is ignored
    # so that none is lost on a shell.
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN] + [
        signal.SIGUSR1
    ] * preemptible


def note_early(*, preemptible: bool) -> list[int]:
    """Return the list to which each of them is added that comes from now on, until somebody else
    handles them.

    It would end this process, and look as if the agent had been killed. A starter that is forked
    then has the same handlers and so lives on: what a scheduler sends to every process of a job is
    the agent's to obey.
    """
    early: list[int] = []
    for number in heeded(preemptible=preemptible):
        signal.signal(number, lambda number, _: early.append(number))
    return early
