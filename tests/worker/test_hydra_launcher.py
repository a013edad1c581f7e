"""`hydra/launcher=clusterjob` on this machine, with an unmodified Hydra application."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra_app import write_app
from launching import ROOT
from procs import TEST_TIMEOUT

import clusterjob
from clusterjob.core import arrays
from clusterjob.core.options import OPTIONS
from clusterjob.core.records import Records
from clusterjob.errors import SpecError
from clusterjob.node.program import Program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hydra") is None, reason="Hydra is missing: pip install hydra-core"
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    write_app(tmp_path)
    return tmp_path


def multirun(app: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "app.py", "--multirun", "hydra/launcher=clusterjob", *overrides],
        cwd=app,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
        # By exec, nothing imports torch.
        env={**os.environ, "PYTHONPATH": str(ROOT), "CLUSTERJOB_START": "exec"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_value_of_several_words_becomes_several_arguments() -> None:
    program = Program("script", "a.py", args=("-x", "{all...}", "{one}"))
    values = (("all", "lr=1 'text=a {one}'"), ("one", "{all...}"))
    assert arrays.program_of(program, values).args == ("-x", "lr=1", "text=a {one}", "{all...}")
    assert arrays.program_of(program, (("all", ""), ("one", "1"))).args == ("-x", "1")
    with pytest.raises(SpecError, match="no list of shell words"):
        arrays.program_of(program, (("all", "'"), ("one", "1")))


def test_launcher_has_each_setting_of_a_job() -> None:
    from hydra_plugins.clusterjob_launcher import launcher

    fields = set(launcher.ClusterjobLauncherConf.__dataclass_fields__)
    own = {"_target_", "cluster", "wait", "max_running"}
    assert fields == {*OPTIONS, *own} - {"array", "sweep"}


def test_sweep_runs_jobs_in_their_directories(app: Path) -> None:
    done = multirun(
        app, "lr=1,2", "db=pg", "text='it\\'s \"{x}\"'", "hydra.sweep.dir=runs/here",
        "hydra.launcher.cluster=local", "hydra.launcher.max_running=2",
    )  # fmt: skip
    records = Records().all()
    assert [record.name for record in records] == ["app", "app"]
    for number, record in enumerate(records):
        folder = app / "runs" / "here" / str(number)
        assert f"clusterjob logs -f {record.job_id}" in done.stdout
        assert (folder / "rank0.txt").read_text() == f"{number} {2 * (number + 1)} {record.job_id}"
        overrides = (folder / ".hydra" / "overrides.yaml").read_text()
        assert overrides.splitlines()[:2] == [f"- lr={number + 1}", "- db=pg"]
        assert "name: pg" in (folder / ".hydra" / "config.yaml").read_text()
        output = clusterjob.Job.get(record.job_id).logs()
        assert output == f'rank 0 {number + 1} pg it\'s "{{x}}" {number}\n'


def test_application_whose_defaults_name_another_launcher_runs(app: Path) -> None:
    config = app / "conf" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("  - _self_\n", "  - _self_\n  - override hydra/launcher: x\n"))
    multirun(app, "lr=1", "hydra.launcher.cluster=local", "hydra.launcher.wait=true")
    [record] = Records().all()
    assert "rank 0 1" in clusterjob.Job.get(record.job_id).logs()


@pytest.mark.slow
def test_sweeper_gets_return_values_and_error_of_failed_job(app: Path) -> None:
    done = multirun(app, "hydra/sweeper=mine", "hydra.launcher.cluster=local")
    assert "values [10, 30]" in done.stdout
    done = multirun(app, "lr=9", "hydra.launcher.cluster=local", code=1)
    assert "ValueError: the rate is too large" in done.stderr
    [_, _, failed] = Records().all()
    assert "the rate is too large" in clusterjob.Job.get(failed.job_id).logs()


def test_wrong_setting_is_an_error_before_any_job(app: Path) -> None:
    done = multirun(app, "lr=1,2", "hydra.launcher.nodes=many", code=1)
    assert "'many' is not a whole number" in done.stderr
    done = multirun(app, "lr=1,2", "hydra.launcher.cluster=absent", code=1)
    assert "there is no cluster 'absent'" in done.stderr
    limits = ("hydra.launcher.max_running=1", "hydra.launcher.wait=false")
    done = multirun(app, "lr=1,2", "hydra.launcher.cluster=local", *limits, code=1)
    assert "max_running=1 with wait=false: the cluster 'local' has no queue" in done.stderr
    assert not Records().all()


def test_sweep_without_wait_names_each_job(app: Path) -> None:
    done = multirun(app, "lr=1,2", "hydra.launcher.cluster=local", "hydra.launcher.wait=false")
    jobs = [clusterjob.Job.get(record.job_id) for record in Records().all()]
    assert all(f"clusterjob logs -f {job.id}" in done.stdout for job in jobs)
    assert [job.wait(TEST_TIMEOUT).exit_code for job in jobs] == [0, 0]
