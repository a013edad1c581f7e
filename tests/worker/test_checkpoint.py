"""ctx.checkpoint: kills at any moment, torn checkpoints, ranks that agree, shards."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from launching import launch, run, script

from clusterjob import bootstrap
from clusterjob.errors import CheckpointError, UsageError
from clusterjob.worker.checkpoint import Checkpoint

# One of the pytest processes imports torch, while it runs these tests.
pytestmark = pytest.mark.xdist_group("checkpoint")


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """Return the checkpoints of a directory with those of step 1 and 2."""
    import torch

    checkpoint = bootstrap.init(process_group=False).checkpoint(tmp_path / "saved")
    for step in (1, 2):
        checkpoint.save({"weights": torch.full((1000,), float(step)), "step": step}, step=step)
    return checkpoint


@pytest.fixture(autouse=True)
def _closed() -> object:
    yield
    bootstrap.shutdown()


def paths(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "saved").iterdir())


# -- one process -----------------------------------------------------------------------------------


def test_load_without_checkpoint_returns_none(tmp_path: Path) -> None:
    checkpoint = bootstrap.init(process_group=False).checkpoint(tmp_path / "saved")
    assert checkpoint.load() is None
    assert checkpoint.step is None


def test_latest_two_checkpoints_are_kept(saved: Checkpoint, tmp_path: Path) -> None:
    saved.save({"step": 3}, step=3)
    assert [path.name for path in paths(tmp_path)] == ["00000001.step2", "00000002.step3"]
    assert saved.load() == {"step": 3}
    assert saved.step == 3


def test_same_step_can_be_saved_twice(saved: Checkpoint) -> None:
    saved.save({"step": 2, "again": True}, step=2)
    assert saved.load() == {"step": 2, "again": True}


@pytest.mark.parametrize("how", ["truncated", "missing", "overwritten"])
def test_torn_checkpoint_is_skipped_and_then_removed(
    saved: Checkpoint, tmp_path: Path, how: str
) -> None:
    state_file = paths(tmp_path)[-1] / "state.pt"
    if how == "truncated":
        state_file.write_bytes(state_file.read_bytes()[:-10])
    elif how == "missing":
        state_file.unlink()
    else:
        state_file.write_bytes(b"x" * state_file.stat().st_size)
    state = saved.load()
    assert state["step"] == saved.step == 1
    assert state["weights"].eq(1).all()
    saved.save({"step": 2}, step=2)
    assert [path.name for path in paths(tmp_path)] == ["00000000.step1", "00000002.step2"]
    assert saved.load() == {"step": 2}


def test_load_fails_if_all_checkpoints_are_torn(saved: Checkpoint, tmp_path: Path) -> None:
    for path in paths(tmp_path):
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: EOFError"):
        saved.load()


def test_failed_save_keeps_earlier_checkpoints(saved: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 3 cannot be saved in "):
        saved.save({"function": lambda: None}, step=3)
    state = saved.load()
    assert state["step"] == saved.step == 2
    saved.save({"step": 3}, step=3)
    assert [path.name for path in paths(tmp_path)] == ["00000001.step2", "00000002.step3"]


@pytest.mark.parametrize("step", [-1, 1.0, True, 10**18])
def test_wrong_step_is_refused(saved: Checkpoint, step: object) -> None:
    with pytest.raises(UsageError, match="must be a whole number"):
        saved.save({}, step=step)  # type: ignore[arg-type]


class Harmful:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_load_executes_no_pickle(saved: Checkpoint, tmp_path: Path) -> None:
    saved.save({"step": 3, "harmful": Harmful(tmp_path / "harm")}, step=3)
    assert saved.load()["step"] == 2
    assert not (tmp_path / "harm").exists()
    saved.load(weights_only=False)
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_sharded_load_executes_no_pickle(tmp_path: Path, where: str) -> None:
    import torch

    checkpoint = bootstrap.init(process_group=False).checkpoint(tmp_path / "saved", sharded=True)
    harmful = Harmful(tmp_path / "harm")
    checkpoint.save({"a": torch.ones(4), "b": harmful if where == "value" else 1}, step=1)
    if where == "metadata":
        [path] = paths(tmp_path)
        (path / ".metadata").write_bytes(pickle.dumps(harmful))
    with pytest.raises(CheckpointError):
        checkpoint.load({"a": torch.zeros(4), "b": 0})
    assert not (tmp_path / "harm").exists()


# -- kills -----------------------------------------------------------------------------------------

# Forks a process for each save and kills it at its n-th operation on a file, for all n. After each,
# loads the state, which must be that of the last save or of the one before.
KILLED_SAVES = """
    import os, signal, sys
    import torch
    from clusterjob import bootstrap

    SHARDED = sys.argv[1] == "sharded"

    def context():
        return bootstrap.init(process_group=False).checkpoint("saved", sharded=SHARDED)

    def state(step):
        return {"weights": torch.full((5000,), float(step)), "step": step}

    def loaded():
        checkpoint = context()
        found = checkpoint.load(*([state(0)] if SHARDED else []))
        if found is None:
            return 0
        assert checkpoint.step == found["step"], (checkpoint.step, found["step"])
        assert found["weights"].eq(found["step"]).all()
        return found["step"]

    def in_child(function):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write_end, str(function()).encode())
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        answer = os.read(read_end, 100)
        os.close(read_end)
        return answer.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def save(step, kill_at):
        checkpoint = context()
        left = kill_at

        def count(event=None, arguments=()):
            nonlocal left
            if event in REMOVALS or (event in EVENTS and "saved" in str(arguments[0])):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        real = os.fsync
        def fsync(descriptor):
            count("open", ("saved",))
            real(descriptor)
            count("open", ("saved",))
        os.fsync = fsync
        sys.addaudithook(count)
        checkpoint.save(state(step), step=step)
        return left

    EVENTS, REMOVALS = {"open", "os.mkdir", "os.rename", "os.listdir"}, {"os.remove", "os.rmdir"}
    import torch.distributed.checkpoint, torch.distributed.checkpoint.filesystem
    bootstrap.init(process_group=False)
    torch.save(state(0), os.devnull)  # imports more
    assert in_child(lambda: [save(1, 0), save(2, 0)])[1] == 0
    known, kill_at, kills = 2, 0, 0
    while True:
        kill_at += 1
        answer, code = in_child(lambda: save(known + 1, kill_at))
        assert code in (0, -signal.SIGKILL), code
        step, load_code = in_child(loaded)
        assert load_code == 0, load_code
        assert int(step) in ((known + 1,) if code == 0 else (known, known + 1)), (step, known)
        known = int(step)
        if code == 0:
            break
        kills += 1
    assert len(os.listdir("saved")) == 2, os.listdir("saved")  # a whole save removes all leftovers
    print(kills)
    """


@pytest.mark.parametrize("kind", ["whole", pytest.param("sharded", marks=pytest.mark.slow)])
def test_kill_at_each_operation_of_save_leaves_loadable_state(tmp_path: Path, kind: str) -> None:
    ran = run([sys.executable, script(tmp_path, KILLED_SAVES), kind], tmp_path, code=0)
    assert int(ran.out) >= 10


# -- several processes -----------------------------------------------------------------------------


def test_ranks_agree_on_what_is_loaded_and_whether_it_is_saved(tmp_path: Path) -> None:
    text = """
        import torch
        from clusterjob import bootstrap, errors
        with bootstrap.init() as ctx:
            checkpoint = ctx.checkpoint("saved")
            for step in (1, 2):
                checkpoint.save({"of": ctx.rank, "step": step}, step=step)
            real = torch.load
            def load(path, **options):
                if ctx.rank == 1 and "step2" in str(path):
                    raise OSError("unreadable")
                return real(path, **options)
            torch.load = load
            print(ctx.rank, checkpoint.load(), checkpoint.step)
            open("file", "w").close()
            try:
                ctx.checkpoint("file").save({}, step=1)
            except errors.CheckpointError as error:
                print(ctx.rank, error)
        """
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path, code=0)
    for rank in range(2):
        assert f"{rank} {{'of': 0, 'step': 1}} 1" in ran.out
    assert "1 step 1 cannot be saved in file: another process failed" in ran.out
    assert "0 step 1 cannot be saved in file: [Errno" in ran.out


def test_failed_save_is_blamed_on_rank_0_alone(tmp_path: Path) -> None:
    text = """
        import time
        from clusterjob import bootstrap, errors
        with bootstrap.init() as ctx:
            open("saved", "w").close()
            try:
                ctx.checkpoint("saved").save({}, step=1)
            except errors.CheckpointError:
                time.sleep(0.05 * ctx.is_main)  # the other rank reports its error first
                raise
        """
    ran = launch("fork", 2, [script(tmp_path, text)], tmp_path, code=1)
    assert "FAILED: rank 0 " in ran.err
    assert "saved: [Errno" in ran.err.rpartition("FAILED: ")[2]


SHARDED = """
    import sys
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from clusterjob import bootstrap
    with bootstrap.init() as ctx:
        mesh = init_device_mesh("cpu", (ctx.world_size,))
        torch.manual_seed(ctx.world_size)
        model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
        state = {"model": model.state_dict(), "step": 0}
        checkpoint = ctx.checkpoint("saved", sharded=True)
        if checkpoint.load(state) is None:
            for step in (1, 2):
                checkpoint.save({"model": model.state_dict(), "step": step}, step=step)
        else:
            model.load_state_dict(state["model"])
        total = model.weight.full_tensor().sum().item()
        ctx.print("weights", checkpoint.step, state["step"], total)
    """


@pytest.mark.slow
def test_torn_sharded_checkpoint_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    program = script(tmp_path, SHARDED)
    ran = launch("fork", 2, [program], tmp_path, code=0)
    [part, *_] = sorted((tmp_path / "saved" / "00000001.step2").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-10])
    ran = launch("fork", 2, [program], tmp_path, code=0)
    assert "weights 1 1 " in ran.out


@pytest.mark.slow
def test_sharded_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    program = script(tmp_path, SHARDED)
    outs = []
    for nproc in (4, 2, 3):
        ran = launch("fork", nproc, [program], tmp_path, code=0)
        outs.append(next(line.split() for line in ran.out.splitlines() if "weights" in line)[-3:])
    [_, first], [step, state, _], _ = (out[1:] if n == 0 else out for n, out in enumerate(outs))
    assert (step, state) == ("2", "2")
    assert [out[-1] for out in outs] == [first] * 3
