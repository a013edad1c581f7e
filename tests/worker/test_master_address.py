"""Where the processes of a job meet: at the agents' store, or at an address, a port or a file of
the script's own.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hooked import MODES
from launching import free_port, launch, script

from clusterjob.node.workers import torch_patches

MEET = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = sys.argv[1]

def meet(*args, **options):
    dist.init_process_group("gloo", *args, **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"all are {int(total.item())}\\n")  # whole, where two processes write into one pipe
    sys.stdout.flush()
    dist.destroy_process_group()

def tutorial(rank, world_size):  # https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = PORT
    meet(rank=rank, world_size=world_size)

def imagenet(local, url):  # https://github.com/pytorch/examples/blob/main/imagenet/main.py, --multiprocessing-distributed
    meet(init_method=url, rank=RANK * 2 + local, world_size=WORLD * 2)
"""

# How the processes meet, and how many workers there are: each is to meet one other.
FORMS = {
    "spawned": (1, "mp.spawn(tutorial, args=(2,), nprocs=2)"),
    "forked": (1, "mp.start_processes(tutorial, args=(2,), nprocs=2, start_method='fork')"),
    "imagenet by tcp": (1, "mp.spawn(imagenet, args=('tcp://127.0.0.1:' + PORT,), nprocs=2)"),
    "imagenet by env": (1, "mp.spawn(imagenet, args=('env://',), nprocs=2)"),
    "own port": (2, "os.environ['MASTER_PORT'] = PORT; meet()"),
    "tcp": (2, "meet(init_method='tcp://127.0.0.1:' + PORT, rank=RANK, world_size=WORLD)"),
    "file": (
        2,
        "meet(init_method='file://' + os.path.abspath('meeting'), rank=RANK, world_size=WORLD)",
    ),
    "the job's, by another name": (2, "os.environ['MASTER_ADDR'] = 'localhost'; meet()"),
    "the job's": (2, "meet()"),
}


def meeting_script(directory: Path, last: str) -> Path:
    return script(
        directory,
        f"{MEET}\nif __name__ == '__main__':\n{textwrap.indent(textwrap.dedent(last), '    ')}\n",
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_a_script_that_names_its_own_meeting_point_meets_there(
    tmp_path: Path, form: str, mode: str
) -> None:
    nproc, last = FORMS[form]
    ended = launch(mode, nproc, [meeting_script(tmp_path, last), free_port()], tmp_path)
    assert ended.code == 0, ended.err
    assert "all are 2" in ended.out
    assert not (tmp_path / "meeting").exists()  # which would stop the next run


def test_workers_of_a_torchrun_that_a_worker_starts_are_its_own(tmp_path: Path) -> None:
    inner = meeting_script(tmp_path, "meet()")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        inner,
        "0",
    ]
    ended = launch("exec", 1, ["--", *torchrun], tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.count("all are 2") == 2


@pytest.mark.parametrize(
    ("last", "who"),
    [
        (
            "meet(init_method='tcp://127.0.0.1:' + PORT, rank=1, world_size=2)",
            "the address is that of init_method",
        ),
        (
            "os.environ['MASTER_PORT'] = PORT; os.environ['RANK'] = '1'; meet(rank=1, world_size=2)",
            "the script has set MASTER_PORT=PORT",
        ),
    ],
)
def test_a_wait_for_a_store_that_nobody_serves_is_explained_within_ten_seconds(
    tmp_path: Path, last: str, who: str
) -> None:
    port = str(free_port())
    program = meeting_script(
        tmp_path, f"import threading; threading.Timer(20, os._exit, [7]).start(); {last}"
    )
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterjob.node", "--start", "fork", program, port],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "nobody listens" in line)
        waited = time.monotonic() - begin
        process.terminate()
        process.stderr.read()
    assert waited < 10 + torch_patches._WAITING_NOTICE * 3  # the import of torch is not the wait
    assert (
        f"nobody listens at 127.0.0.1:{port}, where this process waits for rank 0's store (Connection refused)"
        in line
    )
    assert who.replace("PORT=PORT", f"PORT={port}") in line
    assert "(train.py line " in line
    assert "; the store of the job is at 127.0.0.1:" in line


def test_an_address_is_the_agents_where_name_and_port_lead_to_their_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(torch_patches.STORE, "127.0.0.1:2345")
    assert torch_patches.served_at("127.0.0.1", 2345) == "127.0.0.1"
    assert torch_patches.served_at("localhost", 2345) == "localhost"
    assert torch_patches.served_at("127.0.0.1", 2346) is None
    assert torch_patches.served_at("192.0.2.1", 2345) is None
    monkeypatch.setenv(torch_patches.STORE, "192.0.2.1:2345")
    assert torch_patches.served_at("localhost", 2345) is None  # another machine's
    monkeypatch.setenv(torch_patches.STORE, "")
    assert torch_patches.served_at("127.0.0.1", 2345) is None


def test_every_name_of_this_machine_is_the_agents_where_their_store_is_at_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_patches.STORE, "127.0.0.1:2345")
    assert torch_patches.served_at(own, 2345) == "127.0.0.1"
    assert torch_patches.served_at(own, 2346) is None


def test_the_file_of_a_meeting_that_the_script_has_removed_does_not_come_back(
    tmp_path: Path,
) -> None:
    ended = launch("exec", 2, [meeting_script(tmp_path, """
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=RANK, world_size=WORLD)
        dist.barrier()
        if RANK == 0:
            os.unlink("meeting")
        dist.barrier()
        dist.destroy_process_group()
    """), 0], tmp_path)  # fmt: skip
    assert ended.code == 0, ended.err
    assert not (tmp_path / "meeting").exists()


def test_localhost_is_the_agents_on_the_machine_that_serves_their_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_patches.STORE, f"{own}:2345")
    assert torch_patches.served_at("localhost", 2345) == own
