"""A real job of 2 nodes x 2 ranks: who makes the others wait is named, and nobody else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import command
from procs import wait_until

from clusterjob.core.records import Records
from clusterjob.node.logs.events import read_events

# A file names the ranks that are slow, and how. Rank 2 starts late, and rank 0 saves checkpoints.
SCRIPT = """
import pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(100_000):
    how, *slow = pathlib.Path("slow").read_text().split()
    if number % 20 == 0:  # all ranks end together
        end = torch.tensor(float(how == "end"))
        dist.all_reduce(end)
        if end.item():
            break
    time.sleep(0.02)
    if str(rank) in slow and how == "sleep":
        time.sleep(0.06)
    begin = time.monotonic()
    while str(rank) in slow and how == "busy" and time.monotonic() < begin + 0.06:
        pass
    if number == 0 and rank == 2:
        time.sleep(3)
    if rank == 0 and number % 50 == 49:
        time.sleep(0.3)
    optimizer.zero_grad()
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
_TIMEOUT = 150.0  # seconds; about 25 are needed


class Named:
    """The stragglers of a job."""

    def __init__(self, directory: Path, job_id: str) -> None:
        self._directory = directory
        self.job_id = job_id
        self.job_dir = Records().find(job_id).job_dir

    def events(self, name: str) -> list[int]:
        found = read_events(self.job_dir / "events.jsonl")
        return [event["rank"] for event in found if event["event"] == name]

    def wait_for(self, name: str, ranks: list[int]) -> None:
        wait_until(lambda: len(self.events(name)) >= len(ranks), _TIMEOUT, f"{name} {ranks}")
        assert sorted(self.events(name)) == ranks

    def status(self) -> dict[str, Any]:
        text = command(self._directory, "status", self.job_id, "--json").stdout
        return json.loads(text)["jobs"][0]


@pytest.mark.slow
def test_slow_ranks_are_named_and_nobody_is_blamed_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def say(text: str) -> None:
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(tmp_path / "slow")  # a rank never reads a part

    say("none")
    words = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "2")
    shown = command(tmp_path, "submit", *words, "train.py").stdout
    named = Named(tmp_path, shown.split()[-1])
    metrics = named.job_dir / "logs" / "node1" / "metrics.jsonl"

    def measured() -> int:
        """Return the number of samples with the waits of both ranks."""
        lines = metrics.read_text().splitlines()[1:] if metrics.exists() else []
        samples = [json.loads(line) for line in lines if line.endswith("]")]
        return sum(all(worker[-1] is not None for worker in one[-2]) for one in samples if one[-2])

    try:
        wait_until(lambda: measured() >= 4, _TIMEOUT, "samples")
        assert not named.events("straggling")
        # A data loader that is slow on one rank.
        say("sleep 1")
        named.wait_for("straggling", [1])
        [found] = named.status()["stragglers"]
        assert (found["rank"], found["node"]) == (1, 0)
        assert 0.1 < found["share"] <= 1
        line = command(tmp_path, "status", named.job_id).stderr
        assert "rank 1 (node 0, " in line
        assert " step for it\n" in line
        # It is repaired, and a whole node becomes slow.
        say("busy 2 3")
        named.wait_for("caught_up", [1])
        named.wait_for("straggling", [1, 2, 3])
        assert [one["rank"] for one in named.status()["stragglers"]] == [2, 3]
        command(tmp_path, "report", named.job_id, "-o", str(tmp_path / "report.html"))
        assert "ranks 2-3 (node 1, " in (tmp_path / "report.html").read_text()
    finally:
        say("end")
        command(tmp_path, "wait", named.job_id)
