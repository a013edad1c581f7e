"""Spare nodes and elastic jobs on this machine, as the commands show them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from inside_job import Inside, running, write_script
from procs import TEST_TIMEOUT, wait_until

from clusterjob.core.records import Records
from clusterjob.node.logs.events import read_job_events

# Each rank creates the file up<RANK>, of the first round, and up<RESTART>.<RANK>.
GUEST = """
    import os, pathlib, time
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    for name in (rank, f"{restart}.{rank}"):
        pathlib.Path(f"up{name}").touch()
    print(rank, "of", os.environ["WORLD_SIZE"], flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.02)
"""
SPARE = ("--cluster", "local", "--nodes", "2", "--spares", "1", "--max-restarts", "1")


# Prints a line after the first all-reduce of each round.
REDUCING = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1000)
    dist.all_reduce(value)
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("round", restart, int(value[0]), time.monotonic(), flush=True)
    pathlib.Path("up" + os.environ["RANK"]).touch()
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


def lose(job: Inside, node: int) -> None:
    """Kill the agent of a node."""
    agents = Records().find(job.id).handle.data["agents"]
    os.kill(agents[node]["pid"], signal.SIGKILL)


def finish(job: Inside) -> dict[str, Any]:
    (job.directory / "leave").touch()
    job.exec(verb="wait")
    [found] = json.loads(job.exec("--json", verb="status")[0])["jobs"]
    return found


@pytest.mark.usefixtures("plain_python")
def test_commands_find_a_rank_on_the_spare_node_that_has_taken_it(tmp_path: Path) -> None:
    with running(tmp_path, *SPARE, program=(write_script(tmp_path, GUEST),), ranks=2) as job:
        lose(job, 1)
        files = [tmp_path / f"up1.{rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files), TEST_TIMEOUT, "the next round")
        place = 'echo "$RANK of $WORLD_SIZE, node $GROUP_RANK"'
        assert job.shell(place, "--rank", "1") == "1 of 2, node 1\n"
        everywhere = job.shell(place, "--all").splitlines()
        assert sorted(everywhere) == ["[node 0] 0 of 2, node 0", "[node 2] 1 of 2, node 1"]
        _, err = job.exec("--node", "1", "true", code=255)
        assert b"no worker runs on node 1" in err
        _, err = job.exec("--rank", "2", verb="logs", code=2)
        assert b"has no rank 2" in err
        end = finish(job)
        assert (end["state"], end["nodes"], end["restarts"]) == ("SUCCEEDED", 3, 1)
        lines = job.exec(verb="logs")[0].decode().splitlines()
    assert sorted(line for line in lines if " of 2" in line) == [
        *["[0] 0 of 2"] * 2, *["[1] 1 of 2"] * 2
    ]  # fmt: skip


@pytest.mark.slow
def test_first_all_reduce_follows_soon_after_the_loss_of_a_node(tmp_path: Path) -> None:
    program = ("--nproc-per-node", "4", write_script(tmp_path, REDUCING))
    with running(tmp_path, *SPARE, program=program, ranks=8) as job:
        job_dir = Records().find(job.id).job_dir

        def reduced() -> list[float]:
            """Return the times of the second round's first all-reduce, if all ranks have it."""
            text = "".join(path.read_text() for path in (job_dir / "logs").rglob("*.out"))
            found = re.findall(r"round 1 8 ([\d.]+)\n", text)
            return [float(each) for each in found] if len(found) == 8 else []

        lose(job, 1)
        times = wait_until(reduced, TEST_TIMEOUT, "the next all-reduce")
        lost = next(e for e in read_job_events(job_dir) if e["event"] == "lost")
        assert min(times) - lost["monotonic"] < RESTART_SECONDS
        assert finish(job)["restarts"] == 1
