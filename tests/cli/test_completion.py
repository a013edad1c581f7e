"""Completion in real shells: a test types a line and a TAB in a terminal and reads the line."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, new_folder, write_tree
from procs import TEST_TIMEOUT, wait_until
from terminals import Terminal

from clusterjob.cli import app, completion_answers, completion_values
from clusterjob.cli.completion import SCRIPTS

START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "--no-rcs", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": "source <(clusterjob completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(clusterjob completion zsh)",
    "fish": "clusterjob completion fish | source",
}
WAIT_FOR_SHELL = "echo re''ady\n"  # its echo on the terminal does not contain the word
PRINT_WORDS = "\x01printf '<%s>' \n"  # Ctrl-A moves to the begin of the line


class Shell(Terminal):
    """An interactive shell in a terminal, with the completion loaded."""

    def __init__(self, name: str, directory: Path) -> None:
        env = os.environ | {"TERM": "xterm"}
        super().__init__(START[name], cwd=directory, controlling=True, env=env)
        self._run(f"{LOAD[name]}\n")

    def complete(self, text: str) -> list[str]:
        """Type a text and a TAB; return the words of the line, as the shell reads them."""
        self._run(f"{text}\t{PRINT_WORDS}")
        found = re.findall(r"(?:<[^<>\s]*>)+", self.shown.decode(errors="replace"))
        assert found, self.shown
        return found[-1][1:-1].split("><")

    def _run(self, text: str) -> None:
        self.shown = b""
        self.type(f"{text}{WAIT_FOR_SHELL}".encode())
        self.read_until(b"ready")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a profile and a script; the command, sinfo and ssh hosts exist."""
    home, work, tools = (tmp_path / name for name in ("home", "work", "bin"))
    for folder in (home / ".ssh", work, tools):
        folder.mkdir(parents=True)
    write_tree(
        work, **{"clusterjob.toml": '[clusters.hpc]\nbackend = "slurm"\n', "training.py": ""}
    )
    write_tree(
        home,
        **{
            ".ssh/config": "Include more\nHost node-7 *.example\nHost $(touch${IFS}p)\n",
            ".ssh/more": "Host=bastion\nHost `touch${IFS}q`x\n",
        },
    )
    command = tools / "clusterjob"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m clusterjob "$@"\n')
    sinfo = tools / "sinfo"
    sinfo.write_text("#!/bin/sh\nprintf 'gpu-long\\ndebug\\n$(touch r)\\n'\n")
    for each in (command, sinfo):
        each.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.chdir(work)
    make_records(["training-abc234", "other-xyz789"])
    return work


def make_records(names: list[str]) -> None:
    folder = new_folder(Path(os.environ["CLUSTERJOB_HOME"]) / "records")
    for number, name in enumerate(names, start=len(list(folder.iterdir()))):
        path = folder / f"{name}.json"
        path.write_text("{}")
        os.utime(path, (1_000_000 + number, 1_000_000 + number))


@pytest.fixture(params=list(SCRIPTS))
def shell(request: pytest.FixtureRequest, place: Path) -> Iterator[Shell]:
    assert shutil.which(request.param), f"{request.param} is missing: run `make packages`"
    with Shell(request.param, place) as opened:
        yield opened


def test_tab_completes_in_the_shell(shell: Shell, place: Path) -> None:
    lines = {
        "clusterjob logs tr": ["logs", "training-abc234"],
        "clusterjob run --nproc": ["run", "--nproc-per-node"],
        "clusterjob submit --cluster=hp": ["submit", "--cluster=hpc"],
        "clusterjob submit -p deb": ["submit", "-p", "debug"],
        "clusterjob submit --hosts bastion,nod": ["submit", "--hosts", "bastion,node-7"],
        "clusterjob submit --after afterok:tr": ["submit", "--after", "afterok:training-abc234"],
        "clusterjob run -N 2 tra": ["run", "-N", "2", "training.py"],
    }
    for line, words in lines.items():
        assert shell.complete(line) == ["clusterjob", *words], line
    for line in ("clusterjob hosts trust ", "clusterjob submit -p "):
        shell.complete(f"{line}\t\t")
    assert sorted(path.name for path in place.iterdir()) == ["clusterjob.toml", "training.py"]


# -- the answer ------------------------------------------------------------------------------------


def answers(capsys: pytest.CaptureFixture[str], *words: str, shell: str = "fish") -> list[str]:
    assert completion_answers.answer(app, [shell, *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line.partition("\t")[0] for line in out.splitlines()]


def test_latest_ids_are_completed_newest_first(
    capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place
    monkeypatch.setattr(completion_values, "_SORT_TIME", TEST_TIMEOUT)
    make_records(["a-222222", "b-222222", "a-333333_7"])
    assert answers(capsys, "clusterjob", "cancel", "") == [
        "b-222222", "a-222222", "other-xyz789", "training-abc234",
    ]  # fmt: skip
    assert answers(capsys, "clusterjob", "cancel", "a-222222", "a") == []
    ended = Path(os.environ["CLUSTERJOB_HOME"]) / "records/b-222222.json"
    ended.write_text('{"end": {"state": "SUCCEEDED"}, "job_dir": "/"}')
    for verb, ids in (("cancel", []), ("logs", ["b-222222"])):
        assert answers(capsys, "clusterjob", verb, "b-") == ids
    ended.unlink()
    make_records([f"many-{number:03}" for number in range(150)])
    newest = [f"many-{number:03}" for number in range(149, 49, -1)]
    assert answers(capsys, "clusterjob", "cancel", "") == newest
    assert answers(capsys, "clusterjob", "cancel", "many-00")[-1] == "many-000"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("submit", "--start", ""), ["auto", "fork", "exec"]),
        (("submit", "--launcher", ""), ["agent", "ray", "srun"]),
        (("submit", "--nproc_per_node", ""), ["gpu", "cpu", "auto"]),
        (("submit", "--after", "afterok:a,aftern"), ["afterok:a,afternotok:"]),
        (("submit", "--workdir", "x"), [":files"]),
        (("run", "train.py", "--l"), [":files"]),
        (("run", "--", "ba"), [":files"]),
        (("launch", "--node-r"), ["--node-rank"]),
        (("launch", "--start", ""), ["auto", "fork", "exec"]),
        (("hosts", "tr"), ["trust"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("no-such-command", ""), []),
        (("submit", "--no-such-option", ""), [":files"]),
        (("env", ""), []),
    ],
)
def test_word_at_the_cursor_is_completed(
    capsys: pytest.CaptureFixture[str], place: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    assert place
    assert answers(capsys, "clusterjob", *words) == expected


def test_opposite_of_a_switch_is_described_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion_answers.answer(app, ["zsh", "clusterjob", "submit", "--no-req"]) == 0
    assert "--no-requeue\tThe opposite of --requeue\n" in capsys.readouterr().out


def test_only_plain_values_are_offered() -> None:
    hostile = ["$(x)", "`x`", "a b", "a;b", "a'b", "-rf", "~x", "a\nb", "\x1b[2J", "a$b", "é"]
    assert completion_values.plain([*hostile, "gpu-1", "gpu[1-4]", "me@a.b:22", "gpu-1"]) == [
        "gpu-1", "gpu[1-4]", "me@a.b:22",
    ]  # fmt: skip


def test_slow_sinfo_does_not_delay_the_shell(place: Path) -> None:
    """The first TAB starts sinfo, which fills the cache after it; a later TAB reads the cache."""
    release = place.parent / "release"
    os.mkfifo(release)
    sinfo = place.parent / "bin/sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat {release} > /dev/null\necho slow\n")
    begin = time.monotonic()
    assert completion_values.partitions() == []
    assert time.monotonic() - begin < TEST_TIMEOUT / 2
    release.write_text("")
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "clusterjob/partitions"
    wait_until(lambda: cache.exists() and cache.read_text(), TEST_TIMEOUT)
    sinfo.write_text("#!/bin/sh\nexit 1\n")
    assert completion_values.partitions() == ["slow"]


def test_broken_sources_give_no_candidates_and_no_error(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    (place / "clusterjob.toml").write_text("[[[")
    os.mkfifo(place.parent / "home/.ssh/pipe")
    (place.parent / "home/.ssh/config").write_text("Include pipe config\nHost a\n")
    assert answers(capsys, "clusterjob", "submit", "--cluster", "") == []
    assert answers(capsys, "clusterjob", "submit", "--login", "") == []
    (place / "clusterjob.toml").unlink()
    assert answers(capsys, "clusterjob", "submit", "--login", "") == ["a"]
    assert answers(capsys, 'clusterjob submit --login "', shell="bash") == []
