"""Jobs under a real Slurm: what reaches the nodes, how jobs end, and other commands."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from procs import wait_for_no_processes, wait_until
from slurm_user import PROMPT, SLEEPER, User
from ssh_network import python_without_torch

REPORT = """
    import json, os, sys
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_NTASKS",
             "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID",
             "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_GTIDS", "SLURM_STEP_NODELIST")
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def reported(out: str) -> list[dict[str, str]]:
    """Return the reports of all ranks in rank order."""
    return [json.loads(line.partition("] ")[2]) for line in sorted(out.splitlines())]


def test_job_that_sees_no_gpu_ends_before_its_script(user: User) -> None:
    done = user.run("print('ran')", "--gpus-per-node", "2", "--launcher", "srun", code=1)
    assert "ran" not in done.stdout
    said = done.stderr + done.stdout  # Slurm's output may be the only place of the line
    assert "this node has 0 of the" in said
    assert "CUDA_VISIBLE_DEVICES 0,1" in said


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_job_on_two_nodes_sets_rank_environment(user: User, launcher: str) -> None:
    options = (
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--nproc-per-node",
        "2",
        "--no-require-gpus",  # the GPUs of this Slurm exist in its configuration alone
        "--exclude",
        "n1",
        "--launcher",
        launcher,
    )
    ranks = reported(user.run(REPORT, *options).stdout)
    seen = [
        (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["SLURMD_NODENAME"]) for one in ranks
    ]
    # NodeAddr of n2, whose name does not resolve
    assert {one["MASTER_ADDR"] for one in ranks} == {"127.0.0.2"}
    assert [one["GROUP_RANK"] for one in ranks] == ["0", "0", "1", "1"]
    assert seen == [
        ("0", "0", "4", "n2"),
        ("1", "1", "4", "n2"),
        ("2", "0", "4", "n3"),
        ("3", "1", "4", "n3"),
    ]
    # Agents give a worker the variables that srun gives to a task.
    for one in ranks:
        assert (one["SLURM_PROCID"], one["SLURM_LOCALID"]) == (one["RANK"], one["LOCAL_RANK"])
        assert one["SLURM_NODEID"] == one["GROUP_RANK"]
        assert one["SLURM_NTASKS"] == one["SLURM_NPROCS"] == one["SLURM_STEP_NUM_TASKS"] == "4"
        assert (one["SLURM_STEP_NUM_NODES"], one["SLURM_STEP_TASKS_PER_NODE"]) == ("2", "2(x2)")
        assert one["SLURM_GTIDS"] == ("0,1" if one["GROUP_RANK"] == "0" else "2,3")
        assert one["SLURM_STEP_NODELIST"] == "n[2-3]"
    # Each rank sees the GPUs of its peers, too.
    assert {one["CUDA_VISIBLE_DEVICES"] for one in ranks} == {"0,1,2,3,4,5,6,7"}
    [job] = user.jobs()
    assert (job["state"], job["exit_code"], job["nodes"], job["backend"]) == (
        "SUCCEEDED",
        0,
        2,
        "slurm",
    )
    assert user.slurm.wait_for_job(job["backend_id"])["ExitCode"] == "0:0"
    assert (user.directory_of(job["id"]) / "ends" / "srun.0").read_text() == "0\n"
    wait_for_no_processes(PROMPT)


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_failed_rank_ends_job_on_all_nodes_and_is_named(user: User, launcher: str) -> None:
    text = """
        import os, pathlib, sys, time
        rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
        pathlib.Path(f"up{rank}").touch()
        while not all(os.path.exists(f"up{one}") for one in range(4)):
            time.sleep(0.02)
        if rank == "3":
            raise ValueError("boom")
        time.sleep(1000)
    """
    options = (
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--nodelist",
        "n3,n4",
        "--launcher",
        launcher,
    )
    message = user.run(text, *options, code=1).stderr
    assert re.search(
        r"FAILED: rank 3 \(node 1, local rank 1, host n4\): ValueError: boom", message
    ), message
    wait_for_no_processes(PROMPT)
    [job] = user.jobs()
    assert {
        key: job["failure"][key] for key in ("rank", "local_rank", "node_rank", "host", "exit_code")
    } == {
        "rank": 3,
        "local_rank": 1,
        "node_rank": 1,
        "host": "n4",
        "exit_code": 1,
    }
    ended = user.slurm.wait_for_job(job["backend_id"])
    # srun exits with the highest code of all tasks, including those that it has killed.
    code = (user.directory_of(job["id"]) / "ends" / "srun.0").read_text().strip()
    assert code in (("1",) if launcher == "agent" else ("1", "137", "143"))
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", f"{code}:0")


def test_requested_options_reach_slurm(user: User) -> None:
    job_id = user.submit(
        SLEEPER,
        "--name",
        "a name",
        "--time",
        "30m",
        "--mem",
        "3G",
        "--nproc-per-node",
        "3",
        "--cpus-per-task",
        "2",
        "--partition",
        "small",
        "--gpus-per-node",
        "4",
        "--set",
        "hold=true",
        "--set",
        "nice=7",
        "--set",
        "comment=my own | words",
        "--set",
        "begin=now+1hour",
    )
    job = user.slurm_job(job_id)
    assert {
        name: job[name]
        for name in (
            "Partition",
            "TimeLimit",
            "NumNodes",
            "NumCPUs",
            "CPUs/Task",
            "Nice",
            "Requeue",
        )
    } == {
        "Partition": "small",
        "TimeLimit": "00:30:00",
        "NumNodes": "1-1",
        "NumCPUs": "6",
        "CPUs/Task": "6",
        "Nice": "7",
        "Requeue": "0",
    }
    assert "mem=3G" in job["TRES"]
    assert job["TresPerNode"] == "gres:gpu:4"
    shown = user.slurm.run("squeue", "--noheader", "--format=%j|%k|%Z").stdout.strip()
    assert shown == f"{job_id}|clusterjob:{job_id} my own | words|{user.directory_of(job_id)}"
    status = user.job(job_id)
    assert (status["state"], status["backend_id"]) == ("PENDING", user.slurm_id(job_id))
    assert "JobHeldUser" in status["reason"] or "BeginTime" in status["reason"]
    user("cancel", job_id)
    assert user.wait_for_state(job_id, "CANCELLED")["exit_code"] == 143
    assert user.slurm_job(job_id)["JobState"] == "CANCELLED"
    assert user("wait", job_id, code=143).stderr.startswith(f"clusterjob: job {job_id} CANCELLED")


def test_other_process_gets_status_follows_logs_and_cancels(user: User) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "2", until=("up0", "up1"))
    assert user.wait_for_state(job_id, "RUNNING")["started_at"] is not None
    wait_until(
        lambda: sorted(user.output(job_id).splitlines()) == ["[0] line of 0", "[1] line of 1"],
        PROMPT,
        "both lines",
    )
    follower = user.start("logs", "-f", job_id)
    waiter = user.start("wait", job_id)
    wait_until(lambda: "line of 1" in user.output_of(follower)[0], PROMPT)
    user("cancel", job_id)
    assert (follower.wait(PROMPT), waiter.wait(PROMPT)) == (143, 143)
    assert "CANCELLED" in user.output_of(waiter)[1]
    wait_for_no_processes(PROMPT)
    assert "had ended already" in user("cancel", job_id).stderr


SAVER = """
    import os, pathlib, time
    rank = os.environ["RANK"]
    try:
        print("up", flush=True)
        pathlib.Path(f"up{rank}").touch()
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(1)
        pathlib.Path(f"saved{rank}").touch()
"""


def test_every_rank_gets_keyboard_interrupt_and_saves_after_ctrl_c_in_run(user: User) -> None:
    command = user.start(
        "run", "--cluster", "slurm", "--nodes", "2", "--grace", "60", user.script(SAVER)
    )
    wait_until(
        lambda: user.output_of(command)[0].count("up") >= 1, PROMPT
    )  # run follows the job now
    user.wait_for("up0", "up1")
    command.send_signal(signal.SIGINT)
    assert command.wait(PROMPT) == 130, user.output_of(command)
    user.wait_for("saved0", "saved1", timeout=0.1)
    [job] = user.jobs()
    assert (job["state"], job["reason"]) == ("CANCELLED", "cancelled")
    user.slurm.wait_for_job(job["backend_id"])
    wait_for_no_processes(PROMPT)


def test_setup_lines_run_on_each_node_and_failed_line_is_named(user: User) -> None:
    text = "import os\nprint(os.environ['SLURMD_NODENAME'], os.environ['FROM_SETUP'])"
    out = user.run(
        text, "--nodes", "2", "--setup", "export FROM_SETUP=$(echo $SLURMD_NODENAME | tr n N)"
    ).stdout
    assert sorted(out.splitlines()) == ["[0] n1 N1", "[1] n2 N2"]
    user.slurm.wait_idle()  # completing nodes take no other job yet
    message = user.run(
        text, "--nodes", "2", "--setup", "if [ $SLURM_NODEID = 1 ]; then sh -c 'exit 9'; fi", code=9
    ).stderr
    assert "FAILED: node 1 (host n2): a setup line failed: if [" in message
    wait_for_no_processes(PROMPT)


def test_custom_template_is_used(user: User) -> None:
    user.path("mine.sh.j2").write_text(
        '#!/bin/bash\n#SBATCH --nice=77\necho mine >&2\n{% include "slurm.sh.j2" %}\n'
    )
    job_id = user.submit("print('worked')", "--template", "mine.sh.j2")
    assert user("wait", job_id).stderr == f"clusterjob: job {job_id} SUCCEEDED\n"
    assert user.slurm_job(job_id)["Nice"] == "77"
    assert (user.directory_of(job_id) / "logs" / "slurm.out").read_text().startswith("mine\n")


def test_container_without_pyxis_is_refused_before_it_waits(user: User) -> None:
    message = user.refused("--container", "pyxis:nvcr.io/nvidia/pytorch:24.01-py3")
    assert "srun has no --container-image (no Pyxis)" in message


def test_python_without_torch_is_refused_before_a_script_that_needs_it_waits(
    user: User, tmp_path: Path
) -> None:
    needs = user.script("import torch\n")
    python = ("--python", str(python_without_torch(tmp_path)))
    message = user("submit", "--cluster", "slurm", *python, needs, code=1).stderr
    assert f"no torch: {python[1]} does not find it" in message
    for options in (
        (*python, "--set", "need_torch=false", needs),  # the nodes may have another Python
        (*python, "--setup", "true", needs),
        (*python, user.script("if 0:\n    import torch\n", "may.py")),
        (*python, "--", "sleep", "30"),
        ("--python", sys.executable, needs),
    ):
        user("submit", "--cluster", "slurm", "--set", "hold=true", *options)


def test_container_image_is_passed_to_apptainer(user: User) -> None:
    """It cannot run here: a fake one records its arguments."""
    notes = user.command_first_on_path(
        "apptainer",
        'printf "%s\\n" "$@" > "$NOTES"\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n',
    )
    user.path("my image.sif").touch()
    out = user.run(
        "print('inside')",
        "--no-require-gpus",
        "--gpus-per-node",
        "1",
        "--container",
        "my image.sif",
        "--python",
        str(user.python),
    ).stdout
    assert out == "inside\n"
    [job] = user.jobs()
    job_dir = str(user.directory_of(job["id"]))
    mounted = (job_dir, user.directory)
    binds = [word for path in mounted for word in ("--bind", f"{path}:{path}")]
    image = str(user.directory / "my image.sif")
    assert notes.read_text().splitlines() == [
        "exec",
        "--nv",
        *binds,
        "--pwd",
        str(user.directory),
        image,
        "bash",
        f"{job_dir}/slurm.sh",
    ]


COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "sinfo")


def test_slurm_without_slurm_conf_variable_is_default(user: User) -> None:
    """Slurm's commands may know their configuration without SLURM_CONF and a default file.

    On a real site its path is compiled in; here, wrappers around the commands set SLURM_CONF.
    """
    conf = str(user.slurm.conf)
    for name in COMMANDS:
        user.command_first_on_path(
            name, f'export SLURM_CONF={conf}\necho "$@" >> "$NOTES"\nexec "$REAL" "$@"\n'
        )
    assert json.loads(user("config", "--json").stdout)["backend"] == "slurm"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_CONF")
        job_id = user("submit", "--set", "hold=true", user.script("pass")).stdout.strip()
        assert user.job(job_id)["backend"] == "slurm"
        pings = user.directory.parent / "notes-scontrol"
        assert pings.read_text().count("ping") == 1, "SLURM_CONF alone needs none"
        user("render", "--cluster", "local", user.script("pass"))
        user("list")
        user("--help")
        assert pings.read_text().count("ping") == 1
    user("cancel", job_id)


@pytest.mark.parametrize(
    "scontrol",
    ["sleep 600", "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"],
)
def test_sbatch_without_reachable_slurm_is_not_chosen(user: User, scontrol: str) -> None:
    user.command_first_on_path(
        "scontrol", f"exec {scontrol}\n" if scontrol.startswith("sleep") else f"{scontrol}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_CONF")
        assert "sbatch --parsable" not in user("render", user.script("pass"), timeout=PROMPT).stdout
