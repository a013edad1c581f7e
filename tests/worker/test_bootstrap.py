"""clusterjob.bootstrap with real torch and real processes.

It runs under the launcher, under torchrun, with a manual rank assignment and as a plain script.
"""

from __future__ import annotations

import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import (
    TEST_TIMEOUT,
    finish,
    free_port,
    launch,
    rank_reports,
    run,
    script,
    start_manually,
)
from preloaded import Preloaded

from clusterjob import bootstrap
from clusterjob.errors import PlacementError, UsageError
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.logs import failure_texts
from clusterjob.node.workers import torch_patches
from clusterjob.worker import group

# -- the import ------------------------------------------------------------------------------------


def test_bootstrap_import_loads_only_standard_library_and_clusterjob(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); "
        "import clusterjob.bootstrap; print(*set(sys.modules) - before)"
    )
    ran = run([sys.executable, "-c", code], tmp_path, code=0)
    loaded = {name.partition(".")[0] for name in ran.out.split()}
    assert loaded <= set(sys.stdlib_module_names) | {"clusterjob"}
    assert "clusterjob" in loaded
    assert not loaded & {"torch", "asyncio", "subprocess", "inspect", "dataclasses"}


# -- two launched processes ------------------------------------------------------------------------

# Each assertion is one of this test.
ALL_FEATURES = """
    import math, os, warnings
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap
    from clusterjob.errors import UsageError

    def refused(call):
        try:
            call()
        except UsageError as error:
            return str(error)

    def gloo_threads():
        tasks = os.listdir("/proc/self/task")
        return sum("gloo" in Path(f"/proc/self/task/{task}/comm").read_text() for task in tasks)

    with bootstrap.init(timeout=60) as ctx:
        # The first optimizer imports this, too; imported now, it would keep the group for ever.
        import torch.distributed.nn.functional
        r = ctx.rank
        assert (r, ctx.local_rank, ctx.world_size, ctx.local_world_size) == (
            int(os.environ["RANK"]), r, 2, 2)
        assert (ctx.node_rank, ctx.nnodes, ctx.is_main) == (0, 1, r == 0)
        assert ctx.master_addr in ("127.0.0.1", "localhost")
        assert str(ctx.master_port) == os.environ["MASTER_PORT"]
        assert (ctx.backend, str(ctx.device)) == ("gloo", "cpu")
        assert ctx.source == (
            "clusterjob" if "CLUSTERJOB_REPORT_FD" in os.environ else "torchrun")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (r, 2, "gloo")

        ops = ("mean", "sum", "min", "max", "product")

        def same(found, expected):
            assert (found, type(found)) == (expected, type(expected)), (found, expected)

        for op, expected in zip(ops, (2.5, 5, 2, 3, 6)):
            same(ctx.reduce(r + 2, op), expected)
        for op, expected in zip(ops, (-1.25, -2.5, -3.0, 0.5, -1.5)):
            same(ctx.reduce([0.5, -3.0][r], op), expected)
        same(ctx.reduce([1.0, 2.0][r]), 1.5)
        same(ctx.reduce(2**62 + r, "sum"), 2**63 + 1)
        same(ctx.reduce([1, 0.5][r], "sum"), 1.5)
        same(ctx.reduce(r == 0, "sum"), 1)
        nan = float("nan")
        assert math.isnan(ctx.reduce([nan, 1.0][r], "min"))
        assert math.isnan(ctx.reduce([1.0, nan][r], "max"))

        def check(value, op, expected, dtype=torch.float32):
            before = value.clone()
            result = ctx.reduce(value, op)
            assert torch.equal(value, before) and result is not value
            assert (result.device, result.dtype) == (value.device, dtype), result
            assert result.shape == value.shape and result.tolist() == expected, result

        base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (r + 1)
        check(base, "mean", [[1.5, 3.0], [4.5, 6.0]])
        check(base, "sum", [[3.0, 6.0], [9.0, 12.0]])
        check(base, "min", [[1.0, 2.0], [3.0, 4.0]])
        check(base, "max", [[2.0, 4.0], [6.0, 8.0]])
        check(base, "product", [[2.0, 8.0], [18.0, 32.0]])
        check(base.t(), "sum", [[3.0, 9.0], [6.0, 12.0]])
        check(torch.tensor(3.0), "sum", 6.0)
        check(torch.empty(0, 3), "sum", [])
        check(torch.tensor([1, 4]) * (r + 1), "mean", [1.5, 6.0])
        check(torch.tensor([5], dtype=torch.int16), "sum", [10], torch.int16)
        large = torch.full((1,), 60000.0, dtype=torch.float16)  # twice that is too large
        check(large, "mean", [60000.0], torch.float16)
        check(torch.tensor([True, r == 1]), "sum", [2, 1], torch.int64)
        check(torch.tensor([False, r == 1]), "max", [False, True], torch.bool)
        assert not ctx.reduce(torch.ones(1, requires_grad=True)).requires_grad

        ctx.barrier()
        ctx.print("hello from", ctx.rank, sep=" - ")

        torch.manual_seed(r)
        model = torch.nn.Linear(2, 1)
        wrapped = ctx.wrap(model, bucket_cap_mb=1)
        wrapped(torch.full((1, 2), float(r + 1))).sum().backward()
        assert type(wrapped).__name__ == "DistributedDataParallel" and wrapped.module is model
        assert (model.weight.grad.tolist(), wrapped.device_ids) == ([[1.5, 1.5]], None)
        assert torch.equal(ctx.reduce(model.weight, "max"), ctx.reduce(model.weight, "min"))

        sampler = ctx.sampler(range(10))
        assert (len(sampler), sampler.num_replicas, sampler.rank) == (5, 2, r)
        shares = ctx.sampler(range(10), shuffle=False, drop_last=True)
        assert list(shares) == list(range(r, 10, 2))

        assert bootstrap.init() is ctx
        assert bootstrap.init("gloo", rank=r, process_group=True) is ctx
        with bootstrap.init() as inner:  # like a library that the script calls
            assert inner is ctx
        assert dist.is_initialized()
        error = refused(lambda: bootstrap.init("nccl"))
        assert "'gloo'" in error and "'nccl'" in error
        assert "process_group" in refused(lambda: bootstrap.init(process_group=False))
        assert "timeout=60" in refused(lambda: bootstrap.init(timeout=5))
        error = refused(lambda: ctx.reduce(1, "median"))
        assert "'median'" in error and "mean, sum, min, max, product" in error
        assert "str" in refused(lambda: ctx.reduce("1"))
        assert "64 bits" in refused(lambda: ctx.reduce(2**63))

        # newer Pythons warn of each fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            bootstrap.shutdown()  # like an exit handler; it must keep the parent's group
            os._exit(0 if dist.is_initialized() else 1)
        assert os.waitpid(child, 0)[1] == 0
        ctx.barrier()
        formed = gloo_threads()

    assert not dist.is_initialized()
    del wrapped, inner
    assert gloo_threads() <= formed
    for call in (lambda: ctx.reduce(1), ctx.barrier, lambda: ctx.wrap(model)):
        assert "shut down" in refused(call)
    for _ in range(2):  # like a notebook; the launcher's store still has keys of the last group
        with bootstrap.init() as ctx:
            assert ctx.reduce(1, "sum") == 2
    # Under our agents the last group is freed when a later one has formed.
    assert gloo_threads() <= formed
    ctx = bootstrap.init()  # the process exits without shutdown
    assert ctx.reduce(1, "sum") == 2
"""


# A worker started by exec differs from one of torchrun only in its variables.
@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_context_reduces_wraps_and_samples_on_two_ranks(tmp_path: Path, launcher: str) -> None:
    ran = launch(launcher, 2, [script(tmp_path, ALL_FEATURES)], tmp_path, code=0)
    hellos = [line for line in ran.out.splitlines() if "hello" in line]
    assert [line.endswith("hello from - 0") for line in hellos] == [True]
    assert "arning" not in ran.err  # torch warns of a group that is not destroyed


# -- one process -----------------------------------------------------------------------------------

SINGLE_PROCESS = """
    import json, sys
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap

    options, source, backend = json.loads(sys.argv[1])
    with bootstrap.init(**options) as ctx:
        assert (ctx.source, ctx.backend, str(ctx.device)) == (source, backend, "cpu")
        assert (ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size) == (0, 0, 1, 1)
        assert (ctx.node_rank, ctx.nnodes, ctx.is_main) == (0, 1, True)
        assert (ctx.master_addr is None) == (source == "none")
        assert dist.is_initialized() == (backend is not None)
        model = torch.nn.Linear(2, 1)
        assert (ctx.wrap(model) is model) == (backend is None)
        three = torch.tensor([3])
        for op in ("mean", "sum", "min", "max", "product"):
            assert ctx.reduce(3, op) == 3
            assert ctx.reduce(three, op).tolist() == [3]
        assert type(ctx.reduce(3)) is float and ctx.reduce(three).dtype is torch.float32
        assert ctx.reduce(three, "sum") is not three
        small = torch.ones(1).to(torch.float8_e5m2)
        assert (ctx.reduce(small).dtype, ctx.reduce(small).tolist()) == (small.dtype, [1.0])
        assert backend is not None or ctx.reduce(10**400, "sum") == 10**400
        assert list(ctx.sampler(range(4), shuffle=False)) == [0, 1, 2, 3]
        ctx.barrier()
        ctx.print("alone")
    assert not dist.is_initialized()
    bootstrap.shutdown()  # harmless
"""


@pytest.mark.parametrize(
    ("launcher", "options", "source", "backend"),
    [
        ("", {}, "none", None),
        ("", {"process_group": True}, "none", "gloo"),
        ("fork", {}, "clusterjob", "gloo"),
    ],
)
def test_single_process_has_a_process_group_only_if_launched_or_asked(
    tmp_path: Path,
    preloaded: Preloaded,
    launcher: str,
    options: dict[str, bool],
    source: str,
    backend: str | None,
) -> None:
    argv = [script(tmp_path, SINGLE_PROCESS), json.dumps([options, source, backend])]
    ran = launch(launcher, 1, argv, tmp_path) if launcher else preloaded.run(argv, tmp_path)
    assert (ran.code, "alone" in ran.out, "arning" in ran.err) == (0, True, False), ran.err


def test_reduce_and_barrier_without_process_group_are_refused(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    text = """
        import torch
        from clusterjob import bootstrap
        from clusterjob.errors import UsageError
        ctx = bootstrap.init(process_group=False)
        assert ctx.world_size == 2 and ctx.backend is None
        assert not torch.distributed.is_initialized()
        model = torch.nn.Linear(1, 1)
        assert ctx.wrap(model) is model
        for call in (lambda: ctx.reduce(1), ctx.barrier):
            try:
                call()
            except UsageError as error:
                assert "process_group=False" in str(error)
            else:
                raise AssertionError("not refused")
        print("fine", ctx.rank)
    """
    started = start_manually(preloaded, 2, [script(tmp_path, text)], tmp_path)
    for rank, process in enumerate(started):
        ran = finish(process, code=0)
        assert ran.out == f"fine {rank}\n"


# -- errors of init --------------------------------------------------------------------------------

ONLY_INIT = """
    import sys
    from clusterjob import bootstrap
    try:
        bootstrap.init()
    finally:
        print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "LOCAL_RANK is not set, so that"),
        (
            {
                "CLUSTERJOB_NNODES": "2",
                "CLUSTERJOB_NODE_RANK": "1",
                "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
            },
            "`clusterjob launch SCRIPT`",
        ),
    ],
)
def test_incomplete_or_node_variables_are_refused_before_torch_import(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    ran = run([sys.executable, script(tmp_path, ONLY_INIT)], tmp_path, variables)
    assert (ran.code, ran.out) == (1, "False\n")
    assert "PlacementError" in ran.err
    assert message in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "mpi"}, "nccl, gloo"),
        ({"timeout": 0}, "seconds above 0"),
        ({"timeout": math.nan}, "seconds above 0"),
        ({"world_size": 2}, "rank and world_size"),
        ({"local_rank": 1}, "rank and world_size"),
    ],
)
def test_init_refuses_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bootstrap.init(**options)


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local_rank", "gpus", "name"),
    [
        (0, 0, "cpu"),
        (3, 0, "cpu"),
        (0, 1, "cuda:0"),
        (3, 1, "cuda:0"),
        (3, 8, "cuda:3"),
        (9, 8, "cuda:1"),
    ],
)
def test_device_is_chosen_by_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, gpus: int, name: str
) -> None:
    import torch

    chosen = list[Any]()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    context: Any = SimpleNamespace(local_rank=local_rank)
    group._use_device(context, "cuda", gpus)
    assert str(context.device) == name
    assert list(map(str, chosen)) == [name] * (gpus > 0)


def test_backend_is_nccl_with_gpus_and_gloo_without() -> None:
    assert group.choose_backend(None, 0) == "gloo"
    assert group.choose_backend(None, 4) == "nccl"
    assert group.choose_backend("gloo", 4) == "gloo"
    with pytest.raises(UsageError, match="needs a GPU"):
        group.choose_backend("nccl", 0)


# -- process groups and ranks of the script --------------------------------------------------------


def test_process_group_of_script_is_used_and_not_destroyed(tmp_path: Path) -> None:
    text = """
        import torch.distributed as dist
        from clusterjob import bootstrap
        from clusterjob.errors import UsageError
        dist.init_process_group()  # the backend left to torch
        with bootstrap.init() as ctx:
            assert (ctx.rank, ctx.world_size) == (dist.get_rank(), 2)
            assert (ctx.local_rank, ctx.backend, ctx.source) == (ctx.rank, "gloo", "clusterjob")
            assert ctx.reduce(ctx.rank, "sum") == 1
            ctx.barrier()
        bootstrap.shutdown()
        for options in ({"backend": "nccl"}, {"process_group": False}):
            try:
                bootstrap.init(**options)
            except UsageError as error:
                assert "the script has initialised" in str(error)
            else:
                raise AssertionError("not refused")
        assert dist.is_initialized()
        dist.barrier()
        dist.destroy_process_group()
        with bootstrap.init() as ctx:  # now a group of bootstrap
            assert ctx.reduce(1, "sum") == 2
        assert not dist.is_initialized()
        print("fine", ctx.rank)
    """
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path, code=0)
    assert "fine 0" in ran.out
    assert "fine 1" in ran.out


def test_process_group_without_launcher_has_local_ranks(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    text = """
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from clusterjob import bootstrap

        def work(rank):
            url = f"file://{__file__}.meeting"
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
            ctx = bootstrap.init()
            assert (ctx.rank, ctx.world_size) == (rank, 2)
            assert (ctx.local_rank, ctx.local_world_size) == (rank, 2)
            assert (ctx.node_rank, ctx.nnodes, ctx.source) == (0, 1, "process group")
            assert ctx.reduce(rank, "max") == 1
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.start_processes(work, nprocs=2, start_method="fork")
    """
    preloaded.run([script(tmp_path, text)], tmp_path, code=0)  # both ranks' asserts hold


def test_init_accepts_manual_rank_assignment(tmp_path: Path, preloaded: Preloaded) -> None:
    text = """
        import os, sys
        from clusterjob import bootstrap
        rank, port = int(sys.argv[1]), int(sys.argv[2])
        with bootstrap.init(
            rank=rank, world_size=2, local_rank=rank, master_addr="127.0.0.1", master_port=port
        ) as ctx:
            assert (ctx.rank, ctx.local_rank, ctx.world_size) == (rank, rank, 2)
            assert ctx.source == "arguments"
            assert ctx.reduce(rank, "sum") == 1
        assert "MASTER_ADDR" not in os.environ
        with bootstrap.init(rank=0, world_size=1) as ctx:
            assert ctx.backend is None
    """
    path, port = script(tmp_path, text), free_port()
    # The arguments override the node-level variables of a platform.
    platform = {"RANK": "0", "WORLD_SIZE": "1"}
    ranks = [preloaded.start([path, rank, port], tmp_path, platform) for rank in range(2)]
    for ran in [finish(each) for each in ranks]:
        assert ran.code == 0, ran.err


# -- failures --------------------------------------------------------------------------------------

FAILS_DURING_COLLECTIVE = """
    import atexit, contextlib, os, sys, time
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap

    atexit.register(print, "atexit ran")  # stdout is a pipe: visible only if the exit flushes it
    ctx = bootstrap.init()
    with ctx if sys.argv[1] == "with" else contextlib.nullcontext():
        ctx.barrier()
        if ctx.rank == 0:
            while not os.path.exists("rank 1 has ended"):
                time.sleep(0.01)
        # DDP, too, has collectives in progress when backward() fails.
        dist.all_reduce(torch.ones(1_000_000), async_op=True)
        if ctx.rank == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("block", ["with", "without"])
def test_exception_ends_process_at_once_with_code_1(
    block: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    path = script(tmp_path, FAILS_DURING_COLLECTIVE)
    survivor, failing = start_manually(
        preloaded, 2, [path, block], tmp_path, {"PYTHONUNBUFFERED": ""}
    )
    try:
        # No other rank joins its collective and no launcher stops it, so it must exit by itself.
        ran = finish(failing, timeout=TEST_TIMEOUT / 2)
    finally:
        (tmp_path / "rank 1 has ended").touch()
        other = finish(survivor)
    assert ran.code == 1
    assert ran.err.rstrip().endswith("ValueError: boom")
    assert ran.out == "atexit ran\n"
    assert other.code == 1
    assert failure_texts.is_effect(failure_texts.meanings(other.err.splitlines()))
    assert other.out == "atexit ran\n"


def test_exit_code_of_sys_exit_in_with_block_is_kept(tmp_path: Path, preloaded: Preloaded) -> None:
    text = (
        "import sys\nfrom clusterjob import bootstrap\n"
        "with bootstrap.init() as ctx:\n    sys.exit(3)\n"
    )
    for ran in [
        finish(process)
        for process in start_manually(preloaded, 2, [script(tmp_path, text)], tmp_path)
    ]:
        assert ran.code == 3, ran.err
        assert "Traceback" not in ran.err


def test_on_preempt_outside_of_main_thread_is_refused() -> None:
    context = bootstrap.init(process_group=False)
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="main thread"):
            pool.submit(context.on_preempt, print).result()
    finally:
        bootstrap.shutdown()


def test_only_the_worker_itself_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        # Also a worker of a torchrun that a worker has started is no rank.
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
        own, parent = os.getpid(), os.getppid()
        for value in ("", "x:0:y", f"{write}:0:{parent}", f"999999:0:{own}", f"{write}:{own}"):
            monkeypatch.setenv("CLUSTERJOB_REPORT_FD", value)
            torch_patches.send("WorkerAlive", step=1)
        monkeypatch.setenv("CLUSTERJOB_REPORT_FD", f"{write}:3:{own}")
        torch_patches.send("WorkerAlive", step=2)
        sent = json.loads(os.read(read, 1000))
        assert sent == {"type": "WorkerAlive", "local_rank": 3, "step": 2}
    finally:
        os.close(read)
        os.close(write)


# -- Slurm tasks with the variables of srun --------------------------------------------------------

SUMS = """
    import json, sys
    from pathlib import Path
    import torch
    from clusterjob import bootstrap

    with bootstrap.init(timeout=60) as ctx:
        total = ctx.reduce(torch.tensor([ctx.rank + 1.0]), "sum").item()
        Path(f"rank{ctx.rank}.json").write_text(json.dumps([
            ctx.local_rank, ctx.local_world_size, ctx.world_size, ctx.node_rank, ctx.nnodes,
            ctx.source, ctx.master_port, total]))
"""


def test_slurm_tasks_form_process_group_without_agent(tmp_path: Path, preloaded: Preloaded) -> None:
    path = script(tmp_path, SUMS)
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "no-such-node-1", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0",
    }  # fmt: skip
    tasks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
    for process in [preloaded.start([path], tmp_path, task) for task in tasks]:
        finish(process, code=0)
    ranks = rank_reports(tmp_path, 3)
    port = ranks[0][6]
    assert 20000 <= port < 32000
    assert ranks == [[rank, 3, 3, 0, 1, "slurm", port, 6.0] for rank in range(3)]


@pytest.mark.parametrize("nproc", [None, 1, 4])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("process_group", [None, False])
def test_slurm_task_with_several_gpus_is_refused(
    nproc: int | None, gpus: int, process_group: bool | None
) -> None:
    worker = Worker(
        Topology(2, 1, nproc_per_node=nproc, master_addr="n1", master_port=29500, source="slurm"),
        1,
        local_rank=0,
        world_size=2,
        local_world_size=1,
    )
    if nproc is None and gpus == 8 and process_group is None:
        with pytest.raises(PlacementError) as caught:
            group.check_gpus(worker, gpus, process_group=process_group)
        assert "sees 8 GPUs" in caught.value.message
        assert all(word in caught.value.hint for word in ("clusterjob launch", "--ntasks-per-node"))
    else:
        group.check_gpus(worker, gpus, process_group=process_group)
