"""Options that users know from sbatch, docker, SkyPilot and torchrun: flags, GPUs, help."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import typer
from command_user import CommandUser
from nvidia import FakeSmi
from slurm_user import SLEEPER

from clusterjob.cli import app, main
from clusterjob.cli.help import EXAMPLES
from clusterjob.core.option import GROUPS
from clusterjob.core.options import OPTIONS

SHOW_GPUS = """
    import os
    print(os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


def commands() -> list[str]:
    """Return every command by its words, such as ``hosts trust``; a group is a command too."""
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    below = [f"{name} {sub}" for name in top for sub in getattr(top[name], "commands", {})]
    return sorted([*top, *below])


# -- flags -----------------------------------------------------------------------------------------


def test_line_of_sbatch_sets_the_same_options(local_user: CommandUser) -> None:
    line = "-N2 -p train -t 30 -J first -A team -c 4 --gpus 8 --after afternotok:7:8 --after 9"
    done = local_user("render", "--json", "--cluster", "slurm", *line.split(), "--", "true")
    plan = json.loads(done.stdout)
    wanted = {
        "--nodes=2", "--partition=train", "--time=0-00:30:00", "--account=team",
        "--cpus-per-task=32", "--gpus-per-node=8", f"--job-name={plan['job_id']}",
        "--dependency=afternotok:7,afternotok:8,afterok:9",
    }  # fmt: skip
    assert wanted <= set(plan["commands"][0]["argv"])
    assert plan["notes"] == ["--gpus: 8 on each of 2 nodes, 16 in total"]


def test_line_of_torchrun_runs_the_same_workers(local_user: CommandUser) -> None:
    script = local_user.script("""
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:])
    """)
    line = "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts 1 --rdzv_backend c10d"
    done = local_user("run", *line.split(), script, "--nproc_per_node", "x_y")
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == [
        f"{rank} 2 --nproc_per_node x_y" for rank in (0, 1)
    ]
    assert "clusterjob: --rdzv_backend has no effect: the nodes find each other" in done.stderr


# -- GPUs of this machine --------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path / "bin", prefix=f"GPU-{os.getpid()}-")
    monkeypatch.setenv("PATH", f"{fake.directory}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_local_job_uses_the_chosen_gpus(local_user: CommandUser, smi: FakeSmi) -> None:
    done = local_user("run", "--gpus", "3,1", local_user.script(SHOW_GPUS))
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{rank} {smi.prefix}3,{smi.prefix}1" for rank in (0, 1)]
    done = local_user("run", "--gpus", "device=9", local_user.script(SHOW_GPUS), code=1)
    assert "--gpus device=9: GPU 9 does not exist; existing GPUs: 0, 1, 2, 3" in done.stderr


def test_local_job_takes_idle_gpus_and_holds_them(
    local_user: CommandUser,
    smi: FakeSmi,
) -> None:
    smi.set_gpus([3, 40_000, 3, 3], {3: [(1, "python")]})
    first = local_user.submit(SLEEPER, "--gpus", "auto:1", until=("up0",))
    script = local_user.script(SHOW_GPUS)
    done = local_user("run", "--gpus", "auto:1", script)
    assert done.stdout == f"0 {smi.prefix}2\n", "0 is held by the first job; 1 and 3 are not idle"
    done = local_user("submit", "--gpus", "auto:2", script, code=1)
    assert "1 idle GPUs where 2 are asked for" in done.stderr
    assert f"0 job {first}" in done.stderr
    assert len(json.loads(local_user("list", "--json").stdout)["jobs"]) == 2, "nothing is left"
    smi.set_gpus([3, 40_000, 3, 3], {})
    done = local_user("run", "--gpus", "auto", script)
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{rank} {smi.prefix}2,{smi.prefix}3" for rank in (0, 1)], "all idle ones"
    local_user("cancel", first)


def test_help_of_job_has_groups_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--help"]) == 0
    text = capsys.readouterr().out
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings == [*(group.capitalize() for group in GROUPS), "Examples"]
    for option in OPTIONS.values():
        section = text.partition(f"\n{option.group.capitalize()}:\n")[2].partition("\n\n")[0]
        assert not option.help or option.flag in section, f"{option.flag} is not in {option.group}"


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*commands()} - {"launch"}))  # its help has no typer
def test_help_of_every_command_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert EXAMPLES.get(name), f"add a row to clusterjob.cli.help.EXAMPLES for {name!r}"
    assert main([*name.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    shown = out.partition("\nExamples:\n")[2].splitlines()
    assert ([line.strip() for line in shown], err) == (list(EXAMPLES[name]), "")


def test_examples_have_only_known_options() -> None:
    from test_docs_claims import find_unknown_option

    lines = [line for lines in EXAMPLES.values() for line in lines]
    for line in lines:
        command = re.search(r"clusterjob (.*?)(?: (?:&&|--) .*)?$", line)
        assert command, line
        assert not find_unknown_option(command[1]), line


def test_help_shows_the_whole_summary_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Run a command inside a running job, in a worker's environment and allocation." in shown
    assert "..." not in shown.partition("Commands:")[2]
