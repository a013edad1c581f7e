"""Find an address of node 0 that every other host can reach."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from clusterjob.errors import HostError, SubmitError
from clusterjob.node.host_server.requests import Listen, ProbeAddresses, StopListening
from clusterjob.remote.pool import complaint, for_each
from clusterjob.remote.sessions import Place, Sessions

_PROBE_TIMEOUT = 3.0  # seconds to reach node 0 at an address


def meet(
    sessions: Sessions,
    place: Place,
    ports: Sequence[int],
    likely: str,
    stop: threading.Event | None = None,
) -> str:
    """Return an address of node 0's own interfaces that every other node has just reached.

    Args:
        sessions: the sessions with the hosts.
        place: the hosts; at least two.
        ports: ports on which node 0 may listen, in order of preference.
        likely: the address to try first: the one that the submitter's connection reached.
        stop: set when the submission is aborted.

    Raises:
        SubmitError: no such address exists; the message names each host that cannot reach node 0.
    """
    nonce = secrets.token_hex(16)
    coordinator = sessions.session(place, 0)
    listener, _ = coordinator.ask(Listen(tuple(ports), nonce))
    # The address that the submitter's connection reached is first. Behind NAT it is not listed: the
    # machine has no such address on its interfaces.
    addresses = sorted(listener["addresses"], key=lambda address: address != likely)
    node0 = place.hosts[0]
    try:

        def work(node: int) -> dict[str, Any]:
            session = sessions.session(place, node)
            answer, _ = session.ask(
                ProbeAddresses(tuple(addresses), listener["port"], nonce=nonce, wait=_PROBE_TIMEOUT)
            )
            if not answer["reached"]:
                why = (
                    ", ".join(f"{address} ({text})" for address, text in answer["why"].items())
                    or "it has no address"
                )
                hint = f"port {listener['port']} and those above have to be open between the hosts"
                raise HostError(
                    str(place.hosts[node]), f"it cannot reach {node0} at {why}", hint=hint
                )
            found: dict[str, Any] = answer
            return found

        outcome = for_each(range(1, len(place.hosts)), work, stop=stop)
    finally:
        coordinator.ask(StopListening())
    if outcome.errors:
        errors = [outcome.errors[node] for node in sorted(outcome.errors)]
        raise SubmitError(*complaint(errors, len(place.hosts))) from errors[0]
    for address in addresses:
        if all(address in answer["reached"] for answer in outcome.results.values()):
            return str(address)
    reached = "; ".join(
        f"{place.hosts[node]} at {', '.join(answer['reached'])}"
        for node, answer in outcome.results.items()
    )
    raise SubmitError(f"no address of {node0} is reached by all other hosts: {reached}")
