"""SSH jobs go on without a lost host and begin on another host of the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from procs import kill_all, wait_until
from sshsite import TEST_TIMEOUT, Site, close_connections, output_lines, wait_for_lines

from clusterjob.core import polling
from clusterjob.core.bad_hosts import BadHosts
from clusterjob.core.records import Record
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState

# Each rank prints its round, rank and node, then a line every 0.2 s; it ends if a file exists.
GUEST = """
    import os, sys, time
    names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE")
    print("round {} rank {} of {}".format(*map(os.environ.get, names)), flush=True)
    count = 0
    while not os.path.exists(sys.argv[1]):
        count += 1
        print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], "line", count, flush=True)
        time.sleep(0.2)
"""


def lines_of(record: Record, rank: int, text: str) -> int:
    paths = (record.job_dir / "logs").rglob(f"rank{rank}.*out")
    return sum(path.read_text().count(text) for path in paths)


def follow(record: Record) -> None:
    polling.status(record)
    polling.collect(record)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["gpu1"], ids=["coordinator"])
def test_job_goes_on_with_its_spare_host_when_a_host_is_cut_off(
    site: Site, tmp_path: Path, host: str
) -> None:
    leave = tmp_path / "leave"
    record = site.submit(
        GUEST,
        str(leave),
        hosts="gpu[1-3]",
        spares=1,
        max_restarts=1,
        lease=3,
        set={"connect_timeout": "3"},
        until=("round 0 rank 0 of 2", "round 0 rank 1 of 2"),
    )
    cut = site.ssh_network.hosts[host]
    cut.link("down")
    try:
        wait_for_lines(record, "round 1 rank 0 of 2", "round 1 rank 1 of 2")
        status = polling.status(record)
        assert status.state is JobState.RUNNING
        before = lines_of(record, 0, "round 1 line")

        def grows() -> bool:
            follow(record)
            return lines_of(record, 0, "round 1 line") > before + 10

        wait_until(grows, TEST_TIMEOUT, "more output of rank 0")
        assert polling.status(record).state is JobState.RUNNING
        leave.touch()
        polled = wait_until(lambda: polling.status(record).verdict, TEST_TIMEOUT, "the end")
        assert (polled.state, polled.restarts) == (JobState.SUCCEEDED, 1)
        # Later jobs avoid the host, if they have enough others.
        blamed = [(each.host, each.kind) for each in BadHosts(record.cluster).listed()]
        assert blamed == [(host, "node_lost")]
        later = site.plan(Program("script", "script.py"), hosts="gpu[1-3]", nodes=2)
        others = [name for name in ("gpu1", "gpu2", "gpu3") if name != host]
        assert [command.argv[1] for command in later.commands] == others
        assert any(f"avoids {host} (node_lost in job script-" in note for note in later.notes)
    finally:
        cut.link("up")
        kill_all(cut.pids())
        close_connections()
    assert any("round 1 rank 1 of 2" in line for line in output_lines(record))
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end of all agents")


@pytest.mark.slow
def test_another_host_of_the_list_replaces_one_that_cannot_be_reached(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    gone = site.ssh_network.hosts["gpu1"]
    gone.stop()
    try:
        record = site.submit("print('up')", hosts="gpu[1-3]", nodes=2, set={"connect_timeout": "5"})
    finally:
        gone.start()
    assert sorted(output_lines(record)) == ["0 out up", "1 out up"]
    assert "gpu3 takes its place" in caplog.text
    assert [host["name"] for host in record.handle.data["hosts"]] == ["gpu3", "gpu2"]
    assert '"node_rank": 0, "host": "gpu3"' in (record.job_dir / "events.jsonl").read_text()
