"""Any answer of a host is accepted or raises one error.

The host is a function that gives fuzzed answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JSON, changed, emptied, fuzz
from hostile_host import MIRRORS, exchange, packed, polled
from hypothesis import strategies as st
from launching import write_tree

from clusterjob.errors import ClusterJobError
from clusterjob.remote import answer_schemas
from clusterjob.remote.fetch import Fetch, Request

NAMES_OF_CALLS = sorted({*answer_schemas.ANSWERS, "put"})
POLLED = polled(
    {"path": "events.jsonl", "offset": 0, "size": 3},
    {"path": "result.json", "stamp": "1", "size": 2},
)
NAMES = st.sampled_from(
    [
        "runs",
        "runs/a",
        "runs/b/c",
        "runs/../x",
        "../x",
        "/x",
        "runs/.git/hooks/x",
        "runs/a/d",
        "",
        ".",
        "runs/",
        "x",
        "runs/l",
        "runs/e",
        ".",
    ]
) | st.text(max_size=12)
ENTRIES = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(["file", "dir", "link"]),
        st.integers(-1, 0o777),
        st.integers(-1, 9),
        st.integers(-1, 2**64),
        NAMES,
        st.just(""),
    ),
    max_size=6,
)


def host(*answers: bytes) -> Callable[[Any], bytes]:
    """Return a host that gives these answers to its calls and then hangs up."""
    given = iter(answers)
    return lambda _: next(given, b"")


@contextlib.contextmanager
def at_most_one_host_error() -> Iterator[None]:
    raised: list[ClusterJobError] = []
    try:
        yield
    except ClusterJobError as error:
        raised.append(error)
    assert all(error.exit_code == 1 and len(error.message) < 5000 for error in raised)


@fuzz(data=st.binary(max_size=300), name=st.sampled_from(NAMES_OF_CALLS))
def test_any_bytes_from_host_are_an_answer_or_one_error(data: bytes, name: str) -> None:
    with at_most_one_host_error():
        exchange(host(data)).ask(name)


def example_directory(tmp_path: Path) -> Path:
    """Return an empty directory for one example; the test may write only below its `here`."""
    root = emptied(tmp_path / "example")
    write_tree(root, **{"here/token": "secret"})
    return root


def assert_nothing_beside(root: Path) -> None:
    assert [path.name for path in root.iterdir()] == ["here"]
    assert (root / "here" / "token").read_text() == "secret"


@pytest.mark.parametrize("poll", MIRRORS)
@fuzz(
    answer=changed(POLLED),
    data=st.just(b"abcde") | st.binary(max_size=8),
    logs=st.booleans(),
)
def test_mirror_of_any_answer_writes_only_permitted_files(
    tmp_path: Path, poll: Callable[..., None], answer: Any, data: bytes, logs: bool
) -> None:
    root = example_directory(tmp_path)
    with at_most_one_host_error():
        poll(host(packed(answer, data)), root / "here", logs=logs)
    permitted = {"token", "events.jsonl", "result.json", "ends", "logs"}
    assert {path.name for path in (root / "here").iterdir()} <= permitted
    assert_nothing_beside(root)


@fuzz(
    entries=ENTRIES,
    extra_row=st.none() | JSON | st.binary(max_size=20),
    lengths=st.lists(st.integers(0, 9), max_size=4),
    false_lengths=st.booleans(),
)
def test_fetch_of_any_tree_writes_only_below_requested_path(
    tmp_path: Path, entries: list[Any], extra_row: Any, lengths: list[int], false_lengths: bool
) -> None:
    root = example_directory(tmp_path)
    rows = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    rows += (
        extra_row
        if isinstance(extra_row, bytes)
        else b""
        if extra_row is None
        else json.dumps(extra_row).encode()
    )
    if not false_lengths:  # the answer of an honest host with these files
        lengths = [size for _, kind, _, size, *_ in entries if kind == "file"]
    answers = [
        packed({"absent": []}, rows),
        packed({"lengths": lengths}, b"x" * sum(max(0, length) for length in lengths)),
    ]
    request = Request(
        "x-1",
        "code",
        paths=["runs"],
        target=root / "here",
        may_replace=lambda _: True,
        max_files=10,
        max_bytes=1000,
        sent={},
        notes=tmp_path / "notes.json",
    )
    with at_most_one_host_error():
        Fetch(exchange(host(*answers)), request).run()
    written = {
        path.relative_to(root / "here").as_posix() for path in (root / "here").rglob("*")
    } - {"token"}
    assert all(name == "runs" or name.startswith("runs/") for name in written)
    assert not any(".git" in name.casefold().split("/") for name in written)
    for name in written:
        path = root / "here" / name
        assert not path.is_symlink() or path.resolve().is_relative_to(root / "here")
    assert_nothing_beside(root)
