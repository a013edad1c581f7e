"""Find the commands that pages show in code blocks, and run them as a reader does.

`SESSIONS` assigns each shown command to the test that runs it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import ROOT, Run, executable, finish, new_folder

RUNNERS = "tests/e2e/test_docs_commands.py"
READMES = ("README.md", "README.zh-CN.md")
# A command line of a page: indented by four spaces, after a prompt, or in a block of shell code.
_SHOWN = re.compile(r"^(?: {4,}|\s*\$ )(.*)$")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:clusterjob|torchrun|python (?:train|app)\.py)(?: |$)")

# What a page shows -> what the tests use instead; the braces hold values of the test.
REPLACED = {
    "train-e7trvw": "{job_id}",  # the id that the previous submit printed
    "train-8phtvv": "{job_id}",
    "SHA256:...": "{fingerprint}",
    "10.0.0.1": "{address}",  # of the first of two network namespaces
    "CLUSTERJOB_TOKEN=...": "CLUSTERJOB_TOKEN={token}",
    "WANDB_API_KEY=...": "WANDB_API_KEY=5ecret",
    'partition = "gpu"': 'partition = "main"',  # a partition of the tests' Slurm
    'set = { qos = "high", constraint = "a100" }': "",  # it has no QOS and no node features
    "me@login1": "login1",  # the login host has only the user of the tests
    "/opt/conda/bin/python": "{python}",
    'set = { remote_home = "/scratch/me/clusterjob" }': (
        'set = {{ remote_home = "{remote_home}", ssh_config = "{ssh_config}" }}'
    ),
}


@dataclass(frozen=True)
class Session:
    """Commands that pages show, in the order in which one test runs them."""

    runner: str  # the name of a test in `RUNNERS`, or a test id of another file
    pages: tuple[str, ...]
    commands: tuple[str, ...]


SESSIONS = (
    Session(
        "test_rehearsal_of_readme_script_shows_losses",
        (*READMES, "docs/laptop.md"),
        ("clusterjob run --cluster local --nodes 2 --nproc-per-node 2 train.py",),
    ),
    Session(
        "test_launch_on_each_worker_of_platform_joins_them",
        (*READMES, "docs/mlp.md", "docs/mlp.zh-CN.md"),
        ("clusterjob launch train.py",),
    ),
    Session(
        "test_launch_commands_of_reference_page_join_two_nodes",
        ("docs/reference.md",),
        (
            "CLUSTERJOB_NODE_RANK=0 clusterjob launch --nproc-per-node 8 train.py",
            "CLUSTERJOB_NODE_RANK=1 clusterjob launch --nproc-per-node 8 train.py",
        ),
    ),
    Session(
        "test_secret_and_notify_commands_give_values_to_worker_and_tell_the_end",
        ("docs/reference.md",),
        (
            (
                "clusterjob submit --secret WANDB_API_KEY"
                " --secret HF_TOKEN=~/.cache/huggingface/token train.py"
            ),
            "clusterjob submit --notify SLACK --notify-cmd 'cat >> ~/ended.jsonl' train.py",
        ),
    ),
    Session(
        "test_template_of_backends_page_starts_nodes",
        ("docs/backends.md",),
        ("clusterjob run --nodes 2 --template mine.sh.j2 train.py 1",),
    ),
    Session(
        "test_unchanged_script_runs_under_torchrun_and_clusterjob",
        ("docs/scripts.md",),
        (
            "torchrun --nproc-per-node 2 train.py --lr 0.1",
            "clusterjob run --nproc-per-node 2 train.py --lr 0.1",
        ),
    ),
    Session(
        "test_bootstrap_script_trains_under_each_launcher",
        ("docs/scripts.md",),
        (
            "python train.py",
            "clusterjob run --nodes 2 --nproc-per-node 2 train.py",
            "torchrun --nproc-per-node 2 train.py",
        ),
    ),
    Session(
        "test_framework_scripts_form_one_world_over_two_nodes",
        ("docs/scripts.md",),
        (
            "clusterjob run --nodes 2 --nproc-per-node 2 lightning_fit.py",
            "clusterjob run --nodes 2 --nproc-per-node 2 accelerate_default.py",
            "clusterjob run --nodes 2 --nproc-per-node 2 hf_trainer.py",
        ),
    ),
    Session(
        "tests/e2e/test_stacks_local.py::test_stacks_of_forked_workers_and_of_a_stopped_one",
        ("docs/troubleshooting.md",),
        ("clusterjob stacks train-e7trvw",),
    ),
    Session(
        "tests/slurm/test_hydra_sweep.py::"
        "test_jobs_of_sweep_of_scripts_page_run_on_two_nodes_after_logout",
        ("docs/scripts.md",),
        (
            (
                "python app.py --multirun hydra/launcher=clusterjob hydra.launcher.cluster=slurm"
                " hydra.launcher.nodes=2 lr=0.1,0.01"
            ),
        ),
    ),
    Session(
        "tests/node/test_ray_launcher.py::test_ray_over_two_nodes_of_slurm_keeps_exit_code",
        ("docs/scripts.md",),
        ("clusterjob run --nodes 2 --launcher ray driver.py",),
    ),
    Session(
        "test_slurm_commands_of_readme_show_output_of_all_ranks",
        READMES,
        (
            "clusterjob submit --cluster hpc --nodes 2 --gpus-per-node 8 train.py",
            "clusterjob status",
            "clusterjob logs -f train-e7trvw",
        ),
    ),
    Session(
        "test_first_commands_of_slurm_page_check_and_submit",
        ("docs/slurm.md",),
        (
            "clusterjob submit --cluster slurm --nodes 2 --gpus-per-node 8 --time 2h train.py",
            "clusterjob doctor --cluster hpc --nodes 2 --gpus-per-node 8",
            "clusterjob render --cluster hpc train.py",
            "clusterjob submit --requeue --signal-before 90s --time 12h train_resume.py",
        ),
    ),
    Session(
        "test_array_commands_of_slurm_page_start_all_elements",
        ("docs/slurm.md",),
        (
            "clusterjob submit --sweep lr=0.1,0.01 --sweep seed=0-9 --array %8 train.py --epochs 3",
            "clusterjob submit --array 0-99%8 train.py",
        ),
    ),
    Session(
        "test_until_done_commands_of_slurm_page_start_next_attempts",
        ("docs/slurm.md",),
        (
            "clusterjob submit --until-done --checkpoint-dir out --time 12h train.py",
            "clusterjob submit --until-done --checkpoint-dir out --time 12h -- bash train.sh",
        ),
    ),
    Session(
        "test_commands_of_laptop_page_run_through_login_host",
        ("docs/laptop.md",),
        (
            "clusterjob submit --cluster hpc --nodes 2 --gpus-per-node 8 train.py",
            "clusterjob logs -f train-e7trvw",
            "clusterjob fetch train-e7trvw runs/ --to results",
        ),
    ),
    Session(
        "test_ssh_command_of_readme_runs_on_two_hosts",
        READMES,
        ("clusterjob run --hosts gpu1,gpu2 --gpus-per-node 8 train.py",),
    ),
    Session(
        "test_commands_of_ssh_page_check_hosts_and_fetch_results",
        ("docs/ssh.md",),
        (
            "clusterjob hosts --hosts gpu1,gpu2",
            "clusterjob doctor --hosts gpu1,gpu2",
            "clusterjob submit --hosts gpu1,gpu2 --gpus-per-node 8 train.py",
            "clusterjob submit --hosts gpu[1-3] --nodes 2 --spares 1 train.py",
            "clusterjob fetch train-8phtvv runs/ --to results",
        ),
    ),
    Session(
        "tests/ssh/test_ssh_login.py::test_code_is_asked_once_for_all_commands_after_login",
        ("docs/ssh.md",),
        ("clusterjob login gpu1", "clusterjob logout gpu1"),
    ),
    Session(
        "test_trust_commands_of_ssh_page_record_host_key",
        ("docs/ssh.md",),
        (
            "clusterjob hosts trust gpu1",
            "clusterjob hosts trust gpu1 --fingerprint SHA256:...",
            "clusterjob hosts trust gpu1 --replace",
        ),
    ),
    Session(
        "test_submit_command_of_mlp_page_runs_task_with_its_profile",
        ("docs/mlp.md", "docs/mlp.zh-CN.md"),
        ("clusterjob submit --cluster vemlp --nodes 2 --gpus-per-node 8 train.py --epochs 3",),
    ),
    Session(
        "tests/e2e/test_inside_local.py::test_commands_of_troubleshooting_page",
        ("docs/troubleshooting.md",),
        (
            "clusterjob exec train-e7trvw --rank 3 -- nvidia-smi",
            "clusterjob shell train-e7trvw",
            "clusterjob forward train-e7trvw 6006",
        ),
    ),
    Session(
        "tests/e2e/test_report_command.py::test_report_of_a_job_that_runs_and_has_failed",
        ("docs/troubleshooting.md",),
        ("clusterjob report train-e7trvw",),
    ),
    Session(
        "tests/platforms/test_backend_example.py::test_job_runs_on_queue",
        ("docs/backends.md",),
        ("clusterjob run --cluster tinyq --nodes 2 --nproc-per-node 2 examples/train_digits.py",),
    ),
)


# Writes one line and one file; needs no torch. torchrun's workers share an unbuffered stdout, so
# that lines of several ranks mix unless each line is one write.
TRAIN = """
import os, pathlib, sys
pathlib.Path("runs").mkdir(exist_ok=True)
pathlib.Path("runs", f"rank{os.environ['RANK']}").write_text("trained")
words = ["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\\n")
"""


def pages() -> list[str]:
    """Return the pages whose commands run, relative to the repository."""
    return [*READMES, "CONTRIBUTING.md", *(f"docs/{path.name}" for path in docs())]


def docs() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))


def shown_commands(text: str) -> list[str]:
    """Return the commands in a page's code blocks, without synopses such as `[OPTIONS]`."""
    found, language = [], None
    for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            language = None if language is not None else fence[1]
            continue
        match = _SHOWN.match(line)
        command = match[1] if match else line if language in ("sh", "bash", "console") else ""
        command = re.split(r"\s#(?:\s|$)", command)[0].strip()
        if _COMMAND.match(command) and "[OPTIONS]" not in command:
            found.append(command)
    return found


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Shell:
    """A reader's shell: it runs the commands of one session in a directory.

    The directory holds `TRAIN` as train.py, unless the test writes another script.

    Attributes:
        values: the values for the braces in `REPLACED`; a submit sets ``job_id``.
        left: the commands of the session that have not run yet.
    """

    def __init__(self, runner: str, directory: Path) -> None:
        [session] = [session for session in SESSIONS if session.runner == runner]
        self.left = list(session.commands)
        self.directory = directory / "work"
        self.values: dict[str, str] = {"token": "0123456789abcdef" * 4}
        self._bin = new_folder(directory / "commands")
        self.use(sys.executable)

    def use(self, *interpreter: str) -> None:
        """Let the commands `clusterjob`, `torchrun` and `python` use this interpreter."""
        for name, module in (
            ("clusterjob", ["-m", "clusterjob"]),
            ("torchrun", ["-m", "torch.distributed.run"]),
            ("python", []),
        ):
            executable(
                self._bin / name, f'#!/bin/sh\nexec {shlex.join([*interpreter, *module])} "$@"\n'
            )

    def write(self, name: str, text: str) -> None:
        self.directory.mkdir(exist_ok=True)
        (self.directory / name).write_text(text)

    def adapt(self, text: str) -> str:
        """Replace the values of a page by those of the test, as `REPLACED` says."""
        for shown, used in REPLACED.items():
            if shown in text:
                text = text.replace(shown, used.format(**self.values))
        return text

    def start(
        self,
        command: str,
        *,
        prefix: Sequence[str] = (),
        before: str = "",
        environ: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a command of the session.

        Args:
            command: as the page shows it.
            prefix: a command that runs the shell.
            before: lines that the page shows before the command.
            environ: variables that the page requires.
            stdin: the command's stdin.
        """
        self.left.remove(command)
        if not (self.directory / "train.py").exists():
            self.write("train.py", TRAIN)
        # The GPUs of the tests' clusters exist in their configuration alone.
        env = {**os.environ, "CLUSTERJOB_REQUIRE_GPUS": "0", **(environ or {})}
        return subprocess.Popen(
            [*prefix, "bash", "-c", f"{before}\n{self.adapt(command)}"],
            cwd=self.directory,
            env={**env, "PATH": f"{self._bin}{os.pathsep}{env['PATH']}"},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that the whole process group can be killed
        )

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> Run:
        """Wait for a command; fail the test if its exit code is not ``code``."""
        ran = finish(process)
        assert ran.code == code, f"exit code {ran.code}\n{ran.out}\n{ran.err}"
        return ran

    def __call__(self, command: str, code: int = 0, **more: Any) -> Run:
        ran = self.finish(self.start(command, **more), code)
        if command.startswith("clusterjob submit"):
            self.values["job_id"] = ran.out.strip()
        return ran

    def clusterjob(self, *words: str, environ: Mapping[str, str] | None = None) -> Run:
        """Run a command that no page shows: to check an effect, or to clean up."""
        argv = [sys.executable, "-m", "clusterjob", *words]
        return finish(
            subprocess.Popen(
                argv,
                cwd=self.directory,
                env={**os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
