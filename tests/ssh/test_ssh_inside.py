"""Commands, shells and port forwards inside a job on hosts that are reached over SSH."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re

import pytest
from inside_job import LEFT, Inside, get, get_at_once
from procs import TEST_TIMEOUT, command_line, wait_until
from sshsite import SLEEPER, Site
from stacked import LIMIT, NOISE, WAITING, check_stacks
from verdicts import wait_for_verdict

from clusterjob.core import polling
from clusterjob.core.records import Records


def started(site: Site) -> Inside:
    record = site.submit(SLEEPER, nproc_per_node=2, until=[f"up {rank}" for rank in range(4)])
    return Inside(record.job_id, site.directory)


def on_host(site: Site, host: str, text: str) -> list[int]:
    return [pid for pid in site.ssh_network.hosts[host].pids() if text in command_line(pid)]


def sampled_ranks(site: Site, job: Inside) -> list[set[int]]:
    """Return the ranks of the newest sample of each node."""
    _, out, _ = site.run("metrics", job.id, "--json")
    nodes = json.loads(out)["nodes"] if out else []
    return [{one["rank"] for one in node["samples"][-1]["workers"]} for node in nodes]


def cancel(site: Site, job: Inside) -> None:
    site.run("cancel", job.id, code=0)


def test_exec_runs_on_host_of_rank_and_killed_client_leaves_nothing(site: Site) -> None:
    job = started(site)
    there = site.remote_dir(Records().find(job.id), "gpu2") / "code"
    connections = on_host(site, "gpu2", "@notty")  # of this process
    job.check_exec("$(uname -n) $PWD", f"gpu2 {there}")
    job.check_shell(rank=2, where="uname -n", answer="gpu2")
    job.check_killed_client(node=1, sleepers=lambda: on_host(site, "gpu2", "sleep 7777"))
    wait_until(lambda: on_host(site, "gpu2", "@notty") == connections, 2 * LEFT, "the end of ssh")
    cancel(site, job)


@pytest.mark.slow
def test_exec_and_metrics_on_all_hosts_and_beside_an_unreachable_one(site: Site) -> None:
    job = started(site)
    out, _ = job.exec("--all", "--", "bash", "-c", "echo $RANK $(uname -n)")
    assert sorted(out.decode().splitlines()) == ["[node 0] 0 gpu1", "[node 1] 2 gpu2"]
    data = os.urandom(50_000_000)
    out, _ = job.exec("cat", data=data)
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
    wait_until(lambda: sampled_ranks(site, job) == [{0, 1}, {2, 3}], TEST_TIMEOUT, "samples")
    site.ssh_network.hosts["gpu2"].stop()
    try:
        _, err = job.exec("--node", "1", "true", code=255)
        assert err.decode().startswith("clusterjob: error: gpu2: ")
        assert len(err.decode().splitlines()) <= 2
        out, err = job.exec("--all", "uname", "-n", code=255)
        assert out == b"[node 0] gpu1\n"
        assert err.decode().startswith("clusterjob: gpu2: ")
        _, out, err = site.run("metrics", job.id, "--json", code=0)
        assert len(json.loads(out)["nodes"]) == 2, "what was copied before"
        assert re.fullmatch("clusterjob: .*gpu2.*\n", err)
    finally:
        site.ssh_network.hosts["gpu2"].start()
    cancel(site, job)


@pytest.mark.slow
def test_forward_reaches_loopback_of_host_and_ends_with_job(site: Site) -> None:
    job = started(site)
    with (
        job.served(node=1, python=str(site.python)) as (server, port),
        job.forwarded(f"0:{port}", "0:9", "--node", "1") as (forward, [local, refused]),
    ):
        with contextlib.suppress(ConnectionResetError):
            assert get(refused, "") == b""
        assert forward.stderr.readline().startswith(
            "clusterjob: node 1: port 9: Connection refused"
        )
        assert get_at_once(local, "script.py") == {site.path("script.py").read_bytes()}
        cancel(site, job)
        assert forward.wait(TEST_TIMEOUT) == 255
        assert f"job {job.id} has ended" in forward.stderr.read()
        assert server.wait(TEST_TIMEOUT) == 255
    wait_until(lambda: not on_host(site, "gpu2", "http.server"), LEFT, "the end of the server")


@pytest.mark.slow
def test_cut_network_ends_client_and_later_the_command(site: Site) -> None:
    record = site.submit(SLEEPER, hosts="gpu2", until=("up 0",))
    job = Inside(record.job_id, site.directory)
    with job.popen("exec", "--", "bash", "-c", "echo up; sleep 7777", stderr=-1) as process:
        assert process.stdout.readline() == b"up\n"
        site.ssh_network.hosts["gpu2"].link("down")
        try:
            assert process.wait(TEST_TIMEOUT) == 255
            assert process.stderr.read().startswith(b"clusterjob: error: gpu2: ")
        finally:
            site.ssh_network.hosts["gpu2"].link("up")
    # The program's next sign of life shows the host that the connection is gone.
    wait_until(lambda: not on_host(site, "gpu2", "sleep 7777"), TEST_TIMEOUT, "the end")
    cancel(site, job)


def test_stacks_of_16_ranks_on_2_hosts_are_read_and_saved_by_cancel(site: Site) -> None:
    record = site.submit(WAITING, nproc_per_node=8, until=[f"up {rank}" for rank in range(16)])
    job = Inside(record.job_id, site.directory)
    assert check_stacks(job, 16, ["gpu1", "gpu2"]) < LIMIT * NOISE
    site.run("cancel", "--stacks", record.job_id, code=0)
    verdict = wait_for_verdict(Records().find(record.job_id))
    assert (verdict.evidence, verdict.evidence_ranks) == ("logs/node0/stacks.txt", 16)
    path = record.job_dir / "logs" / "node0" / "stacks.json"
    wait_until(lambda: (polling.collect(record), path.exists())[1], TEST_TIMEOUT, "the file")
    ranks = json.loads(path.read_text())["ranks"]
    assert [(each["rank"], each["node_rank"]) for each in ranks] == [
        (rank, rank // 8) for rank in range(16)
    ]
