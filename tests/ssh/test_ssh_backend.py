"""Jobs on real hosts over real sshd servers: started, left alone, watched from elsewhere,
cancelled, and what faults make of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from procs import SAVER, command_line, kill_one_by_one, wait_until
from sshsite import PATIENCE, SLEEPER, Site, end_of, hang_up, lines_of, wait_for_lines, workers_on
from sshworld import HostOfWorld, sh

from clusterjob.core import jobs, node_zip
from clusterjob.core.hosts import Host
from clusterjob.core.records import Records
from clusterjob.errors import ClusterJobError, HostError, SpecError
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState
from clusterjob.remote.sessions import Place, Visits

CUT_OFF = 15.0  # seconds within which a job has ended on the other hosts when one is cut off


# -- a job that goes well --------------------------------------------------------------------------------------------------


def test_a_job_runs_on_every_host_with_the_code_and_its_output_comes_back(site: Site) -> None:
    site.path("sub").mkdir()
    site.path("sub/data.txt").write_text("déjà vu")
    record = site.submit(
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.uname().nodename, os.environ["MASTER_ADDR"], open("sub/data.txt").read())
        print("to stderr", file=sys.stderr)
        assert "CLUSTERJOB_TOKEN" not in os.environ and not sys.stdin.read()
        """,
        nproc_per_node=2,
    )
    lines = sorted(lines_of(record))
    assert lines == sorted(
        [f"{rank} out {rank} 4 gpu{1 + rank // 2} 10.77.0.1 déjà vu" for rank in range(4)]
        + [f"{rank} err to stderr" for rank in range(4)]
    )
    assert jobs.status(Records().find(record.job_id)).state is JobState.SUCCEEDED


def test_what_lies_on_a_host_is_its_owners_alone_and_no_secret_is_shown(site: Site) -> None:
    record = site.submit(SLEEPER)
    wait_for_lines(record, "up 0", "up 1")
    token = (record.job_dir / "token").read_text()
    for host in ("gpu1", "gpu2"):
        place = site.remote_dir(record, host)
        assert place.stat().st_mode & 0o777 == 0o700
        assert place.parent.parent.stat().st_mode & 0o777 == 0o700
        assert (place / "token").read_text() == token
        assert (place / "token").stat().st_mode & 0o777 == 0o600
        for pid in site.world.hosts[host].pids():
            assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert token not in json.dumps(Records().find(record.job_id).to_json())
    jobs.cancel([record])


def test_another_process_on_another_day_asks_follows_and_cancels(site: Site) -> None:
    record = site.submit(SLEEPER)
    hang_up()
    wait_for_lines(record, "up 0", "up 1")
    status = site.command("status", "--json", record.job_id)
    out, err = status.communicate(timeout=PATIENCE)
    assert json.loads(out)["jobs"][0]["state"] == "RUNNING", err
    logs = site.command("logs", record.job_id)
    out, err = logs.communicate(timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["[0] up 0", "[1] up 1"], err
    cancel = site.command("cancel", record.job_id)
    out, err = cancel.communicate(timeout=PATIENCE)
    assert cancel.returncode == 0, err
    assert not site.running()
    verdict = end_of(Records().find(record.job_id))
    assert (verdict.state, verdict.exit_code) == (JobState.CANCELLED, 143)


def test_a_failure_names_its_rank_and_its_host(site: Site) -> None:
    record = site.submit(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise SystemExit(7)
        time.sleep(1000)
        """
    )
    verdict = end_of(record)
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 7)
    assert verdict.failure is not None
    assert (verdict.failure.rank, verdict.failure.host) == (1, "gpu2")


def test_a_failure_names_its_host_as_the_user_wrote_it(site: Site) -> None:
    record = site.submit("raise SystemExit(3)", hosts="root@10.77.0.2:22")
    verdict = end_of(record)
    assert verdict.failure is not None
    assert verdict.failure.host == "root@10.77.0.2:22"


def test_the_submitted_id_stands_alone_and_the_job_needs_nobody(site: Site) -> None:
    submitted = site.command("submit", *site.options(), site.script(SLEEPER))
    out, err = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 0, err
    record = Records().find(out.strip())
    assert out == f"{record.job_id}\n"
    wait_for_lines(record, "up 0", "up 1")
    jobs.cancel([record])


def test_ctrl_c_in_run_cancels_everywhere(site: Site) -> None:
    run = site.command("run", *site.options(), site.script(SLEEPER))
    assert run.stdout is not None
    assert "up" in run.stdout.readline()
    assert "up" in run.stdout.readline()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130, err
    wait_until(lambda: not site.running(), PATIENCE, "the end of the agents")


def test_every_rank_saves_in_except_keyboard_interrupt_of_run_over_ssh(site: Site) -> None:
    run = site.command("run", *site.options(), "--grace", "60", site.script(SAVER))
    assert run.stdout is not None
    shown = run.stdout.readline()
    while "[0-1]" not in shown and shown.count("up") < 2:
        shown += run.stdout.readline()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130, err
    assert "[0-1] saved" in out or out.count("saved") == 2
    assert "CANCELLED" in err
    wait_until(lambda: not site.running(), PATIENCE, "the end of the agents")


def test_a_run_that_is_killed_leaves_the_job_running_and_reachable(site: Site) -> None:
    run = site.command("run", *site.options(), site.script(SLEEPER))
    assert run.stdout is not None
    assert "up" in run.stdout.readline()
    assert "up" in run.stdout.readline()
    run.kill()
    run.communicate(timeout=PATIENCE)
    (record,) = Records().all()
    time.sleep(1)
    assert jobs.status(record).state is JobState.RUNNING
    wait_for_lines(record, "up 0", "up 1")
    jobs.cancel([record])
    assert not site.running()


def test_a_submit_that_is_killed_in_the_middle_can_be_asked_after(site: Site) -> None:
    """Wherever the kill meets it: nothing ran, or the job runs and is found by its record."""
    for delay in (0.7, 1.1):
        submitted = site.command("submit", *site.options(join_timeout=3), site.script(SLEEPER))
        time.sleep(delay)
        submitted.kill()
        submitted.communicate(timeout=PATIENCE)
        for record in Records().all():
            status = jobs.status(record)
            # An agent that was started alone gives up after the 3 s, which may be over by now.
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


def test_hosts_behind_a_bastion(site: Site) -> None:
    record = site.submit(
        'import os; print(os.uname().nodename, os.environ["MASTER_ADDR"])', hosts="inner[1-2]"
    )
    assert sorted(lines_of(record)) == ["0 out inner1 10.78.0.1", "1 out inner2 10.78.0.1"]


def test_slots_of_a_host_file_are_the_workers(site: Site) -> None:
    site.path("hosts").write_text("gpu1 slots=1\ngpu2 slots=3\n")
    record = site.submit(
        'import os; print(os.uname().nodename, os.environ["WORLD_SIZE"])',
        hosts=None,
        hostfile="hosts",
    )
    assert sorted(lines_of(record)) == [
        "0 out gpu1 4",
        "1 out gpu2 4",
        "2 out gpu2 4",
        "3 out gpu2 4",
    ]


def test_the_hosts_of_an_mpi_task_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.path("mpi").write_text("10.77.0.1 slots=1\n10.77.0.3 slots=1\n")
    monkeypatch.setenv("MLP_MPI_HOSTFILE", str(site.path("mpi")))
    monkeypatch.setenv("MLP_SSH_PORT", "22")
    record = site.submit("import os; print(os.uname().nodename)", hosts=None)
    assert sorted(lines_of(record)) == ["0 out gpu1", "1 out gpu3"]


def test_setup_lines_run_where_the_code_is(site: Site) -> None:
    site.path("env.sh").write_text("export FROM_THE_CODE=yes\n")
    record = site.submit('import os; print(os.environ["FROM_THE_CODE"])', setup=["source ./env.sh"])
    assert sorted(lines_of(record)) == ["0 out yes", "1 out yes"]


def test_without_sync_the_working_directory_is_the_hosts_own(site: Site, tmp_path: Path) -> None:
    record = site.submit("import os; print(os.getcwd())", sync="false")
    assert set(lines_of(record)) == {f"{rank} out {site.directory}" for rank in range(2)}
    assert not (site.remote_dir(record, "gpu1") / "code").exists()


def test_hosts_with_one_home_directory(site: Site) -> None:
    shared = f"{site.world.directory}/shared"
    record = site.submit('import os; print(os.environ["RANK"])', set={"remote_home": shared})
    assert sorted(lines_of(record)) == ["0 out 0", "1 out 1"]


def test_one_host_needs_no_meeting(site: Site) -> None:
    record = site.submit('import os; print(os.environ["MASTER_ADDR"])', hosts="gpu3")
    assert lines_of(record) == ["0 out 127.0.0.1"]


def logins(host: HostOfWorld) -> int:
    return (host.directory / "sshd.log").read_text().count("Accepted publickey")


def test_following_takes_one_connection_a_host(site: Site) -> None:
    record = site.submit(
        "import time\nfor n in range(30): print('line', n, flush=True); time.sleep(0.1)"
    )
    hang_up()
    before = {name: logins(site.world.hosts[name]) for name in ("gpu1", "gpu2")}
    follow = site.command("logs", "-f", record.job_id)
    out, err = follow.communicate(timeout=PATIENCE)
    assert follow.returncode == 0, err
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
    assert {name: logins(site.world.hosts[name]) - count for name, count in before.items()} == {
        "gpu1": 1,
        "gpu2": 1,
    }


def test_a_terminal_sees_how_far_the_code_has_come(site: Site) -> None:
    with site.path("weights.bin").open("wb") as stream:
        for _ in range(60):
            stream.write(os.urandom(1 << 20))
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "clusterjob", "submit", *site.options(), site.script("")]
    submitted = subprocess.Popen(
        words,
        cwd=site.directory,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is gone
        while data := os.read(ours, 1 << 16):
            seen += data
    os.close(ours)
    out, _ = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 0, seen
    assert b"sending code to 2 hosts" in seen
    assert end_of(Records().find(out.decode().strip())).state is JobState.SUCCEEDED


# -- bad input -------------------------------------------------------------------------------------------------------------


def test_every_unfit_host_is_named_at_once_and_nothing_runs_on_the_others(
    site: Site, tmp_path: Path
) -> None:
    site.world.write_config(
        "Host closed\n  HostName 10.77.0.1\n  Port 9\nHost strange\n  HostName 10.77.0.3\n  User nobody\n"
    )
    site.world.known_hosts.write_text(
        "".join(
            f"{host.address} {host.public_key}\n"
            for host in site.world.hosts.values()
            if host.name != "gpu2"
        )
    )
    error = site.refused(hosts="gpu1,closed,no-such-host.invalid,gpu2,strange")
    first, *rest = error.message.splitlines()
    assert first == "4 of 5 hosts cannot be used:"
    assert [line.split(":")[0].strip() for line in rest] == [
        "closed",
        "no-such-host.invalid",
        "gpu2",
        "strange",
    ]
    assert "connection refused" in rest[0]
    assert "unknown host" in rest[1]
    assert "its key is unknown" in rest[2]
    assert "lets nobody in with none of these keys" in rest[3]


def test_hosts_that_do_not_answer_are_named_beside_those_that_do(site: Site) -> None:
    gpu3 = site.world.hosts["gpu3"]
    gpu3.run("ip", "route", "add", "blackhole", "10.77.0.100")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        site.world.write_config(
            f"Host hole\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\nHost wrong\n  HostName 10.77.0.2\n"
            "Host hole gpu3\n  ConnectTimeout 4\n"  # those that answer may take longer
        )
        keys = site.world.known_hosts.read_text().splitlines()
        keys = [line for line in keys if not line.startswith("10.77.0.2 ")] + [
            f"10.77.0.2 {gpu3.public_key}"
        ]
        site.world.known_hosts.write_text("\n".join(keys) + "\n")
        begin = time.monotonic()
        try:
            error = site.refused(hosts="gpu1,gpu3,hole,wrong")
        finally:
            gpu3.run("ip", "route", "del", "blackhole", "10.77.0.100")
    assert time.monotonic() - begin < 30
    assert error.message.splitlines()[0] == "3 of 4 hosts cannot be used:"
    timed_out, hole, wrong = error.message.splitlines()[1:]
    assert timed_out == "  gpu3: no answer from 10.77.0.3:22 within 4 s"
    assert hole == "  hole: it accepts TCP and sends nothing for 4 s"
    assert wrong.startswith("  wrong: its key has changed: it shows ssh-ed25519 SHA256:")


def test_a_machine_that_has_two_names(site: Site) -> None:
    site.world.write_config("Host other\n  HostName 10.77.0.1\n  HostKeyAlias 10.77.0.1\n")
    error = site.refused(hosts="gpu1,gpu2,other")
    assert "other: it is the same machine as gpu1" in error.message


def test_no_python(site: Site) -> None:
    error = site.refused(python="/nowhere/python")
    assert "gpu1: no Python: there is no interpreter /nowhere/python" in error.message
    assert "--python" in error.hint


def test_python_too_old(site: Site, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[-1])" "$@"\n'
    )
    old.chmod(0o755)
    error = site.refused(python=str(old))
    assert "gpu2: Python too old: " in error.message
    assert "is 3.8, 3.10 or newer is needed" in error.message


def test_no_torch(site: Site) -> None:
    error = site.refused(set={"need_torch": "true"})
    assert "gpu1: no torch: " in error.message
    assert "gpu2: no torch: " in error.message


def test_a_command_needs_no_torch(site: Site) -> None:
    record = jobs.submit(
        site.plan(Program("command", "hostname"), set={"need_torch": "true"}), "ssh", detach=True
    )
    assert sorted(lines_of(record)) == ["0 out gpu1", "1 out gpu2"]


def test_disk_full_on_one_host(site: Site, full_disk: HostOfWorld) -> None:
    error = site.refused()
    assert error.message.startswith("gpu2: disk full: ")


def test_a_disk_that_fills_up_while_it_is_written(site: Site) -> None:
    """There is room, but for no more than a few files."""
    host = site.world.hosts["gpu2"]
    sh("mount", "-t", "tmpfs", "-o", "size=200m,nr_inodes=9", "tmpfs", host.home)
    host.stop()
    host.start()
    try:
        error = site.refused()
        assert error.message.startswith("gpu2: No space left on device: ")
    finally:
        hang_up()
        host.stop()
        sh("umount", host.home)
        host.start()


def test_a_login_that_prints_is_listened_past(site: Site) -> None:
    for name in ("gpu1", "gpu2"):
        (site.world.hosts[name].home / ".bashrc").write_text("echo welcome; echo to stderr >&2\n")
    try:
        record = site.submit('print("fine")')
        assert sorted(lines_of(record)) == ["0 out fine", "1 out fine"]
    finally:
        for name in ("gpu1", "gpu2"):
            (site.world.hosts[name].home / ".bashrc").unlink()


def test_ctrl_c_while_a_job_is_submitted_leaves_nothing(site: Site) -> None:
    submitted = site.command("submit", *site.options(setup=["sleep 60"]), site.script(SLEEPER))
    place = site.world.hosts["gpu2"].home / ".clusterjob" / "jobs"
    wait_until(
        lambda: place.is_dir() and list(place.iterdir()), PATIENCE, "the job's directory on a host"
    )
    submitted.send_signal(signal.SIGINT)
    _, err = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 130, err
    wait_until(
        lambda: not site.running() and not list(place.iterdir()),
        PATIENCE,
        "the end of what was put there",
    )
    for record in Records().all():
        assert jobs.status(record).state in (JobState.CANCELLED, JobState.LOST)


def test_setup_lines_that_fail_are_named(site: Site) -> None:
    error = site.refused(setup=["true", "echo nope >&2; false"])
    assert "gpu1: a setup line failed: echo nope >&2; false (nope)" in error.message


def test_a_script_that_is_not_sent(site: Site, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("")
    with pytest.raises(SpecError, match="lies outside of"):
        site.plan(Program("script", "../outside.py"))
    plan = site.plan(Program("script", str(site.path(site.script("")).absolute())))
    assert plan.spec.program.target == "script.py"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"nodes": 3}, "--nodes 3: there are only 2 hosts"),
        ({"set": {"colour": "red"}}, "unknown option 'colour'"),
        ({"set": {"remote_home": "relative"}}, "is not an absolute path"),
        ({"set": {"connect_timeout": "soon"}}, "not a number"),
        ({"array": "0-3"}, "has no --array"),
        ({"hostfile": "x"}, "both --hosts and --hostfile"),
    ],
)
def test_what_makes_no_sense_on_hosts(site: Site, flags: dict[str, Any], why: str) -> None:
    site.script("")
    with pytest.raises(ClusterJobError, match=why):
        site.plan(Program("script", "script.py"), **flags)


def test_a_profile_says_where_and_how(site: Site) -> None:
    site.script("", "train.py")
    site.path("clusterjob.toml").write_text(
        f"""
        [clusters.lab]
        backend = "ssh"
        hosts = ["gpu[1-2]", "root@gpu3:22"]
        python = "{site.python}"
        set = {{ ssh_config = "{site.world.config}", need_torch = false, remote_home = "~/elsewhere" }}
        """
    )
    settings = jobs.settle({}, "lab", directory=site.directory)
    plan = jobs.plan(
        jobs.make_spec(Program("script", "train.py"), settings, directory=site.directory), settings
    )
    assert [str(host) for host in plan.spec.hosts] == ["gpu1", "gpu2", "root@gpu3:22"]
    record = jobs.submit(plan, "lab", detach=True)
    assert end_of(record).state is JobState.SUCCEEDED
    assert (site.world.hosts["gpu3"].home / "elsewhere" / "jobs" / record.job_id).is_dir()


def test_hosts_are_for_hosts_alone(site: Site) -> None:
    site.script("")
    for backend in ("local", "slurm"):
        settings = jobs.settle(site.flags(set={}), backend, directory=site.directory)
        settings = replace(
            settings, values={key: value for key, value in settings.values.items() if key != "set"}
        )
        with pytest.raises(SpecError, match=f"the {backend} cluster takes no hosts"):
            jobs.plan(
                jobs.make_spec(Program("script", "script.py"), settings, directory=site.directory),
                settings,
            )


def test_the_first_hosts_are_taken(site: Site) -> None:
    plan = site.plan(Program("script", site.script("")), hosts="gpu[1-3]", nodes=2)
    assert [command.argv[1] for command in plan.commands] == ["gpu1", "gpu2"]


def test_a_host_that_cannot_reach_node_0_is_named(site: Site) -> None:
    site.world.hosts["gpu2"].run("ip", "route", "add", "prohibit", "10.77.0.1")
    try:
        error = site.refused()
    finally:
        site.world.hosts["gpu2"].run("ip", "route", "del", "prohibit", "10.77.0.1")
    assert "gpu2: it cannot reach gpu1 at 10.77.0.1 (" in error.message


def test_node_0_is_met_at_an_address_that_the_others_reach(site: Site) -> None:
    """The client reaches gpu1 at an address to which gpu2 has no route."""
    gpu1 = site.world.hosts["gpu1"]
    gpu1.run("ip", "link", "add", "br9", "type", "bridge")
    gpu1.run("ip", "addr", "add", "10.1.1.1/24", "dev", "br9")
    gpu1.run("ip", "link", "set", "br9", "up")
    sh("ip", "route", "add", "10.1.1.1", "via", "10.77.0.1")
    try:
        site.world.write_config("Host first\n  HostName 10.1.1.1\n  HostKeyAlias 10.77.0.1\n")
        record = site.submit('import os; print(os.environ["MASTER_ADDR"])', hosts="first,gpu2")
        assert set(lines_of(record)) == {"0 out 10.77.0.1", "1 out 10.77.0.1"}
    finally:
        hang_up()
        wait_until(lambda: not gpu1.pids(), 10, "the end of the visit")
        sh("ip", "route", "del", "10.1.1.1")
        gpu1.run("ip", "link", "del", "br9")


# -- bad weather -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("host", ["gpu1", "gpu2"], ids=["node 0", "node 1"])
def test_a_host_that_is_cut_off_ends_the_job_on_the_others(site: Site, host: str) -> None:
    record = site.submit(SLEEPER, set={"connect_timeout": "5"})
    wait_for_lines(record, "up 0", "up 1")
    cut, other = site.world.hosts[host], site.world.hosts["gpu2" if host == "gpu1" else "gpu1"]
    begin = time.monotonic()
    cut.link("down")
    try:
        hang_up()
        sessions = set(other.pids())
        wait_until(lambda: not workers_on(other), CUT_OFF, "the end of the job on the other host")
        took = time.monotonic() - begin
        assert took < CUT_OFF, sessions
        verdict = end_of(record, 60)
        assert verdict.state in (JobState.FAILED, JobState.LOST)
        assert verdict.exit_code == 1
        assert host in verdict.reason
        wait_until(
            lambda: not workers_on(cut), CUT_OFF, "the end of the job on the host that is cut off"
        )
    finally:
        cut.link("up")
        kill_one_by_one(
            cut.pids()
        )  # the visit that was cut off: its sshd learns of that when TCP gives up


def test_sshd_restarted_while_training_changes_nothing(site: Site) -> None:
    record = site.submit(
        """
        import os, time
        print("up", os.environ["RANK"], flush=True)
        while not os.path.exists("leave"):
            time.sleep(0.05)
        print("left", os.environ["RANK"])
        """
    )
    wait_for_lines(record, "up 0", "up 1")
    for name in ("gpu1", "gpu2"):
        host = site.world.hosts[name]
        host.stop()
        kill_one_by_one(
            [pid for pid in host.pids() if "sshd" in command_line(pid)]
        )  # as where the whole service is restarted
    status = jobs.status(record)
    assert status.verdict is None
    assert status.state in (JobState.UNKNOWN, JobState.RUNNING)
    for name in ("gpu1", "gpu2"):
        site.world.hosts[name].start()
        (site.remote_dir(record, name) / "code" / "leave").touch()
    assert sorted(lines_of(record)) == ["0 out left 0", "0 out up 0", "1 out left 1", "1 out up 1"]


def test_an_agent_that_is_killed_is_a_job_that_is_lost_or_failed(site: Site) -> None:
    record = site.submit(SLEEPER)
    wait_for_lines(record, "up 0", "up 1")
    agent = json.loads((site.remote_dir(record, "gpu2") / "agents" / "node1.json").read_text())
    os.kill(agent["pid"], signal.SIGKILL)
    verdict = end_of(record)
    assert verdict.state is JobState.FAILED
    assert "gpu2" in verdict.reason
    wait_until(lambda: not site.running(), 10, "the end")


def test_a_directory_removed_on_the_hosts_is_no_success(site: Site) -> None:
    record = site.submit("")
    wait_until(lambda: not workers_on(site.world.hosts["gpu1"]), PATIENCE, "the end")
    wait_until(lambda: not workers_on(site.world.hosts["gpu2"]), PATIENCE, "the end")
    for name in ("gpu1", "gpu2"):
        subprocess.run(["rm", "-rf", site.remote_dir(record, name)], check=True)
    verdict = end_of(record)
    assert verdict.state is JobState.LOST
    assert "gone" in verdict.reason


def test_a_directory_removed_here_is_mirrored_anew(site: Site) -> None:
    record = site.submit("print('out')")
    shutil.rmtree(record.job_dir)
    assert end_of(record).state is JobState.SUCCEEDED
    hang_up()
    jobs.collect(record)
    assert (record.job_dir / "logs" / "node1" / "rank1.out").read_text() == "out\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "WON", "exit_code": 0}', "\0"])
def test_a_verdict_that_is_none_is_no_verdict(site: Site, text: str) -> None:
    record = site.submit(SLEEPER, hosts="gpu1")
    (site.remote_dir(record, "gpu1") / "result.json").write_text(text)
    assert jobs.status(record).verdict is None
    jobs.cancel([record])


def test_a_job_that_is_cancelled_while_it_is_submitted_does_not_start(site: Site) -> None:
    submitted = site.command("submit", *site.options(setup=["sleep 60"]), site.script(SLEEPER))
    place = site.world.hosts["gpu2"].home / ".clusterjob" / "jobs"
    wait_until(
        lambda: place.is_dir() and list(place.iterdir()), PATIENCE, "the job's directory on a host"
    )
    (record,) = Records().all()
    jobs.cancel([record])
    _, err = submitted.communicate(timeout=PATIENCE)
    assert submitted.returncode == 1
    assert "cancelled while it was being submitted" in err
    assert not site.running()


def test_an_answer_that_is_nonsense_is_one_line(site: Site, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"
    noisy.mkdir()
    (noisy / "sitecustomize.py").write_text(
        f"""import os, threading, time
def make_noise():
    while not os.path.exists("{noisy}/go"):
        time.sleep(0.02)
    print("noise", flush=True)
    open("{noisy}/made", "w").close()
threading.Thread(target=make_noise, daemon=True).start()
"""
    )
    python = tmp_path / "noisy-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={noisy} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    visits = Visits(lambda _: None, node_zip.node_zip)
    try:
        session = visits.session(
            Place((Host("gpu1"),), str(python), ssh_config=site.world.config), 0
        )
        session.ask("check", need=0, torch=False, own=True)
        (noisy / "go").touch()
        wait_until((noisy / "made").exists, PATIENCE, "the noise")
        with pytest.raises(HostError, match="gpu1: it sends a malformed answer"):
            session.ask("check", need=0, torch=False, own=True)
    finally:
        visits.close()


def test_a_host_writes_nothing_here_that_it_was_not_asked_for(site: Site) -> None:
    record = site.submit("")
    assert end_of(record).state is JobState.SUCCEEDED
    hang_up()
    logs = site.remote_dir(record, "gpu2") / "logs" / "node1"
    (logs / "..evil").write_text("x")
    (logs / "rank1.out").write_text("y" * 100)
    jobs.collect(record)
    assert not list(record.job_dir.rglob("*evil*"))


def test_logs_of_megabytes_come_whole(site: Site) -> None:
    record = site.submit(
        'print("x" * 1023, flush=True)\nfor n in range(9000): print(f"{n:01023d}")', hosts="gpu1"
    )
    lines = lines_of(record)
    assert len(lines) == 9001
    assert lines[-1].endswith("8999")
    assert (record.job_dir / "logs" / "node0" / "rank0.out").stat().st_size == 9001 * 1024
