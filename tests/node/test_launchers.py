"""Run an all-reduce with clusterjob.bootstrap under each launcher that is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import environment, free_port, rank_reports, run, script

TRAIN = """
    import json
    import os
    import sys
    from pathlib import Path
    import torch
    from clusterjob import bootstrap

    with bootstrap.init(timeout=90) as ctx:
        total = ctx.reduce(torch.tensor([ctx.rank + 1.0]), "sum").item()
        Path(f"rank{ctx.rank}.json").write_text(json.dumps({
            "place": [
                ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size,
                ctx.node_rank, ctx.nnodes,
            ],
            "source": ctx.source, "total": total,
            "threads": torch.get_num_threads(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        }))
"""


def require_program(program: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: run `make packages`")
    return program


def check_ranks(directory: Path, world: int, source: str) -> list[dict[str, Any]]:
    ranks = rank_reports(directory, world)
    for number, rank in enumerate(ranks):
        assert rank["place"] == [number, number, world, world, 0, 1]
        assert (rank["source"], rank["total"]) == (source, world * (world + 1) / 2)
        assert rank["interface"] == "lo"
    return ranks


ROOT_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(False, id="no master"),
        pytest.param(True, id="master given", marks=pytest.mark.slow),
    ],
)
def test_bootstrap_under_mpirun_of_open_mpi_trains_all_ranks(tmp_path: Path, given: bool) -> None:
    extra = ROOT_MPI | (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if given else {}
    )
    run(
        [require_program("mpirun.openmpi"), "-n", "2", sys.executable, script(tmp_path, TRAIN)],
        tmp_path,
        extra,
        code=0,
    )
    check_ranks(tmp_path, 2, "openmpi")


@pytest.mark.mpi
@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param(False, id="plain", marks=pytest.mark.slow),
        pytest.param(True, id="inside a shell"),
    ],
)
def test_bootstrap_under_mpiexec_of_mpich_trains_all_ranks(tmp_path: Path, wrapped: bool) -> None:
    path = script(tmp_path, TRAIN)
    command = (
        ["sh", "-c", f"cd . && '{sys.executable}' '{path}'; exit $?"]
        if wrapped
        else [sys.executable, path]
    )
    run([require_program("mpirun.mpich"), "-n", "2", *command], tmp_path, code=0)
    check_ranks(tmp_path, 2, "hydra")


@pytest.mark.mpi
def test_mpich_jobs_on_one_host_get_different_ports(tmp_path: Path) -> None:
    """Hydra sets no job id; the process behind PMI_FD distinguishes two jobs."""
    code = (
        "from clusterjob.node.environments.this_node import detect, look_up; import os; "
        "print(detect(look_up(os.environ)).placement.topology.master_port)"
    )
    ports = [
        set(
            run(
                [require_program("mpirun.mpich"), "-n", "2", sys.executable, "-c", code], tmp_path
            ).out.split()
        )
        for _ in range(3)
    ]
    assert all(len(each) == 1 for each in ports)
    assert len(set.union(*ports)) > 1  # all equal by chance: 1 in 144 million


def test_cores_are_divided_among_processes_of_node(tmp_path: Path) -> None:
    """Without its own share, each process would start as many threads as there are cores."""
    path = script(tmp_path, TRAIN)
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = []
    for rank in range(2):
        env = environment(tmp_path, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        del env["OMP_NUM_THREADS"]
        started.append(subprocess.Popen([sys.executable, path], cwd=tmp_path, env=env))
    assert [process.wait(120) for process in started] == [0, 0]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [rank["threads"] for rank in check_ranks(tmp_path, 2, "env")] == [share, share]


def test_commands_without_installed_packages_are_refused_in_one_line(tmp_path: Path) -> None:
    assert importlib.util.find_spec("typer") is not None
    argv = [sys.executable, "-S", "-m", "clusterjob", "env"]  # -S: no installed packages
    refused = run(argv, tmp_path, {}, code=2)
    assert "clusterjob: error: without an installation only launch works\n" in refused.err
