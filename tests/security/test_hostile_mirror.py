"""A hostile host sends files of a job without end; their number and size are bounded.

The host is a real sshd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_host import hostile
from procs import TEST_TIMEOUT
from sshsite import Site

from clusterjob.backends.slurm.mirror import ClusterMirror
from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.verdict import JobState
from clusterjob.remote import mirror

# Sends 4 MB per answer and always announces more.
_ENDLESS = """
round, data = 0, b"x" * (4 << 20)
def answer(request):
    global round
    round += 1
    files = {files}
    return {{"known": True, "alive": True, "files": files, "more": True}}, data
"""
REPLACED_LOG = _ENDLESS.format(
    files="""[{"path": "logs/node0/rank0.out", "stamp": str(round), "size": len(data)}]"""
)
REPLACED_VERDICT = _ENDLESS.format(
    files="""[{"path": "result.json", "stamp": str(round), "size": len(data)}]"""
)
UNASKED_LOG = _ENDLESS.format(
    files="""[{"path": "logs/node0/rank0.out", "offset": 0, "size": len(data)}]"""
)
# The file grows by only 512 bytes, because each part has the same offset.
SAME_PART = _ENDLESS.format(
    files="""[{"path": "logs/node0/rank0.out", "size": 512,
               "offset": request["jobs"][0]["sizes"].get("logs/node0/rank0.out", 0)}] * 8192"""
)
GROWING_LOG = _ENDLESS.format(
    files="""[{"path": "logs/node0/rank0.out", "size": len(data),
               "offset": request["jobs"][0]["sizes"].get("logs/node0/rank0.out", 0)}]"""
)
TOO_MANY_REPLACEMENTS = "it replaces result files of one job too often, more than 67.1 MB"


@pytest.fixture
def record(site: Site) -> Record:
    """Return a job whose end has not been polled."""
    return site.submit("", hosts="gpu1", set={"connect_timeout": "5"})


@pytest.fixture
def play(site: Site, record: Record) -> Iterator[Callable[[str], None]]:
    with hostile(site.ssh_network.hosts["gpu1"]) as play:
        yield play


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (REPLACED_LOG, "it sends a file that was not asked for: 'logs/node0/rank0.out'"),
        (REPLACED_VERDICT, TOO_MANY_REPLACEMENTS),
        (SAME_PART, "it sends a file twice in one answer"),
    ],
    ids=["replaced log", "replaced verdict", "same part"],
)
def test_logs_end_when_host_sends_the_same_file_without_end(
    site: Site, record: Record, play: Callable[[str], None], code: str, why: str
) -> None:
    play(code)
    site.run("logs", record.job_id)
    polling.collect(record)
    status = polling.status(record)
    assert status.state is JobState.UNKNOWN
    assert f"gpu1: {why}" in status.reason


def test_logs_that_grow_without_end_stop_at_size_limit(
    record: Record, play: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test lowers the limit of 16 GB to 64 MiB."""
    monkeypatch.setattr(mirror, "MAX_TOTAL_BYTES", 64 << 20)
    play(GROWING_LOG)
    polling.collect(record)
    assert (
        sum(path.stat().st_size for path in (record.job_dir / "logs" / "node0").iterdir())
        <= 64 << 20
    )
    status = polling.status(record)
    assert (status.state, "gpu1: it sends more than 67.1 MB of one job" in status.reason) == (
        JobState.UNKNOWN,
        True,
    )


def test_status_refuses_log_that_it_did_not_request(
    record: Record, play: Callable[[str], None]
) -> None:
    play(UNASKED_LOG)
    begin = time.monotonic()
    status = polling.status(record)
    assert "gpu1: it sends a file that was not asked for: 'logs/node0/rank0.out'" in status.reason
    assert time.monotonic() - begin < TEST_TIMEOUT
    assert not (record.job_dir / "logs" / "node0" / "rank0.out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "token",
        "logs/../../x",
        "ends/.x",
        "elements/1/result.json",
        "logs/node0/a/b",
        "cancelled",
    ],
)
def test_login_host_cannot_write_files_that_were_not_asked_for(name: str, tmp_path: Path) -> None:
    job_dir = tmp_path / "x-1"
    record = Record(
        "x-1", "x", cluster="hpc", backend="slurm", job_dir=job_dir, nodes=1,
        submitted_at="2026-01-01T00:00:00Z", spec={},
    )  # fmt: skip
    job_dir.mkdir()

    def forged_answer(_call: str, *, bulk: bool, **_arguments: Any) -> tuple[Any, bytes]:
        assert bulk
        forged = {"path": name, "stamp": "1", "size": 3}
        return {"jobs": [{"known": True, "more": False, "files": [forged]}]}, b"lie"

    with pytest.raises(HostError, match="not asked for"):
        ClusterMirror("login1").poll(forged_answer, [(record, True)])
    assert list(job_dir.iterdir()) == []
