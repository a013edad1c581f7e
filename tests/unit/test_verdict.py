"""Verdict of a job: its JSON form, its text, and the kinds of failures."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.logs.failure_texts import (
    is_effect,
    kind_of_end,
    last_exception,
    meanings,
    meanings_of_end,
    place,
    without_library_warnings,
)
from clusterjob.node.verdict import (
    SCHEMA,
    STACK_TITLE,
    Failure,
    FailureKind,
    JobState,
    Verdict,
)

FAILURE = Failure(
    3,
    1,
    node_rank=1,
    host="gpu7",
    exit_code=137,
    signal="SIGKILL",
    message="was killed by SIGKILL",
    last_lines=("one", "two"),
)
NODE_FAILURE = Failure(
    None, None, node_rank=2, host="gpu9", exit_code=1, signal=None, message="the agent was lost"
)

text = st.text(st.characters())
numbers = st.integers(0, 2**31 - 1)
failures = st.builds(
    Failure,
    rank=st.none() | numbers,
    local_rank=st.none() | numbers,
    node_rank=numbers,
    host=text,
    exit_code=st.integers(0, 255),
    signal=st.none() | text,
    message=text,
    last_lines=st.lists(text, max_size=3).map(tuple),
    effect=st.booleans(),
    kind=st.sampled_from(FailureKind),
)
ends = st.sampled_from([state for state in JobState if state.final or state is JobState.PREEMPTED])
verdicts = st.builds(
    lambda state, code, **rest: Verdict(state, 0 if state is JobState.SUCCEEDED else code, **rest),
    state=ends,
    code=st.integers(1, 255),
    reason=text,
    failure=st.none() | failures,
    consequences=st.lists(failures, max_size=3).map(tuple),
    restarts=st.integers(0, 99),
    attempt=st.integers(0, 99),
    started_at=st.none() | text,
    ended_at=st.none() | text,
    evidence=text,
    evidence_ranks=numbers,
)


@given(verdicts)
def test_verdict_is_equal_after_json_round_trip(verdict: Verdict) -> None:
    data = json.loads(json.dumps(verdict.to_json()))
    assert data["schema"] == SCHEMA
    assert Verdict.from_json(data) == verdict


def test_unknown_fields_of_newer_verdict_are_ignored() -> None:
    verdict = Verdict(
        JobState.FAILED, 137, reason="reason", failure=FAILURE, consequences=(NODE_FAILURE,)
    )
    data = verdict.to_json() | {"schema": 9, "colour": "red"}
    data["failure"] = data["failure"] | {"colour": "red"}
    assert Verdict.from_json(data) == verdict


def test_missing_fields_of_older_verdict_have_defaults() -> None:
    assert Verdict.from_json({"state": "SUCCEEDED", "exit_code": 0}) == Verdict(
        JobState.SUCCEEDED, 0
    )


def test_failure_is_named_by_rank_node_and_host() -> None:
    assert FAILURE.who == "rank 3 (node 1, local rank 1, host gpu7)"
    assert NODE_FAILURE.who == "node 2 (host gpu9)"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict(JobState.SUCCEEDED, 0), "SUCCEEDED"),
        (Verdict(JobState.SUCCEEDED, 0, restarts=1), "SUCCEEDED after 1 restart"),
        (Verdict(JobState.SUCCEEDED, 0, restarts=2), "SUCCEEDED after 2 restarts"),
        (Verdict(JobState.CANCELLED, 143, reason="cancelled"), "CANCELLED"),
        (
            Verdict(JobState.CANCELLED, 143, reason="SIGTERM on gpu7"),
            "CANCELLED: SIGTERM on gpu7",
        ),
    ],
)
def test_text_without_failure_is_state_restarts_and_reason(verdict: Verdict, text: str) -> None:
    assert verdict.text() == text


def test_text_of_failure_names_cause_last_lines_and_consequences() -> None:
    effect = dataclasses.replace(FAILURE, rank=0, effect=True)
    own = [dataclasses.replace(FAILURE, rank=rank, message="ValueError: boom") for rank in (4, 5)]
    others = (
        effect,
        own[0],
        dataclasses.replace(NODE_FAILURE, message="it is on fire"),
        own[1],
        dataclasses.replace(effect, rank=2),
        dataclasses.replace(FAILURE, rank=6),
    )
    assert Verdict(
        JobState.FAILED,
        137,
        reason=f"{FAILURE.who}: {FAILURE.message}",
        failure=FAILURE,
        consequences=others,
        restarts=3,
    ).text().splitlines() == [
        "FAILED after 3 restarts: rank 3 (node 1, local rank 1, host gpu7): was killed by SIGKILL",
        "  the last lines of its stderr:",
        "  | one",
        "  | two",
        "  2 ranks failed as a consequence: 0, 2",
        "  1 rank failed with the same error: 6",
        "  2 ranks failed for another reason: 4-5: ValueError: boom",
        "  1 node failed for another reason: node 2: it is on fire",
    ]


@pytest.mark.parametrize(("ranks", "line"), [(1, "stacks of 1 rank"), (2, "stacks of 2 ranks")])
def test_text_names_the_file_of_the_stacks(ranks: int, line: str) -> None:
    end = Verdict(JobState.FAILED, 1, evidence="stacks.txt", evidence_ranks=ranks)
    assert end.text().splitlines()[-1] == f"  {line}: stacks.txt"


def test_job_that_fails_by_an_early_exit_exits_with_1() -> None:
    assert Verdict.of_failure(dataclasses.replace(FAILURE, exit_code=0)).exit_code == 1


def test_text_shows_stack_under_its_name_and_lines_without_label_of_torch() -> None:
    def shown(*lines: str) -> list[str]:
        failure = dataclasses.replace(FAILURE, last_lines=lines)
        return Verdict(JobState.FAILED, 1, failure=failure).text().splitlines()[1:]

    title = "  its stack (most recent call first):"
    assert shown(STACK_TITLE, "decode (data.py:7)") == [title, "  | decode (data.py:7)"]
    lines = shown("[rank3]: Traceback", "[rank3]: [rank3]:   File", "a [rank3]: b")
    assert lines[1:] == ["  | Traceback", "  |   File", "  | a [rank3]: b"]


def test_text_of_verdict_shows_few_of_many_reasons() -> None:
    others = tuple(
        dataclasses.replace(FAILURE, rank=rank, message=f"ValueError: {rank}")
        for rank in range(100)
    )
    lines = (
        Verdict(JobState.FAILED, 137, reason="boom", failure=FAILURE, consequences=others)
        .text()
        .splitlines()
    )
    assert [line for line in lines if "reason" in line][-1] == "  and 94 more reasons"
    assert len(lines) < 12


# Errors of gloo, NCCL and torch's store after another rank ended, from public threads and runs.
@pytest.mark.parametrize(
    "line",
    [
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
            "Connection closed by peer [127.0.0.1]:28375"
        ),
        (
            "RuntimeError: [enforce fail at pair.cc:446] . "
            "Read error [10.0.0.2]:5: Connection reset by peer"
        ),
        "RuntimeError: Application timeout caused pair closure",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        (
            "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. "
            "Connection was likely closed."
        ),
        (
            "torch.distributed.DistBackendError: NCCL error: remote process exited "
            "or there was a network error, NCCL version 2.21.5"
        ),
        "recvValue failed on SocketImpl(fd=8): failed to recv, got 0 bytes",
        "sendBytes failed on SocketImpl(fd=3): Broken pipe",
        "RuntimeError: NCCL communicator was aborted on rank 0.",
        (
            "torch.distributed.DistStoreError: wait timeout after 4000ms, "
            "keys: /default_pg/0//cpu//0/1"
        ),
        (
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] "
            "Timed out waiting 3000ms for recv operation to complete"
        ),
        (
            "clusterjob.errors.CheckpointError: step 50 cannot be saved in out: "
            "another process failed"
        ),
    ],
)
def test_error_about_lost_peer_is_effect(line: str) -> None:
    assert is_effect(meanings([line]))
    assert is_effect(meanings(["Traceback (most recent call last):", line, ""]))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ValueError: boom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "was killed by SIGKILL",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data'",
        "Segmentation fault (core dumped)",
        "AssertionError",
        "loss is nan at step 5",
        "clusterjob.errors.CheckpointError: step 50 cannot be saved in out: [Errno 28] No space",
    ],
)
def test_own_error_of_worker_is_not_effect(line: str) -> None:
    assert not is_effect(meanings([line]))


TITLE = "Traceback (most recent call last):"
FIRST = [TITLE, '  File "a.py", line 1, in <module>', "KeyError: 'a'", ""]
OF_LOADER = [
    "    raise exception",
    "ValueError: Caught ValueError in DataLoader worker process 0.",
    f"Original {TITLE}",
]
IN_SCRIPT = ['  File "/home/me/train.py", line 3', "    x = = 1", "        ^"]


@pytest.mark.parametrize(
    ("lines", "exception", "where"),
    [
        ([TITLE, "  ...", "errors.LinkError: boom", "hint: do that"], "errors.LinkError: boom", ""),
        (["hint: do that"], None, ""),
        (["ValueError: boom"], None, ""),
        (
            [
                *FIRST,
                f"[rank1]: [rank1]: {TITLE}",  # of the second process group
                '[rank1]: [rank1]:   File "b.py", line 2, in <module>',
                "[rank1]: [rank1]: ValueError: boom",
                "more of the message",
                "Set the environment variable HYDRA_FULL_ERROR=1",
            ],
            "ValueError: boom",
            "b.py:2",
        ),
        ([*FIRST, TITLE, "  cut short"], None, ""),
        (
            [*OF_LOADER, '  File "train.py", line 9, in __getitem__', "ValueError: cut image", ""],
            "ValueError: cut image",
            "train.py:9",
        ),
        (
            [
                f"[rank0]: {TITLE}",
                '[rank0]:   File "/home/me/train.py", line 7, in <module>',
                "[rank0]:     step()",
                '[rank0]:   File "/home/me/model.py", line 12, in step',
                "[rank0]: ValueError: boom",
                '  File "/later.py", line 1, in f',
            ],
            "ValueError: boom",
            "model.py:12",
        ),
        # A syntax error of the script itself has no title.
        (
            ["a warning", *IN_SCRIPT, "SyntaxError: invalid", ""],
            "SyntaxError: invalid",
            "train.py:3",
        ),
        (IN_SCRIPT, None, ""),
    ],
)
def test_last_exception_and_its_innermost_place_are_found(
    lines: list[str], exception: str | None, where: str
) -> None:
    assert (last_exception(lines), place(lines)) == (exception, where)


def test_library_warnings_are_removed_unless_all_lines_are_warnings() -> None:
    warnings = [
        (
            "[W1122 05:56:20.930705543 socket.cpp:207] [c10d] "
            "The hostname of the client socket cannot be retrieved. err=-3"
        ),
        (
            "[rank1]:[W1122 05:56:21.930705543 TCPStore.cpp:106] [c10d] "
            "sendBytes failed on SocketImpl(fd=3): Broken pipe"
        ),
        (
            "Exception raised from sendBytes at "
            "/pytorch/torch/csrc/distributed/c10d/Utils.hpp:653 (most recent call first):"
        ),
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)",
    ]
    error = (
        "[rank1]:[E1122 05:56:21.930705543 ProcessGroupNCCL.cpp:607] "
        "Watchdog caught collective operation timeout"
    )
    assert without_library_warnings(["ValueError: boom", *warnings, error]) == (
        "ValueError: boom",
        error,
    )
    assert without_library_warnings(warnings) == tuple(warnings)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom_device"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "device"),
        ("RuntimeError: HIP error: out of resources", "device"),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrect setup", "device"),
        (
            (
                "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, "
                "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3"
            ),
            "device",
        ),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "code"),
        (
            (
                "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator:"
                " can't allocate memory: you tried to allocate 9 bytes. Error code 12"
            ),
            "oom_host",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "oom_host"),
        (
            (
                "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is"
                " possible that dataloader's workers are out of shared memory."
            ),
            "oom_host",
        ),
        (
            "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /default_pg/0//cpu",
            "rendezvous",
        ),
        (
            (
                "[rank1]:[E1122 05:56:21.930705543 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog"
                " caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran"
            ),
            "network",
        ),
        ("MemoryError", "oom_host"),
        ("ModuleNotFoundError: No module named 'wandb'", "import"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer", "network"),
        ("clusterjob.errors.RanksMissingError: waiting for rank 3", "rendezvous"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated.", "terminated"),
        ("RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly", "terminated"),
        ("multiprocessing.api.SignalException: Process 7 got signal: 15", "terminated"),
        ("ValueError: boom", "code"),
    ],
)
def test_failure_kind_comes_from_error_text(line: str, kind: str) -> None:
    lines = ["Traceback (most recent call last):", line]
    assert kind_of_end(None, meanings(lines), None, raised=True) is FailureKind(kind)


@pytest.mark.parametrize(
    "handled",
    [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "MemoryError",
    ],
)
def test_handled_error_in_output_does_not_give_the_kind(handled: str) -> None:
    traceback = "Traceback (most recent call last):"
    frame = '  File "train.py", line 9, in step'
    lines = [traceback, frame, handled, "now with less", traceback, frame, "ValueError: boom"]
    found = meanings_of_end("exited with code 1", lines)
    assert kind_of_end(None, found, None, raised=True) is FailureKind.CODE
    found = meanings_of_end("ValueError: boom", [handled], FailureKind.CODE)
    assert kind_of_end(FailureKind.CODE, found, None, raised=True) is FailureKind.CODE
    found = meanings_of_end("exited with code 1", [traceback, frame, handled, "bye"])
    assert kind_of_end(None, found, None, raised=True) is not FailureKind.CODE
    found = meanings_of_end("killed by SIGABRT", [handled, "terminate called"])
    assert kind_of_end(None, found, "SIGABRT", raised=False) is not FailureKind.SIGNAL


@pytest.mark.parametrize(
    ("signal_name", "raised", "kind"),
    [
        ("SIGTERM", False, "terminated"),
        ("SIGSEGV", True, "signal"),
        (None, True, "code"),
        (None, False, "exit_code"),
    ],
)
def test_failure_kind_without_known_text_comes_from_signal_or_exit(
    signal_name: str | None, raised: bool, kind: str
) -> None:
    assert kind_of_end(None, frozenset(), signal_name, raised=raised) is FailureKind(kind)


def test_failure_kind_reported_by_worker_is_kept() -> None:
    found = meanings(["RuntimeError: Connection closed by peer"])
    reported = FailureKind.RENDEZVOUS
    assert kind_of_end(reported, found, None, raised=True) is reported
