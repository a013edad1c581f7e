"""Jobs over SSH on real sshd servers: start, follow, cancel and faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import code_writer
import pytest
from procs import checked_output, command_line, kill_all, wait_until
from ssh_network import SshHost
from sshsite import (
    SLEEPER,
    TEST_TIMEOUT,
    Site,
    close_connections,
    output_lines,
    wait_for_lines,
    workers_on,
)
from terminals import Terminal
from verdicts import wait_for_verdict

from clusterjob.backends.base import Status
from clusterjob.cli import output
from clusterjob.core import jobs, polling
from clusterjob.core.records import Record, Records
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.remote.mirror import JobMirror

# Prints a line with its rank, and another one when the file "leave" exists.
UNTIL_LEAVE = """
    import os, time
    print("up", os.environ["RANK"], flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.05)
    print("left", os.environ["RANK"])
"""


# -- jobs that succeed ---------------------------------------------------------------------------


@pytest.fixture
def talking_shells(site: Site) -> Iterator[None]:
    """Let bash print on hosts whenever a command runs there."""
    places = [site.ssh_network.hosts[name].home / ".bashrc" for name in ("gpu1", "gpu2")]
    for place in places:
        place.write_text("echo welcome; echo to stderr >&2\n")
    yield
    for place in places:
        place.unlink()


@pytest.mark.usefixtures("talking_shells")
def test_job_runs_with_its_code_on_every_host_and_output_returns(site: Site) -> None:
    """The host file sets the workers of each host; setup lines run in the directory of the code."""
    site.path("hosts").write_text("gpu1 slots=1\ngpu2 slots=3\n")
    site.path("env.sh").write_text("export FROM_THE_CODE=yes\n")
    site.path("sub").mkdir()
    site.path("sub/data.txt").write_text("déjà vu")
    record = site.submit(
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.uname().nodename,
              os.environ["MASTER_ADDR"], os.environ["FROM_THE_CODE"], open("sub/data.txt").read())
        print("to stderr", file=sys.stderr)
        assert "CLUSTERJOB_TOKEN" not in os.environ and not sys.stdin.read()
        """,
        hosts=None,
        hostfile="hosts",
        setup=["source ./env.sh"],
    )
    hosts = ("gpu1", "gpu2", "gpu2", "gpu2")
    assert sorted(output_lines(record)) == sorted(
        [f"{rank} out {rank} 4 {host} 10.77.0.1 yes déjà vu" for rank, host in enumerate(hosts)]
        + [f"{rank} err to stderr" for rank in range(4)]
    )
    assert polling.status(Records().find(record.job_id)).state is JobState.SUCCEEDED


def test_git_answers_beside_file_and_files_written_there_are_named(site: Site) -> None:
    said = code_writer.make(site.directory)
    program = Program("script", str(site.path("train.py")))  # the hosts have it elsewhere
    record = jobs.submit(site.plan(program), "ssh", detach=True)
    lines = output_lines(record)
    for rank in (0, 1):
        mark = f"{rank} out "
        assert [line.removeprefix(mark) for line in lines if line.startswith(mark)] == said
    verdict = wait_for_verdict(record)

    def named() -> list[str]:
        polling.status(record)
        lines = output.written_beside_code(record.job_dir, verdict)
        return sorted(line.partition(" on ")[2] for line in lines)

    wait_until(lambda: named() == ["gpu1: last.pt", "gpu2: last.pt"], TEST_TIMEOUT, "both names")


def test_job_files_on_host_are_private_and_token_is_not_exposed(site: Site) -> None:
    record = site.submit(SLEEPER, until=("up 0", "up 1"))
    elapsed = polling.status(record).elapsed  # by the clock of the host
    assert elapsed is not None
    assert 0 <= elapsed < TEST_TIMEOUT
    token = (record.job_dir / "token").read_text()
    for host in ("gpu1", "gpu2"):
        place = site.remote_dir(record, host)
        assert place.stat().st_mode & 0o777 == 0o700
        assert place.parent.parent.stat().st_mode & 0o777 == 0o700
        assert (place / "token").read_text() == token
        assert (place / "token").stat().st_mode & 0o777 == 0o600
        pids = site.ssh_network.hosts[host].pids()
        assert pids
        for pid in pids:
            assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert token not in json.dumps(Records().find(record.job_id).to_json())
    jobs.cancel([record])


def test_failure_names_rank_and_host_as_user_wrote_it(site: Site) -> None:
    record = site.submit(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise SystemExit(7)
        time.sleep(1000)
        """,
        hosts="gpu1,root@10.77.0.2:22",
    )
    verdict = wait_for_verdict(record)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 7)
    assert (verdict.failure.rank, verdict.failure.host) == (1, "root@10.77.0.2:22")


def test_killed_run_leaves_job_running_and_reachable(site: Site) -> None:
    run = site.command("run", *site.options(), site.script(SLEEPER))
    assert "up" in run.stdout.readline()
    assert "up" in run.stdout.readline()
    run.kill()
    run.communicate(timeout=TEST_TIMEOUT)
    (record,) = Records().all()
    assert polling.status(record).state is JobState.RUNNING
    wait_for_lines(record, "up 0", "up 1")
    jobs.cancel([record])
    assert not site.running()


def test_killed_submit_leaves_nothing_or_job_that_its_record_finds(site: Site) -> None:
    """After a kill at any moment, either nothing runs or the record of the job finds it."""
    for delay in (0.7, 1.1):
        submitted = site.command("submit", *site.options(join_timeout=3), site.script(SLEEPER))
        time.sleep(delay)
        submitted.kill()
        submitted.communicate(timeout=TEST_TIMEOUT)
        for record in Records().all():
            status = polling.status(record)
            # An agent without its peer gives up after 3 s, which may be over already.
            assert status.state in (
                JobState.LOST,
                JobState.RUNNING,
                JobState.PENDING,
                JobState.SUCCEEDED,
                JobState.FAILED,
            ), status
            jobs.cancel([record])
            Records().remove(record.job_id)
        wait_until(lambda: not site.running(), 10, "the end of what was started")


def test_hosts_of_mpi_hostfile_variable_run_job_behind_bastion(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.path("mpi").write_text("inner1 slots=1\ninner2 slots=1\n")
    monkeypatch.setenv("MLP_MPI_HOSTFILE", str(site.path("mpi")))
    monkeypatch.setenv("MLP_SSH_PORT", "22")
    record = site.submit(
        'import os; print(os.uname().nodename, os.environ["MASTER_ADDR"])', hosts=None
    )
    assert sorted(output_lines(record)) == ["0 out inner1 10.78.0.1", "1 out inner2 10.78.0.1"]


def test_job_without_sync_runs_in_existing_directory_of_hosts_with_one_home(site: Site) -> None:
    shared = site.ssh_network.directory / "shared"
    record = site.submit(
        "import os; print(os.getcwd())", sync="false", set={"remote_home": str(shared)}
    )
    assert sorted(output_lines(record)) == [f"{rank} out {site.directory}" for rank in range(2)]
    assert not (shared / "jobs" / record.job_id / "code").exists()


def test_command_on_single_host_needs_no_torch_and_uses_loopback_as_master_addr(
    site: Site,
) -> None:
    program = Program("command", "sh", args=("-c", "echo $(hostname) $MASTER_ADDR"))
    plan = site.plan(program, hosts="gpu3", set={"need_torch": "true"})
    assert output_lines(jobs.submit(plan, "ssh", detach=True)) == ["0 out gpu3 127.0.0.1"]


def test_following_logs_opens_one_connection_per_host(site: Site) -> None:
    record = site.submit(
        "import time\nfor n in range(30): print('line', n, flush=True); time.sleep(0.1)"
    )
    close_connections()
    hosts = [site.ssh_network.hosts[name] for name in ("gpu1", "gpu2")]
    before = [host.logins for host in hosts]
    _, out, _ = site.run("logs", "-f", record.job_id, code=0)
    shown = [line for line in out.splitlines() if line.startswith("[0-1] ")]
    alone = [line for line in out.splitlines() if not line.startswith("[0-1] ")]
    assert len(shown) * 2 + len(alone) == 60, "every line of both, once"
    for rank in range(2):
        own = [
            line.partition("] line ")[2]
            for line in out.splitlines()
            if line.startswith(("[0-1]", f"[{rank}]"))
        ]
        assert own == [str(number) for number in range(30)], "each rank's in their order"
    assert [host.logins for host in hosts] == [count + 1 for count in before]


def test_submit_on_terminal_shows_hosts_and_code_upload_progress(site: Site) -> None:
    with site.path("weights.bin").open("wb") as stream:
        for _ in range(60):
            stream.write(os.urandom(1 << 20))
    argv = [sys.executable, "-m", "clusterjob", "submit", *site.options(), site.script("")]
    with Terminal(argv, cwd=site.directory) as terminal:
        assert terminal.finish() == 0, terminal.shown
    seen = terminal.shown
    [record] = Records().all()
    assert b"\r\x1b[J0 of 2 hosts reached\r\x1b[J1 of 2 hosts reached\r\x1b[J2 of 2 hosts" in seen
    assert re.search(rb"sending code to 2 hosts: \d+ MB of 126 MB, [\d.]+ [MG]B/s", seen)
    assert seen.endswith(f"\r\x1b[J{record.job_id}\r\n".encode())
    assert wait_for_verdict(record).state is JobState.SUCCEEDED


def test_follow_without_terminal_prints_hosts_and_bytes_once(site: Site) -> None:
    _, out, err = site.run(
        "submit", "--follow", *site.options(), site.script("print('hello')"), code=0
    )
    # The two lines are shown as one if they arrive together.
    assert out.splitlines()[1:] in (
        ["[0-1] hello"],
        ["[0] hello", "[1] hello"],
        ["[1] hello", "[0] hello"],
    )
    lines = err.splitlines()
    assert len(set(lines)) == len(lines)
    assert lines[0] == "clusterjob: 2 of 2 hosts reached"
    assert re.fullmatch(r"clusterjob: sent code to 2 hosts: .*", lines[1])


# -- invalid input and unusable hosts ------------------------------------------------------------


def test_submit_names_all_unusable_hosts_and_starts_nothing(site: Site, tmp_path: Path) -> None:
    site.ssh_network.write_config(
        "Host closed\n  HostName 10.77.0.1\n  Port 9\n"
        "Host strange\n  HostName 10.77.0.3\n  User nobody\n"
    )
    site.ssh_network.known_hosts.write_text(
        "".join(
            f"{host.address} {host.public_key}\n"
            for host in site.ssh_network.hosts.values()
            if host.name != "gpu2"
        )
    )
    error = site.refused(hosts="gpu1,closed,no-such-host.invalid,gpu2,strange")
    first, text = error.message.split(": ", 1)
    assert first == "4 of 5 hosts cannot be used"
    reasons = dict(reason.split(": ", 1) for reason in text.split("; "))
    assert list(reasons) == ["closed", "no-such-host.invalid", "gpu2", "strange"]
    assert "its key is unknown" in reasons["gpu2"]
    assert "it accepts none of the keys of nobody" in reasons["strange"]


@pytest.mark.parametrize(
    ("flags", "messages", "hint"),
    [
        (
            {"python": "/nowhere/python"},
            ["gpu1: no Python: there is no interpreter /nowhere/python"],
            "--python",
        ),
        ({"set": {"need_torch": "true"}}, ["gpu1: no torch: ", "gpu2: no torch: "], ""),
        (
            {"setup": ["true", "echo nope >&2; false"]},
            ["gpu1: a setup line failed: echo nope >&2; false (nope)"],
            "",
        ),
        ({"hosts": "gpu1,gpu2,other"}, ["other: it is the same machine as gpu1"], ""),
    ],
    ids=["no interpreter", "no torch", "setup line", "same machine"],
)
def test_host_that_cannot_run_the_job_is_refused_with_the_reason(
    site: Site, flags: dict[str, Any], messages: list[str], hint: str
) -> None:
    site.ssh_network.write_config("Host other\n  HostName 10.77.0.1\n  HostKeyAlias 10.77.0.1\n")
    error = site.refused(**flags)
    assert all(message in error.message for message in messages)
    assert hint in error.hint


def test_full_disk_on_one_host_is_reported(site: Site, full_disk: SshHost) -> None:
    assert site.refused().message.startswith("gpu2: disk full: ")


def test_ctrl_c_during_submit_leaves_nothing_on_hosts(site: Site) -> None:
    submitted = site.command("submit", *site.options(setup=["sleep 60"]), site.script(SLEEPER))
    place = site.ssh_network.hosts["gpu2"].home / ".clusterjob" / "jobs"
    wait_until(
        lambda: place.is_dir() and list(place.iterdir()),
        TEST_TIMEOUT,
        "the job's directory on a host",
    )
    submitted.send_signal(signal.SIGINT)
    _, err = submitted.communicate(timeout=TEST_TIMEOUT)
    assert submitted.returncode == 130, err
    wait_until(
        lambda: not site.running() and not list(place.iterdir()),
        TEST_TIMEOUT,
        "the end of what was put there",
    )
    for record in Records().all():
        assert polling.status(record).state in (JobState.CANCELLED, JobState.LOST)


def test_fewer_nodes_than_hosts_uses_first_hosts(site: Site) -> None:
    plan = site.plan(Program("script", site.script("")), hosts="gpu[1-3]", nodes=2)
    assert [command.argv[1] for command in plan.commands] == ["gpu1", "gpu2"]


def test_master_addr_is_address_that_other_hosts_reach(site: Site) -> None:
    """The client reaches gpu1 at an address to which gpu2 has no route."""
    gpu1 = site.ssh_network.hosts["gpu1"]
    gpu1.run("ip", "link", "add", "br9", "type", "bridge")
    gpu1.run("ip", "addr", "add", "10.1.1.1/24", "dev", "br9")
    gpu1.run("ip", "link", "set", "br9", "up")
    checked_output("ip", "route", "add", "10.1.1.1", "via", "10.77.0.1")
    try:
        site.ssh_network.write_config("Host first\n  HostName 10.1.1.1\n  HostKeyAlias 10.77.0.1\n")
        record = site.submit('import os; print(os.environ["MASTER_ADDR"])', hosts="first,gpu2")
        assert set(output_lines(record)) == {"0 out 10.77.0.1", "1 out 10.77.0.1"}
    finally:
        close_connections()
        wait_until(lambda: not gpu1.pids(), 10, "the end of the session")
        checked_output("ip", "route", "del", "10.1.1.1")
        gpu1.run("ip", "link", "del", "br9")


# -- faults --------------------------------------------------------------------------------------


def test_sshd_restart_does_not_affect_running_job(site: Site) -> None:
    record = site.submit(UNTIL_LEAVE, until=("up 0", "up 1"))
    for name in ("gpu1", "gpu2"):
        host = site.ssh_network.hosts[name]
        host.stop()
        # A restart of the whole service ends the sessions, too.
        kill_all([pid for pid in host.pids() if "sshd" in command_line(pid)])
    status = polling.status(record)
    assert status.verdict is None
    assert status.state in (JobState.UNKNOWN, JobState.RUNNING)
    for name in ("gpu1", "gpu2"):
        site.ssh_network.hosts[name].start()
        (site.remote_dir(record, name) / "code" / "leave").touch()
    assert sorted(output_lines(record)) == [
        "0 out left 0",
        "0 out up 0",
        "1 out left 1",
        "1 out up 1",
    ]


def test_line_written_after_the_poll_that_brings_the_end_is_shown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll reads the logs before the ends; here the job goes on between the two."""
    record = site.submit(UNTIL_LEAVE, hosts="gpu1", until=("up 0",))
    place = site.remote_dir(record, "gpu1")
    end = Verdict(JobState.SUCCEEDED, 0).to_json() | {"node_rank": 0}
    (place / "ends" / "node0.json").write_text(json.dumps(end))
    statuses = polling.statuses

    def go_on(records: Sequence[Record]) -> list[tuple[Record, Status]]:
        pairs = statuses(records)
        if pairs[0][1].verdict is not None:
            (place / "code" / "leave").touch()
            wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end")
        return pairs

    monkeypatch.setattr(polling, "statuses", go_on)
    assert output_lines(record) == ["0 out up 0", "0 out left 0"]


def test_poll_that_began_before_the_end_does_not_count_as_the_last(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = site.submit(UNTIL_LEAVE, until=("up 0", "up 1"))
    poll, read, arrived = JobMirror.poll, threading.Event(), threading.Event()

    def poll_slow_host(mirror: JobMirror, session: Any, *, logs: bool) -> Any:
        answer = poll(mirror, session, logs=logs)
        if mirror._node == 1:
            read.set()
            arrived.wait(TEST_TIMEOUT)
        return answer

    monkeypatch.setattr(JobMirror, "poll", poll_slow_host)
    wait_until(lambda: (polling.status(record), read.is_set())[1], TEST_TIMEOUT, "the poll")
    for name in ("gpu1", "gpu2"):
        (site.remote_dir(record, name) / "code" / "leave").touch()
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end")
    answer = threading.Timer(2, arrived.set)
    answer.start()
    assert {"0 out left 0", "1 out left 1"} <= set(output_lines(record))
    answer.join()


def test_job_with_directories_removed_on_hosts_is_lost(site: Site) -> None:
    record = site.submit("")
    wait_until(lambda: not workers_on(site.ssh_network.hosts["gpu1"]), TEST_TIMEOUT, "the end")
    wait_until(lambda: not workers_on(site.ssh_network.hosts["gpu2"]), TEST_TIMEOUT, "the end")
    for name in ("gpu1", "gpu2"):
        subprocess.run(["rm", "-rf", site.remote_dir(record, name)], check=True)
    verdict = wait_for_verdict(record)
    assert verdict.state is JobState.LOST
    assert "gone" in verdict.reason


def test_removed_local_job_directory_is_mirrored_again(site: Site) -> None:
    record = site.submit("print('out')")
    shutil.rmtree(record.job_dir)
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    close_connections()
    polling.collect(record)
    assert (record.job_dir / "logs" / "node1" / "rank1.out").read_text() == "out\n"


def test_job_cancelled_during_submit_does_not_start(site: Site) -> None:
    submitted = site.command("submit", *site.options(setup=["sleep 4"]), site.script(SLEEPER))
    place = site.ssh_network.hosts["gpu2"].home / ".clusterjob" / "jobs"
    wait_until(
        lambda: place.is_dir() and list(place.iterdir()),
        TEST_TIMEOUT,
        "the job's directory on a host",
    )
    (record,) = Records().all()
    jobs.cancel([record])
    _, err = submitted.communicate(timeout=TEST_TIMEOUT)
    assert submitted.returncode == 1
    assert "cancelled while it was being submitted" in err
    assert not site.running()
