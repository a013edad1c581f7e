"""Where the lead listens when no platform names a port."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import GangError
from clusterjob.node.rendezvous import ports


def taken() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 1000))
def test_every_agent_computes_the_same_ports_below_the_ephemeral_ones(
    job_id: str, attempt: int
) -> None:
    found = ports.candidates(job_id, attempt, named_port=None)
    assert found == ports.candidates(job_id, attempt, named_port=None)
    assert len(found) == ports.COUNT
    assert all(1024 < port < 32768 for port in found)
    assert len(set(found)) > ports.COUNT // 2


def test_another_job_or_attempt_looks_elsewhere() -> None:
    found = [
        ports.candidates(job_id, attempt, named_port=None)
        for job_id in ("job-1", "job-2", "job-11")
        for attempt in (0, 1)
    ]
    assert len({tuple(sequence) for sequence in found}) == 6
    assert len({sequence[0] for sequence in found}) == 6


def test_a_named_port_is_the_only_one() -> None:
    assert ports.candidates("job", 3, named_port=29500) == [29500]


def test_the_lead_listens_at_the_first_that_is_free() -> None:
    with taken() as first, taken() as second, taken() as third:
        numbers = [holder.getsockname()[1] for holder in (first, second, third)]
        third.close()
        with ports.listen("127.0.0.1", numbers) as listener:
            assert listener.getsockname() == ("127.0.0.1", numbers[2])
            with socket.create_connection(listener.getsockname(), 5) as connection:
                assert connection.getpeername() == listener.getsockname()


def test_a_port_is_free_again_as_soon_as_its_lead_is_gone() -> None:
    with taken() as holder:
        number = holder.getsockname()[1]
    for _ in range(3):
        with ports.listen("127.0.0.1", [number]) as listener:
            client = socket.create_connection(listener.getsockname(), 5)
            accepted = listener.accept()[0]
            accepted.close()  # this side closes first, so the kernel remembers the port for a while
            client.close()


def test_two_leads_never_share_a_port() -> None:
    with ports.listen("127.0.0.1", [0]) as first, pytest.raises(GangError):
        ports.listen("127.0.0.1", [first.getsockname()[1]])


def test_all_taken_is_said_with_the_ports() -> None:
    with taken() as first, taken() as second:
        numbers = [first.getsockname()[1], second.getsockname()[1]]
        with pytest.raises(
            GangError, match=f"no free port at 127.0.0.1: {numbers[0]}, {numbers[1]} are taken"
        ):
            ports.listen("127.0.0.1", numbers)


@pytest.mark.parametrize("host", ["999.1.1.1", "node0..cluster"])
def test_an_address_that_does_not_resolve_is_said(host: str) -> None:
    with pytest.raises(GangError, match=f"node 0 cannot listen at {host}"):
        ports.listen(host, [0])
