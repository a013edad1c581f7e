"""Process groups use the job store, or an address, port or file that the script sets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import free_port, launch, script

from clusterjob.node.workers import torch_patches

FUNCTIONS = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = sys.argv[1]

def meet(form, *args, **options):
    dist.init_process_group("gloo", *args, **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    # one write per line: two processes share the pipe
    sys.stdout.write(f"{form}: all are {int(total.item())}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()

def tutorial(rank, world_size, form):
    # https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = PORT
    meet(form, rank=rank, world_size=world_size)

# https://github.com/pytorch/examples/blob/main/imagenet/main.py, --multiprocessing-distributed
def imagenet(local, url, form):
    meet(form, init_method=url, rank=RANK * 2 + local, world_size=WORLD * 2)

def processes(function, *args, method="fork"):
    mp.start_processes(function, args=args, nprocs=2, start_method=method)
"""

# The forms of a process group of two processes, by the number of workers: name and code.
FORMS = {
    1: {
        "spawned": "processes(tutorial, 2, 'spawned', method='spawn')",
        "forked": "processes(tutorial, 2, 'forked')",
        "imagenet by tcp": "processes(imagenet, 'tcp://127.0.0.1:' + PORT, 'imagenet by tcp')",
        "imagenet by env": "processes(imagenet, 'env://', 'imagenet by env')",
    },
    2: {
        "job store": "meet('job store')",
        "job store by other name": (
            "os.environ['MASTER_ADDR'] = 'localhost'; meet('job store by other name')"
        ),
        "tcp": "meet('tcp', init_method=f'tcp://127.0.0.1:{PORT}', rank=RANK, world_size=WORLD)",
        "file": (
            "meet('file', init_method='file://' + os.path.abspath('meeting'), "
            "rank=RANK, world_size=WORLD)"
        ),
        "own port": "os.environ['MASTER_PORT'] = PORT; meet('own port')",
    },
}


def group_script(directory: Path, last: str) -> Path:
    main = textwrap.indent(textwrap.dedent(last), "    ")
    return script(directory, f"{FUNCTIONS}\nif __name__ == '__main__':\n{main}\n")


@pytest.mark.parametrize("mode", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("nproc", FORMS)
def test_script_with_own_address_or_file_forms_process_groups(
    tmp_path: Path, nproc: int, mode: str
) -> None:
    code = "\n".join(FORMS[nproc].values())
    ended = launch(mode, nproc, [group_script(tmp_path, code), free_port()], tmp_path, code=0)
    formed = [form for form in FORMS[nproc] if f"{form}: all are 2" in ended.out]
    assert formed == list(FORMS[nproc]), ended.err
    assert not (tmp_path / "meeting").exists()  # an old file would block the next run


@pytest.mark.slow
def test_torchrun_started_by_worker_has_its_own_workers(tmp_path: Path) -> None:
    inner = group_script(tmp_path, "meet('inner')")
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
    ended = launch("exec", 1, ["--", *torchrun], tmp_path, code=0)
    assert ended.out.count("all are 2") == 2


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(
            "meet('late', init_method='tcp://127.0.0.1:' + PORT, rank=1, world_size=2)",
            id="init_method",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "os.environ['MASTER_PORT'] = PORT; os.environ['RANK'] = '1'; "
            "meet('late', rank=1, world_size=2)",
            id="variables",
        ),
    ],
)
def test_wait_for_missing_store_is_explained_within_seconds(tmp_path: Path, last: str) -> None:
    port = str(free_port())
    # The import of torch, which takes long on a busy machine, comes before.
    begin = "import pathlib, time; pathlib.Path('begin').write_text(str(time.monotonic()))"
    program = group_script(
        tmp_path, f"{begin}; import threading; threading.Timer(60, os._exit, [7]).start(); {last}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterjob.node", "--start", "fork", program, port],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with process:
        line = next(line for line in process.stderr if "no store answers" in line)
        waited = time.monotonic() - float((tmp_path / "begin").read_text())
        process.terminate()
        process.stderr.read()
    assert waited < torch_patches._WAITING_NOTICE * 4
    assert f"no store answers at 127.0.0.1:{port}, where this process waits for rank 0's" in line
    assert "; the job store is at 127.0.0.1:" in line


def test_port_of_job_store_means_the_job_store_whatever_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(torch_patches.STORE, "192.0.2.1:2345")
    assert torch_patches.served_at(2345) == "192.0.2.1"
    assert torch_patches.served_at(2346) is None
    monkeypatch.setenv(torch_patches.STORE, "")
    assert torch_patches.served_at(2345) is None
