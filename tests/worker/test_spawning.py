"""clusterjob.spawn, launch --gpus, and multiprocessing processes with manual ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import (
    HOST,
    TEST_TIMEOUT,
    executable,
    finish,
    free_port,
    new_folder,
    run,
    script,
    start,
)
from preloaded import Preloaded
from procs import own_processes, wait_for_no_processes, wait_until
from ssh_network import python_without_torch

import clusterjob
from clusterjob import ClusterJobError, JobFailed
from clusterjob.errors import PlacementError, UsageError

MAIN = """
    import os, sys
    import clusterjob

    class Point:
        def __init__(self, x): self.x = x

    class Sad(Exception): pass

    def train(flag, scale=1):
        from clusterjob import bootstrap
        import torch
        with bootstrap.init() as ctx:
            model = ctx.wrap(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            print("trained on", ctx.source)
            devices = os.environ.get("CUDA_VISIBLE_DEVICES")
            return Point((ctx.rank, flag, scale, ctx.reduce(1, "sum"), devices, sys.argv[1:]))

    def fail():
        from clusterjob import bootstrap
        with bootstrap.init() as ctx:
            if ctx.rank == 1:
                raise Sad("no such layer")
            ctx.barrier()

    if __name__ == "__main__":
        points = clusterjob.spawn(train, args=(True,), kwargs={"scale": 3}, nprocs=2, gpus="4,5")
        assert all(isinstance(point, Point) for point in points)
        print([point.x for point in points])
        try:
            clusterjob.spawn(fail, nprocs=2)
        except Sad as error:
            cause = str(error.__cause__)
            print("sad:", error, "| rank 1:" in cause.replace("\\n", "| "), "in fail" in cause)
"""


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents and workers find no torch, whose import takes ten times longer than the rest."""
    without = new_folder(tmp_path / "without")
    (without / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    monkeypatch.setenv("PYTHONPATH", f"{without}:{os.environ['PYTHONPATH']}")


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put temporary files into a directory that the test can check."""
    folder = new_folder(tmp_path / "tmp")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_spawn_returns_objects_and_raises_exceptions_of_main_script(
    tmp_path: Path,
) -> None:
    ran = run([sys.executable, script(tmp_path, MAIN), "--epochs", 3], tmp_path, code=0)
    lines = ran.out.splitlines()
    expected = [(rank, True, 3, 2, "4,5", ["--epochs", "3"]) for rank in range(2)]
    assert any("trained on clusterjob" in line for line in lines)
    assert str(expected) in lines
    assert "sad: no such layer True True" in lines
    assert "Sad: no such layer" in ran.err  # the worker's own traceback
    assert not list(tmp_path.glob("clusterjob-*"))


def rank_variables() -> tuple[str, ...]:
    return tuple(
        os.environ.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    )


@pytest.mark.usefixtures("no_torch")
def test_spawned_processes_have_ranks_and_their_output_is_shown(
    own_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def print_and_return_pid() -> int:
        print("here")
        print("there", file=sys.stderr)
        return os.getpid()

    pids = clusterjob.spawn(print_and_return_pid, nprocs=3)
    assert len({*pids, os.getpid()}) == 4
    shown = capsys.readouterr()
    assert sum("here" in line for line in shown.out.splitlines()) >= 1
    assert "there" in shown.err
    assert clusterjob.spawn(rank_variables, nprocs=2, gpus="") == [
        ("0", "2", "0", ""),
        ("1", "2", "1", ""),
    ]
    assert clusterjob.spawn(rank_variables, gpus="") == [("0", "1", "0", "")]
    assert list(own_tmp.iterdir()) == []


@pytest.mark.usefixtures("no_torch")
def test_spawn_starts_one_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert clusterjob.spawn(rank_variables, gpus=[4, 6]) == [
        (rank, "2", rank, "4,6") for rank in "01"
    ]
    for gpus, why in (
        ("0,4", "GPU 0 is not available here: CUDA_VISIBLE_DEVICES=4,5,6"),
        ("4,4", "occurs twice"),
        ("4,,5", "empty or occurs"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            clusterjob.spawn(rank_variables, gpus=gpus)
        assert "\n" not in str(caught.value)


def test_invalid_arguments_are_refused_before_start(
    monkeypatch: pytest.MonkeyPatch, own_tmp: Path
) -> None:
    for nprocs in (0, -1, True, "2"):
        with pytest.raises(UsageError, match="nprocs"):
            clusterjob.spawn(rank_variables, nprocs=nprocs)
    with pytest.raises(ClusterJobError, match="cannot be pickled"):
        clusterjob.spawn(threading.Lock().acquire)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlacementError, match="already one process of a job"):
        clusterjob.spawn(rank_variables)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("CLUSTERJOB_NNODES", "2")
    monkeypatch.setenv("CLUSTERJOB_NODE_RANK", "0")
    monkeypatch.setenv("CLUSTERJOB_MASTER_ADDR", "10.0.0.1")
    with pytest.raises(UsageError, match="one of 2 nodes"):
        clusterjob.spawn(rank_variables)
    assert list(own_tmp.iterdir()) == []


@pytest.mark.usefixtures("no_torch")
def test_killed_process_stops_other_processes() -> None:
    def die() -> None:
        import time

        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(JobFailed, match=r"rank 1 .*killed by SIGKILL"):
        clusterjob.spawn(die, nprocs=2)
    assert own_processes() == []  # at once: spawn returns after all processes have ended


@pytest.mark.usefixtures("no_torch")
def test_two_spawns_at_once_work_on_platform_with_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM": "1", "GPU": "0", "0_HOST": "10.1.2.3", "0_PORT": "2222"}.items():
        monkeypatch.setenv(f"MLP_WORKER_{name}", value)
    monkeypatch.setenv("MLP_ROLE_INDEX", "0")

    def report_rank() -> tuple[int, str]:
        import time

        time.sleep(0.5)  # so that both spawns run at the same time
        return int(os.environ["RANK"]), os.environ["MASTER_ADDR"]

    with ThreadPoolExecutor(2) as pool:
        found = [
            job.result()
            for job in [pool.submit(clusterjob.spawn, report_rank, nprocs=2) for _ in range(2)]
        ]
    assert found == [[(0, "127.0.0.1"), (1, "127.0.0.1")]] * 2


def test_failed_start_error_contains_cause(
    monkeypatch: pytest.MonkeyPatch, own_tmp: Path, tmp_path: Path
) -> None:
    broken = executable(tmp_path / "python", "#!/bin/sh\necho no such machine >&2\nexit 3\n")
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(JobFailed, match="ended with 3: no such machine"):
        clusterjob.spawn(rank_variables)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ClusterJobError, match="cannot be started: No such file"):
        clusterjob.spawn(rank_variables)
    assert list(own_tmp.iterdir()) == []


WAITING = """
    import sys, time
    from pathlib import Path
    import clusterjob

    def wait(folder):
        import os
        Path(folder, os.environ["RANK"]).touch()
        time.sleep(600)

    if __name__ == "__main__":
        sys.executable = sys.argv[2]  # starts the agent
        clusterjob.spawn(wait, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_caller_leaves_no_processes(number: int, tmp_path: Path) -> None:
    argv = [script(tmp_path, WAITING), tmp_path, python_without_torch(tmp_path)]
    caller = start([sys.executable, *argv], tmp_path)
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), TEST_TIMEOUT)
    assert len(own_processes()) >= 4  # the caller, the agent, its forkserver, the workers
    os.kill(caller.pid, number)
    assert finish(caller).code == -number
    wait_for_no_processes(30)


# -- launch --gpus ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "requested", "expected"),
    [("2,3", "device=3", ["3"]), (None, "0,1", ["0,1", "0,1"])],
)
def test_launch_gpus_option_sets_visible_devices(
    visible: str | None, requested: str, expected: list[str], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "clusterjob",
        "launch",
        "--gpus",
        requested,
        "--",
        "sh",
        "-c",
        "echo $CUDA_VISIBLE_DEVICES >&2; echo $RANK",
    ]
    ran = run(
        command, tmp_path, {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}, code=0
    )
    assert sorted(line.split("] ")[1] for line in ran.out.splitlines()) == [
        str(rank) for rank in range(len(expected))
    ]
    assert expected[0] in ran.err


def test_launch_refuses_gpus_outside_visible_devices(tmp_path: Path) -> None:
    ran = run(
        [sys.executable, "-m", "clusterjob", "launch", "--gpus", "4,5", "train.py"],
        tmp_path,
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        code=2,
    )
    assert (
        ran.err.splitlines()[0]
        == "clusterjob: GPU 4, 5 is not available here: CUDA_VISIBLE_DEVICES=0,1"
    )


MLP = {"MLP_ROLE_INDEX": "0", "MLP_WORKER_NUM": "1", "MLP_WORKER_GPU": "8"}


@pytest.mark.parametrize(
    ("environ", "words", "seen"),
    [
        ({}, ["--require-gpus", "999", "ran.py"], "torch sees 0 of the 999"),
        ({}, ["--require-gpus", "9", "--start", "exec", "ran.py"], "torch sees 0 of the 9"),
        ({}, ["--require-gpus", "9", "--", "touch", "ran"], "this node has 0 of the 9"),
        (MLP, ["--nproc-per-node", "2", "ran.py"], "torch sees 0 of the 2"),
        (MLP, ["--nproc-per-node", "99", "ran.py"], "torch sees 0 of the 8"),
    ],
)
def test_workers_without_the_promised_gpus_do_not_start(
    tmp_path: Path, environ: dict[str, str], words: list[str], seen: str
) -> None:
    (tmp_path / "ran.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "clusterjob", "launch", *words]
    ran = run(command, tmp_path, environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert (ran.code, (tmp_path / "ran").exists()) == (1, False)
    line = ran.err.splitlines()[0]
    assert f"{seen} GPUs" in line
    for word in ("torch ", "driver ", "CUDA_VISIBLE_DEVICES ", "--no-require-gpus", HOST):
        assert word in line


@pytest.mark.parametrize("words", [["--require-gpus", "0"], ["--nproc-per-node", "cpu"]])
def test_workers_start_without_gpus_where_launch_requires_none(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "ran.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "clusterjob", "launch", *words, "ran.py"]
    ran = run(command, tmp_path, MLP | {"CUDA_VISIBLE_DEVICES": ""})
    assert (ran.code, (tmp_path / "ran").exists()) == (0, True), ran.err


# -- multiprocessing processes with manual ranks ---------------------------------------------------

MANUAL_RANKS = """
    import os, sys
    import torch
    import torch.multiprocessing as mp
    from clusterjob import bootstrap

    def train(rank, world_size, rounds):
        for _ in range(rounds):
            with bootstrap.init(rank=rank, world_size=world_size, timeout=60) as ctx:
                assert (ctx.rank, ctx.local_rank) == (rank, rank)
                assert (ctx.local_world_size, ctx.nnodes) == (world_size, 1)
                assert ctx.master_addr == os.environ.get("MASTER_ADDR", "127.0.0.1")
                if ctx.reduce(1, "sum") != world_size:
                    raise SystemExit("not all were there")
        print("done", flush=True)

    if __name__ == "__main__":
        method, *port = sys.argv[1:]
        if port:  # as in torch's tutorial
            os.environ["MASTER_ADDR"], [os.environ["MASTER_PORT"]] = "localhost", port
        context = mp.get_context(method)
        context.set_forkserver_preload(["torch.distributed"])
        for _ in range(2):
            several = [(rank, 2, 2 - len(port)) for rank in range(2)]
            workers = [context.Process(target=train, args=each) for each in several]
            for process in workers: process.start()
            for process in workers: process.join()
            assert [process.exitcode for process in workers] == [0, 0]
"""


@pytest.mark.parametrize(
    ("method", "has_port"), [("fork", False), ("forkserver", False), ("fork", True)]
)
def test_multiprocessing_ranks_need_no_master_addr(
    method: str, has_port: bool, tmp_path: Path, preloaded: Preloaded
) -> None:
    port = [free_port()] if has_port else []
    ran = preloaded.run([script(tmp_path, MANUAL_RANKS), method, *port], tmp_path, code=0)
    assert ran.out.split() == ["done"] * 4


WITHOUT_RANK_0 = """
    import multiprocessing
    from clusterjob import bootstrap
    from clusterjob.errors import RendezvousError, PlacementError

    def join_rank_1():
        try:
            bootstrap.init(rank=1, world_size=2, timeout=0.5)
        except RendezvousError as error:
            print(error, flush=True)

    if __name__ == "__main__":
        child = multiprocessing.get_context("fork").Process(target=join_rank_1)
        child.start()
        child.join()
        try:
            bootstrap.init(rank=1, world_size=2)
        except PlacementError as error:
            print(error)
"""


def test_manual_rank_without_rank_0_or_without_parent_is_refused(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    ran = preloaded.run([script(tmp_path, WITHOUT_RANK_0)], tmp_path, code=0)
    late, alone = ran.out.splitlines()
    assert "rank 1 on " in late
    assert "cannot reach rank 0 at 127.0.0.1:" in late
    assert "Connection refused; gave up after " in late
    assert "MASTER_ADDR" in alone
