"""`rerun` of real local jobs: recorded program, arguments and environment under a new id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from launching import write_tree

from clusterjob.core import job_settings, rerun
from clusterjob.core.job_secrets import Secret
from clusterjob.core.records import Record, Records, home
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, UsageError
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict

SCRIPT = "import os, sys; print(sys.argv[1:], os.environ['PUBLIC'], os.environ['TOKEN'] * 2)\n"


@pytest.fixture
def work(tmp_path: Path, plain_python: str) -> Path:
    """Return a directory with a script; the interpreter of jobs starts fast, without torch."""
    write_tree(tmp_path / "work", **{"script.py": SCRIPT})
    return tmp_path / "work"


def submitted(work: Path, *words: str, **env: str) -> str:
    """Submit a job or repeat one, and wait for its end; return its id."""
    job_id = command(work, *words, **env).strip()
    command(work, "wait", job_id)
    return job_id


SUBMIT = ("submit", "--cluster", "local")


def command(work: Path, *words: str, code: int = 0, **env: str) -> str:
    done = commands.command(work, *words, code=code, **env)
    return done.stdout if code == 0 else done.stderr


def test_rerun_repeats_program_environment_and_asks_for_secrets_again(work: Path) -> None:
    options = ("--env", "PUBLIC=yes", "--secret", "TOKEN")
    first = submitted(work, *SUBMIT, *options, "script.py", "--lr", "a b", TOKEN="one")
    assert "--secret TOKEN: it is not set here" in command(work, "rerun", first, code=2)
    (work / "token").write_text("two\n")
    second = submitted(work.parent, "rerun", "@", "--secret", "TOKEN=work/token")
    assert (second.startswith("script-"), second == first) == (True, False)
    assert command(work, "logs") == "['--lr', 'a b'] yes twotwo\n"
    assert "two" not in (Records().directory / f"{second}.json").read_text()
    work.rename(work.parent / "moved")
    error = command(work.parent, "rerun", first, code=2, TOKEN="x")
    assert f"the working directory '{work}' does not exist" in error
    assert len(Records().all()) == 2, "nothing is left of a rerun that is refused"


def test_rerun_names_the_new_job_if_stdout_is_full(work: Path) -> None:
    first = submitted(work, *SUBMIT, "--", "true")
    argv = [*commands.CLUSTERJOB, "rerun", first]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            argv, cwd=work, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    second = Records().find("@").job_id
    assert (done.returncode, second == first) == (1, False)
    assert f"hint: the job runs; its id is {second}" in done.stderr
    command(work, "wait", second)


@pytest.mark.parametrize("program", [["script.py"], ["--", "bash", "script.sh"]], ids=["py", "sh"])
def test_rerun_runs_the_code_that_was_submitted_and_clean_frees_it(
    work: Path, program: list[str]
) -> None:
    script = "import helper; print(helper.value)\n"
    shell = f"{sys.executable} script.py\n"
    write_tree(work, **{"helper.py": "value = 'old'\n", "script.py": script, "script.sh": shell})
    first = submitted(work, *SUBMIT, *program)
    (work / "script.sh").unlink()
    write_tree(work, **{"helper.py": "value = 'new'\n", "script.py": "not Python\n"})
    second = submitted(work, "rerun", first)
    assert command(work, "logs", second) == "old\n"
    assert Records().find(second).code == Records().find(first).code
    command(work, "clean", first, "--yes")
    third = submitted(work, "rerun", second)
    assert command(work, "logs", third) == "old\n", "another job still uses the code"
    for blob in (home() / "store").glob("*/*"):
        os.utime(blob, (0, 0))
    command(work, "clean", "--all", "--yes")
    assert list((home() / "store").glob("*/*")) == []


def test_rerun_without_the_recorded_code_is_refused(work: Path) -> None:
    job_id = command(work, "submit", "--cluster", "local", "script.py", code=0).strip()
    command(work, "cancel", job_id)
    (Records().find(job_id).job_dir / "code.list").unlink()
    assert "is not kept any more" in command(work, "rerun", job_id, code=1)
    assert len(Records().all()) == 1


def spec_of(work: Path, **settings: Any) -> JobSpec:
    resolved = job_settings.resolve(settings, "local", directory=work)
    return job_settings.make_spec(Program("script", "script.py"), resolved, directory=work)


def recorded(work: Path, spec: JobSpec, **fields: Any) -> Record:
    end = Verdict(fields.pop("state", JobState.SUCCEEDED), fields.pop("code", 0))
    record = Record(
        "job-a",
        "job",
        cluster="lab",
        backend="local",
        job_dir=work,
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec=json.loads(json.dumps(spec.to_json())),
        **{"end": end.to_json(), **fields},
    )
    Records().save(record)
    return record


@pytest.mark.parametrize(
    ("secrets", "failed", "message"),
    [((), True, "has failed: it is SUCCEEDED"), ([Secret("OTHER")], False, "has no such secret")],
)
def test_rerun_of_what_the_job_does_not_have_is_refused(
    work: Path, secrets: list[Secret], failed: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        rerun.plan(recorded(work, spec_of(work)), secrets, failed=failed)


def test_failed_job_is_repeated(work: Path) -> None:
    record = recorded(work, spec_of(work), state=JobState.FAILED, code=3)
    assert rerun.plan(record, (), failed=True).spec.program.target == "script.py"


def test_pickled_calls_are_copied(work: Path) -> None:
    (work / "call.0.pkl").write_bytes(b"call")
    planned = rerun.plan(recorded(work, spec_of(work)), (), failed=False)
    assert [file.data for file in planned.files if file.path.name == "call.0.pkl"] == [b"call"]
    assert all(file.path.parent == planned.job_dir for file in planned.files)


def test_elements_to_repeat_keep_their_indices_and_values(work: Path) -> None:
    spec = JobSpec(
        Program("script", "script.py"), work, sweep=("lr=1,2,3,4",), array="%2", only=(1, 3)
    )
    array = spec.elements()
    assert (array.indices, array.at_once, len(array.values)) == ((1, 3), 2, 4)
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))).only == (1, 3)
    with pytest.raises(SpecError, match="has no element 4"):
        JobSpec(Program("script", "script.py"), work, sweep=("lr=1,2,3,4",), only=(4,))


def test_settings_of_record_are_used_without_configuration(work: Path) -> None:
    """The job's cluster may be a profile that does not exist any more."""
    record = recorded(work, spec_of(work, max_restarts=2, env=["A=b"]))
    planned = rerun.plan(record, (), failed=False)
    assert (planned.spec.max_restarts, dict(planned.spec.env)) == (2, {"A": "b"})
