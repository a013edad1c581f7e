"""The host server's main loop: requests are checked, and the session survives a wrong one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from procs import TEST_TIMEOUT

from clusterjob.node.host_server import requests
from clusterjob.node.host_server.requests import REQUESTS
from clusterjob.node.host_server.server import RequestHandler
from clusterjob.remote import answer_schemas

MAIN = "import sys; from clusterjob.node.host_server.server import main; main(sys.argv[1])"
CHECK = REQUESTS.encode(requests.Check(need=0, torch=False, own=False))


def ask(home: Path, *sent: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
    """Send requests to one host server, the body after the first; return its answers."""
    first, *rest = [json.dumps({"size": 0, **each}).encode() + b"\n" for each in sent]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(home)],
        input=first + body + b"".join(rest),
        stdout=subprocess.PIPE,
        timeout=TEST_TIMEOUT,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_unknown_request_is_refused_by_name_and_session_goes_on(tmp_path: Path) -> None:
    refused, answer = ask(tmp_path, {"type": "Explode", "size": 3}, CHECK, body=b"abc")
    assert refused == {"error": "unknown request 'Explode'", "size": 0}
    assert answer["errors"] == []


def test_request_without_name_is_refused_and_session_goes_on(tmp_path: Path) -> None:
    refused, answer = ask(tmp_path, {"op": "check"}, CHECK)
    assert refused == {"error": "unknown request None", "size": 0}
    assert answer["errors"] == []


def test_unknown_field_of_request_is_ignored(tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, {**CHECK, "added": [1]})
    assert answer["home"] == str(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"need": "5"}, "malformed request: Check.need: '5'"),
        ({"torch": 1}, "malformed request: Check.torch: 1"),
        ({"gpus": None}, "malformed request: Check.gpus: None"),
    ],
)
def test_wrong_field_is_answered_with_its_name_and_session_goes_on(
    tmp_path: Path, wrong: dict[str, Any], error: str
) -> None:
    refused, answer = ask(tmp_path, {**CHECK, **wrong}, CHECK)
    assert refused == {"error": error, "size": 0}
    assert answer["errors"] == []


def test_missing_field_is_answered_with_its_name(tmp_path: Path) -> None:
    (refused,) = ask(tmp_path, {"type": "Check", "torch": False, "own": False})
    assert refused["error"] == "malformed request: Check: no need"


def test_every_request_has_a_handler_and_no_field_named_size(tmp_path: Path) -> None:
    handlers = RequestHandler(tmp_path)._handlers
    assert {kind.__name__: kind for kind in handlers} == REQUESTS._kinds
    for kind in handlers:
        assert "size" not in {field.name for field in dataclasses.fields(kind)}


def test_every_answer_schema_belongs_to_a_request() -> None:
    assert answer_schemas._ANSWERS.keys() <= REQUESTS._kinds.keys()


def test_large_request_is_accepted() -> None:
    files = tuple((f"{index:064x}", 2**40) for index in range(20_000))
    sent = [
        requests.ReceiveFiles(files),
        requests.RunCommand(("sbatch", "x" * (4 << 20), "\udcff"), {}, job="", wait=1),
        requests.PollNode("x", 0, True, 1 << 20, sizes={"a" * 4000: 2**50}, stamps={"b": "1-2-3"}),
    ]
    for request in sent:
        assert REQUESTS.decode(json.loads(json.dumps(REQUESTS.encode(request)))) == request
