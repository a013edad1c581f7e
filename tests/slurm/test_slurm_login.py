"""Slurm jobs from a laptop: a real sshd as login host with a real Slurm behind it.

The laptop itself has no Slurm.
"""

from __future__ import annotations

import json
import os
import stat

import pytest
from launching import executable, new_folder
from login_user import GUEST, Laptop
from procs import wait_for_no_processes, wait_until
from slurm_user import PROMPT

pytestmark = pytest.mark.slow

REPORT = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "SLURMD_NODENAME", "SLURM_SUBMIT_DIR")
    report = {name: os.environ.get(name) for name in names}
    print(json.dumps(report | {"cwd": os.getcwd(), "args": sys.argv[1:]}))
"""


def reported(out: str) -> list[dict[str, object]]:
    """Return the reports of all ranks in rank order."""
    return [json.loads(line[line.index("{") :]) for line in sorted(out.splitlines())]


# -- single jobs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_job_on_two_nodes_runs_laptop_code_over_one_connection(
    laptop: Laptop, launcher: str
) -> None:
    laptop.path("data.txt").write_text("sent along")
    text = (
        REPORT
        if launcher == "agent"
        else REPORT.replace('"RANK"', '"SLURM_PROCID"').replace('"WORLD_SIZE"', '"SLURM_NTASKS"')
    )
    done = laptop.run(
        text, "--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, args=("a b", "$(x)")
    )
    assert laptop.login.connections == 1
    [job] = laptop.jobs()
    assert laptop.login.connections == 1, "the status of an ended job needs no connection"
    there = laptop.there(job["id"])
    ranks = reported(done.stdout)
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
    wait_for_no_processes(PROMPT)


def test_all_commands_share_connection_of_login(laptop: Laptop) -> None:
    laptop("login", "login1", "--cluster", "hpc")
    job_id = laptop.submit(GUEST, "--nodes", "2", until=("up0", "up1"))
    assert job_id in laptop("list").stdout
    laptop("status", job_id)
    laptop("logs", job_id)
    laptop("cancel", job_id)
    assert laptop.login.connections == 1
    assert "logged out" in laptop("logout", "login1", "--cluster", "hpc").stderr
    laptop.wait_for_state(job_id, "CANCELLED")
    assert laptop.login.connections == 2, "a new connection, after the logout"
    wait_for_no_processes(PROMPT)


def test_shell_special_characters_arrive_unchanged(laptop: Laptop) -> None:
    laptop.profile(remote_home=str(laptop.login.home / "-a 'b' \"c\" $(d) 100% ☃"))
    hostile = 'it\'s "a" $(b) `c` \\ ☃ -x'
    out = laptop.run(
        REPORT,
        "--name",
        hostile,
        "--set",
        f"comment={hostile}",
        "--env",
        f"X={hostile}",
        args=(hostile, "line\nbreak"),
    ).stdout
    [rank] = reported(out)
    assert rank["args"] == [hostile, "line\nbreak"]
    assert "☃/jobs/" in str(rank["cwd"])


def test_no_sync_job_uses_workdir_setup_lines_and_remote_python(laptop: Laptop) -> None:
    laptop.patch.delenv("CLUSTERJOB_PYTHON")
    elsewhere = new_folder(laptop.login.home / "project")
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


# -- arrays and many jobs ------------------------------------------------------------------------


def test_status_of_many_jobs_takes_one_connection_and_cancel_ends_them(laptop: Laptop) -> None:
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


def test_job_waits_only_for_job_of_same_cluster(laptop: Laptop) -> None:
    first = laptop.submit(GUEST)
    second = laptop.submit("print('second')", "--after", first)
    assert "Dependency" in laptop.job(second)["reason"]
    other = laptop(
        "render", "--cluster", "slurm", "--after", first, laptop.script(GUEST), code=2
    ).stderr
    assert "name a job of the same cluster" in other
    laptop.leave()
    assert laptop("wait", second).returncode == 0


# -- faults --------------------------------------------------------------------------------------


def test_follow_waits_for_restarted_sshd_of_login_host(laptop: Laptop) -> None:
    job_id = laptop.submit(GUEST, until=("up0",))
    follower = laptop.start("logs", "-f", job_id)
    wait_until(lambda: "line of 0" in laptop.output_of(follower)[0], PROMPT)
    laptop.login.stop(close_connections=True)
    job = laptop.wait_for_state(job_id, "UNKNOWN", timeout=PROMPT)
    assert "login1: " in job["reason"]
    laptop.leave()
    laptop.login.start()
    assert follower.wait(PROMPT * 3) == 0
    assert laptop.output_of(follower)[0] == "line of 0\nleft 0\n"
    assert "Traceback" not in laptop.output_of(follower)[1]


def test_job_is_found_after_connection_breaks_during_sbatch(laptop: Laptop) -> None:
    bin_ = new_folder(laptop.login.directory / "bin")
    # The wrapper submits the job, but the connection breaks before it ends.
    # Queries for the job fail, too.
    test_only = 'case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac'
    executable(
        bin_ / "sbatch",
        f'#!/bin/sh\n{test_only}\n/usr/bin/sbatch "$@"\ntouch {laptop.meeting}/taken\nsleep 5\n',
    )
    # Slurm's commands are searched for in the PATH of a login shell.
    (laptop.login.home / ".bash_profile").write_text(f"export PATH={bin_}:/usr/bin:/bin\n")
    command = laptop.start("submit", "--cluster", "hpc", laptop.script(GUEST), until=("taken",))
    laptop.login.stop(close_connections=True)
    assert command.wait(60) == 1
    message = laptop.output_of(command)[1]
    assert "it is unknown whether Slurm accepted the job: login1: the connection broke" in message
    assert "Traceback" not in message
    laptop.login.start()
    laptop.wait_for("up0")
    [job] = laptop.jobs()
    assert laptop.wait_for_state(job["id"], "RUNNING", timeout=PROMPT * 2)["backend_id"]
    laptop.leave()
    assert laptop("logs", "-f", job["id"]).stdout == "line of 0\nleft 0\n"


def test_each_submit_error_is_one_line_and_leaves_no_files(laptop: Laptop) -> None:
    def refused(*options: str) -> str:
        words = ("submit", "--cluster", "hpc", *options, laptop.script("pass"))
        message = laptop(*words, code=1).stderr
        assert message.count("clusterjob: error:") == 1
        assert (laptop.remaining_files(), laptop.remaining_remote_jobs()) == ([], [])
        return message

    assert "Slurm refuses the job: invalid partition" in refused("--partition", "nowhere")
    assert "nowhere.invalid" in refused("--login", "me@nowhere.invalid")
    laptop.login.known_hosts.write_text("")
    assert "login1: its key is unknown" in (message := refused())
    assert "clusterjob hosts trust login1" in message
    laptop.login.trust()

    laptop.login.stop()
    conf = laptop.login.environment.pop("SLURM_CONF")
    laptop.login.start()
    assert "SLURM_CONF" in refused()
    laptop.patch.setenv("SLURM_CONF", "/nonexistent/here")  # does not matter on the login host
    assert "set SLURM_CONF to the path of slurm.conf" in refused()
    laptop.login.stop()
    laptop.login.environment["SLURM_CONF"] = "/nonexistent/there"
    laptop.login.start()
    assert (
        "login1: sbatch cannot be run: Slurm's configuration /nonexistent/there does not exist"
        in refused()
    )
    laptop.login.stop()
    del laptop.login.environment["SLURM_CONF"]
    bin_ = new_folder(laptop.login.directory / "bin")
    for name in ("bash", "python3", "env", "ls"):
        (bin_ / name).symlink_to(f"/usr/bin/{name}")
    laptop.login.environment["PATH"] = str(bin_)
    laptop.login.start()
    (laptop.login.home / ".bash_profile").write_text(f"PATH={bin_}\n")
    assert "login1: sbatch cannot be run: No such file or directory" in refused()
    # Commands that are only on the PATH of a login shell are found.
    (laptop.login.home / ".bash_profile").write_text(
        f"echo hello\nexport PATH={bin_}:/usr/bin:/bin SLURM_CONF={conf}\n"
    )
    assert laptop.run("print('found')").stdout == "found\n"
    assert (
        "does not support"
        not in laptop("render", "--cluster", "hpc", "--no-sync", laptop.script("pass")).stderr
    )
