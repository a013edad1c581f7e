"""A hostile Slurm login host sends any answer for Slurm and job directories: short errors.

The host is a function that answers the calls of each session.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_host import Answer, exchange, polled
from procs import TEST_TIMEOUT

from clusterjob.backends import base
from clusterjob.backends.slurm.login_host import Login
from clusterjob.cli import main
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.config import Settings
from clusterjob.core.plans import new_id
from clusterjob.core.records import Handle, Record, Records, home
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import events
from clusterjob.node.program import Program
from clusterjob.remote.sessions import Sessions

OPTIONS = {"connect_timeout": "3"}
ESCAPES = "\x1b]52;c;eA==\x07\x1b[2J\u202e"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a job of a Slurm cluster whose login host is gpu1."""
    job_id = new_id("train")
    login = Login.named("gpu1", OPTIONS, ()).to_json()
    data = {"ids": ["7"], "cluster": None, "at": time.time() - 60, "login": login}
    spec: dict[str, Any] = {
        "login": "gpu1", "launcher": "srun", "options": OPTIONS, "setup": [], "nproc_per_node": 1,
        "workdir": str(tmp_path),
    }  # fmt: skip
    made = Record(
        job_id,
        "train",
        cluster="hpc",
        backend="slurm",
        job_dir=home() / "jobs" / job_id,
        nodes=1,
        submitted_at=events.now(),
        spec=spec,
        handle=Handle("slurm", "7", data=data),
    )
    made.job_dir.mkdir(parents=True)
    Records().save(made)
    return made


def printed(text: str) -> Answer:
    return {"code": 0, "out": len(text.encode())}, text.encode()


def queue(request: dict[str, Any], job: str, **changes: str) -> str:
    """Return the line of squeue for one job, with the field separator of the command."""
    separator = request["argv"][-1].removeprefix("--format=%F").partition("%K")[0]
    fields = {
        "base": "7", "task": "N/A", "own": "7", "state": "PENDING", "reason": "Resources",
        "start": "N/A", "submitted": "1", "name": "train", "directory": f"/h/jobs/{job}",
        "comment": f"clusterjob:{job}",
    }  # fmt: skip
    return separator.join([*(fields | changes).values(), ""]) + "\n"


def reports(request: dict[str, Any], _job: str) -> Answer:
    """Send false reports of srun."""
    log = b"srun: error: n1: tasks 5-3: Exited with exit code 999\n"
    log += b"srun: error: n1: task " + b"9" * 6000 + b": Killed\n"
    files: list[dict[str, Any]] = [{"path": "ends/srun.0", "stamp": "1", "size": 2}]
    if "logs/slurm.out" in request["jobs"][0]["sizes"]:
        return polled(*files), b"1\n"
    files.append({"path": "logs/slurm.out", "offset": 0, "size": len(log)})
    return polled(*files), b"1\n" + log


def checked(**changes: Any) -> Answer:
    found = {
        "errors": [], "identity": "x", "addresses": ["10.0.0.1"], "host": "gpu1", "home": "/h",
        "time": time.time(), "python": "3.11.2", "torch": None, "free": 10**10, "gpus": [],
    }  # fmt: skip
    return found | changes, b""


# How a host answers calls, by their names; the second argument is the id of the job.
Plays = dict[str, Callable[[dict[str, Any], str], Answer]]
HONEST: Plays = {
    "poll": lambda request, _: ({**polled(), "jobs": polled()["jobs"] * len(request["jobs"])}, b""),
    "run_command": lambda *_: printed(""),
    "check": lambda *_: checked(),
}
PLAYS: dict[str, Plays] = {
    "absent with escapes": {"run_command": lambda *_: ({"absent": ESCAPES}, b"")},
    "refused with escapes": {
        "run_command": lambda *_: ({"code": 1, "out": 0}, ESCAPES.encode() * 1000)
    },
    "refused at length": {"run_command": lambda *_: ({"code": 1, "out": 0}, b"x" * (8 << 20))},
    "binary output": {"run_command": lambda *_: ({"code": 0, "out": 4}, b"\xff\x00\xfe\n")},
    "escapes in the queue": {
        "run_command": lambda request, job: printed(
            queue(request, job, reason=ESCAPES, name=ESCAPES, start=ESCAPES)
        )
    },
    "invalid numbers": {
        "run_command": lambda request, job: printed(
            queue(
                request, job, base="²", task="9" * 5000, own="²", start="9" * 11, submitted="9" * 11
            )
        )
    },
    "false reports of srun": {"poll": reports},
    "many rows": {
        "run_command": lambda request, job: printed(
            "".join(queue(request, job, base=str(n), own=str(n)) for n in range(10_000))
        )
    },
    "endless answer": {"run_command": lambda *_: b"x" * (32 << 20)},
    "clock far in the future": {
        "check": lambda *_: checked(time=1e299),
        "run_command": lambda *_: printed("7\n"),
    },
}


@pytest.fixture
def play(record: Record, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets the login host play one of `PLAYS`."""

    def play(name: str) -> None:
        plays = HONEST | PLAYS[name]

        def answer(request: dict[str, Any]) -> Answer:
            chosen = plays.get(request["call"])
            return ({"missing": []}, b"") if chosen is None else chosen(request, record.job_id)

        monkeypatch.delitem(base._loaded, "slurm", raising=False)  # like a new process
        monkeypatch.setattr(Sessions, "session", lambda *_: exchange(answer))

    return play


def settings(directory: Path) -> Settings:
    options = [f"{key}={value}" for key, value in OPTIONS.items()]
    flags = {"login": "gpu1", "set": options, "python": sys.executable}
    return job_settings.resolve(flags, None, directory=directory)


def submit(directory: Path) -> None:
    (directory / "train.py").touch()
    program, found = Program("script", "train.py"), settings(directory)
    spec = job_settings.make_spec(program, found, directory=directory)
    jobs.submit(jobs.plan(spec, found), "hpc", detach=True)


@pytest.mark.parametrize("name", PLAYS)
def test_invalid_slurm_answer_of_login_host_gives_bounded_status_or_error(
    record: Record, play: Callable[[str], None], tmp_path: Path, name: str
) -> None:
    """Each command ends in time, with a short status or a short ClusterJobError."""
    calls: dict[str, Callable[[], Any]] = {
        "status": lambda: polling.status(Records().find(record.job_id)).reason,
        "cancel": lambda: jobs.cancel([Records().find(record.job_id)]),
        "logs": lambda: polling.collect(Records().find(record.job_id)),
        "doctor": lambda: [*jobs.doctor_checks(settings(tmp_path), tmp_path)],
        "submit": lambda: submit(tmp_path),
    }
    for command_name, call in calls.items():
        play(name)
        begin = time.monotonic()
        try:
            message = str(call())
        except ClusterJobError as error:
            message = f"{error.message} {error.hint}"
        assert time.monotonic() - begin < TEST_TIMEOUT, command_name
        assert len(message) < 6000, command_name


@pytest.mark.parametrize(
    "name", ["escapes in the queue", "refused with escapes", "absent with escapes"]
)
def test_control_characters_from_login_host_are_escaped_in_output(
    record: Record, play: Callable[[str], None], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for verb in ("status", "cancel"):
        play(name)
        main([verb, record.job_id])
        out, err = capsys.readouterr()
        assert out + err
        assert not {"\x1b", "\x07", "\u202e"} & set(out + err), verb
