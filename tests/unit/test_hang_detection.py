"""When a job hangs: the rule by which a worker moves, and the verdict."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterjob.core.records import Record
from clusterjob.insight import silence
from clusterjob.node.agent.node_workers import bounded
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics.samples import NodeFacts, Sample, SampleWriter
from clusterjob.node.rendezvous import messages, root_cause
from clusterjob.node.rendezvous.messages import check_sender
from clusterjob.node.stacks import progress
from clusterjob.node.stacks.flight_recorder import DUMP_FILE, PIPE_FILE, FlightRecorder
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.stacks.progress import Activity, Progress
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


# -- workers that move -----------------------------------------------------------------------------


def frames(*places: str) -> tuple[Frame, ...]:
    """Return frames, the innermost first, of texts such as ``train.py:f``, the outermost first."""
    parts = [place.partition(":") for place in places]
    return tuple(Frame(file, 7, name) for file, _, name in reversed(parts))


def stack(*main: str, rank: int = 0, answered: bool = True, **threads: str) -> RankStack:
    others = tuple(ThreadStack(name, frames(place)) for name, place in threads.items())
    return RankStack(
        rank, 0, "host", 10 + rank, state="sleeps", answered=answered,
        threads=(ThreadStack("MainThread", frames(*main) if answered else ()), *others),
    )  # fmt: skip


class Samples:
    """Samples of one rank, with counters that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.activity, self.now = Activity(io=0, cpu=0.0, below_io=0, runs=False), 0.0
        self.hidden: list[bool] = []
        self.progress = Progress()
        monkeypatch.setattr(progress, "read_activity", self._read)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _read(self, workers: dict[int, bool]) -> dict[int, Activity]:
        self.hidden = list(workers.values())
        return dict.fromkeys(workers, self.activity)

    def take(self, *found: RankStack, **used: Any) -> bool:
        self.now += 5.0
        self.activity = replace(self.activity, **used)
        return self.progress.sample(lambda: found)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Samples:
    taken = Samples(monkeypatch)
    assert taken.take(stack("a.py:main", "a.py:step")), "a new rank moves"
    return taken


def test_rank_in_another_function_moves(samples: Samples) -> None:
    assert not samples.take(stack("a.py:main", "a.py:step"))
    assert samples.take(stack("a.py:main", "a.py:evaluate"))
    assert not samples.take(stack("a.py:main", "a.py:evaluate"))


def test_deeper_or_shallower_call_of_the_same_function_is_no_move(samples: Samples) -> None:
    for main in (("a.py:main",), ("a.py:main", "a.py:step", "a.py:ready"), ("a.py:main",)):
        assert not samples.take(stack(*main))
    assert samples.take(stack("a.py:main", "a.py:other"))


@pytest.mark.parametrize(
    ("used", "moves"),
    [
        ({"io": 1}, True),
        ({"cpu": 4.0}, True),
        ({"cpu": 0.1}, False),  # a monitor
        ({"below_io": 50_000_000}, True),
        ({"below_io": 500_000}, False),
    ],
)
def test_rank_that_uses_its_files_or_works_below_moves(
    samples: Samples, used: dict[str, Any], moves: bool
) -> None:
    assert samples.take(stack("a.py:main", "a.py:step"), **used) is moves
    assert not samples.take(stack("a.py:main", "a.py:step"))


def test_stack_that_is_written_in_a_sample_is_no_move(samples: Samples) -> None:
    def write() -> list[RankStack]:
        samples.activity = replace(samples.activity, io=900)
        return [stack("a.py:main", "a.py:step")]

    assert not samples.progress.sample(write)
    assert not samples.take(stack("a.py:main", "a.py:step"))


def test_process_below_that_waits_for_a_core_works(samples: Samples) -> None:
    assert not samples.take(stack("a.py:main", "a.py:step"), runs=True)
    assert samples.take(stack("a.py:main", "a.py:step"), runs=True)


@pytest.mark.parametrize("main", [None, "<frozen importlib._bootstrap>:exec_module", "a.py:step"])
def test_main_thread_counts_as_below_where_the_stack_does_not_show_the_work(
    monkeypatch: pytest.MonkeyPatch, main: str | None
) -> None:
    samples = Samples(monkeypatch)
    samples.take(stack(main or "", answered=main is not None))
    assert samples.hidden == [main != "a.py:step"]


def test_counters_of_a_main_thread_that_computes_grow_if_it_is_hidden() -> None:
    own = os.getpid()
    before = progress.read_activity({own: True})[own]
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = {hidden: progress.read_activity({own: hidden})[own] for hidden in (True, False)}
    assert after[True].cpu > before.cpu
    assert after[True].runs
    assert after[False].cpu < after[True].cpu


def test_late_answer_is_no_move(samples: Samples) -> None:
    assert not samples.take(stack("", answered=False))
    assert not samples.take(stack("a.py:main", "a.py:step"))


def test_thread_with_a_usual_place_does_not_move_its_rank(samples: Samples) -> None:
    places = ["w.py:wait"] * 6 + ["w.py:read", "w.py:wait", "w.py:wait", "w.py:send", "w.py:wait"]
    for place in places:
        assert not samples.take(stack("a.py:main", "a.py:step", monitor=place))


def test_thread_that_works_moves_its_rank(samples: Samples) -> None:
    moves = [
        samples.take(stack("a.py:main", "a.py:step", pool=f"w.py:{name}")) for name in "abcdefgh"
    ]
    assert sum(moves) >= 3


def test_new_worker_moves_and_no_worker_stands_still(samples: Samples) -> None:
    other = replace(stack("a.py:main", "a.py:step"), pid=99)
    assert samples.take(other)
    assert samples.take()


# -- verdict and messages --------------------------------------------------------------------------


def hang_of(
    stacks: list[RankStack], seconds: float = 90.0, *, step: int = -1, first_rank: int = 0
) -> tuple[Verdict, Failure]:
    """Return the end of a job that hangs with these stacks, and its failure."""
    why = f"no progress for {seconds:g}s"
    hang = Failure.of_node(0, "host", message=why, kind=FailureKind.HANG)
    end = Verdict(JobState.FAILED, 1, reason=why, failure=hang)
    first_ranks = dict.fromkeys((0, 1), first_rank)
    found = root_cause.of_hang(end, stacks, step=step, first_ranks=first_ranks)
    assert found.failure is not None
    return found, found.failure


def test_verdict_names_the_rank_outside_of_the_collective() -> None:
    waiting = [f"{TORCH}:all_reduce"]
    stacks = [stack("train.py:main", *waiting, rank=rank) for rank in (0, 2)]
    stacks.append(stack("train.py:main", "data.py:decode", rank=1))
    _, failure = hang_of(stacks, 600.0, step=12)
    assert (failure.kind, failure.rank) == (FailureKind.HANG, 1)
    assert failure.message == (
        "no progress for 600s: ranks 0, 2 wait in all_reduce (train.py:7);"
        " rank 1 is in decode (data.py:7);"
        " last step 12"
    )
    assert failure.last_lines[1] == "decode (data.py:7)"


def test_verdict_names_the_stopped_one_of_two_ranks() -> None:
    stopped = replace(stack(rank=1), answered=False, state="is stopped (do_signal_stop)")
    _, failure = hang_of([stack("train.py:main", "train.py:step", rank=0), stopped])
    assert failure.rank == 1
    assert failure.message.endswith(
        "rank 1 does not answer: the process is stopped (do_signal_stop)"
    )


def test_stack_in_verdict_leaves_out_import_machinery() -> None:
    machinery = [f"<frozen importlib._bootstrap>:load{i}" for i in range(30)]
    stacks = [stack("train.py:main", *machinery, "slow.py:<module>", rank=0)]
    stacks.append(stack("train.py:main", f"{TORCH}:all_reduce", rank=1))
    _, failure = hang_of(stacks)
    assert failure.last_lines[1:] == ("<module> (slow.py:7)", "main (train.py:7)")


def test_verdict_names_no_rank_if_all_wait_alike() -> None:
    stacks = [stack("train.py:main", f"{TORCH}:all_reduce", rank=rank) for rank in (0, 1)]
    found, failure = hang_of(stacks)
    assert failure.rank is None
    assert found.reason.startswith("no progress for 90s: all 2 ranks wait in all_reduce")


def test_verdict_names_the_last_rank_that_runs() -> None:
    last = replace(stack("train.py:main", f"{TORCH}:barrier", rank=3), node_rank=1, host="gpu9")
    _, failure = hang_of([last], first_rank=2)
    place = (failure.rank, failure.local_rank, failure.node_rank, failure.host)
    assert place == (3, 1, 1, "gpu9")


def test_stack_of_another_node_is_refused_and_a_huge_one_fits_a_message() -> None:
    huge = replace(
        stack("a.py:main"),
        threads=tuple(ThreadStack(f"t{n}", frames(*["x" * 300 + ":f"] * 200)) for n in range(300)),
    )
    message = messages.StackFound(0, bounded(huge))
    data = messages.FROM_AGENT.encode(message)
    assert len(data) < 256_000
    assert messages.FROM_AGENT.decode(json.loads(data)) == message
    with pytest.raises(MalformedMessageError, match="a stack of node 0"):
        check_sender(message, node_rank=1)


def test_flight_recorder_is_asked_through_a_pipe(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, attempt=0)
    variables = recorder.variables({}, 1)
    assert recorder.variables({"TORCH_FR_DUMP_TEMP_FILE": "/tmp/own"}, 1) == {}
    assert recorder.request(1, [3], 5.0) == ()  # no process reads the pipe
    # As ProcessGroupNCCL does: <prefix><rank>.pipe, and a dump in <prefix><rank>.
    pipe = f"{variables[PIPE_FILE]}3.pipe"
    os.mkfifo(pipe, 0o600)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    target = Path(f"{variables[DUMP_FILE]}3")
    target.parent.mkdir(parents=True)

    def dump() -> None:
        select.select([reader], [], [], 10.0)
        target.write_bytes(os.read(reader, 64))

    thread = threading.Thread(target=dump)
    thread.start()
    assert recorder.request(1, [3], 10.0) == ("logs/node0/flight_recorder.restart1.rank3",)
    thread.join()
    assert target.read_bytes()
    os.close(reader)
    recorder.close()
    assert not Path(pipe).parent.exists()


def test_flight_recorder_without_pipes_sets_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert FlightRecorder(tmp_path, 0, attempt=0).variables({}, 0) == {}


@pytest.mark.parametrize(("quiet", "shown"), [(599.0, False), (660.0, True)])
def test_status_says_that_a_job_is_silent(tmp_path: Path, quiet: float, shown: bool) -> None:
    node_directory(tmp_path, 0).mkdir(parents=True)
    facts = NodeFacts(0, "host", attempt=0, cores=1, memory=1)
    sample = Sample(0.0, 1.0, 0, quiet, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    SampleWriter(tmp_path, 0).add(facts, sample)
    record = cast("Record", SimpleNamespace(job_dir=tmp_path, job_id="train-x"))
    running = cast("Any", SimpleNamespace(state=JobState.RUNNING))
    text = silence.hint(record, running)
    assert text == (
        "no output for 11m: `clusterjob stacks train-x` shows what its ranks do" if shown else ""
    )
    assert silence.hint(record, cast("Any", SimpleNamespace(state=JobState.FAILED))) == ""
