"""A hostile login host of a Slurm cluster: a real sshd that answers for Slurm and for the jobs' directories with anything."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostile_host import hostile
from procs import PATIENCE
from sshsite import Site

from clusterjob import jobs
from clusterjob.node import events
from clusterjob.node.verdict import JobState
from clusterjob.plans import new_id
from clusterjob.records import Handle, Record, Records, home
from clusterjob.slurm.login import Login

# Plays define `command(argv)`, which returns what Slurm's command says, and `looks(request)`, for the jobs' directories.
_LOGIN = """
def command(argv):
    return ""
def looks(request):
    return {"jobs": [{"known": True, "files": [], "more": False} for _ in request["jobs"]]}, b""
def answer(request):
    if request["op"] == "looks":
        return looks(request)
    if request["op"] == "run":
        said = command(request["argv"]).encode()
        return {"code": 0, "out": len(said)}, said
    return {}, b""
"""
_ENDLESS = """
round, data = 0, b"x" * (4 << 20)
def looks(request):
    global round
    round += 1
    files = {files}
    return {{"jobs": [{{"known": True, "files": files, "more": True}}]}}, data[:sum(file["size"] for file in files)]
"""
REPLACED = _ENDLESS.format(files="""[{"path": "ends/node0.json", "stamp": str(round), "size": len(data)}]""")
REPLACED_LOG = _ENDLESS.format(files="""[{"path": "logs/node0/rank0.out", "stamp": str(round), "size": len(data)}]""")
# Of two files one grows while the other is said to be gone.
GONE_LOG = _ENDLESS.format(
    files="""[{"path": f"logs/node0/rank{round % 2}.out", "gone": True, "size": 0},
              {"path": f"logs/node0/rank{1 - round % 2}.out", "offset": 0, "size": len(data)}]"""
)


@pytest.fixture
def record(site: Site) -> Record:
    """Return a job of a Slurm behind gpu1."""
    set_ = {"ssh_config": str(site.world.config), "connect_timeout": "5"}
    job_id = new_id("train")
    handle = Handle("slurm", "7", {"ids": ["7"], "cluster": None, "at": time.time() - 60, "login": Login.named("gpu1", set_, ()).to_json()})
    spec: dict[str, Any] = {"login": "gpu1", "options": set_, "setup": [], "nproc_per_node": 1, "workdir": str(site.directory)}
    made = Record(job_id, "train", "hpc", "slurm", home() / "jobs" / job_id, 1, events.now(), spec, handle)
    made.job_dir.mkdir(parents=True)
    Records().save(made)
    return made


@pytest.fixture
def play(site: Site) -> Iterator[Callable[[str], None]]:
    with hostile(site.world.hosts["gpu1"], _LOGIN) as change:

        def play(code: str) -> None:
            forget()
            change(_LOGIN + code)

        yield play
    forget()


def forget() -> None:
    """Forget the connection, as a new process has none."""
    backend: Any = jobs._loaded.pop("slurm", None)
    if backend is not None:
        backend.close()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (REPLACED, "it sends the ends of one job again and again, more than 67.1 MB"),
        (REPLACED_LOG, "it sends a file that was not asked for: 'logs/node0/rank0.out'"),
        (GONE_LOG, "it sends a file that was not asked for: 'logs/node0/rank1.out'"),
    ],
    ids=["replaced", "replaced log", "gone log"],
)
def test_logs_end_where_a_login_host_sends_without_end(
    site: Site, record: Record, play: Callable[[str], None], code: str, why: str
) -> None:
    play(code)
    process = site.command("logs", record.job_id, stdin=subprocess.DEVNULL)
    try:
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in err
    jobs.collect(record)
    status = jobs.status(record)
    assert (status.state, f"gpu1: {why}" in status.reason) == (JobState.UNKNOWN, True), status
