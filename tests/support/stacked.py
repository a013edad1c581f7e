"""A job whose rank 3 is in `decode` while the others wait in a queue, and its stacks."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from inside_job import Inside

# Each rank creates the file up<RANK> in $MEET, or in its working directory.
WAITING = """
    import os, pathlib, queue, sys, threading, time

    def decode():
        while True:
            time.sleep(1000)

    rank = os.environ["RANK"]
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("up", rank, flush=True)
    (pathlib.Path(os.environ.get("MEET", ".")) / f"up{rank}").touch()
    if rank == "3":
        decode()
    queue.Queue().get()
"""
LIMIT = 3.0  # seconds for the stacks of 16 ranks on 2 hosts
NOISE = 4  # a busy machine is slower


def stacks_json(job: Inside, *words: str, code: int = 0) -> dict[str, Any]:
    out, _ = job.exec("--json", *words, verb="stacks", code=code)
    return json.loads(out)


def check_stacks(job: Inside, ranks: int, hosts: list[str]) -> float:
    """Read the stacks of a job of `WAITING` on two nodes; return the seconds of a reading.

    Args:
        job: the job.
        ranks: the number of its ranks.
        hosts: the host names of its nodes.
    """
    begin = time.monotonic()
    out, err = job.exec(verb="stacks")
    seconds = time.monotonic() - begin
    lines = out.decode().splitlines()
    most = f"{ranks - 1} ranks" if ranks > 4 else "ranks 0-2"
    assert re.fullmatch(
        rf"{most} wait in queue\.get \(\w+\.py:14\); rank 3 is in decode \(\w+\.py:6\)", lines[0]
    ), lines
    assert lines[2].startswith("rank 3 (node ")
    assert lines[3].startswith("  decode (")
    assert any(re.fullmatch(r"  Thread-\d+ \(wait\) of rank 3:", line) for line in lines)
    assert err == b""
    data = stacks_json(job)
    assert (data["schema"], data["id"]) == (1, job.id)
    assert [each["rank"] for each in data["ranks"]] == list(range(ranks))
    assert all(each["answered"] and each["pid"] > 1 for each in data["ranks"])
    assert [len(each["threads"]) for each in data["ranks"]] == [2] * ranks
    per_node = ranks // len(hosts)
    assert [(each["node_rank"], each["host"]) for each in data["ranks"]] == [
        (rank // per_node, hosts[rank // per_node]) for rank in range(ranks)
    ]
    assert [each["ranks"] for each in data["groups"]] == [
        [3], [rank for rank in range(ranks) if rank != 3]
    ]  # fmt: skip
    assert data["groups"][0]["frames"][0]["function"] == "decode"
    begin = time.monotonic()
    one = stacks_json(job, "--rank", "3")
    seconds = min(seconds, time.monotonic() - begin)
    assert [each["rank"] for each in one["ranks"]] == [3]
    first = stacks_json(job, "--node", "0")
    assert {each["node_rank"] for each in first["ranks"]} == {0}
    return seconds
