"""Spare nodes and elastic jobs on this machine, as the commands show them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import command
from procs import TEST_TIMEOUT, kill_all, own_processes, wait_for_no_processes, wait_until

from clusterjob.core.records import Record, Records
from clusterjob.node.logs.events import read_job_events

# Each rank creates the file up<RESTART>.<RANK>, and ends when the file `leave` exists.
GUEST = """
import os, pathlib, time
pathlib.Path("up" + os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["RANK"]).touch()
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("leave"):
    time.sleep(0.02)
"""


# Prints a line after the first all-reduce of each round.
REDUCING = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1000)
dist.all_reduce(value)
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("round", restart, int(value[0]), time.monotonic(), flush=True)
while True:
    ended = torch.tensor([float(os.path.exists("leave"))])
    dist.all_reduce(ended)
    if ended:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
# Seconds from the loss of a node to the first all-reduce; on an idle machine it takes 0.7 s.
RESTART_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _no_job_survives() -> Iterator[None]:
    yield
    try:
        wait_for_no_processes(TEST_TIMEOUT)
    finally:
        kill_all(own_processes())


class Work:
    """A running job of one script.

    Args:
        directory: its working directory.
        words: the options of `clusterjob submit`.
        script: the text of its script.
    """

    def __init__(self, directory: Path, *words: str, script: str = GUEST) -> None:
        self.directory = directory
        (directory / "guest.py").write_text(script)
        submit = command(directory, "submit", "--cluster", "local", *words, "guest.py")
        self.id = submit.stdout.strip()
        self.record: Record = Records().find(self.id)

    def wait_for(self, *names: str) -> None:
        paths = [self.directory / name for name in names]
        wait_until(lambda: all(path.exists() for path in paths), TEST_TIMEOUT, f"files {names}")

    def lose(self, node: int) -> None:
        """Kill the agent of a node."""
        os.kill(self.record.handle.data["agents"][node]["pid"], signal.SIGKILL)

    def ask(self, *words: str, code: int = 0) -> str:
        done = command(self.directory, words[0], self.id, *words[1:], code=code)
        return done.stdout + done.stderr

    def finish(self) -> dict[str, object]:
        (self.directory / "leave").touch()
        self.ask("wait")
        [found] = json.loads(self.ask("status", "--json"))["jobs"]
        return found


@pytest.mark.usefixtures("plain_python")
def test_commands_find_a_rank_on_the_spare_node_that_has_taken_it(tmp_path: Path) -> None:
    job = Work(tmp_path, "--nodes", "2", "--spares", "1", "--max-restarts", "1")
    job.wait_for("up0.0", "up0.1")
    job.lose(1)
    job.wait_for("up1.0", "up1.1")
    place = 'echo "$RANK of $WORLD_SIZE, node $GROUP_RANK"'
    assert job.ask("exec", "--rank", "1", "--", "sh", "-c", place) == "1 of 2, node 1\n"
    everywhere = job.ask("exec", "--all", "--", "sh", "-c", place).splitlines()
    assert sorted(everywhere) == ["[node 0] 0 of 2, node 0", "[node 2] 1 of 2, node 1"]
    lost = job.ask("exec", "--node", "1", "--", "true", code=255)
    assert "no worker runs on node 1" in lost
    assert "has no rank 2" in job.ask("logs", "--rank", "2", code=2)
    end = job.finish()
    assert (end["state"], end["nodes"], end["restarts"]) == ("SUCCEEDED", 3, 1)
    lines = [line for line in job.ask("logs").splitlines() if " of 2" in line]
    assert sorted(lines) == ["[0] 0 of 2"] * 2 + ["[1] 1 of 2"] * 2


@pytest.mark.slow
def test_first_all_reduce_follows_soon_after_the_loss_of_a_node(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--spares", "1", "--nproc-per-node", "4", "--max-restarts", "1")
    job = Work(tmp_path, *words, script=REDUCING)

    def ends(restart: int) -> list[float]:
        """Return the times of the first all-reduce, if all 8 ranks have printed it."""
        text = "".join(path.read_text() for path in (job.record.job_dir / "logs").rglob("*.out"))
        found = re.findall(rf"round {restart} 8 ([\d.]+)\n", text)
        return [float(each) for each in found] if len(found) == 8 else []

    wait_until(lambda: ends(0), TEST_TIMEOUT, "the first all-reduce")
    job.lose(1)
    reduced = min(wait_until(lambda: ends(1), TEST_TIMEOUT, "the next all-reduce"))
    lost = next(e for e in read_job_events(job.record.job_dir) if e["event"] == "lost")
    assert reduced - lost["monotonic"] < RESTART_SECONDS
    assert job.finish()["restarts"] == 1
