"""Options that users know from sbatch, docker, SkyPilot and torchrun: flags, GPUs, help."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from launching import run
from nvidia import FakeSmi
from test_cli import CLUSTERJOB, SLEEPER, Terminal, terminal  # noqa: F401  a fixture

from clusterjob.cli import app, main
from clusterjob.cli.help import EXAMPLES
from clusterjob.core.option import GROUPS
from clusterjob.core.options import OPTIONS

SHOW_GPUS = """
    import os
    print(os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return every command by its words, such as ``hosts trust``; a group is a command too."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = command
        for sub, each in getattr(command, "commands", {}).items():
            found[f"{name} {sub}"] = each
    return found


def help_of(*words: str) -> str:
    done = run([*CLUSTERJOB, *words, "--help"], Path.cwd())
    assert (done.code, done.err) == (0, "")
    return done.out


# -- flags -----------------------------------------------------------------------------------------


def test_short_flags_are_those_of_sbatch() -> None:
    short = {option.short: option.key for option in OPTIONS.values() if option.short}
    sbatch = {
        "-N": "nodes", "-p": "partition", "-t": "time", "-J": "name", "-A": "account",
        "-c": "cpus_per_task",
    }  # fmt: skip
    assert short.items() >= sbatch.items()


def test_line_of_sbatch_sets_the_same_options(terminal: Terminal) -> None:  # noqa: F811
    line = "-N2 -p train -t 30 -J first -A team -c 4 --gpus 8"
    done = terminal("render", "--json", "--cluster", "slurm", *line.split(), "--", "true")
    argv = json.loads(done.stdout)["commands"][0]["argv"]
    wanted = {
        "--nodes=2", "--partition=train", "--time=0-00:30:00", "--account=team",
        "--cpus-per-task=32", "--gpus-per-node=8",
    }  # fmt: skip
    assert wanted <= set(argv)
    assert any(word.startswith("--job-name=first-") for word in argv)  # the job's id
    assert json.loads(done.stdout)["notes"] == ["--gpus: 8 on each of 2 nodes, 16 in total"]


def test_line_of_torchrun_runs_the_same_workers(terminal: Terminal) -> None:  # noqa: F811
    script = terminal.script("""
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:])
    """)
    line = "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts 1 --rdzv_backend c10d"
    done = terminal("run", *line.split(), script, "--nproc_per_node", "x_y")
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == [
        f"{rank} 2 --nproc_per_node x_y" for rank in (0, 1)
    ]
    assert "clusterjob: --rdzv_backend has no effect: the nodes find each other" in done.stderr


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (["7"], "--dependency=afterok:7"),
        (["afterok:7"], "--dependency=afterok:7"),
        (["afterany:7", "after:8"], "--dependency=afterany:7,after:8"),
        (["afternotok:7:8,afterok:9"], "--dependency=afternotok:7,afternotok:8,afterok:9"),
    ],
)
def test_after_has_the_words_of_sbatch(
    terminal: Terminal,  # noqa: F811
    after: list[str],
    expected: str,
) -> None:
    flags = [word for text in after for word in ("--after", text)]
    done = terminal("render", "--json", "--cluster", "slurm", *flags, "--", "true")
    assert expected in json.loads(done.stdout)["commands"][0]["argv"]
    assert "ID alone means afterok" in OPTIONS["after"].help


# -- GPUs of this machine --------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path / "bin", prefix=f"GPU-{os.getpid()}-")
    monkeypatch.setenv("PATH", f"{fake.directory}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_local_job_uses_the_chosen_gpus(terminal: Terminal, smi: FakeSmi) -> None:  # noqa: F811
    done = terminal("run", "--gpus", "3,1", terminal.script(SHOW_GPUS))
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{rank} {smi.prefix}3,{smi.prefix}1" for rank in (0, 1)]
    done = terminal("run", "--gpus", "device=9", terminal.script(SHOW_GPUS), code=1)
    assert "--gpus device=9: GPU 9 does not exist; existing GPUs: 0, 1, 2, 3" in done.stderr


def test_local_job_takes_idle_gpus_and_holds_them(
    terminal: Terminal,  # noqa: F811
    smi: FakeSmi,
) -> None:
    smi.set_gpus([3, 40_000, 3, 3], {3: [(1, "python")]})
    first = terminal.submit(SLEEPER, "--gpus", "auto:1")
    terminal.wait_for("up0")
    done = terminal("run", "--gpus", "auto:1", terminal.script(SHOW_GPUS))
    assert done.stdout == f"0 {smi.prefix}2\n", "0 is held by the first job; 1 and 3 are not idle"
    done = terminal("submit", "--gpus", "auto:2", terminal.script(SHOW_GPUS), code=1)
    assert "1 idle GPUs where 2 are asked for" in done.stderr
    assert f"0 job {first}" in done.stderr
    assert len(json.loads(terminal("list", "--json").stdout)["jobs"]) == 2, "nothing is left"
    smi.set_gpus([3, 40_000, 3, 3], {})
    done = terminal("run", "--gpus", "auto", terminal.script(SHOW_GPUS))
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{rank} {smi.prefix}2,{smi.prefix}3" for rank in (0, 1)], "all idle ones"
    smi.set_gpus([3, 40_000], {1: [(1, "python")]})
    done = terminal("submit", "--gpus", "auto", terminal.script(SHOW_GPUS), code=1)
    assert f"--gpus auto: no GPU is idle: 0 job {first}; 1 NVIDIA H100, 80GB: " in done.stderr
    terminal("cancel", first)


# -- help ------------------------------------------------------------------------------------------


def test_help_of_job_has_groups_in_order_and_examples() -> None:
    text = help_of("submit")
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings == [*(group.capitalize() for group in GROUPS), "Examples"]
    for option in OPTIONS.values():
        assert option.group in GROUPS
        if option.help:
            section = text.partition(f"\n{option.group.capitalize()}:\n")[2].partition("\n\n")[0]
            assert option.flag in section, f"{option.flag} is not in the group {option.group}"


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_of_every_command_ends_with_an_example(name: str) -> None:
    if name == "launch":
        return  # its help is that of the node, which has no typer
    assert EXAMPLES.get(name), f"add a row to clusterjob.cli.help.EXAMPLES for {name!r}"
    shown = help_of(*name.split()).partition("\nExamples:\n")[2].splitlines()
    assert [line.strip() for line in shown] == list(EXAMPLES[name])


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


def test_help_is_fast() -> None:
    """The limit of 0.15 s is measured beside the bare interpreter, to leave out a busy machine."""

    def seconds(*argv: str) -> float:
        begin = time.monotonic()
        subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - begin

    pairs = [(seconds("-m", "clusterjob", "submit", "--help"), seconds("-c", "")) for _ in range(5)]
    shown, bare = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(f"--help: {shown:.3f} s, the interpreter alone: {bare:.3f} s")
    assert shown < max(0.45, 30 * bare)
