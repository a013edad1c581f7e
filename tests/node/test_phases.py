"""The recorded phases of nodes and ranks, and the counts of ranks in the job's events."""

from __future__ import annotations

from procs import WITH_TORCH, Job, MakeJob

from clusterjob.node.logs.events import PhaseBegin, read_phases

BOOTSTRAP = """
    from clusterjob import bootstrap
    with bootstrap.init() as ctx:
        ctx.barrier()
"""
PLAIN = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""
FORMED = ["import", "rendezvous", "init", "running", "ended"]


def phases_of(job: Job, rank: int | None, node: int = 0) -> list[PhaseBegin]:
    return [begin for begin in read_phases(job.dir, node) if begin.rank == rank]


def names(begins: list[PhaseBegin]) -> list[str]:
    return [str(begin.phase) for begin in begins]


def test_ranks_on_two_nodes_record_each_phase_once_and_events_count_them(make_job: MakeJob) -> None:
    job = make_job(2)
    job.run("--nproc-per-node", "2", job.script(BOOTSTRAP), python=WITH_TORCH)
    for rank in range(4):
        begins = phases_of(job, rank, node=rank // 2)
        assert names(begins) == FORMED
        assert [begin.monotonic for begin in begins] == sorted(begin.monotonic for begin in begins)
        assert begins[-1].detail == "exited with code 0"
    for node in (0, 1):
        begun = names(phases_of(job, None, node=node))
        assert begun[:2] == ["setup", "import"]
        assert begun[-2:] == ["running", "ended"]
    last = job.events("ranks")[-1]
    assert (last["joined"], last["formed"], last["world_size"]) == (4, 4, 4)
    assert [event["preload"] for event in job.events("started")] == [True]
    assert (len(job.events("running")), len(job.events("stop"))) == (1, 0)


def test_plain_script_without_fork_records_phases_of_its_ranks(make_job: MakeJob) -> None:
    job = make_job()
    job.run("--start", "exec", "--nproc-per-node", "2", job.script(PLAIN))
    assert [names(phases_of(job, rank)) for rank in (0, 1)] == [FORMED, FORMED]
    assert job.events("ranks")[-1]["formed"] == 2
    assert not job.events("started")[0]["preload"]


def test_rank_without_process_group_runs_from_first_output_and_restart_repeats_phases(
    make_job: MakeJob,
) -> None:
    job = make_job()
    script = job.script("""
        import os, time
        print("hello", flush=True)
        if os.environ["RANK"] == "1":
            time.sleep(60)
        time.sleep(1)
        raise SystemExit(3)
    """)
    job.run("--nproc-per-node", "2", "--max-restarts", "1", script, code=3)
    for restart in (0, 1):
        failed, stopped = (
            [begin for begin in phases_of(job, rank) if begin.restart == restart] for rank in (0, 1)
        )
        assert names(failed) == ["import", "running", "ended"]
        assert failed[-1].detail == "exited with code 3"
        assert names(stopped) == ["import", "running", "stop", "ended"]
    assert [event["restart"] for event in job.events("running")] == [0, 1]
    assert all("sys.exit(3)" in event["why"] for event in job.events("stop"))
    assert not job.events("ranks")


def test_command_runs_from_its_start(make_job: MakeJob) -> None:
    job = make_job()
    job.run("--", "true")
    assert names(phases_of(job, 0)) == ["running", "ended"]


def test_forged_phases_and_those_after_the_first_group_are_ignored(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import json, os
        from clusterjob.node.workers import torch_patches
        pipe = int(os.environ["CLUSTERJOB_REPORT_FD"].partition(":")[0])
        forged = ((7, "init"), (0, "ended"), (0, "x"), (-1, "init"), (0, "rendezvous"))
        for rank, phase in forged:
            line = {"type": "WorkerPhase", "local_rank": rank, "phase": phase, "monotonic": 1.0}
            os.write(pipe, json.dumps(line).encode() + b"\\n")
        for _ in range(500):
            torch_patches.tell("rendezvous")
            torch_patches.tell("running")
        if os.fork() == 0:
            torch_patches.tell("init")  # a child of a worker is no rank
            os._exit(0)
        os.wait()
    """)
    job.run(script)
    begun = names(phases_of(job, 0))
    assert begun == ["import", "rendezvous", "running", "ended"]
    times = [begin.monotonic for begin in phases_of(job, 0)]
    assert times == sorted(times)
    assert not [begin for begin in read_phases(job.dir, 0) if begin.rank not in (None, 0)]
