"""Faults of init_process_group after the rendezvous: dead and unreachable ranks are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import HOST, finish, last_message, rank_variables, script, start
from namespaces import machines, skip_reason
from procs import WITH_TORCH, MakeJob

pytestmark = pytest.mark.slow

# Rank 1 stops itself when it calls init_process_group.
INIT = """
    import os, pathlib, signal, time
    import torch.distributed as dist
    from clusterjob import bootstrap

    make = dist.init_process_group
    def faulty(*args, **kwargs):
        if os.environ["RANK"] == "1":
            pathlib.Path("pid1").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return make(*args, **kwargs)
    dist.init_process_group = faulty
    with bootstrap.init(timeout=9) as ctx:
        print("met", ctx.rank, flush=True)
"""


def test_rank_stopped_in_init_process_group_is_root_cause(make_job: MakeJob) -> None:
    job = make_job(2)
    job.run("--nproc-per-node", "2", job.script(INIT), python=WITH_TORCH, code=1)
    pid = job.path("pid1").read_text()
    notice = (
        f"waiting for rank 1 on {HOST} (pid {pid}): "
        "joined the rendezvous, no answer while the process group is made: dead or stuck; "
    )
    errs = [job.log(rank // 2, f"rank{rank}.err") for rank in (0, 2, 3)]
    notices = [
        line
        for err in errs
        for line in err.splitlines()
        if line.startswith(f"clusterjob: {notice}") and line.endswith("s so far")
    ]
    assert len(notices) == 1, errs  # only one rank prints
    assert all(f"RanksMissingError: {notice}gave up after " in last_message(err) for err in errs), (
        errs
    )
    assert (
        job.result["failure"]["rank"],
        sorted(each["rank"] for each in job.result["consequences"]),
    ) == (1, [0, 2, 3])
    assert "the process is stopped" in job.result["reason"]


def test_two_machines_that_cannot_connect_are_named(tmp_path: Path) -> None:
    """Ranks 1 and 2 reach rank 0, but packets between them are lost, like in a firewall."""
    if why := skip_reason():
        pytest.skip(why)
    text = INIT.replace('os.environ["RANK"] == "1"', "False").replace(
        "flush=True)", "flush=True); time.sleep(12 if ctx.rank == 0 else 0)"
    )
    with machines(3) as three:
        for one, other in ((three[1], three[2]), (three[2], three[1])):
            lost = (
                f"ip neigh replace {other.address} lladdr 02:00:00:00:00:09 dev eth0 nud permanent"
            )
            subprocess.run(one.command(*lost.split()), capture_output=True, check=True)
        path = script(tmp_path, text)
        each = [
            start(
                machine.command(sys.executable, path),
                tmp_path,
                rank_variables(rank, 3, 29500, 1) | {"MASTER_ADDR": three[0].address},
            )
            for rank, machine in enumerate(three)
        ]
        ended = [finish(process) for process in each]
    assert [process.code for process in ended] == [0, 1, 1], ended
    notices = [
        line
        for process in ended
        for line in process.err.splitlines()
        if line.startswith("clusterjob: the process group is not made: ")
    ]
    assert len(notices) == 1, ended
    pids = [process.pid for process in each]
    assert (
        "2 of 3 processes wait for each other, such as "
        f"rank 1 on {HOST} (pid {pids[1]}) and rank 2 on {HOST} (pid {pids[2]}): " in notices[0]
    )
    assert "can their machines reach each other" in notices[0]
