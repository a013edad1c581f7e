"""Check hosts before a job: network, host key, interpreter, disk, GPUs, machine identity."""

from __future__ import annotations

import time
from dataclasses import dataclass

from clusterjob.errors import HostError
from clusterjob.remote.pool import for_each
from clusterjob.remote.sessions import Place, Sessions


@dataclass(frozen=True)
class HostReport:
    """Result of one host's check.

    Attributes:
        host: the host as the user wrote it.
        address: user@address:port from the ssh configuration; empty if that cannot be read.
        error: why the host is unfit, one line; empty if it is fit.
        hint: what to do about the error.
        python, torch: the interpreter's version, and whether it finds torch.
        free: free bytes on the disk of clusterjob's directory.
        name: the host's node name (uname).
        gpus: one text for each GPU.
        home: clusterjob's directory there; empty if the host did not answer.
        machine: identity of the machine, which does not depend on its name or address.
        ahead: the smallest possible difference of the two clocks in seconds: positive if the host's
            clock is ahead, negative if it is behind; None without an answer.
    """

    host: str
    address: str = ""
    error: str = ""
    hint: str = ""
    python: str = ""
    torch: bool | None = None
    free: int | None = None
    name: str = ""
    gpus: tuple[str, ...] = ()
    home: str = ""
    machine: str = ""
    ahead: float | None = None


def probe_hosts(sessions: Sessions, place: Place, *, own: bool = True) -> list[HostReport]:
    """Check in parallel whether hosts are fit for jobs.

    Args:
        sessions: the sessions with the hosts.
        place: the hosts.
        own: whether the session runs in the job's interpreter, which must then find torch.
    """

    def ask(node: int) -> HostReport:
        host, address = place.hosts[node], ""
        try:
            target = sessions.pool(place).resolve(host)
            address = f"{target.user}@{target.hostname}:{target.port}"
            begin = time.time()
            answer, _ = sessions.session(place, node).ask(
                "check", need=0, torch=own, own=own, with_gpus=True
            )
            end = time.time()
        except HostError as error:
            why = error.why if error.host == str(host) else error.message
            return HostReport(str(host), address, error=why, hint=error.hint)
        # The host read its clock between begin and end: a time between them shows no difference.
        ahead = max(answer["time"] - end, min(0.0, answer["time"] - begin))
        return HostReport(
            str(host),
            address,
            error="; ".join(answer["errors"]),
            python=answer["python"],
            torch=answer["torch"],
            free=answer["free"],
            name=answer["host"],
            gpus=tuple(answer["gpus"]),
            home=answer["home"],
            machine=answer["identity"],
            ahead=ahead,
        )

    nodes = range(len(place.hosts))
    outcome = for_each(nodes, ask)
    return [outcome.results[node] for node in nodes]
