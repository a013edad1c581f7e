"""A real job of 2 nodes x 2 ranks: who makes the others wait is named, and nobody else is."""

from __future__ import annotations

import json
import re
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


@pytest.mark.slow
def test_slow_ranks_are_named_and_nobody_is_blamed_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def say(text: str) -> None:
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(tmp_path / "slow")  # a rank never reads a part

    say("none")
    words = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "2")
    job_id = command(tmp_path, "submit", *words, "train.py").stdout.strip()
    job_dir = Records().find(job_id).job_dir
    metrics = job_dir / "logs" / "node1" / "metrics.jsonl"

    def measured() -> int:
        """Return the number of samples with the waits of both ranks."""
        lines = metrics.read_text().splitlines()[1:] if metrics.exists() else []
        samples = [json.loads(line) for line in lines if line.endswith("]")]
        return sum(all(worker[-1] is not None for worker in one[-2]) for one in samples if one[-2])

    def named(kind: str) -> list[int]:
        found = read_events(job_dir / "events.jsonl")
        return sorted(event["rank"] for event in found if event["event"] == kind)

    def stragglers() -> list[dict[str, Any]]:
        text = command(tmp_path, "status", job_id, "--json").stdout
        return json.loads(text)["jobs"][0]["stragglers"]

    try:
        wait_until(lambda: measured() >= 4, _TIMEOUT, "samples")
        assert not named("straggling")
        # A data loader that is slow on one rank.
        say("sleep 1")
        wait_until(lambda: named("straggling") == [1], _TIMEOUT, "rank 1")
        [found] = stragglers()
        assert (found["rank"], found["node"]) == (1, 0)
        assert 0.1 < found["share"] <= 1
        line = command(tmp_path, "status", job_id).stderr
        assert re.search(r"rank 1 \(node 0, .* step for it\n", line)
        # It is repaired, and a whole node becomes slow.
        say("busy 2 3")
        wait_until(lambda: named("caught_up") == [1], _TIMEOUT, "the repair")
        wait_until(lambda: named("straggling") == [1, 2, 3], _TIMEOUT, "ranks 2 and 3")
        assert [one["rank"] for one in stragglers()] == [2, 3]
        command(tmp_path, "report", job_id, "-o", str(tmp_path / "report.html"))
        page = (tmp_path / "report.html").read_text()
        assert "rank 2 (node 1, " in page
        assert "rank 3 (node 1, " in page
    finally:
        say("end")
        command(tmp_path, "wait", job_id)
