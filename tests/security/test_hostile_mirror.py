"""A hostile host sends any answer, or files of a job without end: one error, which names it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_host import MIRRORS, Answer, mirror_host, polled

from clusterjob.errors import HostError
from clusterjob.remote import mirror

LOG = "logs/node0/rank0.out"
DATA = b"x" * (4 << 20)
# Invalid answers to a poll.
INVALID: dict[str, Answer] = {
    "size of a terabyte": b'{"size": 1000000000000}\n',
    "negative size": b'{"size": -1}\n',
    "size of a wrong type": b'{"size": "7"}\n',
    "no object": b"[1, 2]\n",
    "nothing": b"{}\n",
    "no JSON": b"clusterjob-session ready\n",
    "deep JSON": b"[" * 500_000 + b"\n",
    "long number": b'{"size": ' + b"9" * 500_000 + b"}\n",
    "not a number": b'{"size": NaN}\n',
    "a line without end": b"x" * (32 << 20),
    "fewer bytes": json.dumps({"size": 9, **polled()}).encode() + b"\n123",
    "always more": (polled(more=True), b""),
    "wrong types": (polled(known=1, alive="yes", files=3, more=None), b""),
    "files of a wrong type": (polled(3), b""),
    "40,000 files": (
        polled(*({"path": f"logs/node0/f{n}", "offset": 0, "size": 1} for n in range(40_000))),
        b"x" * 40_000,
    ),
    "size larger than the data": (polled({"path": "result.json", "stamp": "1", "size": 5}), b"x"),
    "error of a wrong type": ({"error": 5}, b""),
    "endless error": ({"error": "x" * 900_000}, b""),
}
# Files that are not of the job, or that this machine alone writes.
FORBIDDEN = [
    "../x", "../../x", "/etc/x", "token", "logs/../../x", "ends/.x", "elements/1/result.json",
    "logs/node0/a/b", "cancelled",
]  # fmt: skip


@pytest.mark.parametrize("poll", MIRRORS)
@pytest.mark.parametrize(
    "answer",
    [
        *(pytest.param(answer, id=name) for name, answer in INVALID.items()),
        *(
            pytest.param((polled({"path": name, "stamp": "1", "size": 3}), b"lie"), id=name)
            for name in FORBIDDEN
        ),
    ],
)
def test_invalid_answer_or_file_is_one_error_that_names_the_host(
    tmp_path: Path, poll: Callable[..., None], answer: Answer
) -> None:
    with pytest.raises(HostError) as caught:
        poll(lambda _: answer, tmp_path)
    assert caught.value.message.startswith("gpu1: ")
    assert len(caught.value.message) < 3000
    assert list(tmp_path.iterdir()) == []


def replaced(path: str) -> Callable[[dict[str, Any]], Answer]:
    """Return a host that announces a new version of a file in each answer."""
    stamps = map(str, itertools.count())
    return lambda _: (
        polled({"path": path, "stamp": next(stamps), "size": len(DATA)}, more=True),
        DATA,
    )


def grown(path: str, parts: int = 1) -> Callable[[dict[str, Any]], Answer]:
    """Return a host whose file grows in each answer; several parts have the same offset."""

    def answer(request: dict[str, Any]) -> Answer:
        offset = request["jobs"][0]["sizes"].get(path, 0)
        part = {"path": path, "size": len(DATA) // parts, "offset": offset}
        return polled(*[part] * parts, more=True), DATA

    return answer


def removed(path: str) -> Callable[[dict[str, Any]], Answer]:
    """Return a host that removes a log in each answer, and sends another one."""
    gone = {"path": path, "gone": True, "size": 0}
    more = {"path": "logs/node0/rank1.out", "offset": 0, "size": len(DATA)}
    return lambda _: (polled(gone, more, more=True), DATA)


@pytest.mark.parametrize("poll", MIRRORS)
@pytest.mark.parametrize(
    ("host", "why"),
    [
        (lambda: replaced(LOG), f"it sends a file that was not asked for: {LOG!r}"),
        (lambda: removed(LOG), f"it sends a file that was not asked for: {LOG!r}"),
        (lambda: grown(LOG, 8192), "it sends a file twice in one answer"),
        (
            lambda: replaced("result.json"),
            "it replaces result files of one job too often, more than 67.1 MB",
        ),
        (lambda: grown(LOG), "it sends more than 16.8 MB of one job"),
    ],
    ids=["replaced log", "removed log", "same part", "replaced verdict", "growing log"],
)
def test_logs_end_when_host_sends_without_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    poll: Callable[..., None],
    host: Callable[[], Any],
    why: str,
) -> None:
    """The test lowers the limit of 16 GB for all files to 16 MiB."""
    monkeypatch.setattr(mirror, "MAX_TOTAL_BYTES", 16 << 20)
    with pytest.raises(HostError) as caught:
        poll(host(), tmp_path)
    assert caught.value.message == f"gpu1: {why}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 << 20


@pytest.mark.parametrize("poll", MIRRORS)
def test_status_refuses_log_that_it_did_not_request(
    tmp_path: Path, poll: Callable[..., None]
) -> None:
    with pytest.raises(HostError, match="a file that was not asked for"):
        poll(grown(LOG), tmp_path, logs=False)
    assert list(tmp_path.iterdir()) == []


def test_events_file_of_host_does_not_exceed_its_size_limit(tmp_path: Path) -> None:
    """Events are read as a whole; log files may be longer."""
    for name in ("events.jsonl", LOG):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.truncate(mirror.MAX_EVENTS_BYTES)
        sent = {"path": name, "offset": mirror.MAX_EVENTS_BYTES, "size": 1}
        if name == LOG:
            mirror_host(lambda _, sent=sent: (polled(sent), b"x"), tmp_path)
            continue
        with pytest.raises(HostError, match=r"more than .* of events\.jsonl"):
            mirror_host(lambda _, sent=sent: (polled(sent), b"x"), tmp_path)
