"""Record the signals that an agent handles before its event loop runs."""

from __future__ import annotations

import signal


def number_of(name: str) -> int:
    """Return the number of a signal that a process can handle, such as SIGUSR1, usr1 or 10.

    Raises:
        ValueError: there is no such signal, or no process can handle it.
    """
    found = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}")
    if found is None and name.isascii() and name.isdigit():
        found = next((each for each in signal.Signals if each == int(name[:4])), None)
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{name[:40]!r} is not a signal that a script can handle")
    return found


def handled(*, preemptible: bool) -> list[int]:
    """Return the numbers of the signals that request a stop or warn of a preemption.

    Args:
        preemptible: whether the job may be preempted; SIGUSR1 then warns of it.
    """
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    # nohup and background jobs of a shell ignore some signals on purpose: keep these ignored. The
    # job script ignores SIGUSR1 only for its shell: this process handles it.
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN] + [
        signal.SIGUSR1
    ] * preemptible


def collect_early(*, preemptible: bool) -> list[int]:
    """Install handlers that collect these signals, and return the list that they append to.

    Without a handler such a signal would end this process, as if the agent had been killed. A
    forkserver that is forked later inherits the handlers and survives: if a scheduler signals every
    process of a job, only the agent reacts.
    """
    early: list[int] = []
    for number in handled(preemptible=preemptible):
        signal.signal(number, lambda number, _: early.append(number))
    return early
