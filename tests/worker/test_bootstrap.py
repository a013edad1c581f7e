"""The worker side, with real torch and real processes: under our launcher, under torchrun, by hand,
and as a plain script.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import (
    LAUNCHERS,
    MARGIN,
    PATIENCE,
    by_hand,
    environment,
    finish,
    free_port,
    gave_up_after,
    launch,
    run,
    script,
    start,
    told,
)

from clusterjob import bootstrap
from clusterjob.errors import PlaceError, UsageError
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.verdict import is_peer_loss
from clusterjob.worker import device
from clusterjob.worker.process import report_pipe

# -- the import ----------------------------------------------------------------------------------------------------------


def test_importing_it_loads_the_standard_library_and_clusterjob_alone(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import clusterjob.bootstrap; print(*set(sys.modules) - before)"
    ran = run([sys.executable, "-c", code], tmp_path)
    assert ran.code == 0, ran.err
    loaded = {name.partition(".")[0] for name in ran.out.split()}
    assert loaded <= set(sys.stdlib_module_names) | {"clusterjob"}
    assert "clusterjob" in loaded
    assert not loaded & {"torch", "asyncio", "subprocess", "inspect", "dataclasses"}


def test_importing_it_costs_at_most_15_ms(tmp_path: Path) -> None:
    env = environment(tmp_path, {"PYTHONPYCACHEPREFIX": str(tmp_path / "pycache")})
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once

    def seconds(code: str) -> float:
        """Return the processor time of a fresh Python: what else runs on the machine counts little
        in it.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds("import clusterjob.bootstrap")
    pairs = [(seconds("pass"), seconds("import clusterjob.bootstrap")) for _ in range(25)]
    # The quickest of many: everything else only ever adds.
    assert min(own for _, own in pairs) - min(bare for bare, _ in pairs) <= 0.015


# -- two launched processes ------------------------------------------------------------------------------------------------

EVERYTHING = """
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
        names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
        return sum("gloo" in name for name in names)

    told = {}
    with bootstrap.init(timeout=60) as ctx:
        import torch.distributed.nn.functional  # as the first optimizer does; imported now, it would hold the group for ever
        r = ctx.rank
        told["place"] = {name: getattr(ctx, name) for name in (
            "rank", "local_rank", "world_size", "local_world_size", "node_rank", "nnodes", "master_addr", "master_port",
            "backend", "is_main", "source")}
        told["device"] = str(ctx.device)
        told["group"] = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]

        told["numbers"] = {op: ctx.reduce(r + 2, op) for op in ("mean", "sum", "min", "max", "product")}
        told["default"] = ctx.reduce([1.0, 2.0][r])
        told["floats"] = {op: ctx.reduce([0.5, -3.0][r], op) for op in ("mean", "sum", "min", "max", "product")}
        told["exact"] = ctx.reduce(2**62 + r, "sum")
        told["mixed"] = ctx.reduce([1, 0.5][r], "sum")
        told["nan"] = [ctx.reduce([float("nan"), 1.0][r], "min"), ctx.reduce([1.0, float("nan")][r], "max")]
        told["bool"] = ctx.reduce(r == 0, "sum")

        def tensor(value, op):
            before = value.clone()
            result = ctx.reduce(value, op)
            assert torch.equal(value, before) and result is not value and result.device == value.device
            return [result.tolist(), str(result.dtype).removeprefix("torch."), list(result.shape)]

        base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (r + 1)
        told["tensors"] = {op: tensor(base, op) for op in ("mean", "sum", "min", "max", "product")}
        told["dtypes"] = {
            "int mean": tensor(torch.tensor([1, 4]) * (r + 1), "mean"),
            "int16 sum": tensor(torch.tensor([5], dtype=torch.int16), "sum"),
            "half mean": tensor(torch.full((1,), 60000.0, dtype=torch.float16), "mean"),
            "bool sum": tensor(torch.tensor([True, r == 1]), "sum"),
            "bool max": tensor(torch.tensor([False, r == 1]), "max"),
            "scalar": tensor(torch.tensor(3.0), "sum"),
            "strided": tensor(base.t(), "sum"),
            "empty": tensor(torch.empty(0, 3), "sum"),
        }
        told["gradient"] = ctx.reduce(torch.ones(1, requires_grad=True)).requires_grad

        ctx.barrier()
        ctx.print("hello from", ctx.rank, sep=" - ")

        torch.manual_seed(r)
        model = torch.nn.Linear(2, 1)
        wrapped = ctx.wrap(model, bucket_cap_mb=1)
        wrapped(torch.full((1, 2), float(r + 1))).sum().backward()
        told["ddp"] = [type(wrapped).__name__, wrapped.module is model, model.weight.grad.tolist(), wrapped.device_ids]
        told["weights"] = model.weight.tolist()

        sampler = ctx.sampler(range(10))
        told["sampler"] = [len(sampler), sampler.num_replicas, sampler.rank, list(ctx.sampler(range(10), shuffle=False, drop_last=True))]

        told["again"] = bootstrap.init() is ctx and bootstrap.init("gloo", rank=r, process_group=True) is ctx
        with bootstrap.init() as inner:  # as a library would, in the middle of the script's own block
            assert inner is ctx
        told["inner"] = dist.is_initialized()
        told["refused"] = [
            refused(lambda: bootstrap.init("nccl")),
            refused(lambda: bootstrap.init(process_group=False)),
            refused(lambda: bootstrap.init(timeout=5)),
            refused(lambda: ctx.reduce(1, "median")),
            refused(lambda: ctx.reduce("1")),
            refused(lambda: ctx.reduce(2**63)),
        ]

        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of every fork beside threads
        child = os.fork()
        if child == 0:
            bootstrap.shutdown()  # as an exit handler would: the group is not the child's to leave
            os._exit(0 if dist.is_initialized() else 1)
        told["child"] = os.waitpid(child, 0)[1]
        ctx.barrier()

        told["threads"] = [gloo_threads()]

    told["left"] = dist.is_initialized()
    del wrapped, inner
    told["threads"].append(gloo_threads())
    told["closed"] = [refused(lambda: ctx.reduce(1)), refused(ctx.barrier), refused(lambda: ctx.wrap(model))]
    sums = []
    for _ in range(2):  # as a notebook does, or a test: the launcher's store still knows the group before
        with bootstrap.init() as ctx:
            sums.append(ctx.reduce(1, "sum"))
    told["rounds"] = sums
    told["threads"].append(gloo_threads())
    ctx = bootstrap.init()  # and one that the end of the process leaves
    told["last"] = ctx.reduce(1, "sum")
    Path(f"rank{r}.json").write_text(json.dumps(told))
"""


class Launched:
    """What a run of EVERYTHING on two workers has left."""

    def __init__(self, launcher: str, directory: Path) -> None:
        self.launcher = launcher
        self.ran = launch(launcher, 2, [script(directory, EVERYTHING)], directory)
        assert self.ran.code == 0, self.ran.err
        self.ranks = told(directory, 2)


@pytest.fixture(scope="module", params=LAUNCHERS)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(request.param, tmp_path_factory.mktemp(request.param))


def test_every_field_of_the_place_is_right(launched: Launched) -> None:
    master_ports = {rank["place"]["master_port"] for rank in launched.ranks}
    assert len(master_ports) == 1
    for number, rank in enumerate(launched.ranks):
        place = rank["place"]
        assert place["rank"] == place["local_rank"] == number
        assert place["world_size"] == place["local_world_size"] == 2
        assert (place["node_rank"], place["nnodes"]) == (0, 1)
        assert place["master_addr"] in ("127.0.0.1", "localhost")
        assert place["master_port"] > 0
        assert place["backend"] == "gloo"
        assert place["is_main"] is (number == 0)
        assert place["source"] == ("torchrun" if launched.launcher == "torchrun" else "clusterjob")
        assert rank["device"] == "cpu"
        assert rank["group"] == [number, 2, "gloo"]


def test_numbers_are_reduced_to_the_same_value_everywhere(launched: Launched) -> None:
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


def test_tensors_are_reduced_into_new_ones(launched: Launched) -> None:
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
            "half mean": [[60000.0], "float16", [1]],  # 2 x 60000 is beyond what float16 holds
            "bool sum": [[2, 1], "int64", [2]],
            "bool max": [[False, True], "bool", [2]],
            "scalar": [6.0, "float32", []],
            "strided": [[[3.0, 9.0], [6.0, 12.0]], "float32", [2, 2]],
            "empty": [[], "float32", [0, 3]],
        }
        assert rank["gradient"] is False


def test_a_wrapped_model_has_one_set_of_weights_and_the_mean_gradient(launched: Launched) -> None:
    first, second = launched.ranks
    assert first["weights"] == second["weights"]
    for rank in launched.ranks:
        assert rank["ddp"] == ["DistributedDataParallel", True, [[1.5, 1.5]], None]


def test_the_sampler_gives_each_process_its_share(launched: Launched) -> None:
    for number, rank in enumerate(launched.ranks):
        assert rank["sampler"] == [5, 2, number, list(range(number, 10, 2))]


def test_print_is_for_the_main_process(launched: Launched) -> None:
    assert launched.ran.out.count("hello from - ") == 1
    assert "hello from - 0" in launched.ran.out


def test_a_second_init_is_the_first_and_refuses_to_be_another(launched: Launched) -> None:
    for rank in launched.ranks:
        assert rank["again"] is True
        assert rank["inner"] is True
        backend, group, timeout, operation, kind, size = rank["refused"]
        assert "'gloo'" in backend
        assert "'nccl'" in backend
        assert "process_group" in group
        assert "timeout=60" in timeout
        assert "'median'" in operation
        assert "mean, sum, min, max, product" in operation
        assert "str" in kind
        assert "64 bits" in size


def test_leaving_leaves_nothing_and_init_works_again(launched: Launched) -> None:
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


def test_torch_finds_nothing_to_warn_of(launched: Launched) -> None:
    assert "arning" not in launched.ran.err
    assert "destroy_process_group" not in launched.ran.err


# -- one process -----------------------------------------------------------------------------------------------------------

ALONE = """
    import json, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap

    options = json.loads(sys.argv[1])
    with bootstrap.init(**options) as ctx:
        model = torch.nn.Linear(2, 1)
        wrapped = ctx.wrap(model)
        told = {
            "place": [ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size, ctx.node_rank, ctx.nnodes, ctx.is_main],
            "master": [ctx.master_addr, ctx.master_port],
            "source": ctx.source, "backend": ctx.backend, "device": str(ctx.device), "initialized": dist.is_initialized(),
            "wrapped": type(wrapped).__name__, "same": wrapped is model,
            "numbers": [ctx.reduce(3, op) for op in ("mean", "sum", "min", "max", "product")],
            "mean type": type(ctx.reduce(3)).__name__,
            "tensor": [ctx.reduce(torch.tensor([3]), op).tolist() for op in ("mean", "sum", "min", "max", "product")],
            "mean dtype": str(ctx.reduce(torch.tensor([3])).dtype),
            "sampler": list(ctx.sampler(range(4), shuffle=False)),
        }
        tensor = torch.ones(1)
        told["new"] = ctx.reduce(tensor) is not tensor
        ctx.barrier()
        ctx.print("alone")
    told["left"] = dist.is_initialized()
    bootstrap.shutdown()  # harmless
    Path("rank0.json").write_text(json.dumps(told))
"""


def alone(directory: Path, launcher: str | None, **options: Any) -> dict[str, Any]:
    argv = [script(directory, ALONE), json.dumps(options)]
    ran = (
        launch(launcher, 1, argv, directory)
        if launcher
        else run([sys.executable, "-W", "error", *argv], directory)
    )
    assert ran.code == 0, ran.err
    assert "arning" not in ran.err
    assert "alone" in ran.out
    [rank] = told(directory, 1)
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


def test_a_plain_script_is_a_world_of_one_without_a_group(tmp_path: Path) -> None:
    rank = alone(tmp_path, None)
    assert (rank["source"], rank["backend"], rank["initialized"], rank["same"]) == (
        "none",
        None,
        False,
        True,
    )
    assert rank["master"] == [None, None]


def test_a_plain_script_gets_a_group_if_it_asks_for_one(tmp_path: Path) -> None:
    rank = alone(tmp_path, None, process_group=True)
    assert (rank["backend"], rank["initialized"], rank["wrapped"]) == (
        "gloo",
        True,
        "DistributedDataParallel",
    )
    assert rank["master"] == [None, None]


def test_a_launched_world_of_one_has_a_group(tmp_path: Path) -> None:
    rank = alone(tmp_path, "fork")
    assert (rank["source"], rank["backend"], rank["initialized"]) == ("clusterjob", "gloo", True)


def test_without_a_group_processes_cannot_mistake_their_own_value_for_everybodys(
    tmp_path: Path,
) -> None:
    text = """
        import torch
        from clusterjob import bootstrap
        from clusterjob.errors import UsageError
        ctx = bootstrap.init(process_group=False)
        assert ctx.world_size == 2 and ctx.backend is None and not torch.distributed.is_initialized()
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
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path)
    assert ran.code == 0, ran.err
    assert "fine 0" in ran.out
    assert "fine 1" in ran.out


# -- what is refused ---------------------------------------------------------------------------------------------------------

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
def test_a_half_set_environment_names_the_missing_variable(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(PlaceError, match=f"{missing} is not set"):
        bootstrap.init()


def test_a_half_set_environment_ends_the_script_before_torch_is_loaded(tmp_path: Path) -> None:
    ran = run(
        [sys.executable, script(tmp_path, ONLY_INIT)], tmp_path, {"RANK": "0", "WORLD_SIZE": "2"}
    )
    assert ran.code == 1
    assert "PlaceError" in ran.err
    assert "LOCAL_RANK is not set" in ran.err
    assert ran.out == "False\n"


def test_the_place_of_a_node_needs_a_launcher(tmp_path: Path) -> None:
    node = {
        "CLUSTERJOB_NNODES": "2",
        "CLUSTERJOB_NODE_RANK": "1",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
    }
    ran = run([sys.executable, script(tmp_path, ONLY_INIT)], tmp_path, node)
    assert ran.code == 1
    assert "PlaceError" in ran.err
    assert "`clusterjob launch train.py`" in ran.err
    assert ran.out == "False\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "mpi"}, "nccl, gloo"),
        ({"timeout": 0}, "seconds above 0"),
        ({"timeout": math.nan}, "seconds above 0"),
        ({"world_size": 2}, "rank and world_size"),
        ({"local_rank": 1}, "rank and world_size"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bootstrap.init(**options)


def test_processes_that_do_not_meet_say_so_in_time(tmp_path: Path) -> None:
    text = "from clusterjob import bootstrap\nbootstrap.init(timeout=1)\n"
    place = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ran = run([sys.executable, script(tmp_path, text)], tmp_path, place)
    assert ran.code == 1
    last = next(line for line in reversed(ran.err.splitlines()) if "GangError: " in line)
    assert "Connection refused; gave up after " in last
    assert 1 <= gave_up_after(last) <= 1 + MARGIN
    assert f"cannot reach rank 0 at 127.0.0.1:{place['MASTER_PORT']}: " in last


# -- devices -----------------------------------------------------------------------------------------------------------------


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
def test_the_device_follows_the_local_rank_among_the_gpus_that_are_seen(
    local_rank: int, gpus: int, name: str
) -> None:
    assert device.choose_device(local_rank, gpus) == name


def test_the_backend_follows_the_machine() -> None:
    assert device.choose_backend(None, 0) == "gloo"
    assert device.choose_backend(None, 4) == "nccl"
    assert device.choose_backend("gloo", 4) == "gloo"
    with pytest.raises(UsageError, match="needs a GPU"):
        device.choose_backend("nccl", 0)


# -- groups and places that the script brings ----------------------------------------------------------------------------------


def test_a_group_of_the_scripts_own_is_adopted_and_left_alone(tmp_path: Path) -> None:
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
        with bootstrap.init() as ctx:  # now one of our own
            assert ctx.reduce(1, "sum") == 2
        assert not dist.is_initialized()
        print("fine", ctx.rank)
    """
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path)
    assert ran.code == 0, ran.err
    assert "fine 0" in ran.out
    assert "fine 1" in ran.out


def test_an_adopted_group_without_any_launcher_finds_its_local_ranks(tmp_path: Path) -> None:
    text = """
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from clusterjob import bootstrap

        def work(rank):
            dist.init_process_group("gloo", init_method=f"file://{__file__}.meeting", rank=rank, world_size=2)
            ctx = bootstrap.init()
            assert (ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size) == (rank, rank, 2, 2)
            assert (ctx.node_rank, ctx.nnodes, ctx.source) == (0, 1, "process group")
            assert ctx.reduce(rank, "max") == 1
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.start_processes(work, nprocs=2, start_method="fork")
    """
    ran = run([sys.executable, script(tmp_path, text)], tmp_path)
    assert ran.code == 0, ran.err


def test_a_place_by_hand(tmp_path: Path) -> None:
    text = """
        import os, sys
        from clusterjob import bootstrap
        rank, port = int(sys.argv[1]), int(sys.argv[2])
        with bootstrap.init(rank=rank, world_size=2, local_rank=rank, master_addr="127.0.0.1", master_port=port) as ctx:
            assert (ctx.rank, ctx.local_rank, ctx.world_size, ctx.source) == (rank, rank, 2, "arguments")
            assert ctx.reduce(rank, "sum") == 1
        assert "MASTER_ADDR" not in os.environ
        with bootstrap.init(rank=0, world_size=1) as ctx:
            assert ctx.backend is None
    """
    path, port = script(tmp_path, text), free_port()
    # Node-level variables of a platform, which the place by hand overrules.
    platform = {"RANK": "0", "WORLD_SIZE": "1"}
    ranks = [start([sys.executable, path, rank, port], tmp_path, platform) for rank in range(2)]
    for ran in [finish(process) for process in ranks]:
        assert ran.code == 0, ran.err


# -- failures ------------------------------------------------------------------------------------------------------------------

FAILS_WITH_A_COLLECTIVE_UNDER_WAY = """
    import atexit, contextlib, os, sys, time
    import torch
    import torch.distributed as dist
    from clusterjob import bootstrap

    atexit.register(print, "atexit ran")  # on a pipe, so that it is seen only if the end of the process flushes
    ctx = bootstrap.init()
    with ctx if sys.argv[1] == "with" else contextlib.nullcontext():
        ctx.barrier()
        if ctx.rank == 0:
            while not os.path.exists("rank 1 has ended"):
                time.sleep(0.01)
        dist.all_reduce(torch.ones(1_000_000), async_op=True)  # as DDP has them under way when backward() fails
        if ctx.rank == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("block", ["with", "without"])
def test_an_exception_ends_the_process_at_once_with_code_1(block: str, tmp_path: Path) -> None:
    path = script(tmp_path, FAILS_WITH_A_COLLECTIVE_UNDER_WAY)
    survivor, failing = by_hand(2, [path, block], tmp_path, {"PYTHONUNBUFFERED": ""})
    try:
        # Nobody takes part in its collective and nobody stops it: it has to come to its end by
        # itself.
        ran = finish(failing, patience=PATIENCE / 2)
    finally:
        (tmp_path / "rank 1 has ended").touch()
        other = finish(survivor)
    assert ran.code == 1
    assert ran.err.rstrip().endswith("ValueError: boom")
    assert ran.out == "atexit ran\n"
    assert other.code == 1
    assert is_peer_loss(other.err)
    assert other.out == "atexit ran\n"


def test_the_exit_code_of_sys_exit_in_the_block_is_kept(tmp_path: Path) -> None:
    text = "import sys\nfrom clusterjob import bootstrap\nwith bootstrap.init() as ctx:\n    sys.exit(3)\n"
    for ran in [finish(process) for process in by_hand(2, [script(tmp_path, text)], tmp_path)]:
        assert ran.code == 3, ran.err
        assert "Traceback" not in ran.err


@pytest.mark.parametrize("launcher", ["fork", "exec"])
def test_the_launcher_learns_the_time_of_the_first_failure(launcher: str, tmp_path: Path) -> None:
    text = """
        import atexit, os, time
        from clusterjob import bootstrap
        ctx = bootstrap.init()
        ctx.barrier()
        if ctx.rank == 1:
            atexit.register(lambda: (open("failed", "w").close(), time.sleep(2)))  # it fails first and ends last
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


def test_failures_are_reported_by_the_worker_itself_and_by_none_of_its_children(
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


# -- Slurm's tasks, as srun's variables make them -------------------------------------------------------------------------

SUMS = """
    import json, sys
    from pathlib import Path
    import torch
    from clusterjob import bootstrap

    with bootstrap.init(timeout=60) as ctx:
        total = ctx.reduce(torch.tensor([ctx.rank + 1.0]), "sum").item()
        Path(f"rank{ctx.rank}.json").write_text(json.dumps([
            ctx.local_rank, ctx.local_world_size, ctx.world_size, ctx.node_rank, ctx.nnodes, ctx.source, ctx.master_port, total]))
"""


def tasks_of_a_step(directory: Path, tasks: list[dict[str, str]], **common: str) -> list[Any]:
    path = script(directory, SUMS)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "no-such-node-[1-2]",
    } | common
    processes = [start([sys.executable, path], directory, step | task) for task in tasks]
    for process in processes:
        ran = finish(process)
        assert ran.code == 0, ran.err
    return told(directory, len(tasks))


def test_the_tasks_of_a_step_meet_without_an_agent(tmp_path: Path) -> None:
    one_node = {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_NODEID": "0",
    }
    ranks = tasks_of_a_step(
        tmp_path,
        [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)],
        **one_node,
    )
    port = ranks[0][6]
    assert 20000 <= port < 32000
    assert ranks == [[rank, 3, 3, 0, 1, "slurm", port, 6.0] for rank in range(3)]


def test_tasks_that_are_alone_on_their_nodes_are_processes_of_their_own(tmp_path: Path) -> None:
    port = free_port()
    two_nodes = {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = tasks_of_a_step(
        tmp_path,
        [{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in range(2)],
        **two_nodes,
    )
    assert ranks == [[0, 1, 2, rank, 2, "slurm", port, 3.0] for rank in range(2)]


@pytest.mark.parametrize("nproc", [None, 1, 4])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("process_group", [None, False])
def test_a_task_that_would_leave_gpus_idle_is_refused(
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
        with pytest.raises(PlaceError) as caught:
            device.check_gpus(worker, gpus, process_group=process_group)
        assert "sees 8 GPUs" in caught.value.message
        assert all(word in caught.value.hint for word in ("clusterjob launch", "--ntasks-per-node"))
    else:
        device.check_gpus(worker, gpus, process_group=process_group)
