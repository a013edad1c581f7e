"""Submission to Slurm and polls of its queue, with stubs of its commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import write_tree
from procs import TEST_TIMEOUT

from clusterjob.backends.slurm import checks, planning, queue, status, submit
from clusterjob.backends.slurm.backend import SlurmBackend
from clusterjob.backends.slurm.client import UNREACHED, Client, SlurmOutput
from clusterjob.backends.slurm.queue import Queue
from clusterjob.backends.slurm.remote_command import RemoteCommand
from clusterjob.backends.slurm.squeue import JobRow, QueueSnapshot
from clusterjob.core.plans import Plan, PlannedCommand, write_files
from clusterjob.core.records import Handle, Record
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SubmitInDoubtError
from clusterjob.node.program import Program
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState

SBATCH = ("sbatch", "--exclude=n9", "job.sh")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Sequence[str]]]:
    """Let each command of Slurm answer with an exit code and outputs; return the command lines."""

    def answer(code: int, out: str = "", err: str = "") -> list[Sequence[str]]:
        asked: list[Sequence[str]] = []

        def run(self: Client, argv: Sequence[str], *_: Any, **__: Any) -> SlurmOutput:
            asked.append(argv)
            return SlurmOutput(code, out, err)

        monkeypatch.setattr(Client, "run", run)
        monkeypatch.setattr(submit, "_PAUSE", 0.0)
        return asked

    return answer


def plan(tmp_path: Path, *, pieces: int = 1, **fields: Any) -> Plan:
    spec = JobSpec(Program("command", "true"), tmp_path)
    commands = (PlannedCommand(SBATCH),) * pieces
    return Plan("job-1", "slurm", tmp_path, spec, files=(), commands=commands, **fields)


def rows(*bases: int) -> QueueSnapshot:
    found = [JobRow(str(base), "PENDING", name="job-1") for base in bases]
    return QueueSnapshot(1.0, {row.key: row for row in found})


def record(tmp_path: Path, handle: Handle | None = None) -> Record:
    spec = JobSpec(Program("command", "true"), tmp_path).to_json()
    return Record(
        "job-1", "job", "hpc", "slurm", tmp_path, 1, "2026-11-24T10:00:00Z", spec, handle=handle
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((1, "", "quota"), "quota"),
        ((1, "Submitted batch job 999999", "quota"), "quota"),
        ((0, "submitted"), "sbatch printed no job id: 'submitted'"),
    ],
)
def test_record_stays_if_it_is_unknown_whether_slurm_accepted_the_job(
    tmp_path: Path, answers: Any, answer: tuple[Any, ...], why: str
) -> None:
    asked = answers(*answer)
    with pytest.raises(SubmitInDoubtError, match=rf"it is unknown whether .*: {why}"):
        submit.submit_pieces(Client(), plan(tmp_path))
    assert [argv[0] for argv in asked] == ["sbatch"] + ["squeue"] * submit._SEARCHES


def test_pieces_that_a_wrapper_submits_without_ids_are_all_found(
    tmp_path: Path, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(1, err="quota")
    shown = iter([rows(9), rows(9, 10)])
    monkeypatch.setattr(submit, "ask", lambda _: next(shown))
    assert submit.submit_pieces(Client(), plan(tmp_path, pieces=2)) == (["9", "10"], None)
    handle = status.adopt(record(tmp_path), rows(10, 9), {})
    assert (handle.id, handle.data["ids"]) == ("9", ["9", "10"])


@pytest.mark.parametrize(
    ("err", "words"),
    [
        ("Job 7 to start at 2026 on n2 in partition a", ("--exclude=n9,n1", "job.sh")),
        ("allocation failure: nodes are not available", SBATCH[1:]),
    ],
)
def test_blamed_nodes_are_excluded_if_there_are_enough_others(
    tmp_path: Path, answers: Any, err: str, words: tuple[str, ...]
) -> None:
    asked = answers(0, err=f"sbatch: {err}")
    avoid = {"n1": "n1 (device in job train-1)", "n2,n3": "no name"}
    found = submit.without_bad_nodes(Client(), plan(tmp_path, avoid=avoid))
    assert found.commands[0].argv == ("sbatch", *words)
    assert asked == [["sbatch", "--test-only", "--exclude=n9,n1", "job.sh"]]


def test_numbers_that_are_too_long_for_python_are_no_error(answers: Any) -> None:
    long = "9" * 6000
    text = f"a|up|1|{long}|idle|gpu:{long}\nb|up|1|2|idle|gpu:x:{long}\n"
    assert checks.partitions_of(text)["b"].usable == 2
    assert checks._number(f"{long}.{long}") > checks._OLDEST
    assert submit._seconds(f"{long}:00:00") == submit._seconds("UNLIMITED")
    answers(0, f"MaxArraySize = {long}\n")
    assert submit.largest_array(Client()) is None


def test_login_host_that_always_answers_at_once_is_given_up() -> None:
    session = SimpleNamespace(ask=lambda *_, **__: ({"number": 1}, b""))
    host: Any = SimpleNamespace(label="login1", timeout=1.0, session=lambda: session)
    command = RemoteCommand(host, ["squeue"], {}, job_id="")
    _, err = command.communicate(timeout=3.0)
    assert command.returncode == UNREACHED
    assert err == "ssh: login1: it answered before the end of squeue"


# -- the queue -----------------------------------------------------------------------------------

SQUEUE = r"""#!/bin/sh
cd "${0%/*}"
[ ! -e down ] || { echo "squeue: error: Unable to contact slurm controller" >&2; exit 1; }
[ ! -e slow ] || exec sleep 1000
for format; do :; done
echo "$format" | sed 's/--format=//; s/%[FA]/7/g; s/%T/PENDING/; s/%r/JobHeldUser/; s/%j/job-1/
s/%[A-Za-z]/N\/A/g'
"""


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a squeue that shows one held job."""
    write_tree(tmp_path / "bin", squeue=SQUEUE)
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path))
    monkeypatch.setattr(queue, "INTERVAL", 0.1)
    return tmp_path / "bin"


def test_status_keeps_last_state_while_slurm_does_not_answer(bin_: Path, tmp_path: Path) -> None:
    job = record(tmp_path, Handle("slurm", "7", data={"ids": ["7"], "at": 0.0}))
    reasons = ["JobHeldUser", "JobHeldUser; Slurm does not answer: Unable to contact"]
    for reason in reasons:
        found = SlurmBackend().status([job])["job-1"]
        assert (found.state, found.reason.startswith(reason)) == (JobState.PENDING, True), found
        (bin_ / "down").touch()
        [path] = (tmp_path / "slurm").glob("queue-*.json")
        files.write_json(path, (files.read_json(path) or {}) | {"asked_at": 0})


def test_command_stopped_during_its_squeue_blocks_no_other(bin_: Path, tmp_path: Path) -> None:
    (bin_ / "slow").touch()
    stopped = Queue(Client(), tmp_path)
    assert stopped._ask({})
    (bin_ / "slow").unlink()
    assert Queue(Client(), tmp_path).poll().rows["7"].reason == "JobHeldUser"
    stopped.close()


# -- the script ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_program_that_prints_an_error_of_srun_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    error = "srun: error: Unable to create step for job 1: Unable to contact slurm controller"
    fakes = {
        "srun": '#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n',
        "python": f"#!/bin/sh\necho x >> {tmp_path}/runs\necho '{error}' >&2\nexit 1\n",
    }
    write_tree(tmp_path / "bin", **fakes)
    for name in fakes:
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path))
    python = str(tmp_path / "bin" / "python")
    spec = JobSpec(Program("command", "true"), tmp_path, python=python, launcher=launcher)
    made = planning.plan(spec)
    write_files(made)
    script = next(file.path for file in made.files if file.path.name.endswith(".sh"))
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_NODEID": "0"}
    with (made.job_dir / "logs" / "slurm.out").open("wb") as out:
        subprocess.run(
            ["bash", script],
            env=environ | {"SLURM_PROCID": "0"},
            stdout=out,
            stderr=out,
            timeout=TEST_TIMEOUT,
            check=False,
        )
    assert (tmp_path / "runs").read_text() == "x\n"
