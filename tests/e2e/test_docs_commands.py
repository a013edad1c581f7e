"""Run each command that a page shows: on this machine, SSH hosts, Slurm and a platform.

`docs_commands.SESSIONS` assigns the commands to these tests; a test in tests/unit compares that
table with the pages. Commands for Slurm, hosts and MLP run against the tests' own clusters.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import TRAIN, Shell, blocks
from hooked import lines_by_rank
from launching import ROOT, free_port, write_tree
from login_user import Laptop
from namespaces import Machine
from procs import TEST_TIMEOUT, wait_until
from servers import webhook
from slurm_user import User
from sshsite import Site
from volc_platform import Platform


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """Return a shell for the commands of the test; fail the test if one has not run."""
    made = Shell(request.node.originalname, tmp_path)
    yield made
    if not request.session.testsfailed:  # else this test may have ended early
        assert made.left == []


def ranks(output: str, *, of: int, words: str = "") -> bool:
    """Return whether each rank printed its line once."""
    found = re.findall(rf"rank (\d+) of {of}{words}$", output, re.MULTILINE)
    return sorted(map(int, found)) == list(range(of))


def outputs(shell: Shell, environ: dict[str, str] | None = None) -> list[str]:
    """Run all commands of the session; return the output of each, or of the job that it submits."""
    found = []
    for command in list(shell.left):
        out = shell(command, environ=environ).out
        if command.startswith("clusterjob submit"):
            job = shell.values["job_id"]
            assert shell.clusterjob("wait", job, environ=environ).code == 0
            out = shell.clusterjob("logs", job, environ=environ).out
        found.append(out)
    return found


def write_user_config(text: str) -> None:
    write_tree(Path(os.environ["XDG_CONFIG_HOME"]), **{"clusterjob/config.toml": text})


# -- this machine ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_python")
def test_secret_and_notify_commands_give_values_to_worker_and_tell_the_end(
    shell: Shell, tmp_path: Path
) -> None:
    secret, notify = shell.left
    write_tree(tmp_path, **{".cache/huggingface/token": "hf_5ecret\n"})
    environ = {"HOME": str(tmp_path)}
    text = "import os\nprint(*(os.environ.get(name) for name in ('WANDB_API_KEY', 'HF_TOKEN')))"
    shell.write("train.py", text)
    shell(secret, before=shell.adapt("export WANDB_API_KEY=..."), environ=environ)
    assert shell.clusterjob("wait", shell.values["job_id"]).code == 0
    assert shell.clusterjob("logs", shell.values["job_id"]).out == "5ecret hf_5ecret\n"
    with webhook() as hook:
        shell(notify, before=f"export SLACK={hook.url}", environ={"HOME": str(tmp_path)})
        assert shell.clusterjob("wait", shell.values["job_id"]).code == 0
        ended = tmp_path / "ended.jsonl"
        wait_until(lambda: hook.received and ended.exists() and ended.read_text(), TEST_TIMEOUT)
        assert hook.states == ["SUCCEEDED"]
    assert json.loads(ended.read_text())["job_id"] == shell.values["job_id"]


@pytest.mark.usefixtures("plain_python")
def test_template_of_backends_page_starts_nodes(shell: Shell) -> None:
    [template] = blocks("docs/backends.md", "jinja")
    shell.write("mine.sh.j2", template)
    [out] = outputs(shell)
    assert ranks(out, of=2, words=" 1")
    jobs = Path(os.environ["CLUSTERJOB_HOME"]) / "jobs"
    assert {path.name for path in jobs.glob("*/began.*")} == {"began.0", "began.1"}


def test_launch_on_each_worker_of_platform_joins_them(
    shell: Shell, volc_machines: list[Machine]
) -> None:
    [command] = shell.left
    shell.use(sys.executable, "-S")
    variables = {
        "MLP_WORKER_NUM": "2",
        "MLP_WORKER_0_HOST": volc_machines[0].address, "MLP_WORKER_0_PORT": str(free_port()),
        "MLP_WORKER_1_HOST": volc_machines[1].address,
    }  # fmt: skip
    shell.left.append(command)  # each of the two workers runs it
    workers = [
        shell.start(
            command,
            prefix=volc_machines[index].command(),
            environ={**variables, "MLP_ROLE_INDEX": str(index)},
        )
        for index in range(2)
    ]
    assert ranks("".join(shell.finish(worker).out for worker in workers), of=2)


def test_launch_commands_of_reference_page_join_two_nodes(
    shell: Shell, volc_machines: list[Machine]
) -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    exports = re.findall(r"^    (export CLUSTERJOB_.*)$", text, re.MULTILINE)
    assert len(exports) == 2
    shell.use(sys.executable, "-S")
    shell.values["address"] = volc_machines[0].address
    before = shell.adapt("\n".join(exports))
    nodes = [
        shell.start(command, prefix=machine.command(), before=before)
        for command, machine in zip(list(shell.left), volc_machines, strict=False)
    ]
    assert ranks("".join(shell.finish(node).out for node in nodes), of=16)


def test_rehearsal_of_readme_script_shows_losses(shell: Shell) -> None:
    shell.write("train.py", blocks("README.md", "python")[0])
    out = shell(shell.left[0]).out
    assert {f"[{rank}] ready" for rank in range(4)} <= {*lines_by_rank(out)}
    losses = re.findall(r"^\[0\] step (\d) loss \d\.\d{3}$", out, re.MULTILINE)
    assert losses == ["0", "1", "2"]


@pytest.mark.usefixtures("plain_python")
def test_unchanged_script_runs_under_torchrun_and_clusterjob(shell: Shell) -> None:
    assert all(ranks(out, of=2, words=" --lr 0.1") for out in outputs(shell))


@pytest.mark.slow
def test_bootstrap_script_trains_under_each_launcher(shell: Shell) -> None:
    shell.write("train.py", blocks("docs/scripts.md", "python")[0])
    for command, processes in zip(list(shell.left), (1, 4, 2), strict=True):
        out = shell(command).out
        assert re.findall(rf"epoch (\d) loss \d\.\d{{4}} on {processes} x cpu", out) == list("012")
        (shell.directory / "model.pt").unlink()


@pytest.mark.slow
def test_framework_scripts_form_one_world_over_two_nodes(shell: Shell) -> None:
    scripts = ROOT / "tests" / "compat" / "scripts"
    for module, command, line in zip(
        ("lightning", "accelerate", "transformers"),
        list(shell.left),
        ("rank 0 steps 1 world 4", "seen 16 on 4 processes", "steps 2, seen 32, world 4"),
        strict=True,
    ):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is missing: pip install {module}")
        name = command.split()[-1]
        text = (scripts / name).read_text(encoding="utf-8")
        shell.write(name, text.replace("max_epochs=1,", "max_epochs=1, num_nodes=2,"))
        assert line in shell(command).out


# -- hosts over SSH --------------------------------------------------------------------------------


@pytest.fixture
def hosts(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return the hosts; the user's configuration names their ssh configuration."""
    monkeypatch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    write_user_config(f'[clusters.ssh.set]\nssh_config = "{site.ssh_network.config}"\n')
    return site


def test_ssh_command_of_readme_runs_on_two_hosts(
    shell: Shell, site: Site, plain_python: str
) -> None:
    options = f'ssh_config = "{site.ssh_network.config}"\nneed_torch = "false"\n'
    write_user_config(f"[clusters.ssh.set]\n{options}")
    assert ranks(shell(shell.left[0]).out, of=16)


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_commands_of_ssh_page_check_hosts_and_fetch_results(shell: Shell) -> None:
    hosts, doctor, trained, with_spare, _ = outputs(shell)
    assert re.findall(r"^gpu\d", hosts, re.MULTILINE) == ["gpu1", "gpu2"]
    assert "failed" not in doctor
    assert ranks(trained, of=16)
    assert ranks(with_spare, of=2)
    # Those of the last job, on node 0.
    assert [path.name for path in shell.directory.glob("results/runs/*")] == ["rank0"]


def test_trust_commands_of_ssh_page_record_host_key(shell: Shell, hosts: Site) -> None:
    trust, with_fingerprint, replace = shell.left
    known, host = hosts.ssh_network.known_hosts, hosts.ssh_network.hosts["gpu1"]
    shell.values["fingerprint"] = host.fingerprint
    old = f"10.77.0.1 {hosts.ssh_network.hosts['gpu2'].public_key}\n"
    for command, before in ((trust, ""), (with_fingerprint, ""), (replace, old)):
        known.write_text(before)
        ours, terminal = pty.openpty()
        try:
            assert host.fingerprint in shell(command, stdin=terminal).err
        finally:
            os.close(ours)
            os.close(terminal)
        assert known.read_text() == f"10.77.0.1 {host.public_key}\n", command


# -- Slurm -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("user")
def test_slurm_commands_of_readme_show_output_of_all_ranks(shell: Shell) -> None:
    submit, status, logs = shell.left
    shell.write("clusterjob.toml", blocks("README.md", "toml")[0])
    shell(submit)
    header, job = shell(status).out.splitlines()
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert header.split() in [line.split() for line in page.splitlines()]
    assert job.split()[0] == shell.values["job_id"]
    assert ranks(shell(logs).out, of=16)


def test_first_commands_of_slurm_page_check_and_submit(shell: Shell, user: User) -> None:
    write_user_config(shell.adapt(blocks("docs/slurm.md", "toml")[0]))
    shell.write("train.py", TRAIN)
    shell.write("train_resume.py", TRAIN)
    trained, doctor, render, _ = outputs(shell)
    assert ranks(trained, of=16)
    assert "failed" not in doctor
    assert "sbatch" in render
    limits = [user.slurm_job(job["id"])["TimeLimit"] for job in reversed(user.jobs())]
    assert limits == ["02:00:00", "12:00:00"]
    assert user.slurm_job(shell.values["job_id"])["Requeue"] == "1"


@pytest.mark.slow
def test_array_commands_of_slurm_page_start_all_elements(shell: Shell, user: User) -> None:
    for command, size, output in (
        (shell.left[0], 20, "rank 0 of 1 --epochs 3 --lr=0.1 --seed=0\n"),
        (shell.left[1], 100, "rank 0 of 1\n"),
    ):
        shell(command)
        job = shell.values["job_id"]
        assert len(user.jobs(job)) == size
        user("wait", f"{job}_0")
        assert user.output(f"{job}_0") == output
        user("cancel", job)


def test_until_done_commands_of_slurm_page_start_next_attempts(shell: Shell, user: User) -> None:
    resumes = """
        import pathlib, sys, time
        saved = pathlib.Path("out/ckpt.pt")
        if saved.exists():
            sys.exit(print("resumes", *sys.argv[1:]))
        saved.parent.mkdir()
        saved.touch()
        print("saved", flush=True)
        time.sleep(1000)
        """
    shell.write("train.py", textwrap.dedent(resumes))
    shell.write("train.sh", blocks("docs/slurm.md", "bash")[0].replace("python ", "$PYTHON "))
    for command, arguments in ((shell.left[0], ""), (shell.left[1], " --init_from=resume")):
        shutil.rmtree(shell.directory / "out", ignore_errors=True)
        shell(command, environ={"PYTHON": sys.executable, "CLUSTERJOB_SIGNAL_BEFORE": "4s"})
        job = shell.values["job_id"]
        wait_until(lambda job=job: "saved" in user.output(job), 120, "the first attempt")
        user.slurm.run("scancel", "--batch", "--signal=USR1", user.slurm_id(job))
        user("wait", job, timeout=120)
        assert user.output(job) == f"saved\nresumes{arguments}\n"


def test_commands_of_laptop_page_run_through_login_host(shell: Shell, laptop: Laptop) -> None:
    shell.values |= {
        "python": str(laptop.python),
        "remote_home": str(laptop.login.home / "scratch"),
        "ssh_config": str(laptop.login.config),
    }
    write_user_config(shell.adapt(blocks("docs/laptop.md", "toml")[0]))
    assert all(ranks(out, of=16) for out in outputs(shell)[:2])
    assert len(list((shell.directory / "results" / "runs").iterdir())) == 16


# -- MLP -------------------------------------------------------------------------------------------


def test_submit_command_of_mlp_page_runs_task_with_its_profile(
    shell: Shell, volc: Platform
) -> None:
    write_user_config(blocks("docs/mlp.md", "toml")[0] + "poll = 0.2\n")
    # The interpreter below a virtual environment has no torch, so it starts fast.
    python = os.path.realpath(sys.executable)
    environ = {**volc.variables, "WANDB_API_KEY": "5ecret", "CLUSTERJOB_PYTHON": python}
    [out] = outputs(shell, environ)
    assert ranks(out, of=16, words=" --epochs 3")
