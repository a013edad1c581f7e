"""Before a job is stopped, the stacks of its living ranks are saved in the logs."""

from __future__ import annotations

import json
import sys
from typing import Any

from procs import Job, MakeJob


def saved(job: Job, node: int = 0, stem: str = "stacks") -> dict[str, Any]:
    """Return the content of the JSON file; check the text beside it."""
    path = job.dir / "logs" / f"node{node}" / f"{stem}.json"
    data = json.loads(path.read_text())
    text = path.with_suffix(".txt").read_text()
    assert data["why"] in text.splitlines()[0]
    for each in data["ranks"]:
        for thread in each["threads"]:
            for frame in thread["frames"]:
                assert f"{frame['function']} ({frame['file']}:{frame['line']})" in text
    return data


def ranks(data: dict[str, Any]) -> list[int]:
    return [each["rank"] for each in data["ranks"]]


def test_stacks_of_peers_are_saved_before_each_restart(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script("""
        import os, pathlib, time
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path(f"up{restart}.{os.environ['RANK']}").touch()
        if os.environ["RANK"] == "3":
            while len(list(pathlib.Path().glob(f"up{restart}.*"))) < 4:
                time.sleep(0.01)
            raise ValueError("boom")
        time.sleep(1000)
    """)
    job.run("--nproc-per-node", "2", "--max-restarts", "1", script, code=1)
    for stem in ("stacks", "stacks.restart1"):
        data = saved(job, stem=stem)
        assert ranks(data) == [0, 1, 2]
        assert "boom" in data["why"]
        assert all(each["answered"] for each in data["ranks"])
    result = job.result
    assert (result["evidence"], result["evidence_ranks"]) == ("logs/node0/stacks.restart1.txt", 3)
    assert "stacks of 3 ranks: logs/node0/stacks.restart1.txt" in job.stderr(job.agents[0])


def test_stacks_and_flight_recorder_are_saved_at_the_time_limit(make_job: MakeJob) -> None:
    """Each worker does what ProcessGroupNCCL does: its pipe is read, and the dump written."""
    job = make_job(1)
    script = job.script("""
        import os, time
        rank = os.environ["RANK"]
        pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
        os.mkfifo(pipe)
        open(pipe).read()
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "w") as dump:
            dump.write("all_reduce")
        time.sleep(1000)
    """)
    flags = ("--nproc-per-node", "2", "--time-limit", "3")
    job.run(*flags, script, python=(sys.executable,), code=124)
    data = saved(job)
    assert ranks(data) == [0, 1]
    assert data["why"] == "the time limit of 3 s was reached"
    names = [f"logs/node0/flight_recorder.rank{rank}" for rank in (0, 1)]
    assert sorted(data["flight_recorder"]) == names
    assert [(job.dir / name).read_text() for name in names] == ["all_reduce"] * 2
