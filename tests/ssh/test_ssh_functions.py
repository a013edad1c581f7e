"""Functions over SSH: plain results come back, pickles only with `trust_results=True`.

The hosts are real sshd; hostile hosts answer as they like.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_host import hostile
from ssh_network import SshNetwork
from sshsite import Site, close_connections

import clusterjob
from clusterjob import Job, JobFailed, RemoteError
from clusterjob.api import results
from clusterjob.core.records import Record, Records
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs.job_dir import OUTCOMES
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict

# Answers Tree and Get with CONTENT as each file; SIZE is what Tree announces.
SENDER = """
CONTENT = {content!r}
SIZE = {size!r}
NAME = {name!r}
asked = open({log!r}, "a")
def answer(request):
    if request["call"] == "tree":
        asked.write(" ".join(request["paths"]) + "\\n")
        asked.flush()
        rows = [(NAME or path, "file", 0o600, SIZE, 0, "", "") for path in request["paths"]]
        return {{"absent": []}}, b"".join(json.dumps(row).encode() + b"\\n" for row in rows)
    parts = [CONTENT[offset:offset + length] for _, offset, length in request["parts"]]
    return {{"lengths": [len(part) for part in parts]}}, b"".join(parts)
"""


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job[Any]]:
    """A function's job on gpu1 that has succeeded, as its record says; nothing ran."""
    plan = site.plan(Program("module", "clusterjob.worker.call"), hosts="gpu1")
    end = Verdict(JobState.SUCCEEDED, 0).to_json()
    plan.job_dir.mkdir(parents=True)
    Records().save(
        Record(
            plan.job_id,
            plan.spec.name,
            cluster="ssh",
            backend="ssh",
            job_dir=plan.job_dir,
            nodes=1,
            submitted_at="2026-01-01T00:00:00Z",
            spec=plan.spec.to_json(),
            end=end,
        )
    )
    return Job(plan.job_id)


def play(tmp_path: Path, content: bytes, size: int | None = None, name: str = "") -> str:
    return SENDER.format(
        content=content,
        size=len(content) if size is None else size,
        name=name,
        log=str(tmp_path / "asked"),
    )


def test_pickle_of_host_is_not_requested_without_trust(
    site: Site, ended: Job[Any], tmp_path: Path
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    plain = json.dumps({"pickled": "Trap"}).encode()
    gpu1 = site.ssh_network.hosts["gpu1"]
    with hostile(gpu1, play(tmp_path, plain)):
        with pytest.raises(JobFailed, match="not plain data: Trap") as caught:
            ended.result()
        assert "trust_results=True" in caught.value.hint
    assert ".pkl" not in (tmp_path / "asked").read_text()
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


def test_host_cannot_fill_memory_or_send_other_files(
    site: Site, ended: Job[Any], tmp_path: Path
) -> None:
    gpu1 = site.ssh_network.hosts["gpu1"]
    with hostile(gpu1, play(tmp_path, b"x", size=2 * results.MAX_PLAIN)) as change:
        with pytest.raises(ClusterJobError, match="gpu1: the results have 128 MB"):
            ended.result()
        change(play(tmp_path, b"x", name="../rank0.attempt0.json"))
        with pytest.raises(ClusterJobError, match="that was not asked for"):
            ended.result()
        change(play(tmp_path, b"x", size=5))
        with pytest.raises(ClusterJobError, match="another size"):
            ended.result()
        change(play(tmp_path, b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
        with pytest.raises(JobFailed, match="malformed"):
            ended.result()


def test_result_without_file_or_host_is_one_error(site: Site, ended: Job[Any]) -> None:
    with pytest.raises(JobFailed, match="succeeded, but rank 0 wrote no result"):
        ended.result()
    site.ssh_network.hosts["gpu1"].stop()
    close_connections()
    try:
        with pytest.raises(ClusterJobError, match="gpu1"):
            ended.result()
    finally:
        site.ssh_network.hosts["gpu1"].start()


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
