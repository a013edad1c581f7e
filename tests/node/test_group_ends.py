"""Process groups in a job's processes: freed late, one after another, in forked children, and
beside other backends.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hooked import MODES, hooked_path, python, unfolded
from launching import free_port, launch, script

# A function makes the model and ends its group: the model is freed after it. A corner of the store
# for each round, so that nothing but that can go wrong in a torch without the hook.
FREED_LATE = """
    import os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    store, rank, world_size = next(dist.rendezvous("env://"))

    def train(round):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"round{round}", store), rank=rank, world_size=world_size)
        half = dist.new_group([0, 1])
        models = [DDP(torch.nn.Linear(16, 16))]
        if rank < 2:
            models.append(DDP(torch.nn.Linear(16, 16), process_group=half))
        for _ in range(5):
            for model in models:
                model(torch.randn(4, 16)).square().mean().backward()
        dist.destroy_process_group()

    for round in range(8):
        train(round)
    print("ended well")
"""


@pytest.mark.parametrize("mode", MODES)
def test_models_that_are_freed_after_their_groups_neither_hang_nor_abort(
    tmp_path: Path, mode: str
) -> None:
    ended = launch(mode, 3, [script(tmp_path, FREED_LATE)], tmp_path)
    assert ended.code == 0, ended.err
    assert {f"[{rank}] ended well" for rank in range(3)} == set(unfolded(ended.out))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_classic_script_ends_well_each_time(tmp_path: Path, mode: str) -> None:
    classic = script(tmp_path, """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        def main():
            dist.init_process_group("gloo")
            model = DDP(torch.nn.Linear(32, 32))
            for _ in range(10):
                model(torch.randn(8, 32)).square().mean().backward()
            dist.destroy_process_group()

        main()
    """)  # fmt: skip
    ended = [launch(mode, 4, [classic], tmp_path) for _ in range(10)]
    assert [each.code for each in ended] == [0] * 10, [each.err for each in ended if each.code]


@pytest.mark.parametrize("own_port", [True, False])
def test_groups_one_after_another_meet_and_keep_no_more_files_and_threads(
    tmp_path: Path, own_port: bool
) -> None:
    program = f"""
        import os
        import torch, torch.distributed as dist
        if {own_port}:
            os.environ["MASTER_PORT"] = "{free_port()}"

        def used():
            return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

        counts = []
        for _ in range(12):
            dist.init_process_group("gloo")
            group = dist.new_group([0, 1])
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 4
            dist.destroy_process_group()
            counts.append(used())
        assert counts[-1] <= counts[2], counts
        print("met twelve times")
    """
    ended = launch("fork", 2, [script(tmp_path, program)], tmp_path)
    assert ended.code == 0, ended.err
    assert unfolded(ended.out) == ["[0] met twelve times", "[1] met twelve times"]


@pytest.mark.parametrize("mode", MODES)
def test_trials_whose_other_ranks_are_new_processes_meet_each_time(
    tmp_path: Path, mode: str
) -> None:
    program = """
        import multiprocessing, os
        import torch, torch.distributed as dist

        def trial(rank, world_size):
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            if rank == 0:
                print("met", int(total.item()))

        for world_size in (2, 3, 2, 2):  # rank 2 has not formed as many groups as the others
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=trial, args=(rank, world_size)) for rank in range(1, world_size)]
            for child in children:
                child.start()
            trial(0, world_size)
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0] * len(children)
    """
    ended = launch(mode, 1, [script(tmp_path, program)], tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.split("\n") == ["[0] met 2", "[0] met 3", "[0] met 2", "[0] met 2", ""]


def test_trials_by_bootstrap_whose_other_ranks_are_new_processes_meet_each_time(
    tmp_path: Path,
) -> None:
    program = """
        import multiprocessing
        from clusterjob import bootstrap

        def trial(rank, world_size):
            with bootstrap.init(rank=rank, world_size=world_size, timeout=60) as ctx:
                total = ctx.reduce(1, "sum")
            if rank == 0:
                print("met", total)

        for world_size in (2, 3, 2):
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=trial, args=(rank, world_size)) for rank in range(1, world_size)]
            for child in children:
                child.start()
            trial(0, world_size)
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0] * len(children)
    """
    ended = launch("fork", 1, [script(tmp_path, program)], tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.split("\n") == ["[0] met 2", "[0] met 3", "[0] met 2", ""]


def test_bootstrap_serves_a_store_at_the_scripts_own_port_for_one_group_after_another(
    tmp_path: Path,
) -> None:
    program = """
        import os, sys
        from clusterjob import bootstrap

        os.environ["MASTER_PORT"] = sys.argv[1]
        for _ in range(3):
            with bootstrap.init(timeout=60) as ctx:
                print("met", ctx.reduce(1, "sum"))
    """
    ended = launch("fork", 2, [script(tmp_path, program), free_port()], tmp_path)
    assert ended.code == 0, ended.err
    assert unfolded(ended.out) == ["[0] met 2"] * 3 + ["[1] met 2"] * 3


def test_a_new_group_without_this_process_frees_nothing(tmp_path: Path) -> None:
    program = """
        import torch.distributed as dist
        from clusterjob.node.workers import torch_patches as torch_changes

        dist.init_process_group("gloo")
        dist.destroy_process_group(dist.new_group([0, 1]))
        for ranks in ([1], [0, 1]):
            dist.new_group(ranks)
            print(ranks, bool(torch_changes._DESTROYED))
    """
    ended = launch("fork", 2, [script(tmp_path, program)], tmp_path)
    assert ended.code == 0, ended.err
    assert unfolded(ended.out) == [
        "[0] [0, 1] False",
        "[0] [1] True",
        "[1] [0, 1] False",
        "[1] [1] False",
    ]


# -- groups of one process ------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return hooked_path(tmp_path)


def alone(path: str, code: str) -> list[str]:
    """Return the lines of a program with groups of one process; one that hangs is killed by its own
    alarm.
    """
    told = python(path, f"""
        import gc, os, signal, sys
        signal.alarm(60)
        import torch, torch.distributed as dist

        def make(backend="gloo"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

        def kept():
            gc.collect()
            threads = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
            parts = [type(part).__name__ for part in sys.modules["clusterjob_torch_changes"]._DESTROYED]
            return parts, any("gloo" in thread for thread in threads)
{textwrap.indent(textwrap.dedent(code), " " * 8)}
    """)  # fmt: skip
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_a_forked_child_never_frees_the_groups_of_its_parent(path: str) -> None:
    lines = alone(path, """
        make()
        dist.destroy_process_group()
        make()  # of which the child has a copy
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # it has none of its parent's
            dist.destroy_process_group()
        for _ in range(2):
            if dist.is_initialized():
                dist.destroy_process_group()
            make()
        if child == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)  # fmt: skip
    assert lines == ["7"]


def test_gloo_alone_is_kept_when_its_group_is_destroyed(path: str) -> None:
    lines = alone(path, """
        from torch.testing._internal.distributed import fake_pg  # a backend beside gloo, as NCCL's is

        for backend in ("cpu:gloo,cuda:fake", "fake"):
            make(backend)
            dist.destroy_process_group()
            print(kept())
    """)  # fmt: skip
    assert lines == ["(['ProcessGroupGloo'], True)", "([], False)"]


def test_the_wrapper_of_a_debugged_group_is_kept_which_has_a_gloo_group(path: str) -> None:
    lines = alone(path, """
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        make()
        dist.destroy_process_group()
        print(kept())
    """)  # fmt: skip
    assert lines == ["(['_ProcessGroupWrapper'], True)"]
