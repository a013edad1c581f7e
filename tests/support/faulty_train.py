"""A worker that fails in another way in every round: python faulty_train.py FAULT,FAULT,..."""

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

fault = sys.argv[1].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
guilty = os.environ["RANK"] == "1"


def join(seconds: float = 100) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def exception() -> None:
    raise ValueError("boom")


def handled_errors() -> None:
    for error in (ImportError("flash_attn"), MemoryError(), torch.OutOfMemoryError("CUDA")):
        traceback.print_exception(error.with_traceback(None))
    raise ValueError("boom")


def own_excepthook() -> None:
    sys.excepthook = lambda *_: print("something went wrong", file=sys.stderr)
    raise ValueError("boom")


def syntax() -> None:
    compile("x = = 1", "model.py", "exec")


def missing_module() -> None:
    import module_that_does_not_exist  # noqa: F401


def arguments() -> None:
    import argparse

    argparse.ArgumentParser().parse_args(["--unknown"])


def host_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
    bytearray(1 << 41)


def tensor_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def device_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.14 GiB"
        " of which 1.00 GiB is free. If reserved but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def device() -> None:
    raise torch.AcceleratorError(
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"
        " asynchronously reported at some other API call, so the stacktrace below might be"
        " incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )


def full_disk() -> None:
    with open("/dev/full", "w") as stream:
        stream.write("a checkpoint")


def device_abort() -> None:
    text = (
        "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
        "  what():  CUDA error: an illegal memory access was encountered\n"
    )
    os.write(2, text.encode())
    os.abort()


def network() -> None:
    join()
    dist.all_reduce(torch.ones(1))
    for name in os.listdir("/proc/self/fd") if guilty else ():
        try:  # close the connections to other ranks, not those to the store
            one = socket.socket(fileno=os.dup(int(name)))
            ports = (one.getpeername()[1], one.getsockname()[1])
            if int(os.environ["MASTER_PORT"]) not in ports:
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    dist.all_reduce(torch.ones(1))


def missing_rank() -> None:
    if guilty:
        time.sleep(1000)
    from clusterjob import bootstrap

    bootstrap.init(timeout=3)


def missing_rank_of_torch() -> None:
    if guilty:
        time.sleep(1000)
    join(3)


def early_exit() -> None:
    join()
    if guilty:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)


def segmentation() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_code() -> None:
    sys.exit(3)


def hang() -> None:
    join()
    if guilty:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def lost_agent() -> None:
    forkserver = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(forkserver.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(1000)


def show_progress() -> None:
    while True:
        print("alive", flush=True)
        time.sleep(0.5)


if fault != "hang":  # a busy machine must not look like a hang
    threading.Thread(target=show_progress, daemon=True).start()
if guilty or fault in ("network", "missing_rank", "missing_rank_of_torch", "early_exit", "hang"):
    globals()[fault]()
time.sleep(1000)
