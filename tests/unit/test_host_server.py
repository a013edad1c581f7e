"""The host server's main loop, and the jobs and the code on a host."""

from __future__ import annotations

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
from procs import TEST_TIMEOUT

from clusterjob.node.host_server import code_store, jobs
from clusterjob.node.host_server.server import FUNCTIONS
from clusterjob.node.system import processes
from clusterjob.remote import answer_schemas

MAIN = "import sys; from clusterjob.node.host_server.server import main; main(sys.argv[1], '')"
CHECK = {"call": "check", "arguments": {"need": 0, "torch": False, "own": False}}


def ask(home: Path, *calls: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
    """Send calls to one host server, with a body after the first; return its answers."""
    first, *rest = calls
    sent = json.dumps(first | {"size": len(body)}).encode() + b"\n" + body
    sent += b"".join(json.dumps(each | {"size": 0}).encode() + b"\n" for each in rest)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(home)],
        input=sent,
        stdout=subprocess.PIPE,
        timeout=TEST_TIMEOUT,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"call": "explode", "arguments": {}}, "KeyError: 'explode'"),
        ({"call": "check", "arguments": {}}, "TypeError"),
        ({"call": "up", "arguments": {"job": "../x", "node": 0}}, "'../x' is not a job's name"),
    ],
)
def test_wrong_call_is_answered_with_its_error_and_session_goes_on(
    tmp_path: Path, wrong: dict[str, Any], error: str
) -> None:
    refused, answer = ask(tmp_path, wrong, CHECK, body=b"abc")
    assert error in refused["error"]
    assert (answer["errors"], answer["home"]) == ([], str(tmp_path))


def test_every_function_with_an_answer_schema_exists() -> None:
    assert answer_schemas.ANSWERS.keys() <= {*FUNCTIONS, "interpreter"}


# -- removing ended jobs ---------------------------------------------------------------------------


def put_job(home: Path, name: str, *, code: dict[str, bytes]) -> Path:
    """Install a job with its code through the code store, as a submitter does."""
    job_dir = home / "jobs" / name
    (job_dir / "agents").mkdir(parents=True)
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in code.items()}
    rows = [(path, "file", 0o644, len(data), digests[path]) for path, data in code.items()]
    body = b"".join(code.values())
    listed = [(digests[path], len(data)) for path, data in code.items()]
    assert code_store.receive(home, listed, io.BytesIO(body).read) == {"wrong": []}
    assert install(home, name, rows) == {"missing": []}
    return job_dir


def install(home: Path, name: str, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    packed = zlib.compress(json.dumps(rows).encode())
    return code_store.install(home, name, io.BytesIO(packed).read)


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
    measured = jobs.clean(tmp_path, ["one-a", "gone-c"], remove=False)
    assert [job["kept"] for job in measured["jobs"]] == ["", ""]
    assert measured["jobs"][0]["size"] >= 250_000
    assert measured["jobs"][1] == {"size": 0, "stamp": "", "kept": ""}
    assert 200_000 <= measured["code"] < 250_000
    assert len(stored(tmp_path)) == 2
    removed = jobs.clean(tmp_path, ["one-a"], remove=True)
    assert removed["jobs"][0]["size"] == measured["jobs"][0]["size"]
    assert removed["code"] == measured["code"]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["two-b"]
    assert stored(tmp_path) == {b"s" * 50_000}
    assert jobs.clean(tmp_path, ["one-a"], remove=True)["code"] == 0


def test_code_that_was_just_received_is_kept_for_its_job(tmp_path: Path) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1"})
    answer = jobs.clean(tmp_path, ["one-a"], remove=True)
    assert answer["code"] == 0
    assert stored(tmp_path) == {b"1"}


def test_file_of_a_killed_transfer_is_removed_after_an_hour(tmp_path: Path) -> None:
    put_job(tmp_path, "one-a", code={"own.py": b"1"})
    part = tmp_path / "store" / ".part"
    part.touch()
    jobs.clean(tmp_path, [], remove=True)
    assert part.exists()
    os.utime(part, (time.time() - 7200,) * 2)
    jobs.clean(tmp_path, [], remove=True)
    assert not part.exists()


def test_archive_is_kept_until_no_job_needs_it(tmp_path: Path) -> None:
    for name in ("one-a", "two-b"):
        job_dir = put_job(tmp_path, name, code={"env.tar": b"archive"})
        (job_dir / "code.list").unlink()
        (job_dir / "archive").write_text(hashlib.sha256(b"archive").hexdigest())
    age(tmp_path)
    jobs.clean(tmp_path, ["one-a"], remove=True)
    assert stored(tmp_path) == {b"archive"}
    jobs.clean(tmp_path, ["two-b"], remove=True)
    assert stored(tmp_path) == set()


def test_job_whose_agent_runs_is_kept_on_host(tmp_path: Path) -> None:
    job_dir = put_job(tmp_path, "one-a", code={})
    agent = {"pid": os.getpid(), "process": processes.identity(os.getpid())}
    (job_dir / "agents" / "node3.json").write_text(json.dumps(agent))
    (job,) = jobs.clean(tmp_path, ["one-a"], remove=True)["jobs"]
    assert job["kept"] == "its agent of node 3 still runs"
    assert job_dir.is_dir()


@pytest.mark.parametrize("name", ["", "..", ".", "../jobs", "a/../..", "/etc", "_a"])
def test_clean_refuses_names_that_are_no_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "jobs").mkdir()
    with pytest.raises(ValueError, match="not a job's name"):
        jobs.clean(tmp_path, [name], remove=True)
    assert (tmp_path / "jobs").is_dir()


def test_clean_follows_no_link_on_host(tmp_path: Path) -> None:
    home, precious = tmp_path / "home", tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"x" * 500_000)
    job_dir = put_job(home, "one-a", code={})
    os.symlink(precious, job_dir / "link")
    os.symlink(precious, home / "jobs" / "two-b")
    one, two = jobs.clean(home, ["one-a", "two-b"], remove=True)["jobs"]
    assert one["size"] < 100_000
    assert two["kept"] == "its directory is a link"
    assert (precious / "data").stat().st_size == 500_000
    assert [path.name for path in (home / "jobs").iterdir()] == ["two-b"]
