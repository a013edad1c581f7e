"""One step of a coordinator: what it asks for a decision."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clusterjob.node import decide
from clusterjob.node.coordinator import Coordinator
from clusterjob.node.decide import Decision
from clusterjob.node.environments import slurm_env, this_node
from clusterjob.node.environments.topology import Topology
from clusterjob.node.notifications import Notifier
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import succession
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob


@pytest.mark.parametrize(("down", "up"), [(True, False), (False, True), (None, False)])
def test_node_counts_as_up_only_if_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: bool | None, up: bool
) -> None:
    topology = Topology(2, 0, 1, "n1", None, source=slurm_env.SOURCE)
    identity = JobIdentity("job", 0, b"token", [1], has_torch=False)
    options = LaunchOptions(Program("script", "x.py"))
    asked: list[str] = []

    def answer(host: str) -> bool | None:
        asked.append(host)
        return down

    async def view_after_a_step() -> bool | None:
        coordinator = Coordinator(
            NodeJob(topology, options, identity, tmp_path, print_line=print),
            lambda _: None,
            Notifier("", "job", tmp_path, print_line=print),
        )
        await coordinator._step()
        return coordinator._view().slurm_up

    monkeypatch.setattr(decide, "decide", lambda _, ledger, *__: Decision(ledger, asks_slurm=True))
    monkeypatch.setattr(succession, "slurm_says_down", answer)
    assert asyncio.run(view_after_a_step()) is up
    assert asked == [this_node.node_name()]
