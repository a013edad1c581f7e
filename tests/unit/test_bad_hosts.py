"""Hosts that jobs blamed: noted from events, avoided for a day, forgotten on request."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from commands import command
from launching import new_folder

from clusterjob.core import bad_hosts
from clusterjob.core.bad_hosts import BadHosts
from clusterjob.core.hosts import parse_hosts
from clusterjob.core.records import Record
from clusterjob.core.spec import JobSpec, Resources
from clusterjob.node.program import Program


def spec_of(tmp_path: Path, hosts: str = "", nodes: int = 1, spares: int = 0) -> JobSpec:
    return JobSpec(
        Program("command", "true"),
        tmp_path,
        hosts=tuple(parse_hosts(hosts)) if hosts else (),
        resources=Resources(nodes=nodes),
        spares=spares,
    )


def job_that_blamed(tmp_path: Path, *events: dict[str, Any], hosts: str = "") -> Record:
    job_dir = new_folder(tmp_path / f"job-{time.monotonic_ns()}")
    now = datetime.now(timezone.utc).isoformat()
    lines = [
        {"time": now, "event": "avoid", "node_rank": 1, "kind": "device", "why": "CUDA error"}
        | event
        for event in events
    ]
    (job_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Record(
        job_dir.name, "job", "hpc", "ssh", job_dir, nodes=2, submitted_at=now,
        spec=spec_of(tmp_path, hosts).to_json(),
    )  # fmt: skip


def names(cluster: str = "hpc") -> list[str]:
    return [each.host for each in BadHosts(cluster).listed()]


def test_blamed_host_is_avoided_for_a_day_in_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_that_blamed(tmp_path, {"host": "gpu1"}, {"host": "gpu2", "kind": "node_lost"})
    for _ in range(2):
        BadHosts("hpc").note(job)
    assert (names(), names("another")) == (["gpu1", "gpu2"], [])
    later = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert names() == []


def test_old_and_invalid_events_and_damaged_records_blame_nobody(tmp_path: Path) -> None:
    old = (datetime.now(timezone.utc) - timedelta(hours=25)).isoformat()
    job = job_that_blamed(
        tmp_path,
        {"host": "gpu1", "time": old},
        {"host": "gpu1", "time": "x"},
        {"host": "gpu1\u001b[31m"},
        {"host": ["gpu1"]},
        {"host": "x" * 300},
        {"host": "gpu1", "kind": "../x"},
    )
    BadHosts("hpc").note(job)
    job = job_that_blamed(tmp_path, {"host": "gpu1"})
    BadHosts("hpc").note(replace(job, spec=job.spec | {"nproc_per_node": None}))
    assert names() == []


def test_store_is_private_and_bounded_and_damage_is_ignored(tmp_path: Path) -> None:
    events = [{"host": f"gpu{number}", "why": "x" * 4000} for number in range(300)]
    BadHosts("hpc").note(job_that_blamed(tmp_path, *events))
    path = BadHosts("hpc")._path
    assert len(names()) == 200
    assert path.stat().st_size < 200_000
    assert path.stat().st_mode & 0o777 == 0o600
    for damage in (b"[1]", b"{", b'{"cluster": "hpc", "hosts": [{"host": 1}, 2], "cleared": 3}'):
        path.write_bytes(damage)
        assert names() == []


def test_host_of_a_job_blames_no_host_of_another_job(tmp_path: Path) -> None:
    job = job_that_blamed(tmp_path, {"host": "gpu7"}, {"host": "gpu2"}, hosts="gpu1,gpu2")
    BadHosts("hpc").note(job)
    assert names() == ["gpu2"]


def test_forgotten_host_is_not_noted_again_from_the_same_event(tmp_path: Path) -> None:
    job = job_that_blamed(tmp_path, {"host": "gpu1"}, {"host": "gpu2"})
    BadHosts("hpc").note(job)
    for forgotten, left in (("gpu1", ["gpu2"]), (None, [])):
        assert BadHosts("hpc").clear(forgotten) == 1
        BadHosts("hpc").note(job)
        assert names() == left
    BadHosts("hpc").note(job_that_blamed(tmp_path, {"host": "gpu1"}))
    assert names() == ["gpu1"]


@pytest.mark.parametrize(
    ("nodes", "spares", "order", "unused"),
    [
        (2, 0, ["gpu2", "gpu3", "gpu1"], ["gpu1"]),
        (3, 0, ["gpu1", "gpu2", "gpu3"], []),  # all hosts are needed
        (3, 1, ["gpu2", "gpu3", "gpu1"], ["gpu1"]),  # it is the spare one
    ],
)
def test_avoided_hosts_come_last(
    tmp_path: Path, nodes: int, spares: int, order: list[str], unused: list[str]
) -> None:
    BadHosts("hpc").note(job_that_blamed(tmp_path, {"host": "gpu1"}))
    spec, avoided = bad_hosts.hosts_last(spec_of(tmp_path, "gpu[1-3]", nodes, spares), "hpc")
    assert [str(host) for host in spec.hosts] == order
    assert [each.host for each in avoided] == unused
    if avoided:
        assert bad_hosts.text(avoided).startswith("avoids gpu1 (device in job job-")


def test_commands_list_and_forget_bad_hosts(tmp_path: Path) -> None:
    job = job_that_blamed(tmp_path, {"host": "gpu1", "why": "Xid 79\u001b[2J"}, {"host": "gpu2"})
    for cluster in ("hpc", "hpc2"):
        BadHosts(cluster).note(replace(job, cluster=cluster))
    shown = command(tmp_path, "hosts", "bad", "--cluster", "hpc").stdout
    assert [line.split()[:4] for line in shown.splitlines()[1:]] == [
        [host, "hpc", "device", job.job_id] for host in ("gpu1", "gpu2")
    ]
    assert "\x1b" not in shown
    assert len(json.loads(command(tmp_path, "hosts", "bad", "--json").stdout)["hosts"]) == 4
    assert "HOST is given without --clear" in command(tmp_path, "hosts", "bad", "x", code=2).stderr
    cleared = command(tmp_path, "hosts", "bad", "--clear", "gpu1").stderr
    assert cleared == "clusterjob: 2 hosts forgotten\n"
    command(tmp_path, "hosts", "bad", "--clear")
    assert "no job has blamed a host" in command(tmp_path, "hosts", "bad").stderr
