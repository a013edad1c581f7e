"""What hosts answer before there is a job: reached and trusted, fit or not, and which machine each
is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from clusterjob.errors import HostError
from clusterjob.remote.pool import for_each
from clusterjob.remote.sessions import Place, Visits


@dataclass(frozen=True)
class HostReport:
    """What is known of a host once it was asked.

    Attributes:
        host: as it was written.
        address: user, address and port that ssh's configuration makes of it; empty if that cannot
            be told.
        trouble: why it is unfit, one line; empty if it is fit.
        hint: what can be done about it.
        python, torch: the interpreter's version, and whether it finds torch.
        free: bytes that are free where jobs lie.
        name: the host's own name for itself.
        gpus: its cards, as text.
        home: where all of ours lies there; empty if it did not answer.
        machine: what tells it from other machines, whatever it is called.
        reached_at: its address at which it was reached.
        ahead: seconds that its clock is ahead of ours at the least; 0 where the answer came too
            slowly to tell.
    """

    host: str
    address: str = ""
    trouble: str = ""
    hint: str = ""
    python: str = ""
    torch: bool | None = None
    free: int | None = None
    name: str = ""
    gpus: tuple[str, ...] = ()
    home: str = ""
    machine: str = ""
    reached_at: str = ""
    ahead: float | None = None


def survey(visits: Visits, place: Place, *, own: bool = True) -> list[HostReport]:
    """Ask hosts, all at once, whether they are fit for jobs.

    Args:
        visits: the sessions.
        place: the hosts, and how they are reached.
        own: whether the interpreter of the visit is the job's, so that it has to find torch.
    """

    def ask(node: int) -> HostReport:
        host = place.hosts[node]
        target = visits.pool(place).resolve(host)
        address = f"{target.user}@{target.hostname}:{target.port}"
        try:
            begin = time.time()
            answer, _ = visits.session(place, node).ask(
                "check", need=0, torch=own, own=own, gpus=True
            )
            end = time.time()
        except HostError as error:
            return HostReport(
                str(host),
                address,
                trouble=error.why if error.host == str(host) else error.message,
                hint=error.hint,
            )
        # It read its clock between the two: what is ours in between is as good as the same.
        ahead = max(answer["time"] - end, min(0.0, answer["time"] - begin))
        return HostReport(
            str(host), address, trouble="; ".join(answer["troubles"]), hint="", python=answer["python"],
            torch=answer["torch"], free=answer["free"], name=answer["host"], gpus=tuple(answer["gpus"]), home=answer["home"],
            machine=answer["identity"], reached_at=answer["reached_at"], ahead=ahead,
        )  # fmt: skip

    outcome = for_each(range(len(place.hosts)), ask)
    failed = {
        node: HostReport(str(place.hosts[node]), "", trouble=error.why, hint=error.hint)
        for node, error in outcome.errors.items()
    }
    return [outcome.results.get(node) or failed[node] for node in range(len(place.hosts))]
