"""Under a real srun: the place of each task, and processes that meet with no agent."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from launching import Run, run, script, told
from slurm_cluster import SlurmCluster
from slurm_user import User

MEET = """
    import json
    from pathlib import Path
    import torch
    from clusterjob import bootstrap

    with bootstrap.init(timeout=90) as ctx:
        total = ctx.reduce(torch.tensor([ctx.rank + 1.0]), "sum").item()
        Path(f"rank{ctx.rank}.json").write_text(json.dumps([
            ctx.local_rank, ctx.local_world_size, ctx.world_size, ctx.node_rank, ctx.nnodes, ctx.source, total]))
"""
ENV = [sys.executable, "-m", "clusterjob", "env", "--json"]


def srun(slurm: SlurmCluster, directory: Path, *argv: object, tool: str = "srun") -> Run:
    return run([tool, *argv], directory, slurm.environment)


def said(directory: Path, tasks: int) -> list[dict[str, Any]]:
    """Return what each task has said, which srun was told to keep apart: it merges lines anyhow."""
    return [json.loads((directory / f"said.{task}").read_text()) for task in range(tasks)]


def test_tasks_on_uneven_nodes_in_a_cyclic_order_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The nodes' names do not resolve here: Slurm tells node 0's address."""
    ran = srun(
        slurm,
        tmp_path,
        "-N2",
        "-n5",
        "-m",
        "cyclic",
        "-w",
        "n2,n3",
        sys.executable,
        script(tmp_path, MEET),
    )
    assert ran.code == 0, ran.err
    ranks = told(tmp_path, 5)
    assert [rank[-1] for rank in ranks] == [15.0] * 5
    assert {tuple(rank[2:6:3]) for rank in ranks} == {(5, "slurm")}
    by_node = [[rank[0] for rank in ranks if rank[3] == node] for node in range(2)]
    assert sorted(map(len, by_node)) in ([2, 3], [1, 4])
    assert [sorted(local) for local in by_node] == [list(range(len(local))) for local in by_node]
    assert all(rank[1] == len(by_node[rank[3]]) for rank in ranks)


def test_tasks_alone_on_their_nodes_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    ran = srun(
        slurm, tmp_path, "-N3", "--ntasks-per-node=1", sys.executable, script(tmp_path, MEET)
    )
    assert ran.code == 0, ran.err
    assert told(tmp_path, 3) == [[0, 1, 3, node, 3, "slurm", 6.0] for node in range(3)]


def test_an_agent_on_each_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    launch = [
        "env",
        "CLUSTERJOB_TOKEN=secret",
        sys.executable,
        "-m",
        "clusterjob",
        "launch",
        "--nproc-per-node",
        "2",
    ]
    ran = srun(slurm, tmp_path, "-N2", "--ntasks-per-node=1", *launch, script(tmp_path, MEET))
    assert ran.code == 0, ran.err
    assert told(tmp_path, 4) == [
        [rank % 2, 2, 4, rank // 2, 2, "clusterjob", 10.0] for rank in range(4)
    ]


def test_torchrun_inside_a_step_is_torchrun(slurm: SlurmCluster, tmp_path: Path) -> None:
    ran = srun(
        slurm,
        tmp_path,
        "-N1",
        "-n1",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        script(tmp_path, MEET),
    )
    assert ran.code == 0, ran.err
    assert told(tmp_path, 2) == [[rank, 2, 2, 0, 1, "torchrun", 3.0] for rank in range(2)]


def test_a_step_on_some_nodes_of_a_job_has_its_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    """And the batch script around it, where the same variables are set, has no place at all."""
    words = " ".join(map(repr, ENV))
    (tmp_path / "batch.sh").write_text(
        f"#!/bin/bash\n{words} > batch.json\nsrun -N2 -n2 -w n3,n4 -o said.%t {words}\n"
    )
    ran = srun(slurm, tmp_path, "--wait", "-N4", "-n8", "-o", "out", "batch.sh", tool="sbatch")
    assert ran.code == 0, ran.err + (tmp_path / "out").read_text()
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert (batch["source"], batch["level"], batch["conflicts"]) == ("none", "none", [])
    assert "SLURM_PROCID" in {item["variable"] for item in batch["ignored"]}
    assert [
        (each["level"], each["nnodes"], each["node_rank"], each["master_addr"])
        for each in said(tmp_path, 2)
    ] == [("node", 2, 0, "n3"), ("node", 2, 1, "n3")]


@pytest.mark.parametrize("words", [("env", "MASTER_ADDR=localhost"), ("env", "-u", "SLURM_NODEID")])
def test_what_is_wrong_is_said_by_every_task(
    slurm: SlurmCluster, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ran = srun(slurm, tmp_path, "-N2", "-n4", "-o", "said.%t", *words, *ENV)
    assert ran.code == 1
    assert all(each["conflicts"] and each["source"] == "slurm" for each in said(tmp_path, 4))


def test_a_shell_in_an_allocation_is_no_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    ran = srun(slurm, tmp_path, "-N2", "-n2", *ENV, tool="salloc")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["level"] == "none"


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2])
def test_srun_launcher_runs_plain_env_scripts_and_bootstrap(user: User, tasks: int) -> None:
    """As in dino's and mae's init_distributed_mode: nothing but torch's own variables. A script
    with bootstrap is Slurm's still.
    """
    user.patch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    plain = """
        import os, torch, torch.distributed as dist
        from datetime import timedelta
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print("total", int(total.item()), rank, local, os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"])
        dist.barrier()
        dist.destroy_process_group()
    """
    options = ("--nodes", "2", "--nproc-per-node", str(tasks), "--launcher", "srun")
    out = user.run(plain, *options).stdout
    total = sum(range(1, 2 * tasks + 1))
    expected = [
        f"total {total} {node * tasks + local} {local} {tasks} 2"
        for node in range(2)
        for local in range(tasks)
    ]
    assert sorted(
        line.partition("] ")[2] for line in out.splitlines() if "total" in line
    ) == sorted(expected)
    (user.directory / "meet.py").write_text(textwrap.dedent(MEET))
    user("run", "--cluster", "slurm", *options, "meet.py")
    assert [rank[-2:] for rank in told(user.directory, 2 * tasks)] == [["slurm", float(total)]] * (
        2 * tasks
    )


def test_task_keeps_what_the_user_says_of_the_meeting_point(user: User) -> None:
    text = """
        import os
        print(*(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK")))
        os.execvp("env", ["env", "-u", "CLUSTERJOB_TASK_RANK", "true"])
    """
    said = user.run(
        text, "--launcher", "srun", "--setup", "export MASTER_ADDR=localhost MASTER_PORT=29511"
    ).stdout
    assert "localhost 29511 0" in said


def test_module_in_the_working_directory_is_not_taken_for_ours(user: User) -> None:
    user.path("clone").mkdir()
    for name in ("clusterjob.py", "os.py", "dataclasses.py"):
        user.path(f"clone/{name}").write_text(
            "raise SystemExit('imported from the working directory')\n"
        )
    assert (
        "fine"
        in user(
            "run",
            "--cluster",
            "slurm",
            "--launcher",
            "srun",
            "--workdir",
            "clone",
            "--",
            "echo",
            "fine",
        ).stdout
    )
