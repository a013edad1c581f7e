"""Process groups in workers.

Groups that are freed late, in succession, in forked children, or beside other backends.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hooked import hooked_path, lines_by_rank, python
from launching import free_port, launch, script

# A function creates the model and destroys its group, so the model is freed after the group. Each
# round has its own prefix in the store, so that without the hook only the late release can fail.
FREED_LATE = """
    import os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    store, rank, world_size = next(dist.rendezvous("env://"))

    def train(round):
        prefix_store = dist.PrefixStore(f"round{round}", store)
        dist.init_process_group("gloo", store=prefix_store, rank=rank, world_size=world_size)
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


@pytest.mark.parametrize("mode", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_models_freed_after_their_groups_neither_hang_nor_abort(tmp_path: Path, mode: str) -> None:
    ended = launch(mode, 3, [script(tmp_path, FREED_LATE)], tmp_path, code=0)
    assert {f"[{rank}] ended well" for rank in range(3)} == set(lines_by_rank(ended.out))


@pytest.mark.parametrize("own_port", [pytest.param(True, marks=pytest.mark.slow), False])
def test_successive_groups_leak_no_descriptors_and_threads(tmp_path: Path, own_port: bool) -> None:
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
    ended = launch("fork", 2, [script(tmp_path, program)], tmp_path, code=0)
    assert lines_by_rank(ended.out) == ["[0] met twelve times", "[1] met twelve times"]


def test_bootstrap_serves_store_on_port_of_script_for_successive_groups(
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
    ended = launch("fork", 2, [script(tmp_path, program), free_port()], tmp_path, code=0)
    assert lines_by_rank(ended.out) == ["[0] met 2"] * 3 + ["[1] met 2"] * 3


# -- groups of one process -------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return hooked_path(tmp_path)


def run_one_process(path: str, code: str) -> list[str]:
    """Run a program with groups of one process, and return its lines of output.

    SIGALRM kills a program that hangs.
    """
    completed = python(
        path,
        f"""
        import gc, os, signal, sys
        signal.alarm(60)
        import torch, torch.distributed as dist

        def make(backend="gloo"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
{textwrap.indent(textwrap.dedent(code), " " * 8)}
    """,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


def test_forked_child_does_not_free_groups_of_parent(path: str) -> None:
    lines = run_one_process(
        path,
        """
        make()
        dist.destroy_process_group()
        make()  # the child has a copy of this group
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child does not inherit the alarm
            dist.destroy_process_group()
        for _ in range(2):
            if dist.is_initialized():
                dist.destroy_process_group()
            make()
        if child == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    )
    assert lines == ["7"]


def test_group_left_at_the_end_is_not_freed_and_a_destroyed_one_is(path: str) -> None:
    lines = run_one_process(
        path,
        """
        def show():
            gc.collect()
            tasks = os.listdir("/proc/self/task")
            names = [open(f"/proc/self/task/{task}/comm").read() for task in tasks]
            print(any("gloo" in name for name in names), flush=True)

        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        make()
        dist.destroy_process_group()
        show()
        make()
        patches = sys.modules["clusterjob_hook.torch_patches"]
        patches._never_free(dist.distributed_c10d)
        dist.destroy_process_group()
        show()
    """,
    )
    assert lines == ["False", "True"]
