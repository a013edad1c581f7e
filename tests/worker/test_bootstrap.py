"""clusterjob.bootstrap with real torch and real processes.

It runs under the launcher, under torchrun, with a manual rank assignment and as a plain script.
"""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launching import (
    MARGIN,
    TEST_TIMEOUT,
    Run,
    environment,
    finish,
    free_port,
    launch,
    rank_reports,
    rank_variables,
    run,
    script,
    start_manually,
    timeout_seconds,
)
from preloaded import Preloaded

from clusterjob import bootstrap
from clusterjob.errors import PlacementError, UsageError
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.logs import failure_texts
from clusterjob.worker import group
from clusterjob.worker.process import report_pipe

# -- the import ------------------------------------------------------------------------------------


def test_bootstrap_import_loads_only_standard_library_and_clusterjob(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); "
        "import clusterjob.bootstrap; print(*set(sys.modules) - before)"
    )
    ran = run([sys.executable, "-c", code], tmp_path)
    assert ran.code == 0, ran.err
    loaded = {name.partition(".")[0] for name in ran.out.split()}
    assert loaded <= set(sys.stdlib_module_names) | {"clusterjob"}
    assert "clusterjob" in loaded
    assert not loaded & {"torch", "asyncio", "subprocess", "inspect", "dataclasses"}


def test_bootstrap_import_takes_at_most_15_ms(tmp_path: Path) -> None:
    env = environment(tmp_path, {"PYTHONPYCACHEPREFIX": str(tmp_path / "pycache")})
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once

    def seconds(code: str) -> float:
        """Return the CPU time of a new Python process; other processes affect it little."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds("import clusterjob.bootstrap")
    pairs = [(seconds("pass"), seconds("import clusterjob.bootstrap")) for _ in range(25)]
    # The minimum of many runs: disturbances only add time.
    assert min(own for _, own in pairs) - min(bare for bare, _ in pairs) <= 0.015


# -- two launched processes ------------------------------------------------------------------------

ALL_FEATURES = """
    import json, os, warnings
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

    report = {}
    with bootstrap.init(timeout=60) as ctx:
        # The first optimizer imports this, too; imported now, it would keep the group for ever.
        import torch.distributed.nn.functional
        r = ctx.rank
        report["place"] = {name: getattr(ctx, name) for name in (
            "rank", "local_rank", "world_size", "local_world_size", "node_rank", "nnodes",
            "master_addr", "master_port", "backend", "is_main", "source")}
        report["device"] = str(ctx.device)
        report["group"] = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]

        ops = ("mean", "sum", "min", "max", "product")
        report["numbers"] = {op: ctx.reduce(r + 2, op) for op in ops}
        report["default"] = ctx.reduce([1.0, 2.0][r])
        report["floats"] = {op: ctx.reduce([0.5, -3.0][r], op) for op in ops}
        report["exact"] = ctx.reduce(2**62 + r, "sum")
        report["mixed"] = ctx.reduce([1, 0.5][r], "sum")
        nan = float("nan")
        report["nan"] = [ctx.reduce([nan, 1.0][r], "min"), ctx.reduce([1.0, nan][r], "max")]
        report["bool"] = ctx.reduce(r == 0, "sum")

        def tensor(value, op):
            before = value.clone()
            result = ctx.reduce(value, op)
            assert torch.equal(value, before) and result is not value
            assert result.device == value.device
            return [result.tolist(), str(result.dtype).removeprefix("torch."), list(result.shape)]

        base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (r + 1)
        report["tensors"] = {op: tensor(base, op) for op in ops}
        report["dtypes"] = {
            "int mean": tensor(torch.tensor([1, 4]) * (r + 1), "mean"),
            "int16 sum": tensor(torch.tensor([5], dtype=torch.int16), "sum"),
            "half mean": tensor(torch.full((1,), 60000.0, dtype=torch.float16), "mean"),
            "bool sum": tensor(torch.tensor([True, r == 1]), "sum"),
            "bool max": tensor(torch.tensor([False, r == 1]), "max"),
            "scalar": tensor(torch.tensor(3.0), "sum"),
            "strided": tensor(base.t(), "sum"),
            "empty": tensor(torch.empty(0, 3), "sum"),
        }
        report["gradient"] = ctx.reduce(torch.ones(1, requires_grad=True)).requires_grad

        ctx.barrier()
        ctx.print("hello from", ctx.rank, sep=" - ")

        torch.manual_seed(r)
        model = torch.nn.Linear(2, 1)
        wrapped = ctx.wrap(model, bucket_cap_mb=1)
        wrapped(torch.full((1, 2), float(r + 1))).sum().backward()
        report["ddp"] = [
            type(wrapped).__name__, wrapped.module is model, model.weight.grad.tolist(),
            wrapped.device_ids]
        report["weights"] = model.weight.tolist()

        sampler = ctx.sampler(range(10))
        report["sampler"] = [
            len(sampler), sampler.num_replicas, sampler.rank,
            list(ctx.sampler(range(10), shuffle=False, drop_last=True))]

        report["again"] = (
            bootstrap.init() is ctx
            and bootstrap.init("gloo", rank=r, process_group=True) is ctx)
        with bootstrap.init() as inner:  # like a library that the script calls
            assert inner is ctx
        report["inner"] = dist.is_initialized()
        report["refused"] = [
            refused(lambda: bootstrap.init("nccl")),
            refused(lambda: bootstrap.init(process_group=False)),
            refused(lambda: bootstrap.init(timeout=5)),
            refused(lambda: ctx.reduce(1, "median")),
            refused(lambda: ctx.reduce("1")),
            refused(lambda: ctx.reduce(2**63)),
        ]

        # newer Pythons warn of each fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            bootstrap.shutdown()  # like an exit handler; it must keep the parent's group
            os._exit(0 if dist.is_initialized() else 1)
        report["child"] = os.waitpid(child, 0)[1]
        ctx.barrier()

        report["threads"] = [gloo_threads()]

    report["left"] = dist.is_initialized()
    del wrapped, inner
    report["threads"].append(gloo_threads())
    report["closed"] = [
        refused(lambda: ctx.reduce(1)), refused(ctx.barrier), refused(lambda: ctx.wrap(model))]
    sums = []
    for _ in range(2):  # like a notebook; the launcher's store still has keys of the last group
        with bootstrap.init() as ctx:
            sums.append(ctx.reduce(1, "sum"))
    report["rounds"] = sums
    report["threads"].append(gloo_threads())
    ctx = bootstrap.init()  # the process exits without shutdown
    report["last"] = ctx.reduce(1, "sum")
    Path(f"rank{r}.json").write_text(json.dumps(report))
"""


class Launched:
    """Output and reports of a run of ALL_FEATURES on two workers."""

    def __init__(self, launcher: str, directory: Path) -> None:
        self.launcher = launcher
        self.ran = launch(launcher, 2, [script(directory, ALL_FEATURES)], directory)
        assert self.ran.code == 0, self.ran.err
        self.ranks = rank_reports(directory, 2)


# A worker started by exec differs from one of torchrun only in its variables.
@pytest.fixture(scope="module", params=["fork", "torchrun"])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(request.param, tmp_path_factory.mktemp(request.param))


def test_context_has_rank_node_and_master_fields(launched: Launched) -> None:
    master_ports = {rank["place"]["master_port"] for rank in launched.ranks}
    assert len(master_ports) == 1
    for number, rank in enumerate(launched.ranks):
        fields = rank["place"]
        assert fields["rank"] == fields["local_rank"] == number
        assert fields["world_size"] == fields["local_world_size"] == 2
        assert (fields["node_rank"], fields["nnodes"]) == (0, 1)
        assert fields["master_addr"] in ("127.0.0.1", "localhost")
        assert fields["master_port"] > 0
        assert fields["backend"] == "gloo"
        assert fields["is_main"] is (number == 0)
        assert fields["source"] == ("torchrun" if launched.launcher == "torchrun" else "clusterjob")
        assert rank["device"] == "cpu"
        assert rank["group"] == [number, 2, "gloo"]


def test_reduce_of_numbers_returns_same_value_on_each_rank(launched: Launched) -> None:
    for rank in launched.ranks:
        assert rank["numbers"] == {"mean": 2.5, "sum": 5, "min": 2, "max": 3, "product": 6}
        assert {op: type(value) for op, value in rank["numbers"].items()} == {
            op: float if op == "mean" else int for op in rank["numbers"]
        }
        assert rank["default"] == 1.5
        assert rank["floats"] == {
            "mean": -1.25,
            "sum": -2.5,
            "min": -3.0,
            "max": 0.5,
            "product": -1.5,
        }
        assert rank["exact"] == 2**63 + 1
        assert rank["mixed"] == 1.5
        assert all(math.isnan(value) for value in rank["nan"])
        assert (rank["bool"], type(rank["bool"])) == (1, int)


def test_reduce_of_tensor_returns_new_tensor(launched: Launched) -> None:
    for rank in launched.ranks:
        assert rank["tensors"] == {
            "mean": [[[1.5, 3.0], [4.5, 6.0]], "float32", [2, 2]],
            "sum": [[[3.0, 6.0], [9.0, 12.0]], "float32", [2, 2]],
            "min": [[[1.0, 2.0], [3.0, 4.0]], "float32", [2, 2]],
            "max": [[[2.0, 4.0], [6.0, 8.0]], "float32", [2, 2]],
            "product": [[[2.0, 8.0], [18.0, 32.0]], "float32", [2, 2]],
        }
        assert rank["dtypes"] == {
            "int mean": [[1.5, 6.0], "float32", [2]],
            "int16 sum": [[10], "int16", [1]],
            "half mean": [[60000.0], "float16", [1]],  # 2 x 60000 is too large for float16
            "bool sum": [[2, 1], "int64", [2]],
            "bool max": [[False, True], "bool", [2]],
            "scalar": [6.0, "float32", []],
            "strided": [[[3.0, 9.0], [6.0, 12.0]], "float32", [2, 2]],
            "empty": [[], "float32", [0, 3]],
        }
        assert rank["gradient"] is False


def test_wrapped_model_has_equal_weights_and_mean_gradient(launched: Launched) -> None:
    first, second = launched.ranks
    assert first["weights"] == second["weights"]
    for rank in launched.ranks:
        assert rank["ddp"] == ["DistributedDataParallel", True, [[1.5, 1.5]], None]


def test_sampler_splits_data_by_rank(launched: Launched) -> None:
    for number, rank in enumerate(launched.ranks):
        assert rank["sampler"] == [5, 2, number, list(range(number, 10, 2))]


def test_print_prints_only_on_rank_0(launched: Launched) -> None:
    assert launched.ran.out.count("hello from - ") == 1
    assert "hello from - 0" in launched.ran.out


def test_second_init_returns_same_context_or_refuses_other_options(launched: Launched) -> None:
    for rank in launched.ranks:
        assert rank["again"] is True
        assert rank["inner"] is True
        backend, process_group, timeout, operation, kind, size = rank["refused"]
        assert "'gloo'" in backend
        assert "'nccl'" in backend
        assert "process_group" in process_group
        assert "timeout=60" in timeout
        assert "'median'" in operation
        assert "mean, sum, min, max, product" in operation
        assert "str" in kind
        assert "64 bits" in size


def test_init_works_again_after_shutdown(launched: Launched) -> None:
    for rank in launched.ranks:
        assert rank["child"] == 0
        assert rank["left"] is False
        formed, *left = rank["threads"]
        assert all(threads <= formed for threads in left), (
            "under our agents the last group is freed when a later one has formed"
        )
        assert all("shut down" in message for message in rank["closed"])
        assert rank["rounds"] == [2, 2]
        assert rank["last"] == 2


def test_torch_prints_no_warnings(launched: Launched) -> None:
    assert "arning" not in launched.ran.err
    assert "destroy_process_group" not in launched.ran.err


# -- one process -----------------------------------------------------------------------------------

SINGLE_PROCESS = """
    import json, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap

    options = json.loads(sys.argv[1])
    with bootstrap.init(**options) as ctx:
        model = torch.nn.Linear(2, 1)
        wrapped = ctx.wrap(model)
        ops = ("mean", "sum", "min", "max", "product")
        report = {
            "place": [
                ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size, ctx.node_rank,
                ctx.nnodes, ctx.is_main],
            "master": [ctx.master_addr, ctx.master_port],
            "source": ctx.source, "backend": ctx.backend, "device": str(ctx.device),
            "initialized": dist.is_initialized(),
            "wrapped": type(wrapped).__name__, "same": wrapped is model,
            "numbers": [ctx.reduce(3, op) for op in ops],
            "mean type": type(ctx.reduce(3)).__name__,
            "tensor": [ctx.reduce(torch.tensor([3]), op).tolist() for op in ops],
            "mean dtype": str(ctx.reduce(torch.tensor([3])).dtype),
            "sampler": list(ctx.sampler(range(4), shuffle=False)),
        }
        tensor = torch.ones(1)
        report["new"] = ctx.reduce(tensor) is not tensor
        ctx.barrier()
        ctx.print("alone")
    report["left"] = dist.is_initialized()
    bootstrap.shutdown()  # harmless
    Path("rank0.json").write_text(json.dumps(report))
"""


def run_single_process(
    directory: Path, run_script: Callable[..., Run], **options: Any
) -> dict[str, Any]:
    argv = [script(directory, SINGLE_PROCESS), json.dumps(options)]
    ran = run_script(argv, directory)
    assert ran.code == 0, ran.err
    assert "arning" not in ran.err
    assert "alone" in ran.out
    [rank] = rank_reports(directory, 1)
    assert rank["place"] == [0, 0, 1, 1, 0, 1, True]
    assert rank["device"] == "cpu"
    assert rank["numbers"] == [3, 3, 3, 3, 3]
    assert rank["mean type"] == "float"
    assert rank["tensor"] == [[3], [3], [3], [3], [3]]
    assert rank["mean dtype"] == "torch.float32"
    assert rank["sampler"] == [0, 1, 2, 3]
    assert rank["new"] is True
    assert rank["left"] is False
    return rank


def test_plain_script_has_world_size_1_and_no_process_group(tmp_path: Path) -> None:
    rank = run_single_process(
        tmp_path, lambda argv, folder: run([sys.executable, "-W", "error", *argv], folder)
    )
    assert (rank["source"], rank["backend"], rank["initialized"], rank["same"]) == (
        "none",
        None,
        False,
        True,
    )
    assert rank["master"] == [None, None]


def test_plain_script_with_process_group_option_has_process_group(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    rank = run_single_process(tmp_path, preloaded.run, process_group=True)
    assert (rank["backend"], rank["initialized"], rank["wrapped"]) == (
        "gloo",
        True,
        "DistributedDataParallel",
    )
    assert rank["master"] == [None, None]


def test_launched_single_process_has_process_group(tmp_path: Path) -> None:
    rank = run_single_process(tmp_path, functools.partial(launch, "fork", 1))
    assert (rank["source"], rank["backend"], rank["initialized"]) == ("clusterjob", "gloo", True)


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
        ran = finish(process)
        assert ran.code == 0, ran.err
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
    "missing", ["WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_init_error_names_missing_variable(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in whole.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(PlacementError, match=f"{missing} is not set"):
        bootstrap.init()


def test_init_with_missing_variable_fails_before_torch_import(tmp_path: Path) -> None:
    ran = run(
        [sys.executable, script(tmp_path, ONLY_INIT)], tmp_path, {"RANK": "0", "WORLD_SIZE": "2"}
    )
    assert ran.code == 1
    assert "PlacementError" in ran.err
    assert "LOCAL_RANK is not set" in ran.err
    assert ran.out == "False\n"


def test_init_with_node_variables_only_suggests_launch(tmp_path: Path) -> None:
    node = {
        "CLUSTERJOB_NNODES": "2",
        "CLUSTERJOB_NODE_RANK": "1",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
    }
    ran = run([sys.executable, script(tmp_path, ONLY_INIT)], tmp_path, node)
    assert ran.code == 1
    assert "PlacementError" in ran.err
    assert "`clusterjob launch train.py`" in ran.err
    assert ran.out == "False\n"


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


def test_init_without_rank_0_fails_after_timeout(tmp_path: Path, preloaded: Preloaded) -> None:
    text = "from clusterjob import bootstrap\nbootstrap.init(timeout=1)\n"
    port = free_port()
    ran = preloaded.run([script(tmp_path, text)], tmp_path, rank_variables(1, 2, port))
    assert ran.code == 1
    last = next(line for line in reversed(ran.err.splitlines()) if "RendezvousError: " in line)
    assert "Connection refused; gave up after " in last
    assert 1 <= timeout_seconds(last) <= 1 + MARGIN
    assert f"cannot reach rank 0 at 127.0.0.1:{port}: " in last


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
def test_device_is_chosen_by_local_rank(local_rank: int, gpus: int, name: str) -> None:
    assert group.choose_device(local_rank, gpus) == name


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
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path)
    assert ran.code == 0, ran.err
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
    ran = preloaded.run([script(tmp_path, text)], tmp_path)
    assert ran.code == 0, ran.err


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
    for ran in [finish(process) for process in ranks]:
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


def test_traceback_has_rank_once_if_group_is_not_first_init(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    text = """
        from clusterjob import bootstrap
        for process_group in (False, True, True):
            bootstrap.init(process_group=process_group)
            bootstrap.shutdown()
        raise ValueError("boom")
    """
    [process] = start_manually(preloaded, 1, [script(tmp_path, text)], tmp_path)
    assert finish(process).err.splitlines()[-1] == "[rank0]: ValueError: boom"


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


@pytest.mark.parametrize("launcher", ["fork", "exec"])
def test_first_failure_in_time_is_root_cause(launcher: str, tmp_path: Path) -> None:
    text = """
        import atexit, os, time
        from clusterjob import bootstrap
        ctx = bootstrap.init()
        ctx.barrier()
        if ctx.rank == 1:
            # this rank fails first and exits last
            atexit.register(lambda: (open("failed", "w").close(), time.sleep(2)))
            raise ValueError("boom")
        while not os.path.exists("failed"):
            time.sleep(0.01)
        raise RuntimeError("this came later")
    """
    directory = tmp_path / "job"
    ran = launch(
        launcher, 2, [script(tmp_path, text)], tmp_path, {"CLUSTERJOB_JOB_DIR": str(directory)}
    )
    assert ran.code == 1
    failure = json.loads((directory / "result.json").read_text())["failure"]
    assert (failure["rank"], failure["message"], failure["exit_code"]) == (1, "ValueError: boom", 1)


def test_on_preempt_outside_of_main_thread_is_refused() -> None:
    context = bootstrap.init(process_group=False)
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="main thread"):
            pool.submit(context.on_preempt, print).result()
    finally:
        bootstrap.shutdown()


def test_report_pipe_is_only_for_worker_process_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    try:
        os.set_inheritable(write, True)
        for value in ("", "x:y", f"{write}:{os.getppid()}", f"999999:{os.getpid()}"):
            monkeypatch.setenv("CLUSTERJOB_REPORT_FD", value)
            assert report_pipe() is None
        monkeypatch.setenv("CLUSTERJOB_REPORT_FD", f"{write}:{os.getpid()}")
        assert report_pipe() == write
        assert not os.get_inheritable(write)
    finally:
        os.close(read)
        os.close(write)
    with open(os.devnull) as no_pipe:
        monkeypatch.setenv("CLUSTERJOB_REPORT_FD", f"{no_pipe.fileno()}:{os.getpid()}")
        assert report_pipe() is None


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


def run_slurm_tasks(
    preloaded: Preloaded, directory: Path, tasks: list[dict[str, str]], **common: str
) -> list[Any]:
    path = script(directory, SUMS)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "no-such-node-[1-2]",
    } | common
    processes = [preloaded.start([path], directory, step | task) for task in tasks]
    for process in processes:
        ran = finish(process)
        assert ran.code == 0, ran.err
    return rank_reports(directory, len(tasks))


def test_slurm_tasks_form_process_group_without_agent(tmp_path: Path, preloaded: Preloaded) -> None:
    one_node = {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_NODEID": "0",
    }
    ranks = run_slurm_tasks(
        preloaded,
        tmp_path,
        [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)],
        **one_node,
    )
    port = ranks[0][6]
    assert 20000 <= port < 32000
    assert ranks == [[rank, 3, 3, 0, 1, "slurm", port, 6.0] for rank in range(3)]


def test_one_slurm_task_per_node_has_local_rank_0(tmp_path: Path, preloaded: Preloaded) -> None:
    port = free_port()
    two_nodes = {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = run_slurm_tasks(
        preloaded,
        tmp_path,
        [{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in range(2)],
        **two_nodes,
    )
    assert ranks == [[0, 1, 2, rank, 2, "slurm", port, 3.0] for rank in range(2)]


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
