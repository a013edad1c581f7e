"""`clean` and `rerun` on hosts over SSH, with a host that is cut off."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sshsite import Site, output_lines
from verdicts import wait_for_verdict

from clusterjob.core import cleaning, jobs, rerun
from clusterjob.core.cleaning import Wanted
from clusterjob.core.records import Record, Records


def stored(site: Site, host: str) -> list[Path]:
    return list((site.ssh_network.hosts[host].home / ".clusterjob" / "store").glob("*/*"))


def ended(site: Site, text: str) -> Record:
    record = site.submit(text)
    wait_for_verdict(record)
    return Records().find(record.job_id)


def test_ended_jobs_and_their_code_are_removed_from_all_hosts(site: Site) -> None:
    site.path("data.bin").write_bytes(b"x" * 300_000)
    record = ended(site, "print('done')")
    for host in ("gpu1", "gpu2"):
        for path in stored(site, host):
            os.utime(path, (time.time() - 7200,) * 2)
    found, code = cleaning.find(Wanted())
    assert [job.record.job_id for job in found] == [record.job_id]
    assert found[0].size > 600_000, "both hosts have a copy"
    assert code > 600_000
    assert site.remote_dir(record, "gpu1").is_dir()
    done, freed = cleaning.remove(found)
    assert [(job.kept, job.size) for job in done] == [("", found[0].size)]
    assert freed == code
    for host in ("gpu1", "gpu2"):
        assert not site.remote_dir(record, host).exists()
        assert stored(site, host) == []
    assert Records().all() == []
    assert not record.job_dir.exists()


@pytest.mark.slow
def test_rerun_installs_the_code_that_was_sent_before(site: Site) -> None:
    site.path("value.txt").write_text("old")
    record = ended(site, "print(open('value.txt').read())")
    site.path("value.txt").write_text("new")
    site.path("more.txt").touch()
    again = jobs.submit(rerun.plan(record, (), failed=False), "ssh", detach=True)
    assert sorted(output_lines(again)) == ["0 out old", "1 out old"]
    assert again.handle.data["code"] == record.handle.data["code"]
