"""Functions over SSH: plain results come back, pickles only with `trust_results=True`.

Hostile hosts are functions that answer as they like.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_host import Answer, exchange
from ssh_network import SshNetwork
from sshsite import Site

import clusterjob
from clusterjob import Job, JobFailed, RemoteError
from clusterjob.api import results
from clusterjob.core.hosts import Host
from clusterjob.core.records import Record, Records, home
from clusterjob.core.spec import JobSpec
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs.job_dir import OUTCOMES
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.remote.sessions import Sessions


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def ended(tmp_path: Path) -> Job[Any]:
    """A function's job on gpu1 that has succeeded, as its record says; nothing ran."""
    program = Program("module", "clusterjob.worker.call")
    spec = JobSpec(program, tmp_path, name="call", hosts=(Host("gpu1"),))
    record = Record(
        "call-222222",
        spec.name,
        cluster="ssh",
        backend="ssh",
        job_dir=home() / "jobs" / "call-222222",
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec=spec.to_json(),
        end=Verdict(JobState.SUCCEEDED, 0).to_json(),
    )
    record.job_dir.mkdir(parents=True)
    Records().save(record)
    return Job(record.job_id)


@pytest.fixture
def gpu1(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Answer]], None]:
    """Return a function that sets how the host answers."""
    return lambda answer: monkeypatch.setattr(Sessions, "session", lambda *_: exchange(answer))


def sender(
    content: bytes, size: int | None = None, name: str = "", asked: list[str] | None = None
) -> Callable[..., Answer]:
    """Return a host that sends this content, and announces this size, for each path."""

    def answer(request: dict[str, Any]) -> Answer:
        if request["call"] == "tree":
            (asked if asked is not None else []).extend(request["paths"])
            fields = ("file", 0o600, len(content) if size is None else size, 0, "", "")
            rows = [json.dumps([name or path, *fields]).encode() for path in request["paths"]]
            return {"absent": []}, b"\n".join(rows)
        parts = [content[offset : offset + length] for _, offset, length in request["parts"]]
        return {"lengths": [len(part) for part in parts]}, b"".join(parts)

    return answer


def test_pickle_of_host_is_not_requested_without_trust(
    ended: Job[Any], gpu1: Callable[..., None], tmp_path: Path
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    plain = json.dumps({"pickled": "Trap"}).encode()
    asked: list[str] = []
    gpu1(sender(plain, asked=asked))
    with pytest.raises(JobFailed, match="not plain data: Trap") as caught:
        ended.result()
    assert "trust_results=True" in caught.value.hint
    assert not [path for path in asked if path.endswith(".pkl")]
    folder = Records().find(ended.id).job_dir / OUTCOMES
    # A pickle in the place of the JSON is malformed, and is not loaded.
    (folder / "rank0.attempt0.json").write_bytes(trap)
    (folder / "rank0.attempt0.pkl").write_bytes(trap)
    with pytest.raises(JobFailed, match="the result of rank 0 is malformed"):
        ended.result()
    assert not (tmp_path / "sprung").exists()
    (folder / "rank0.attempt0.json").write_bytes(plain)
    with pytest.raises(JobFailed, match="rank 0 is malformed"):
        Job.get(ended.id, trust_results=True).result()
    assert (tmp_path / "sprung").exists(), "with trust the pickle is loaded"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (sender(b"x", size=2 * results.MAX_PLAIN), "gpu1: the results have 128 MB"),
        (sender(b"x", name="../rank0.attempt0.json"), "that was not asked for"),
        (sender(b"x", size=5), "another size"),
        (sender(b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "malformed"),
        (lambda request: ({"absent": request["paths"]}, b""), "rank 0 wrote no result"),
        (lambda _: b"", "gpu1: the connection broke"),
    ],
    ids=["too large", "other file", "other size", "nested", "no result", "no answer"],
)
def test_host_that_sends_no_result_is_one_error(
    ended: Job[Any], gpu1: Callable[..., None], answer: Callable[..., Answer], error: str
) -> None:
    gpu1(answer)
    with pytest.raises(ClusterJobError, match=error):
        ended.result()


@pytest.mark.slow
def test_function_over_ssh_returns_plain_results_and_errors_as_text(
    site: Site, ssh_network: SshNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.script("FACTOR = 3\n", "helper.py")
    monkeypatch.chdir(site.directory)
    monkeypatch.syspath_prepend(str(site.directory))

    def reduce_ranks(value: int) -> tuple[int, dict[str, float]]:
        import helper

        from clusterjob import bootstrap

        ctx = bootstrap.init()
        return ctx.rank, {"sum": ctx.reduce(float(value * helper.FACTOR), "sum")}

    def fail(kind: str) -> Any:
        if kind == "raise":
            raise KeyError("no such <layer>\x1b[2J")
        return {1, 2}

    flags: Any = site.flags(python=sys.executable)
    flags["set"] = dict(item.split("=", 1) for item in flags["set"])
    job = clusterjob.submit(reduce_ranks, 2, cluster="ssh", **flags)
    values = job.results(timeout=120)
    assert values == [(0, {"sum": 12.0}), (1, {"sum": 12.0})]
    assert Job.get("@").id == job.id
    site.ssh_network.hosts["gpu1"].stop()
    try:
        assert job.result() == (0, {"sum": 12.0}), "the result has a copy on this machine"
    finally:
        site.ssh_network.hosts["gpu1"].start()
    flags["hosts"] = "gpu1"
    group = clusterjob.map(fail, ["raise", "set"], cluster="ssh", **flags)
    with pytest.raises(RemoteError, match="KeyError: 'no such <layer>") as caught:
        group[0].result(timeout=120)
    assert "\x1b" not in str(caught.value)
    assert "in fail" in caught.value.traceback
    assert isinstance(Job.get(group[0].id, trust_results=True).exception(), KeyError)
    with pytest.raises(JobFailed, match="not plain data: set"):
        group[1].result(timeout=120)
    assert Job.get(group[1].id, trust_results=True).result() == {1, 2}
