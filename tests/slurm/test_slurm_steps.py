"""Tasks of a real srun: rank assignment, and process groups without an agent."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from launching import Run, rank_reports, run, script
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
            ctx.local_rank, ctx.local_world_size, ctx.world_size, ctx.node_rank, ctx.nnodes,
            ctx.source, total]))
"""


def srun(slurm: SlurmCluster, directory: Path, *argv: object, tool: str = "srun") -> Run:
    return run([tool, *argv], directory, slurm.environment)


@pytest.mark.slow
def test_tasks_on_uneven_nodes_in_cyclic_order_get_correct_ranks(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The names of the nodes do not resolve here; Slurm supplies node 0's address."""
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
    ranks = rank_reports(tmp_path, 5)
    assert [rank[-1] for rank in ranks] == [15.0] * 5
    assert {tuple(rank[2:6:3]) for rank in ranks} == {(5, "slurm")}
    by_node = [[rank[0] for rank in ranks if rank[3] == node] for node in range(2)]
    assert sorted(map(len, by_node)) in ([2, 3], [1, 4])
    assert [sorted(local) for local in by_node] == [list(range(len(local))) for local in by_node]
    assert all(rank[1] == len(by_node[rank[3]]) for rank in ranks)


LAUNCH = [sys.executable, "-m", "clusterjob", "launch", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("nodes", "command", "ranks"),
    [
        (3, [sys.executable], [[0, 1, 3, node, 3, "slurm", 6.0] for node in range(3)]),
        (2, LAUNCH, [[rank % 2, 2, 4, rank // 2, 2, "clusterjob", 10.0] for rank in range(4)]),
    ],
    ids=["task", "agent"],
)
def test_task_on_each_node_is_a_rank_or_starts_all_ranks(
    slurm: SlurmCluster, tmp_path: Path, nodes: int, command: list[str], ranks: list[list[Any]]
) -> None:
    argv = (f"-N{nodes}", "--ntasks-per-node=1", *command, script(tmp_path, MEET))
    ran = srun(slurm, tmp_path, *argv)
    assert ran.code == 0, ran.err
    assert rank_reports(tmp_path, len(ranks)) == ranks


@pytest.mark.slow
def test_srun_launcher_runs_plain_env_scripts_and_bootstrap(user: User) -> None:
    """The plain script uses only torch's variables, like init_distributed_mode of dino and mae.

    A script with bootstrap still detects Slurm.
    """
    user.patch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    plain = """
        import os, torch, torch.distributed as dist
        from datetime import timedelta
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, world, local = (int(os.environ[name]) for name in names)
        dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world,
                                timeout=timedelta(seconds=60))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print("total", int(total.item()), rank, local, os.environ["LOCAL_WORLD_SIZE"],
              os.environ["GROUP_WORLD_SIZE"])
        dist.barrier()
        dist.destroy_process_group()
    """
    tasks = 2
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
    assert [rank[-2:] for rank in rank_reports(user.directory, 2 * tasks)] == [
        ["slurm", float(total)]
    ] * (2 * tasks)


def test_task_keeps_master_addr_and_port_of_user(user: User) -> None:
    text = """
        import os
        print(*(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK")))
        os.execvp("env", ["env", "-u", "CLUSTERJOB_TASK_RANK", "true"])
    """
    output = user.run(
        text, "--launcher", "srun", "--setup", "export MASTER_ADDR=localhost MASTER_PORT=29511"
    ).stdout
    assert "localhost 29511 0" in output


def test_modules_in_workdir_do_not_shadow_clusterjob(user: User) -> None:
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
