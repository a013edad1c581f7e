"""How a job's end is kept and told."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.verdict import SCHEMA, Failure, JobState, Verdict, is_peer_loss, last_exception

FAILURE = Failure(3, 1, 1, "gpu7", 137, "SIGKILL", "was killed by SIGKILL", ("one", "two"))
NODE_FAILURE = Failure(None, None, 2, "gpu9", 1, None, "the agent was lost")

text = st.text(st.characters())
failures = st.builds(
    Failure, rank=st.none() | st.integers(0), local_rank=st.none() | st.integers(0), node_rank=st.integers(0), host=text,
    exit_code=st.integers(0, 255), signal=st.none() | text, message=text,
    last_lines=st.lists(text, max_size=3).map(tuple), effect=st.booleans(),
)  # fmt: skip
verdicts = st.builds(
    Verdict, state=st.sampled_from(JobState), exit_code=st.integers(0, 255), reason=text, failure=st.none() | failures,
    consequences=st.lists(failures, max_size=3).map(tuple), restarts=st.integers(0, 99), attempt=st.integers(0, 99),
    started_at=st.none() | text, ended_at=st.none() | text,
)  # fmt: skip


def test_states() -> None:
    assert [state for state in JobState if state.final] == [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST]
    assert f"{JobState.LOST}" == str(JobState.LOST) == "LOST"
    assert json.dumps(JobState.FAILED) == '"FAILED"'


@given(verdicts)
def test_a_verdict_survives_json(verdict: Verdict) -> None:
    data = json.loads(json.dumps(verdict.to_json()))
    assert data["schema"] == SCHEMA
    assert Verdict.from_json(data) == verdict


@given(failures)
def test_a_failure_survives_json(failure: Failure) -> None:
    assert Failure.from_json(json.loads(json.dumps(failure.to_json()))) == failure


def test_what_a_newer_writer_adds_is_left_out() -> None:
    verdict = Verdict(JobState.FAILED, 137, "reason", FAILURE, (NODE_FAILURE,))
    data = verdict.to_json() | {"schema": 9, "colour": "red"}
    data["failure"] = data["failure"] | {"colour": "red"}
    assert Verdict.from_json(data) == verdict


def test_what_an_older_writer_leaves_out_has_a_default() -> None:
    assert Verdict.from_json({"state": "SUCCEEDED", "exit_code": 0}) == Verdict(JobState.SUCCEEDED, 0)


def test_the_keys_that_others_read() -> None:
    data = Verdict(JobState.FAILED, 137, "reason", FAILURE).to_json()
    assert set(data) >= {
        "schema",
        "state",
        "exit_code",
        "reason",
        "failure",
        "consequences",
        "restarts",
        "attempt",
        "started_at",
        "ended_at",
    }
    assert data["failure"].items() >= {
        "rank": 3, "local_rank": 1, "node_rank": 1, "host": "gpu7", "exit_code": 137, "signal": "SIGKILL",
        "message": "was killed by SIGKILL",
    }.items()  # fmt: skip
    assert data["failure"]["last_lines"] == ["one", "two"]


def test_who_failed() -> None:
    assert FAILURE.who == "rank 3 (node 1, local rank 1, host gpu7)"
    assert NODE_FAILURE.who == "node 2 (host gpu9)"


def test_the_text_of_a_success_is_one_word() -> None:
    assert Verdict(JobState.SUCCEEDED, 0).text() == "SUCCEEDED"
    assert Verdict(JobState.SUCCEEDED, 0, restarts=1).text() == "SUCCEEDED after 1 restart"
    assert Verdict(JobState.SUCCEEDED, 0, restarts=2).text() == "SUCCEEDED after 2 restarts"


def test_the_text_of_a_failure_names_cause_last_lines_and_consequences() -> None:
    others = (dataclasses.replace(FAILURE, rank=0), NODE_FAILURE)
    assert Verdict(JobState.FAILED, 137, f"{FAILURE.who}: {FAILURE.message}", FAILURE, others, restarts=3).text().splitlines() == [
        "FAILED after 3 restarts: rank 3 (node 1, local rank 1, host gpu7): was killed by SIGKILL",
        "  the last lines of its stderr:",
        "  | one",
        "  | two",
        "  failed after it, as a consequence: 0, node 2",
    ]


def test_the_text_of_a_cancelled_job_is_its_reason() -> None:
    assert Verdict(JobState.CANCELLED, 143, "SIGTERM on gpu7").text() == "CANCELLED: SIGTERM on gpu7"


@given(verdicts)
def test_every_verdict_has_a_text_that_begins_with_its_state(verdict: Verdict) -> None:
    assert verdict.text().startswith(str(verdict.state))


# What gloo, NCCL and torch's store say when another rank is gone, as seen in public threads and in runs.
@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:28375",
        "RuntimeError: [enforce fail at pair.cc:446] . Read error [10.0.0.2]:5: Connection reset by peer",
        "RuntimeError: Application timeout caused pair closure",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
        "recvValue failed on SocketImpl(fd=8): failed to recv, got 0 bytes",
        "sendBytes failed on SocketImpl(fd=3): Broken pipe",
        "RuntimeError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_what_only_tells_of_a_lost_peer(words: str) -> None:
    assert is_peer_loss(words)
    assert is_peer_loss(f"Traceback (most recent call last):\n{words}\n")


@pytest.mark.parametrize(
    "words",
    [
        "", "ValueError: boom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "was killed by SIGKILL",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data'", "Segmentation fault (core dumped)", "AssertionError",
        "loss is nan at step 5",
    ],
)  # fmt: skip
def test_what_is_a_worker_s_own(words: str) -> None:
    assert not is_peer_loss(words)


def test_the_hint_below_an_error_of_ours_is_not_the_error() -> None:
    lines = ["Traceback (most recent call last):", "  ...", "clusterjob.errors.GangError: boom", "hint: do that"]
    assert last_exception(lines) == "clusterjob.errors.GangError: boom"
    assert last_exception(["hint: do that"]) is None
