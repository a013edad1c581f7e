"""Process groups use the job store, or an address, port or file that the script sets."""

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

FUNCTIONS = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = sys.argv[1]

def meet(*args, **options):
    dist.init_process_group("gloo", *args, **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    # one write per line: two processes share the pipe
    sys.stdout.write(f"all are {int(total.item())}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()

def tutorial(rank, world_size):  # https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = PORT
    meet(rank=rank, world_size=world_size)

# https://github.com/pytorch/examples/blob/main/imagenet/main.py, --multiprocessing-distributed
def imagenet(local, url):
    meet(init_method=url, rank=RANK * 2 + local, world_size=WORLD * 2)
"""

# Number of workers and the code that forms a process group of two processes.
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
    "job store by other name": (2, "os.environ['MASTER_ADDR'] = 'localhost'; meet()"),
    "job store": (2, "meet()"),
}


def group_script(directory: Path, last: str) -> Path:
    main = textwrap.indent(textwrap.dedent(last), "    ")
    return script(directory, f"{FUNCTIONS}\nif __name__ == '__main__':\n{main}\n")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_script_with_own_address_or_file_forms_process_group(
    tmp_path: Path, form: str, mode: str
) -> None:
    nproc, last = FORMS[form]
    ended = launch(mode, nproc, [group_script(tmp_path, last), free_port()], tmp_path)
    assert ended.code == 0, ended.err
    assert "all are 2" in ended.out
    assert not (tmp_path / "meeting").exists()  # an old file would block the next run


def test_torchrun_started_by_worker_has_its_own_workers(tmp_path: Path) -> None:
    inner = group_script(tmp_path, "meet()")
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
    ("last", "cause"),
    [
        (
            "meet(init_method='tcp://127.0.0.1:' + PORT, rank=1, world_size=2)",
            "the address comes from init_method",
        ),
        (
            (
                "os.environ['MASTER_PORT'] = PORT; os.environ['RANK'] = '1'; "
                "meet(rank=1, world_size=2)"
            ),
            "the script has set MASTER_PORT=PORT",
        ),
    ],
)
def test_wait_for_missing_store_is_explained_within_10_s(
    tmp_path: Path, last: str, cause: str
) -> None:
    port = str(free_port())
    program = group_script(
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
        line = next(line for line in process.stderr if "no process listens" in line)
        waited = time.monotonic() - begin
        process.terminate()
        process.stderr.read()
    assert waited < 10 + torch_patches._WAITING_NOTICE * 3  # the import of torch takes time, too
    assert (
        f"no process listens at 127.0.0.1:{port}, "
        "where this process waits for rank 0's store (Connection refused)" in line
    )
    assert cause.replace("PORT=PORT", f"PORT={port}") in line
    assert "(train.py line " in line
    assert "; the job store is at 127.0.0.1:" in line


def test_address_is_job_store_if_host_and_port_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(torch_patches.STORE, "127.0.0.1:2345")
    assert torch_patches.served_at("127.0.0.1", 2345) == "127.0.0.1"
    assert torch_patches.served_at("localhost", 2345) == "localhost"
    assert torch_patches.served_at("127.0.0.1", 2346) is None
    assert torch_patches.served_at("192.0.2.1", 2345) is None
    monkeypatch.setenv(torch_patches.STORE, "192.0.2.1:2345")
    assert torch_patches.served_at("localhost", 2345) is None  # the store is on another machine
    monkeypatch.setenv(torch_patches.STORE, "")
    assert torch_patches.served_at("127.0.0.1", 2345) is None


def test_own_address_is_job_store_if_store_is_at_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_patches.STORE, "127.0.0.1:2345")
    assert torch_patches.served_at(own, 2345) == "127.0.0.1"
    assert torch_patches.served_at(own, 2346) is None


def test_init_file_removed_by_script_is_not_created_again(
    tmp_path: Path,
) -> None:
    ended = launch("exec", 2, [group_script(tmp_path, """
        url = "file://" + os.path.abspath("meeting")
        dist.init_process_group("gloo", init_method=url, rank=RANK, world_size=WORLD)
        dist.barrier()
        if RANK == 0:
            os.unlink("meeting")
        dist.barrier()
        dist.destroy_process_group()
    """), 0], tmp_path)  # fmt: skip
    assert ended.code == 0, ended.err
    assert not (tmp_path / "meeting").exists()


def test_localhost_is_job_store_on_machine_of_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_patches.STORE, f"{own}:2345")
    assert torch_patches.served_at("localhost", 2345) == own
