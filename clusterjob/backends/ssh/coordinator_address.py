"""Where a job's hosts meet: an address of node 0's at which every other host has just reached it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from clusterjob.errors import HostError, SubmitError
from clusterjob.remote.pool import complaint, for_each
from clusterjob.remote.sessions import Place, Visits

_PROBE_TIMEOUT = 3.0  # seconds to reach node 0 at an address


def meet(
    visits: Visits,
    place: Place,
    ports: Sequence[int],
    likely: str,
    stop: threading.Event | None = None,
) -> str:
    """Return node 0's address: one of its own, by its kernel's word, at which every other node has
    just reached it.

    Args:
        visits: the sessions with the hosts.
        place: the hosts, of which there are several.
        ports: where node 0 may listen, in order.
        likely: the address that is tried first: the one that our own connection reached.
        stop: set when this is broken off.

    Raises:
        SubmitError: there is none; each host that does not reach node 0 is named.
    """
    nonce = secrets.token_hex(16)
    lead = visits.session(place, 0)
    heard, _ = lead.ask("listen", ports=list(ports), nonce=nonce)
    # The address that our connection reached is the likeliest; behind NAT it is none of the
    # machine's own.
    addresses = sorted(heard["addresses"], key=lambda address: address != likely)
    tried = place.hosts[0]
    try:

        def work(node: int) -> dict[str, Any]:
            session = visits.session(place, node)
            answer, _ = session.ask(
                "probe",
                addresses=addresses,
                port=heard["port"],
                nonce=nonce,
                wait=_PROBE_TIMEOUT,
            )
            if not answer["reached"]:
                why = (
                    ", ".join(f"{address} ({text})" for address, text in answer["why"].items())
                    or "it has no address"
                )
                hint = f"port {heard['port']} and those above have to be open between the hosts"
                raise HostError(
                    str(place.hosts[node]), f"it cannot reach {tried} at {why}", hint=hint
                )
            found: dict[str, Any] = answer
            return found

        outcome = for_each(range(1, len(place.hosts)), work, stop=stop)
    finally:
        lead.ask("hush")
    if outcome.errors:
        errors = [outcome.errors[node] for node in sorted(outcome.errors)]
        raise SubmitError(*complaint(errors, len(place.hosts))) from errors[0]
    for address in addresses:
        if all(address in answer["reached"] for answer in outcome.results.values()):
            return str(address)
    ways = "; ".join(
        f"{place.hosts[node]} at {', '.join(answer['reached'])}"
        for node, answer in outcome.results.items()
    )
    raise SubmitError(f"no address of {tried} is reached by all other hosts: {ways}")
