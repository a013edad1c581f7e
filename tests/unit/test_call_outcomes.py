"""The files with a function's result: exact plain values, bounded texts, hostile content."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterjob.api import failures, results
from clusterjob.core.records import Record
from clusterjob.errors import JobFailed
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import outcomes

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("job")


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) and type(one) is type(other)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_value_comes_back_exactly_without_pickle(folder: Path, value: Any) -> None:
    try:
        json.dumps(value).encode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate survives as an escape
        pass
    outcomes.write_value(folder, 0, attempt=0, value=value)
    found = outcomes.from_json((folder / "call" / "rank0.attempt0.json").read_bytes(), 0)
    assert not found.pickled
    assert same(found.value, value)
    assert not (folder / "call" / "rank0.attempt0.pkl").exists()


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
    outcomes.write_value(tmp_path, 3, attempt=1, value=value)
    plain = outcomes.from_json((tmp_path / "call" / "rank3.attempt1.json").read_bytes(), 3)
    assert plain.pickled == kind
    local = outcomes.read(tmp_path, 3, attempt=1)
    assert local is not None
    assert (local.value, type(local.value)) == (value, type(value))


@pytest.mark.parametrize(("value", "read"), [(Number(2.5), 2.5), (math.nan, math.nan)])
def test_float_of_another_type_and_nan_are_read_as_floats(
    tmp_path: Path, value: float, read: float
) -> None:
    outcomes.write_value(tmp_path, 9, attempt=1, value=value)
    local = outcomes.read(tmp_path, 9, attempt=1)
    assert local is not None
    assert same(local.value, read)


def test_large_value_is_not_sent_as_json(tmp_path: Path) -> None:
    outcomes.write_value(tmp_path, 0, attempt=0, value="x" * (outcomes.MAX_JSON + 1))
    assert (tmp_path / "call" / "rank0.attempt0.json").stat().st_size < 200


def test_exception_is_written_as_bounded_text(tmp_path: Path) -> None:
    outcomes.write_error(tmp_path, 0, attempt=0, error=ValueError("x" * 1_000_000))
    path = tmp_path / "call" / "rank0.attempt0.json"
    assert path.stat().st_size < 200_000
    found = outcomes.from_json(path.read_bytes(), 0)
    assert found.failure is not None
    assert found.failure.type == "ValueError"


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
        assert isinstance(outcomes.from_json(data, 3), outcomes.CallOutcome)


def test_file_larger_than_any_that_a_rank_writes_is_malformed() -> None:
    data = b'{"value":"%s"}'
    room = outcomes.MAX_JSON - len(data % b"")
    assert len(outcomes.from_json(data % (b"x" * room), 0).value) == room
    with pytest.raises(JobFailed, match="malformed"):
        outcomes.from_json(data % (b"x" * (room + 1)), 0)


def test_error_of_hostile_job_controls_no_terminal() -> None:
    """Python prints an error that the user's script does not catch."""
    verdict = Verdict(JobState.LOST, 1, reason="\x1b]0;title\x07\nsecond line")
    with pytest.raises(JobFailed) as caught:
        raise failures.error_of(verdict, None, name="job t-1")
    assert str(caught.value) == "job t-1 LOST: \\x1b]0;title\\x07\nsecond line"
    record = Record(
        "t-1", "t", cluster="none", backend="none", job_dir=Path("/nonexistent"), nodes=1,
        submitted_at="", spec={},
    )  # fmt: skip
    with pytest.raises(JobFailed, match="is not plain data") as caught:
        results._check_plain(record, {0: outcomes.CallOutcome(pickled="\x1b[2J")})
    assert "\x1b" not in str(caught.value)
