"""The files with a function's result: exact plain values, bounded texts, hostile content."""

from __future__ import annotations

import contextlib
import json
import math
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clusterjob.api import outcomes, results
from clusterjob.core.records import Record
from clusterjob.errors import JobFailed
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import call

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["tuple", "dict"]), inner, max_size=4)
    ),
    max_leaves=10,
)


class Pair(NamedTuple):
    """A tuple of another type."""

    one: int
    other: int


class Number(float):
    """As numpy's float64: a float of another type."""


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLAIN)
@example("\ud800")
def test_plain_value_comes_back_exactly_without_pickle(tmp_path: Path, value: Any) -> None:
    call.write_value(tmp_path, 0, attempt=0, value=value)
    found = outcomes.from_json((tmp_path / "call" / "rank0.attempt0.json").read_bytes(), 0)
    assert not found.pickled
    assert (repr(found.value), type(found.value)) == (repr(value), type(value))
    assert not (tmp_path / "call" / "rank0.attempt0.pkl").exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        ([b"x"], "bytes"),
        (10**5000, "int"),
        (Pair(1, 2), "Pair"),
        (HTTPStatus.OK, "HTTPStatus"),
    ],
    ids=["set", "dict", "bytes", "int", "named tuple", "number of another type"],
)
def test_other_value_is_pickled_and_named(tmp_path: Path, value: Any, kind: str) -> None:
    call.write_value(tmp_path, 3, attempt=1, value=value)
    plain = outcomes.from_json((tmp_path / "call" / "rank3.attempt1.json").read_bytes(), 3)
    assert plain.pickled == kind
    local = outcomes.read_outcome(tmp_path, 3, attempt=1)
    assert (local.value, type(local.value)) == (value, type(value))


@pytest.mark.parametrize(("value", "read"), [(Number(2.5), "2.5"), (math.nan, "nan")])
def test_float_of_another_type_and_nan_are_read_as_floats(
    tmp_path: Path, value: float, read: str
) -> None:
    call.write_value(tmp_path, 9, attempt=1, value=value)
    local = outcomes.read_outcome(tmp_path, 9, attempt=1)
    assert (repr(local.value), type(local.value)) == (read, float)


def test_exception_is_written_as_bounded_text(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (ValueError("x" * 1_000_000), Mute()):
        call.write_error(tmp_path, 0, attempt=0, error=error)
        data = (tmp_path / "call" / "rank0.attempt0.json").read_bytes()
        assert len(data) < 200_000
        found = outcomes.from_json(data, 0)
        assert found.failure.type == type(error).__name__


def test_larger_value_than_the_limit_is_neither_written_nor_read(tmp_path: Path) -> None:
    call.write_value(tmp_path, 0, attempt=0, value="x" * (call.MAX_JSON + 1))
    assert (tmp_path / "call" / "rank0.attempt0.json").stat().st_size < 200
    data = b'{"value":"%s"}'
    room = call.MAX_JSON - len(data % b"")
    assert len(outcomes.from_json(data % (b"x" * room), 0).value) == room
    with pytest.raises(JobFailed, match="malformed"):
        outcomes.from_json(data % (b"x" * (room + 1)), 0)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=50)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["value", "error", "pickled", "tuple", "dict", "type"]),
                inner,
            )
        ),
    ).map(lambda data: json.dumps(data).encode())
)
def test_hostile_file_gives_value_or_one_error(data: bytes) -> None:
    with contextlib.suppress(JobFailed):
        assert isinstance(outcomes.from_json(data, 3), call.CallOutcome)


def test_error_of_hostile_job_controls_no_terminal() -> None:
    """Python prints an error that the user's script does not catch."""
    verdict = Verdict(JobState.LOST, 1, reason="\x1b]0;title\x07\nsecond line")
    error = outcomes.error_of(verdict, None, name="job t-1")
    assert str(error) == "job t-1 LOST: \\x1b]0;title\\x07\nsecond line"
    record = Record(
        "t-1", "t", cluster="none", backend="none", job_dir=Path("/nonexistent"), nodes=1,
        submitted_at="", spec={},
    )  # fmt: skip
    with pytest.raises(JobFailed, match="is not plain data") as caught:
        results._check_plain(record, {0: call.CallOutcome(pickled="\x1b[2J")})
    assert "\x1b" not in str(caught.value)
