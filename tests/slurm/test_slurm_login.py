"""A Slurm cluster from a laptop: a real sshd as its login host, a real Slurm behind it, and nothing
of either on the laptop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from login_user import GUEST, Laptop
from procs import SAVER, nothing_left, wait_until
from slurm_user import PROMPT

from clusterjob.backends.slurm.mirror import Mirror
from clusterjob.core.records import Record
from clusterjob.errors import HostError

pytestmark = pytest.mark.slow

TELL = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "SLURMD_NODENAME", "SLURM_SUBMIT_DIR")
    print(json.dumps({name: os.environ.get(name) for name in names} | {"cwd": os.getcwd(), "args": sys.argv[1:]}))
"""


def told(out: str) -> list[dict[str, object]]:
    """Return what each rank has told of itself, in the order of the ranks."""
    return [json.loads(line[line.index("{") :]) for line in sorted(out.splitlines())]


# -- one job ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_two_nodes_run_what_lies_on_the_laptop_over_one_connection(
    laptop: Laptop, launcher: str
) -> None:
    laptop.path("data.txt").write_text("sent along")
    text = (
        TELL
        if launcher == "agent"
        else TELL.replace('"RANK"', '"SLURM_PROCID"').replace('"WORLD_SIZE"', '"SLURM_NTASKS"')
    )
    done = laptop.run(
        text, "--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, args=("a b", "$(x)")
    )
    assert laptop.login.connections == 1
    [job] = laptop.jobs()
    assert laptop.login.connections == 1, "of a job whose end is known nobody is asked"
    there = laptop.there(job["id"])
    ranks = told(done.stdout)
    assert [list(rank.values())[:3] for rank in ranks] == [
        ["0", "4", "n1"],
        ["1", "4", "n1"],
        ["2", "4", "n2"],
        ["3", "4", "n2"],
    ]
    assert {(rank["cwd"], rank["SLURM_SUBMIT_DIR"], *rank["args"]) for rank in ranks} == {
        (str(there / "code"), str(there), "a b", "$(x)")
    }
    assert (there / "code" / "data.txt").read_text() == "sent along"
    assert (job["state"], job["exit_code"], job["nodes"], job["backend"]) == (
        "SUCCEEDED",
        0,
        2,
        "slurm",
    )
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    assert stat.S_IMODE((there / "token").stat().st_mode) == 0o600
    record = json.loads((laptop.home / "records" / f"{job['id']}.json").read_text())
    assert record["handle"]["data"]["directory"] == str(there)
    assert record["handle"]["data"]["login"]["hosts"][0]["name"] == "login1"
    assert (there / "token").read_text() not in laptop.login.log.read_text() + json.dumps(record)
    nothing_left(PROMPT)


def test_another_process_asks_follows_and_cancels(laptop: Laptop) -> None:
    job_id = laptop.submit(GUEST, "--nodes", "2")
    assert laptop.login.connections == 1
    laptop.wait_for("up0", "up1")
    assert laptop.wait_for_state(job_id, "RUNNING")["started_at"] is not None
    wait_until(
        lambda: sorted(laptop.output(job_id).splitlines()) == ["[0] line of 0", "[1] line of 1"],
        PROMPT,
        "both lines",
    )
    before = laptop.login.connections
    follower = laptop.start("logs", "-f", job_id)
    waiter = laptop.start("wait", job_id)
    wait_until(lambda: "line of 1" in laptop.said(follower)[0], PROMPT)
    wait_until(
        lambda: laptop.login.connections == before + 2, PROMPT, "one connection for each process"
    )
    laptop("cancel", job_id)
    assert (follower.wait(PROMPT), waiter.wait(PROMPT)) == (143, 143)
    assert "CANCELLED: cancelled" in laptop.said(waiter)[1]
    assert laptop.login.connections == before + 3
    assert laptop.slurm.wait_for_job(laptop.slurm_id(job_id))["JobState"] in ("CANCELLED", "FAILED")
    nothing_left(PROMPT)
    assert "had ended already" in laptop("cancel", job_id).stderr


def test_ctrl_c_of_run_interrupts_the_workers_behind_a_login_host(laptop: Laptop) -> None:
    command = laptop.start("run", "--cluster", "hpc", "--grace", "60", laptop.script(SAVER))
    wait_until(lambda: "up" in laptop.said(command)[0], PROMPT)
    command.send_signal(signal.SIGINT)
    assert command.wait(PROMPT) == 130, laptop.said(command)
    assert laptop.said(command)[0] == "up\nsaved\n"
    nothing_left(PROMPT)


def test_run_is_attached_and_leaves_the_job_when_it_is_killed(laptop: Laptop) -> None:
    command = laptop.start("run", "--cluster", "hpc", laptop.script(GUEST))
    laptop.wait_for("up0")
    command.kill()
    command.wait()
    [job] = laptop.jobs()
    assert laptop.wait_for_state(job["id"], "RUNNING")["state"] == "RUNNING"
    laptop.leave()
    assert laptop("logs", "-f", job["id"]).stdout == "line of 0\nleft 0\n"
    (laptop.meeting / "leave").unlink()
    (laptop.meeting / "up0").unlink()
    command = laptop.start("run", "--cluster", "hpc", laptop.script(GUEST))
    laptop.wait_for("up0")
    command.send_signal(2)
    assert command.wait(PROMPT) == 130
    assert sorted(job["state"] for job in laptop.jobs()) == ["CANCELLED", "SUCCEEDED"]
    nothing_left(PROMPT)


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_a_rank_that_fails_is_named_with_its_last_words(laptop: Laptop, launcher: str) -> None:
    text = """
        import os, pathlib, time
        rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
        there = pathlib.Path(os.environ["MEET"])
        (there / f"up{rank}").touch()
        while not all((there / f"up{one}").exists() for one in range(2)):
            time.sleep(0.02)
        if rank == "1":
            raise ValueError("boom")
        time.sleep(1000)
    """
    job_id = laptop.submit(text, "--nodes", "2", "--nodelist", "n3,n4", "--launcher", launcher)
    said = laptop("wait", job_id, code=1).stderr
    assert re.search(r"FAILED: rank 1 \(node 1, local rank 0, host n4\): ValueError: boom", said), (
        said
    )
    assert "ValueError: boom" in laptop("logs", job_id, "--rank", "1").stderr
    nothing_left(PROMPT)


def test_names_that_a_shell_would_trip_over(laptop: Laptop) -> None:
    laptop.profile(remote_home=str(laptop.login.home / "-a 'b' \"c\" $(d) 100% ☃"))
    hostile = 'it\'s "a" $(b) `c` \\ ☃ -x'
    out = laptop.run(
        TELL,
        "--name",
        hostile,
        "--set",
        f"comment={hostile}",
        "--env",
        f"X={hostile}",
        args=(hostile, "line\nbreak"),
    ).stdout
    [rank] = told(out)
    assert rank["args"] == [hostile, "line\nbreak"]
    assert "☃/jobs/" in str(rank["cwd"])


def test_setup_lines_no_sync_and_the_interpreter(laptop: Laptop) -> None:
    laptop.patch.delenv("CLUSTERJOB_PYTHON")
    elsewhere = laptop.login.home / "project"
    elsewhere.mkdir()
    (elsewhere / "only_there.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.environ['FROM_SETUP'], sys.executable)\n"
    )
    options = (
        "--no-sync",
        "--workdir",
        str(elsewhere),
        "--setup",
        "export FROM_SETUP=$SLURMD_NODENAME",
    )
    out = laptop("run", "--cluster", "hpc", *options, "only_there.py").stdout.split()
    assert out[:2] == [str(elsewhere), "n1"]
    assert os.path.basename(out[2]).startswith("python3")
    [job] = laptop.jobs()
    assert not (laptop.there(job["id"]) / "code").exists()


def test_a_job_that_is_queued_again_finds_its_directory(laptop: Laptop) -> None:
    text = """
        import os, pathlib, time
        attempt = os.environ["CLUSTERJOB_ATTEMPT"]
        pathlib.Path("here").write_text(attempt)
        (pathlib.Path(os.environ["MEET"]) / f"attempt{attempt}").touch()
        print("attempt", attempt, flush=True)
        while attempt == "0":
            time.sleep(0.1)
    """
    job_id = laptop.submit(text, "--requeue", "--nodes", "2", "--nproc-per-node", "1")
    laptop.wait_for("attempt0")
    assert laptop.wait_for_state(job_id, "RUNNING")["state"] == "RUNNING"
    laptop.slurm.run("scontrol", "requeue", laptop.slurm_id(job_id))
    assert laptop("wait", job_id).returncode == 0
    assert "attempt 1" in laptop.output(job_id)
    assert (laptop.there(job_id) / "code" / "here").read_text() == "1"


def test_what_slurm_has_forgotten_is_told_by_the_directory_there(laptop: Laptop) -> None:
    with laptop.slurm.configured(MinJobAge=2):
        job_id = laptop.submit("raise SystemExit(7)")
        laptop.slurm.wait_for_job(laptop.slurm_id(job_id))
        wait_until(
            lambda: not laptop.slurm.job(laptop.slurm_id(job_id)), 60, "Slurm to forget the job"
        )
        job = laptop.job(job_id)
        assert (job["state"], job["exit_code"]) == ("FAILED", 7)


def test_one_that_was_killed_is_told_by_slurm(laptop_of_either: Laptop) -> None:
    laptop = laptop_of_either
    job_id = laptop.submit(GUEST)
    laptop.wait_for("up0")
    laptop.slurm.run("scancel", "--signal=KILL", "--full", laptop.slurm_id(job_id))
    laptop.slurm.wait_for_job(laptop.slurm_id(job_id))
    job = laptop.wait_for_state(job_id, "FAILED", "CANCELLED", "LOST")
    assert job["state"] != "LOST", job
    nothing_left(PROMPT)


def test_results_come_back(laptop: Laptop) -> None:
    job_id = laptop.submit(
        "import pathlib\npathlib.Path('runs').mkdir()\npathlib.Path('runs/model.pt').write_text('weights')"
    )
    assert laptop("wait", job_id).returncode == 0
    before = laptop.login.connections
    laptop("fetch", job_id, "runs/", "--to", "back")
    assert laptop.path("back/runs/model.pt").read_text() == "weights"
    assert laptop.login.connections == before + 1
    assert "there is no absent" in laptop("fetch", job_id, "absent", "--to", "back", code=1).stderr


# -- arrays, and many jobs ------------------------------------------------------------------------------------------------


def test_an_array_is_one_sbatch_there_and_each_element_a_job(laptop: Laptop) -> None:
    text = """
        import os, sys
        print(os.environ["CLUSTERJOB_ARRAY_INDEX"], *sys.argv[1:])
        sys.exit(5 * (sys.argv[-1] == "--lr=b 'c'"))
    """
    job_id = laptop.submit(text, "--sweep", "lr=a,b 'c',d")
    done = laptop("wait", job_id, code=5)
    assert sorted(re.findall(r"job (\S+) (\w+)", done.stderr)) == [
        (f"{job_id}_0", "SUCCEEDED"), (f"{job_id}_1", "FAILED"), (f"{job_id}_2", "SUCCEEDED"),
    ]  # fmt: skip
    assert laptop.output(f"{job_id}_2") == "2 --lr=d\n"
    assert laptop.login.connections <= 4
    row = laptop("list").stdout.splitlines()[1]
    assert "2 SUCCEEDED, 1 FAILED" in row


def test_elements_that_wait_are_cancelled_and_many_jobs_are_one_question(laptop: Laptop) -> None:
    array = laptop.submit(GUEST, "--array", "0-59", "--set", "hold=true")
    others = [laptop.submit(GUEST, "--set", "hold=true") for _ in range(3)]
    before = laptop.login.connections
    jobs = json.loads(laptop("status", "--json").stdout)["jobs"]
    assert len(jobs) == 63
    assert {job["state"] for job in jobs} == {"PENDING"}
    assert laptop.login.connections == before + 1
    laptop("cancel", f"{array}_7")
    assert laptop.wait_for_state(f"{array}_7", "CANCELLED")["exit_code"] == 143
    laptop("cancel", array, *others)
    assert laptop.slurm.run("squeue", "--noheader").stdout == ""
    wait_until(
        lambda: {job["state"] for job in laptop.jobs(array, *others)} == {"CANCELLED"},
        PROMPT * 2,
        "the end of all",
    )


def test_an_array_is_cut_where_the_profile_says(laptop: Laptop) -> None:
    laptop.profile(max_array_size="3")
    text = "import os\nprint('element', os.environ['CLUSTERJOB_ARRAY_INDEX'])"
    job_id = laptop.submit(text, "--array", "1,4-7")
    assert laptop("wait", job_id).returncode == 0
    assert [laptop.output(f"{job_id}_{index}") for index in (1, 7)] == [
        "element 1\n",
        "element 7\n",
    ]
    assert "is no number of elements" in laptop("render", "--cluster", "hpc", "--set", "max_array_size=x", "--array", "1,2",
                                                laptop.script(text), code=2).stderr  # fmt: skip


def test_a_job_waits_for_another_of_the_same_cluster_alone(laptop: Laptop) -> None:
    first = laptop.submit(GUEST)
    second = laptop.submit("print('second')", "--after", first)
    assert "Dependency" in laptop.job(second)["reason"]
    other = laptop(
        "render", "--cluster", "slurm", "--after", first, laptop.script(GUEST), code=2
    ).stderr
    assert "has to be a job of the same cluster" in other
    laptop.leave()
    assert laptop("wait", second).returncode == 0


# -- bad weather -----------------------------------------------------------------------------------------------------------


def test_sshd_that_restarts_while_a_job_is_followed_is_waited_for(laptop: Laptop) -> None:
    job_id = laptop.submit(GUEST)
    laptop.wait_for("up0")
    follower = laptop.start("logs", "-f", job_id)
    wait_until(lambda: "line of 0" in laptop.said(follower)[0], PROMPT)
    laptop.login.stop(hang_up=True)
    job = laptop.wait_for_state(job_id, "UNKNOWN", timeout=PROMPT)
    assert "login1: " in job["reason"]
    laptop.leave()
    laptop.login.start()
    assert follower.wait(PROMPT * 3) == 0
    assert laptop.said(follower)[0] == "line of 0\nleft 0\n"
    assert "Traceback" not in laptop.said(follower)[1]


def test_a_connection_that_breaks_in_sbatch_leaves_a_job_that_is_found(laptop: Laptop) -> None:
    bin_ = laptop.login.directory / "bin"
    bin_.mkdir()
    # The first that submits: sbatch is heard, and the connection is gone before it has said so.
    # Looks for the job fail, too.
    asked_only = 'case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac'
    (bin_ / "sbatch").write_text(
        f'#!/bin/sh\n{asked_only}\n/usr/bin/sbatch "$@"\ntouch {laptop.meeting}/taken\nsleep 5\n'
    )
    (bin_ / "sbatch").chmod(0o755)
    laptop.login.stop()
    laptop.login.environment["PATH"] = f"{bin_}:/usr/bin:/bin"
    laptop.login.start()
    command = laptop.start("submit", "--cluster", "hpc", laptop.script(GUEST))
    laptop.wait_for("taken")
    laptop.login.stop(hang_up=True)
    assert command.wait(60) == 1
    said = laptop.said(command)[1]
    assert "nobody knows whether Slurm has taken the job: login1: the connection broke" in said
    assert "Traceback" not in said
    laptop.login.start()
    laptop.wait_for("up0")
    [job] = laptop.jobs()
    assert laptop.wait_for_state(job["id"], "RUNNING", timeout=PROMPT * 2)["backend_id"]
    laptop.leave()
    assert laptop("logs", "-f", job["id"]).stdout == "line of 0\nleft 0\n"


def test_each_thing_that_is_wrong_is_one_line_and_leaves_nothing(laptop: Laptop) -> None:
    def refused(*options: str, code: int = 1) -> str:
        said = laptop(
            "submit", "--cluster", "hpc", *options, laptop.script("pass"), code=code
        ).stderr
        assert said.count("clusterjob: error:") == 1
        assert laptop.left_behind() == []
        assert laptop.left_there() == []
        return said

    assert "Slurm refuses the job: " in refused("--partition", "nowhere")
    assert "invalid partition" in refused("--partition", "nowhere")
    assert "nowhere.invalid" in refused("--login", "me@nowhere.invalid")
    assert "names 2 hosts" in refused("--login", "a,b", code=2)
    assert "connect_timeout" in refused("--set", "connect_timeout=x", code=2)
    laptop.login.known_hosts.write_text("")
    assert "login1: its key is unknown" in (said := refused())
    assert "clusterjob hosts trust login1" in said
    laptop.login.trust()

    laptop.login.stop()
    conf = laptop.login.environment.pop("SLURM_CONF")
    laptop.login.start()
    assert "SLURM_CONF" in refused()
    laptop.patch.setenv("SLURM_CONF", "/nonexistent/here")  # is no business of the login host's
    assert "SLURM_CONF names one" in refused()
    laptop.login.stop()
    laptop.login.environment["SLURM_CONF"] = "/nonexistent/there"
    laptop.login.start()
    assert (
        "login1: sbatch cannot be run: Slurm's configuration /nonexistent/there is not there"
        in refused()
    )
    laptop.login.stop()
    del laptop.login.environment["SLURM_CONF"]
    bin_ = laptop.login.directory / "bin"
    bin_.mkdir()
    for name in ("bash", "python3", "env", "ls"):
        (bin_ / name).symlink_to(f"/usr/bin/{name}")
    laptop.login.environment["PATH"] = str(bin_)
    laptop.login.start()
    (laptop.login.home / ".bash_profile").write_text(f"PATH={bin_}\n")
    assert "login1: sbatch cannot be run: No such file or directory" in refused()
    # Where modules put Slurm's commands on the PATH of a login shell, they are found.
    (laptop.login.home / ".bash_profile").write_text(
        f"echo hello\nexport PATH={bin_}:/usr/bin:/bin SLURM_CONF={conf}\n"
    )
    assert laptop.run("print('found')").stdout == "found\n"
    assert (
        "knows no"
        not in laptop("render", "--cluster", "hpc", "--no-sync", laptop.script("pass")).stderr
    )


def test_other_clusters_have_no_login_host(laptop: Laptop) -> None:
    for cluster in ("local", "ssh"):
        hosts = ("--hosts", "a") if cluster == "ssh" else ()
        said = laptop(
            "render", "--cluster", cluster, *hosts, "--login", "x", laptop.script("pass"), code=2
        ).stderr
        assert f"the {cluster} cluster has no --login" in said
    rendered = laptop("render", "--login", "me@login1", laptop.script("pass")).stdout
    assert "ssh me@login1 'cd ~/.clusterjob/jobs/" in rendered
    assert laptop.login.connections == 0, "a plan contacts nothing"


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "token",
        "logs/../../x",
        "ends/.x",
        "elements/1/result.json",
        "logs/node0/a/b",
        "cancelled",
    ],
)
def test_a_login_host_that_lies_writes_nothing_else(name: str, tmp_path: Path) -> None:
    record = Record(
        "x-1",
        "x",
        cluster="hpc",
        backend="slurm",
        job_dir=tmp_path / "x-1",
        nodes=1,
        submitted_at="2026-01-01T00:00:00Z",
        spec={},
    )
    record.job_dir.mkdir()

    def lies(op: str, **asked: Any) -> tuple[Any, bytes]:
        return {
            "jobs": [
                {"known": True, "more": False, "files": [{"path": name, "stamp": "1", "size": 3}]}
            ]
        }, b"lie"

    with pytest.raises(HostError, match="not asked for"):
        Mirror("login1").look(lies, [(record, True)])
    assert list(record.job_dir.iterdir()) == []
