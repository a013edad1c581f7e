"""The ssh configuration of a project is read as it was when the job was submitted, whatever the
project holds later.
"""

from __future__ import annotations

from pathlib import Path

from sshsite import Site, end_of

from clusterjob.core import jobs
from clusterjob.core.records import Records
from clusterjob.core.trust import Use
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState


def test_status_executes_nothing_that_came_into_the_project_after_the_submission(
    site: Site,
) -> None:
    program, mark = Program("script", "train.py"), site.path("executed")
    site.script("", "train.py")
    ours = site.path("ssh_config")
    ours.write_text(site.world.config.read_text())
    site.path("clusterjob.toml").write_text(
        f'[clusters.lab]\nbackend = "ssh"\nhosts = "gpu1"\npython = "{site.python}"\n'
        'set = { ssh_config = "ssh_config", need_torch = false }\n'
    )
    settings = jobs.settle({}, "lab", directory=site.directory, use=Use(program=program))
    kept = Path(settings.values["set"]["ssh_config"])
    assert kept != ours
    assert kept.stat().st_mode & 0o777 == 0o600
    assert jobs.settle({}, "lab", directory=site.directory, use=Use(program=program)).values["set"][
        "ssh_config"
    ] == str(kept), "one for each content"
    record = jobs.submit(
        jobs.plan(jobs.make_spec(program, settings, directory=site.directory), settings),
        "lab",
        detach=True,
    )
    ours.write_text(f"Match exec \"touch '{mark}'\"\n" + ours.read_text())
    assert end_of(record).state is JobState.SUCCEEDED
    jobs.collect(Records().find(record.job_id))
    assert not mark.exists()


def test_a_configuration_of_the_user_is_read_as_it_is(site: Site) -> None:
    site.script("", "train.py")
    flags = {"hosts": "gpu1", "set": [f"ssh_config={site.world.config}"]}
    settings = jobs.settle(
        flags, "ssh", directory=site.directory, use=Use(program=Program("script", "train.py"))
    )
    assert settings.values["set"]["ssh_config"] == str(site.world.config)
