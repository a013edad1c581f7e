"""clusterjob.spawn: functions of this very program in processes of this machine; and processes of
multiprocessing that find each other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import PATIENCE, finish, free_port, run, script, start
from procs import nothing_left, own_marked, wait_until

import clusterjob
from clusterjob import ClusterJobError, JobFailed
from clusterjob.errors import PlaceError, UsageError

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
            return Point((ctx.rank, flag, scale, ctx.reduce(1, "sum"), os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[1:]))

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
            print("sad:", error, "| rank 1:" in str(error.__cause__).replace("\\n", "| "), "in fail" in str(error.__cause__))
"""


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have temporary files lie where the test can look."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_functions_and_classes_of_main_travel_and_come_back_with_an_exception(
    tmp_path: Path,
) -> None:
    ran = run([sys.executable, script(tmp_path, MAIN), "--epochs", 3], tmp_path)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    places = [(rank, True, 3, 2, "4,5", ["--epochs", "3"]) for rank in range(2)]
    assert any("trained on clusterjob" in line for line in lines)
    assert str(places) in lines
    assert "sad: no such layer True True" in lines
    assert "Sad: no such layer" in ran.err  # its own words, as it said them
    assert not list(tmp_path.glob("clusterjob-*"))


def place() -> tuple[str, ...]:
    return tuple(
        os.environ.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    )


def test_each_process_has_its_place_and_what_it_prints_is_shown(
    own_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell() -> int:
        print("here")
        print("there", file=sys.stderr)
        return os.getpid()

    pids = clusterjob.spawn(tell, nprocs=3)
    assert len({*pids, os.getpid()}) == 4
    shown = capsys.readouterr()
    assert sum("here" in line for line in shown.out.splitlines()) >= 1
    assert "there" in shown.err
    assert clusterjob.spawn(place, nprocs=2, gpus="") == [("0", "2", "0", ""), ("1", "2", "1", "")]
    assert list(own_tmp.iterdir()) == []


def test_gpus_say_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert clusterjob.spawn(place, gpus=[4, 6]) == [(rank, "2", rank, "4,6") for rank in "01"]
    for gpus, why in (
        ("0,4", "GPU 0 is not to be had here: CUDA_VISIBLE_DEVICES=4,5,6"),
        ("4,4", "double entry"),
        ("4,,5", "empty or a double"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            clusterjob.spawn(place, gpus=gpus)
        assert "\n" not in str(caught.value)


def test_one_process_where_there_is_no_gpu() -> None:
    assert clusterjob.spawn(place, gpus="") == [("0", "1", "0", "")]


def test_what_cannot_be_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, own_tmp: Path
) -> None:
    for nprocs in (0, -1, True, "2"):
        with pytest.raises(UsageError, match="nprocs"):
            clusterjob.spawn(place, nprocs=nprocs)
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
    with pytest.raises(PlaceError, match="one process of a job already"):
        clusterjob.spawn(place)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("CLUSTERJOB_NNODES", "2")
    monkeypatch.setenv("CLUSTERJOB_NODE_RANK", "0")
    monkeypatch.setenv("CLUSTERJOB_MASTER_ADDR", "10.0.0.1")
    with pytest.raises(UsageError, match="one of 2 nodes"):
        clusterjob.spawn(place)
    assert list(own_tmp.iterdir()) == []


def test_a_process_that_is_killed_stops_the_others() -> None:
    def die() -> None:
        import time

        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(JobFailed, match=r"rank 1 .*killed by SIGKILL"):
        clusterjob.spawn(die, nprocs=2)
    assert own_marked() == []  # at once: nobody is left to be waited for


def test_several_at_once_on_a_platform_s_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM": "1", "GPU": "0", "0_HOST": "10.1.2.3", "0_PORT": "2222"}.items():
        monkeypatch.setenv(f"MLP_WORKER_{name}", value)
    monkeypatch.setenv("MLP_ROLE_INDEX", "0")

    def meet() -> tuple[int, str]:
        import time

        time.sleep(0.5)  # so that they are there at the same time
        return int(os.environ["RANK"]), os.environ["MASTER_ADDR"]

    with ThreadPoolExecutor(2) as pool:
        found = [
            job.result()
            for job in [pool.submit(clusterjob.spawn, meet, nprocs=2) for _ in range(2)]
        ]
    assert found == [[(0, "127.0.0.1"), (1, "127.0.0.1")]] * 2


def test_a_start_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, own_tmp: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such machine >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(JobFailed, match="ended with 3: no such machine"):
        clusterjob.spawn(place)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ClusterJobError, match="cannot be started: No such file"):
        clusterjob.spawn(place)
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
        clusterjob.spawn(wait, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_who_calls_takes_its_processes_along(number: int, tmp_path: Path) -> None:
    caller = start([sys.executable, script(tmp_path, WAITING), tmp_path], tmp_path)
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), PATIENCE)
    assert len(own_marked()) >= 4  # the caller, the agent, its starter, the workers
    os.kill(caller.pid, number)
    assert finish(caller).code == -number
    nothing_left(30)


# -- one machine by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "asked", "told"), [("2,3", "3", ["3"]), (None, "0,1", ["0,1", "0,1"])]
)
def test_launch_takes_gpus(
    visible: str | None, asked: str, told: list[str], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "clusterjob",
        "launch",
        "--gpus",
        asked,
        "--",
        "sh",
        "-c",
        "echo $CUDA_VISIBLE_DEVICES >&2; echo $RANK",
    ]
    ran = run(command, tmp_path, {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {})
    assert ran.code == 0, ran.err
    assert sorted(line.split("] ")[1] for line in ran.out.splitlines()) == [
        str(rank) for rank in range(len(told))
    ]
    assert told[0] in ran.err


def test_launch_refuses_gpus_that_are_not_its_own(tmp_path: Path) -> None:
    ran = run(
        [sys.executable, "-m", "clusterjob", "launch", "--gpus", "4,5", "train.py"],
        tmp_path,
        {"CUDA_VISIBLE_DEVICES": "0,1"},
    )
    assert ran.code == 2
    assert (
        ran.err.splitlines()[0]
        == "clusterjob: GPU 4, 5 is not to be had here: CUDA_VISIBLE_DEVICES=0,1"
    )


# -- processes of multiprocessing ----------------------------------------------------------------------------------------------

BY_HAND = """
    import sys
    import torch
    import torch.multiprocessing as mp
    from clusterjob import bootstrap

    def train(rank, world_size, rounds):
        for _ in range(rounds):
            with bootstrap.init(rank=rank, world_size=world_size, timeout=60) as ctx:
                assert (ctx.rank, ctx.local_rank, ctx.local_world_size, ctx.nnodes) == (rank, rank, world_size, 1)
                if ctx.reduce(1, "sum") != world_size:
                    raise SystemExit("not all were there")
        print("done", flush=True)

    if __name__ == "__main__":
        context = mp.get_context(sys.argv[1])
        for _ in range(2):
            processes = [context.Process(target=train, args=(rank, 2, 2)) for rank in range(2)]
            for process in processes: process.start()
            for process in processes: process.join()
            assert [process.exitcode for process in processes] == [0, 0]
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_of_one_parent_need_no_address(method: str, tmp_path: Path) -> None:
    ran = run([sys.executable, script(tmp_path, BY_HAND), method], tmp_path)
    assert ran.code == 0, ran.err
    assert ran.out.split() == ["done"] * 4


AS_TORCH_S_TUTORIAL = """
    import os
    import torch.multiprocessing as mp
    from clusterjob import bootstrap

    def train(rank, world_size):
        with bootstrap.init(rank=rank, world_size=world_size, timeout=60) as ctx:
            assert (ctx.local_rank, ctx.local_world_size, ctx.nnodes, ctx.master_addr) == (rank, world_size, 1, "localhost")
            assert ctx.reduce(1, "sum") == world_size

    if __name__ == "__main__":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
        mp.spawn(train, args=(2,), nprocs=2)
"""


def test_a_rank_by_hand_at_localhost_is_a_local_rank(tmp_path: Path) -> None:
    ran = run(
        [sys.executable, script(tmp_path, AS_TORCH_S_TUTORIAL.replace("{port}", str(free_port())))],
        tmp_path,
    )
    assert ran.code == 0, ran.err


LOST = """
    import multiprocessing
    from clusterjob import bootstrap
    from clusterjob.errors import GangError, PlaceError

    def come():
        try:
            bootstrap.init(rank=1, world_size=2, timeout=0.5)
        except GangError as error:
            print(error, flush=True)

    if __name__ == "__main__":
        child = multiprocessing.get_context("fork").Process(target=come)
        child.start()
        child.join()
        try:
            bootstrap.init(rank=1, world_size=2)
        except PlaceError as error:
            print(error)
"""


def test_rank_0_that_does_not_come_is_an_error_and_so_is_a_place_without_a_parent(
    tmp_path: Path,
) -> None:
    ran = run([sys.executable, script(tmp_path, LOST)], tmp_path)
    assert ran.code == 0, ran.err
    late, alone = ran.out.splitlines()
    assert "rank 1 has not heard of rank 0 among its parent's processes" in late
    assert "MASTER_ADDR" in alone


def test_two_groups_of_one_parent_at_once_are_refused(tmp_path: Path) -> None:
    code = """
    import multiprocessing, sys
    from clusterjob.worker import siblings
    from clusterjob.errors import GangError

    def lead(ready, go):
        siblings.meet(0)
        ready.set()
        go.wait(60)

    def lead_too():
        try:
            siblings.meet(0)
        except GangError as error:
            print(error, flush=True)

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        ready, go = context.Event(), context.Event()
        first = context.Process(target=lead, args=(ready, go))
        first.start()
        ready.wait(60)
        second = context.Process(target=lead_too)
        second.start()
        second.join()
        go.set()
        first.join()
    """
    ran = run([sys.executable, script(tmp_path, code)], tmp_path)
    assert ran.code == 0, ran.err
    assert "two groups at once need addresses" in ran.out
