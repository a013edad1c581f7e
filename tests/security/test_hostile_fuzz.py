"""Any answer of a host, however wrong, is taken or is one error that names the host: fuzzed over a
real pair of sockets.
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

from clusterjob.backends.slurm.mirror import Mirror as LoginMirror
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError
from clusterjob.remote.fetch import Fetch, Request
from clusterjob.remote.mirror import Mirror
from clusterjob.remote.protocol import Exchange

HASH = "a" * 64
HONEST: dict[str, tuple[dict[str, Any], bytes]] = {
    "look": (
        {
            "known": True,
            "alive": False,
            "more": False,
            "files": [
                {"path": "events.jsonl", "offset": 0, "size": 3},
                {"path": "result.json", "stamp": "1", "size": 2},
            ],
        },
        b"abcde",
    ),
    "check": (
        {
            "errors": [],
            "identity": "x",
            "reached_at": "10.0.0.1",
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
    "facts": (
        {
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
    "run": ({"code": 0, "out": 2}, b"outerr"),
    "probe": ({"reached": ["10.0.0.1"], "why": {"10.0.0.2": "no answer"}}, b""),
    "listen": ({"port": 20000, "addresses": ["10.0.0.1"]}, b""),
    "land": ({"missing": [HASH]}, b""),
}
LOOKS = (
    {"jobs": [{key: value for key, value in HONEST["look"][0].items() if key != "alive"}]},
    HONEST["look"][1],
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
    ),
    max_size=6,
)


@contextlib.contextmanager
def host(*answers: bytes) -> Iterator[Exchange]:
    """Give what asks a host that has answered already, whatever it is asked, and hung up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for data in answers:
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield Exchange("gpu1", ours, timeout=20.0)


def packed(answer: Any, data: bytes) -> bytes:
    told = {"size": len(data), **answer} if isinstance(answer, dict) else answer
    return json.dumps(told).encode() + b"\n" + data


@contextlib.contextmanager
def one_error_of_the_host() -> Iterator[None]:
    raised: list[ClusterJobError] = []
    try:
        yield
    except ClusterJobError as error:
        raised.append(error)
    assert all(error.exit_code == 1 and len(error.message) < 5000 for error in raised)


@fuzz(data=st.binary(max_size=300), op=st.sampled_from([*HONEST, "looks", "tree", "get", "put"]))
def test_any_bytes_are_an_answer_or_an_error(data: bytes, op: str) -> None:
    with host(data) as exchange, one_error_of_the_host():
        exchange.ask(op)


@fuzz(
    pair=st.sampled_from(sorted(HONEST)).flatmap(
        lambda op: st.tuples(st.just(op), changed(HONEST[op][0]))
    ),
    data=st.binary(max_size=8),
)
def test_answer_that_is_taken_has_the_shape_that_its_readers_expect(
    pair: tuple[str, Any], data: bytes
) -> None:
    op, answer = pair
    honest = HONEST[op][0]
    with host(packed(answer, data)) as exchange, one_error_of_the_host():
        found, _ = exchange.ask(op)
        required = honest.keys() - {"code", "out"}
        assert "error" in found or required <= found.keys()
        for key in required & found.keys():
            assert isinstance(found[key], (type(honest[key]), type(None), int, float))


NUMBER = itertools.count()


def fresh(tmp_path: Path) -> Path:
    """Return a directory for one example, in a place where nothing else may appear."""
    place = tmp_path / f"example{next(NUMBER)}"
    (place / "here").mkdir(parents=True)
    (place / "here" / "token").write_text("secret")
    return place


def nothing_beside(place: Path) -> None:
    assert [path.name for path in place.iterdir()] == ["here"]
    assert (place / "here" / "token").read_text() == "secret"
    shutil.rmtree(place)


@fuzz(
    answer=changed(HONEST["look"][0]),
    data=st.just(b"abcde") | st.binary(max_size=8),
    logs=st.booleans(),
)
def test_mirror_of_any_answer_writes_what_a_host_may_write(
    tmp_path: Path, answer: Any, data: bytes, logs: bool
) -> None:
    place = fresh(tmp_path)
    with host(packed(answer, data)) as exchange, one_error_of_the_host():
        Mirror("x-1", place / "here", node=0).look(exchange, logs=logs)
    assert {path.name for path in (place / "here").iterdir()} <= {
        "token",
        "events.jsonl",
        "result.json",
        "ends",
        "logs",
    }
    nothing_beside(place)


@fuzz(answer=changed(LOOKS[0]), data=st.just(LOOKS[1]) | st.binary(max_size=8))
def test_mirror_of_a_login_host_of_any_answer_writes_what_it_may_write(
    tmp_path: Path, answer: Any, data: bytes
) -> None:
    place = fresh(tmp_path)
    record = Record(
        "x-1",
        "x",
        cluster="hpc",
        backend="slurm",
        job_dir=place / "here",
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec={},
    )
    with host(packed(answer, data)) as exchange, one_error_of_the_host():
        LoginMirror("login1").look(exchange.ask, [(record, True)])
    assert {path.name for path in (place / "here").iterdir()} <= {
        "token",
        "events.jsonl",
        "result.json",
        "ends",
        "logs",
    }
    nothing_beside(place)


@fuzz(
    entries=ENTRIES,
    strange=st.none() | JSON | st.binary(max_size=20),
    lengths=st.lists(st.integers(0, 9), max_size=4),
    lie=st.booleans(),
)
def test_fetch_of_any_tree_writes_below_what_was_asked_for(
    tmp_path: Path, entries: list[Any], strange: Any, lengths: list[int], lie: bool
) -> None:
    place = fresh(tmp_path)
    rows = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    rows += (
        strange
        if isinstance(strange, bytes)
        else b""
        if strange is None
        else json.dumps(strange).encode()
    )
    if not lie:  # what an honest host of these files answers
        lengths = [size for _, kind, _, size, _, _ in entries if kind == "file"]
    answers = [
        packed({"absent": []}, rows),
        packed({"lengths": lengths}, b"x" * sum(max(0, length) for length in lengths)),
    ]
    request = Request(
        "x-1",
        "code",
        paths=["runs"],
        target=place / "here",
        may_replace=lambda _: True,
        max_files=10,
        max_bytes=1000,
        sent={},
        notes=tmp_path / "notes.json",
    )
    with host(*answers) as exchange, one_error_of_the_host():
        Fetch(exchange, request).run()
    written = {
        path.relative_to(place / "here").as_posix() for path in (place / "here").rglob("*")
    } - {"token"}
    assert all(name == "runs" or name.startswith("runs/") for name in written)
    assert not any(".git" in name.casefold().split("/") for name in written)
    for name in written:
        path = place / "here" / name
        assert not path.is_symlink() or path.resolve().is_relative_to(place / "here")
    nothing_beside(place)
