"""After a failure, workers that save have the grace, and the others end at once."""

from __future__ import annotations

import signal
import subprocess

from procs import WITH_TORCH, MakeJob

from clusterjob.node.stacks.collect import has_signal

WORKERS = """
    import ctypes, os, signal, sys, time
    import torch, torch.distributed as dist
    rank, told = int(os.environ["RANK"]), []
    def save(*_):
        time.sleep(1.5)
        open("saved", "w").close()
        sys.exit(0)
    def note(*_):
        told.append(time.sleep(0.1))
    if rank < 3:
        handler = [save, note, note][rank]
        signal.signal(signal.SIGTERM, handler)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.signal(signal.SIGTERM, handler) is handler
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    open(f"ready{rank}", "w").close()
    if rank == 1:  # its handler ends, and then it waits for a rank that does not come
        while not told:
            time.sleep(0.01)
        dist.all_reduce(torch.zeros(1), group=pair)
    elif rank == 2:  # its handler cannot begin
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    elif rank == 4:
        while not all(os.path.exists(f"ready{each}") for each in range(4)):
            time.sleep(0.01)
        os._exit(3)
    time.sleep(1000)
"""


def test_only_worker_whose_handler_saves_has_the_grace(make_job: MakeJob) -> None:
    job = make_job(1)
    job.run("--nproc-per-node", "5", job.script(WORKERS), python=WITH_TORCH, code=3)
    assert job.path("saved").exists()
    [stop], [ended] = job.events("stop"), job.events("round_ended")
    assert 1.5 < ended["monotonic"] - stop["monotonic"] < 10  # the grace is 30 s


def test_executed_worker_whose_handler_saves_has_the_grace(make_job: MakeJob) -> None:
    job = make_job(1)
    script = """
        import ctypes, os, signal, time
        def save(*_):
            time.sleep(1.5)
            open("saved", "w").close()
            os._exit(0)
        if os.environ["RANK"] == "2":
            while not (os.path.exists("ready0") and os.path.exists("ready1")):
                time.sleep(0.01)
            os._exit(3)
        signal.signal(signal.SIGTERM, save)
        open("ready" + os.environ["RANK"], "w").close()
        mutex = ctypes.create_string_buffer(64)
        while os.environ["RANK"] == "1":
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
        time.sleep(1000)
    """
    options = ("--nproc-per-node", "3", "--start", "exec")
    job.run(*options, job.script(script), python=WITH_TORCH, code=3)
    assert job.path("saved").exists()
    [stop], [ended] = job.events("stop"), job.events("round_ended")
    assert 1.5 < ended["monotonic"] - stop["monotonic"] < 10


def test_plain_workers_end_at_once(make_job: MakeJob) -> None:
    job = make_job(1)
    script = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(1000)"
    job.run("--nproc-per-node", "2", job.script(script), code=3)
    [stop], [ended] = job.events("stop"), job.events("round_ended")
    assert ended["monotonic"] - stop["monotonic"] < 2  # 0.1 s on a quiet machine


def test_program_with_handler_of_its_own_is_recognised() -> None:
    shell = "trap 'echo saved; exit' {}; echo ready; while :; do sleep 0.05; done"
    for number, catches in (("TERM", True), ("USR1", False)):
        with subprocess.Popen(
            ["bash", "-c", shell.format(number)], stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            assert has_signal(process.pid, "SigCgt", signal.SIGTERM) is catches
            process.kill()
