"""The host server's main loop: requests are checked, and the session survives a wrong one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from procs import TEST_TIMEOUT

from clusterjob.node.host_server import code_store, jobs, requests
from clusterjob.node.host_server.requests import REQUESTS
from clusterjob.node.host_server.server import HANDLERS, WITH_BODY
from clusterjob.node.system import processes
from clusterjob.remote import answer_schemas

MAIN = "import sys; from clusterjob.node.host_server.server import main; main(sys.argv[1], '')"
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


@pytest.mark.parametrize(
    ("wrong", "body", "error"),
    [
        ({"type": "Explode", "size": 3}, b"abc", "unknown request 'Explode'"),
        ({"op": "check"}, b"", "unknown request None"),
        (CHECK | {"need": "5"}, b"", "malformed request: Check.need: '5'"),
        (CHECK | {"torch": 1}, b"", "malformed request: Check.torch: 1"),
        (CHECK | {"gpus": None}, b"", "malformed request: Check.gpus: None"),
        (
            {"type": "Check", "torch": False, "own": False},
            b"",
            "malformed request: Check: no need",
        ),
    ],
    ids=["unknown", "no name", "text", "number", "null", "no field"],
)
def test_wrong_request_is_answered_with_its_error_and_session_goes_on(
    tmp_path: Path, wrong: dict[str, Any], body: bytes, error: str
) -> None:
    refused, answer = ask(tmp_path, wrong, CHECK, body=body)
    assert refused == {"error": error, "size": 0}
    assert (answer["errors"], answer["home"]) == ([], str(tmp_path))


def test_every_request_has_a_handler_and_no_field_named_size() -> None:
    handlers = {requests.Facts, *HANDLERS, *WITH_BODY}
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


# -- removing ended jobs ---------------------------------------------------------------------------


def put_job(home: Path, name: str, *, code: dict[str, bytes]) -> Path:
    """Install a job with its code through the code store, as a submitter does."""
    job_dir = home / "jobs" / name
    (job_dir / "agents").mkdir(parents=True)
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in code.items()}
    rows = [(path, "file", 0o644, len(data), digests[path]) for path, data in code.items()]
    body = b"".join(code.values())
    sent = requests.ReceiveFiles(tuple((digests[path], len(data)) for path, data in code.items()))
    stream = io.BytesIO(body)
    assert code_store.receive(home, sent, read=stream.read) == {"wrong": []}
    packed = zlib.compress(json.dumps(rows).encode())
    assert code_store.install(home, requests.Install(name), packed) == {"missing": []}
    return job_dir


def stored(home: Path) -> set[bytes]:
    return {path.read_bytes() for path in (home / "store").glob("*/*")}


def age(home: Path) -> None:
    """Make all files of the code store two hours old."""
    for path in (home / "store").glob("*/*"):
        os.utime(path, (time.time() - 7200,) * 2)


def test_ended_job_is_measured_then_removed_with_code_that_no_job_uses(tmp_path: Path) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1" * 200_000, "shared.py": b"s" * 50_000})
    put_job(tmp_path, "two-b", code={"shared.py": b"s" * 50_000})
    age(tmp_path)
    measured = jobs.clean(tmp_path, requests.Clean(("one-a", "gone-c"), remove=False))
    assert [job["kept"] for job in measured["jobs"]] == ["", ""]
    assert measured["jobs"][0]["size"] >= 250_000
    assert measured["jobs"][1] == {"size": 0, "stamp": "", "kept": ""}
    assert 200_000 <= measured["code"] < 250_000
    assert len(stored(tmp_path)) == 2
    removed = jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))
    assert removed["jobs"][0]["size"] == measured["jobs"][0]["size"]
    assert removed["code"] == measured["code"]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["two-b"]
    assert stored(tmp_path) == {b"s" * 50_000}
    assert jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))["code"] == 0


def test_code_that_was_just_received_is_kept_for_its_job(tmp_path: Path) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1"})
    answer = jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))
    assert answer["code"] == 0
    assert stored(tmp_path) == {b"1"}


def test_file_of_a_killed_transfer_is_removed_after_an_hour(tmp_path: Path) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1"})
    part = tmp_path / "store" / ".part"
    part.touch()
    jobs.clean(tmp_path, requests.Clean((), remove=True))
    assert part.exists()
    os.utime(part, (time.time() - 7200,) * 2)
    jobs.clean(tmp_path, requests.Clean((), remove=True))
    assert not part.exists()


def test_archive_is_kept_until_no_job_needs_it(tmp_path: Path) -> None:
    for name in ("one-a", "two-b"):
        job_dir = put_job(tmp_path, name, code={"env.tar": b"archive"})
        (job_dir / "code.list").unlink()
        (job_dir / "archive").write_text(hashlib.sha256(b"archive").hexdigest())
    age(tmp_path)
    jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))
    assert stored(tmp_path) == {b"archive"}
    jobs.clean(tmp_path, requests.Clean(("two-b",), remove=True))
    assert stored(tmp_path) == set()


def test_file_that_is_removed_from_store_during_installation_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1"})
    (tmp_path / "jobs" / "two-b").mkdir()
    digest = hashlib.sha256(b"1").hexdigest()
    monkeypatch.setattr(code_store, "is_stored", lambda *_: True)
    (tmp_path / "store" / digest[:2] / digest).unlink()
    packed = zlib.compress(json.dumps([("own.py", "file", 0o644, 1, digest)]).encode())
    answer = code_store.install(tmp_path, requests.Install("two-b"), packed)
    assert answer == {"missing": [digest]}
    assert list((tmp_path / "jobs" / "two-b").iterdir()) == []


def test_job_whose_agent_runs_is_kept_on_host(tmp_path: Path) -> None:
    job_dir = put_job(tmp_path, "one-a", code={})
    agent = {
        "pid": os.getpid(),
        "ticks": processes.start_ticks(os.getpid()),
        "boot_id": processes.boot_id(),
    }
    (job_dir / "agents" / "node3.json").write_text(json.dumps(agent))
    (job,) = jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))["jobs"]
    assert job["kept"] == "its agent of node 3 still runs"
    (job_dir / "agents" / "node3.json").write_text('{"pid": 1}')
    (job,) = jobs.clean(tmp_path, requests.Clean(("one-a",), remove=True))["jobs"]
    assert "is damaged" in job["kept"]
    assert job_dir.is_dir()


@pytest.mark.parametrize(
    "name", ["", "..", ".", "../jobs", "a/../..", "a/elements/0", "/etc", "_a"]
)
def test_clean_refuses_names_that_are_no_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "jobs").mkdir()
    with pytest.raises(ValueError, match="not a job's name"):
        jobs.clean(tmp_path, requests.Clean((name,), remove=True))
    assert (tmp_path / "jobs").is_dir()


def test_clean_follows_no_link_on_host(tmp_path: Path) -> None:
    home, precious = tmp_path / "home", tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"x" * 500_000)
    job_dir = put_job(home, "one-a", code={})
    os.symlink(precious, job_dir / "link")
    os.symlink(precious, home / "jobs" / "two-b")
    one, two = jobs.clean(home, requests.Clean(("one-a", "two-b"), remove=True))["jobs"]
    assert one["size"] < 100_000
    assert two["kept"] == "its directory is a link"
    assert (precious / "data").stat().st_size == 500_000
    assert [path.name for path in (home / "jobs").iterdir()] == ["two-b"]


@fuzz(data=st.binary(max_size=60))
def test_list_of_files_of_any_content_does_not_stop_clean(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "jobs" / "a").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store").mkdir(exist_ok=True)
    for content in (data, zlib.compress(data)):
        (tmp_path / "jobs" / "a" / "code.list").write_bytes(content)
        assert code_store.clean(tmp_path, (), remove=True) == 0
