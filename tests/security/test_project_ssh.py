"""A project's ssh configuration is read as it was when the job was submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import job_settings, jobs, polling, trust
from clusterjob.core.config_files import project_file
from clusterjob.core.records import Records
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState


@pytest.mark.parametrize("transport", ["auto", pytest.param("openssh", marks=pytest.mark.slow)])
def test_status_ignores_ssh_configuration_changed_after_submission(
    site: Site, transport: str
) -> None:
    program, mark = Program("script", "train.py"), site.path("executed")
    site.script("", "train.py")
    ours = site.path("ssh_config")
    ours.write_text(site.ssh_network.config.read_text())
    site.path("clusterjob.toml").write_text(
        '[clusters.lab]\nbackend = "ssh"\nhosts = ["gpu[1-2]", "root@gpu3:22"]\n'
        f'python = "{site.python}"\n'
        f'transport = "{transport}"\n'
        'set = { ssh_config = "ssh_config", need_torch = false, remote_home = "~/elsewhere" }\n'
    )
    trust.record(site.path("clusterjob.toml"), project_file(site.path("clusterjob.toml")).data)
    settings = job_settings.resolve({}, "lab", directory=site.directory, executes=True)
    kept = Path(settings.values["set"]["ssh_config"])
    assert kept != ours
    assert kept.stat().st_mode & 0o777 == 0o600
    assert job_settings.resolve({}, "lab", directory=site.directory, executes=True).values["set"][
        "ssh_config"
    ] == str(kept), "one copy for each content"
    record = jobs.submit(
        jobs.plan(job_settings.make_spec(program, settings, directory=site.directory), settings),
        "lab",
        detach=True,
    )
    assert record.handle.data["transport"] == transport
    ours.write_text(f"Match exec \"touch '{mark}'\"\n" + ours.read_text())
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    polling.collect(Records().find(record.job_id))
    assert not mark.exists()
    assert [str(host) for host in record.job.hosts] == ["gpu1", "gpu2", "root@gpu3:22"]
    assert (site.ssh_network.hosts["gpu3"].home / "elsewhere" / "jobs" / record.job_id).is_dir()


def test_ssh_configuration_of_user_is_not_copied(site: Site) -> None:
    site.script("", "train.py")
    flags = {"hosts": "gpu1", "set": [f"ssh_config={site.ssh_network.config}"]}
    settings = job_settings.resolve(flags, "ssh", directory=site.directory, executes=True)
    assert settings.values["set"]["ssh_config"] == str(site.ssh_network.config)
