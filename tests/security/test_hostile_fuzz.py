"""Any answer of a host is accepted or raises one error.

The tests send fuzzed answers over a real pair of sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing import JSON, changed, fuzz
from hypothesis import strategies as st

from clusterjob.backends.slurm.mirror import ClusterMirror
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError
from clusterjob.remote import answer_schemas
from clusterjob.remote.fetch import Fetch, Request
from clusterjob.remote.mirror import JobMirror
from clusterjob.remote.protocol import Exchange

HASH = "a" * 64
NAMES_OF_CALLS = sorted({*answer_schemas.ANSWERS, "put"})
POLLED: dict[str, Any] = {
    "known": True,
    "alive": False,
    "more": False,
    "files": [
        {"path": "events.jsonl", "offset": 0, "size": 3},
        {"path": "result.json", "stamp": "1", "size": 2},
    ],
}
HONEST: dict[str, tuple[dict[str, Any], bytes]] = {
    "poll": ({"jobs": [POLLED], "clock": 1.0}, b"abcde"),
    "check": (
        {
            "errors": [],
            "identity": "x",
            "addresses": ["10.0.0.1"],
            "host": "gpu1",
            "home": "/h",
            "time": 1.5,
            "python": "3.11.2",
            "torch": None,
            "free": 10**10,
            "gpus": ["0 H100"],
        },
        b"",
    ),
    "interpreter": (
        {
            "torch": True,
            "unfit": "",
            "setup": False,
            "version": [3, 11, 2],
            "executable": "/p",
            "died": "",
            "facts": {
                "torch": "2.13",
                "broken": "",
                "fork": "",
                "seconds": 1.0,
                "cuda": "",
                "gpus": 0,
                "driver_error": "",
                "backends": [],
            },
        },
        b"",
    ),
    "run_command": ({"code": 0, "out": 2}, b"outerr"),
    "install": ({"missing": [HASH]}, b""),
}
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


@contextlib.contextmanager
def host(*answers: bytes) -> Iterator[Exchange]:
    """Yield an exchange with a host that has already sent its answers and hung up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for data in answers:
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield Exchange("gpu1", ours, timeout=20.0)


def packed(answer: Any, data: bytes) -> bytes:
    header = {"size": len(data), **answer} if isinstance(answer, dict) else answer
    return json.dumps(header).encode() + b"\n" + data


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
    with host(data) as exchange, at_most_one_host_error():
        exchange.ask(name)


@fuzz(
    pair=st.sampled_from(sorted(HONEST)).flatmap(
        lambda name: st.tuples(st.just(name), changed(HONEST[name][0]))
    ),
    data=st.binary(max_size=8),
)
def test_accepted_answer_has_expected_fields_and_types(pair: tuple[str, Any], data: bytes) -> None:
    name, answer = pair
    honest = HONEST[name][0]
    with host(packed(answer, data)) as exchange, at_most_one_host_error():
        found, _ = exchange.ask(name)
        required = honest.keys() - {"code", "out"}
        assert "error" in found or required <= found.keys()
        for key in required & found.keys():
            assert isinstance(found[key], (type(honest[key]), type(None), int, float))


NUMBER = itertools.count()


def example_directory(tmp_path: Path) -> Path:
    """Return a new directory for one example; the test may write only below its `here`."""
    root = tmp_path / f"example{next(NUMBER)}"
    (root / "here").mkdir(parents=True)
    (root / "here" / "token").write_text("secret")
    return root


def assert_nothing_beside(root: Path) -> None:
    assert [path.name for path in root.iterdir()] == ["here"]
    assert (root / "here" / "token").read_text() == "secret"
    shutil.rmtree(root)


@fuzz(
    answer=changed(HONEST["poll"][0]),
    data=st.just(b"abcde") | st.binary(max_size=8),
    logs=st.booleans(),
)
def test_job_mirror_of_any_answer_writes_only_permitted_files(
    tmp_path: Path, answer: Any, data: bytes, logs: bool
) -> None:
    root = example_directory(tmp_path)
    with host(packed(answer, data)) as exchange, at_most_one_host_error():
        JobMirror("x-1", root / "here", node=0).poll(exchange, logs=logs)
    assert {path.name for path in (root / "here").iterdir()} <= {
        "token",
        "events.jsonl",
        "result.json",
        "ends",
        "logs",
    }
    assert_nothing_beside(root)


@fuzz(answer=changed(HONEST["poll"][0]), data=st.just(b"abcde") | st.binary(max_size=8))
def test_cluster_mirror_of_any_answer_writes_only_permitted_files(
    tmp_path: Path, answer: Any, data: bytes
) -> None:
    root = example_directory(tmp_path)
    record = Record(
        "x-1",
        "x",
        cluster="hpc",
        backend="slurm",
        job_dir=root / "here",
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec={},
    )
    with host(packed(answer, data)) as exchange, at_most_one_host_error():
        ClusterMirror("login1").poll(exchange.ask, [(record, True)])
    assert {path.name for path in (root / "here").iterdir()} <= {
        "token",
        "events.jsonl",
        "result.json",
        "ends",
        "logs",
    }
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
    with host(*answers) as exchange, at_most_one_host_error():
        Fetch(exchange, request).run()
    written = {
        path.relative_to(root / "here").as_posix() for path in (root / "here").rglob("*")
    } - {"token"}
    assert all(name == "runs" or name.startswith("runs/") for name in written)
    assert not any(".git" in name.casefold().split("/") for name in written)
    for name in written:
        path = root / "here" / name
        assert not path.is_symlink() or path.resolve().is_relative_to(root / "here")
    assert_nothing_beside(root)
