"""A foreign clusterjob.toml executes nothing until the user trusts it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Run, executable, finish, write_tree
from preloaded import Preloaded
from terminals import Terminal

from clusterjob.core import trust
from clusterjob.core.config import resolve
from clusterjob.core.config_files import find_files, project_file
from clusterjob.core.options import OPTIONS
from clusterjob.errors import ConfigError, Untrusted

NOBODY = 65534
BACKENDS = ("local", "slurm", "ssh", "mlp")
CLUSTERJOB = ["-m", "clusterjob"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")


class Clone:
    """A cloned repository whose configuration creates a marker file when it is executed."""

    def __init__(self, root: Path, commands: Preloaded) -> None:
        self.root = root
        self.commands = commands
        self.mark = root.parent / "executed"
        write_tree(
            root, **{"train.py": "print('trained')\n", "pkg/__main__.py": "print('trained')\n"}
        )
        executable(root / "run.sh", "#!/bin/sh\necho trained\n")
        (root / "ssh_config").write_text(
            f"Match exec \"touch '{self.mark}'\"\nHost *\nHostName 127.0.0.1\nPort 1\n"
        )
        self.config(
            "[defaults]\nmax_restarts = 1\n"
            f"setup = [{json.dumps(f'touch {self.mark}')}]\n" + self.profile()
        )

    def profile(self) -> str:
        return (
            "[clusters.hpc]\nbackend = 'ssh'\nhosts = 'evil'\n"
            "[clusters.hpc.set]\nssh_config = 'ssh_config'\nconnect_timeout = 2\n"
        )

    def config(self, text: str) -> Path:
        path = self.root / "clusterjob.toml"
        path.write_text(text)
        return path

    def call(self, *args: str) -> Run:
        return finish(self.commands.start_program([*CLUSTERJOB, *args], self.root, os.environ))

    def on_terminal(self, answers: str, *args: str) -> tuple[int, str]:
        """Run a command on a terminal with answers typed ahead; return its exit code and output."""
        argv = [sys.executable, *CLUSTERJOB, *args]
        with Terminal(argv, cwd=self.root, controlling=True) as terminal:
            terminal.type(answers.encode())
            return terminal.finish(), terminal.shown.decode()

    @property
    def executed(self) -> bool:
        return self.mark.exists()


@pytest.fixture
def clone(tmp_path: Path, preloaded_commands: Preloaded) -> Clone:
    return Clone(tmp_path / "clone", preloaded_commands)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("print('mine')\n")
    return path


def assert_refused(done: Run, *lines: str) -> None:
    assert (done.code, done.out) == (2, ""), done
    first, *shown, hint = done.err.splitlines()
    assert first.startswith("clusterjob: error: ")
    assert "is not trusted, and this command would execute or follow" in first
    assert [line for line in lines if f"  {line}" not in shown] == []
    assert "`clusterjob trust " in hint


# -- (a) files that another user could have written ------------------------------------------------


@needs_root
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            lambda root: os.chown(root / "clusterjob.toml", NOBODY, NOBODY),
            "it belongs to uid 65534",
        ),
        (
            lambda root: (root / "clusterjob.toml").chmod(0o666),
            "everyone can write to it (mode 0666)",
        ),
        (lambda root: root.chmod(0o777), "{}: everyone can write to it (mode 0777)"),
        (
            lambda root: ((root.parent / ".git").mkdir(), root.parent.chmod(0o777)),
            "{.parent}: everyone can write to it (mode 0777)",
        ),
    ],
    ids=["owner", "file", "directory", "parent"],
)
@pytest.mark.usefixtures("plain_python")
def test_config_file_that_another_user_could_write_is_ignored_with_one_line(
    clone: Clone, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(clone.root)
    ignored = f"{clone.root / 'clusterjob.toml'} is ignored: {why.format(clone.root)}"
    done = clone.call("run", "--cluster", "local", "train.py")
    assert (done.code, done.out.strip()) == (0, "trained"), done.err
    assert done.err.splitlines()[0] == f"clusterjob: {ignored}"
    assert not clone.executed
    assert resolve({}, "local", environ={}, directory=clone.root, backends=BACKENDS).values == {}
    done = clone.call("trust", "--yes")
    assert (done.code, ignored in done.err) == (2, True)


@needs_root
@pytest.mark.parametrize("name", ["clusterjob.toml", "pyproject.toml"])
@pytest.mark.parametrize("kind", ["unreadable", "nested", "huge", "link"])
def test_hostile_config_file_of_another_user_in_parent_directory_is_skipped(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shared = Path(folder)
        shared.chmod(0o1777)
        (shared / "work").mkdir()
        (shared / "closed").mkdir(mode=0o700)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(shared / "config"))
        if kind == "link":
            (shared / "closed" / name).write_text("")
            (shared / name).symlink_to(shared / "closed" / name)
        else:
            (shared / name).write_text("[tool.clusterjob]\n" + "x = " + "[" * 100_000)
            (shared / name).chmod(0o600 if kind == "unreadable" else 0o644)
            os.chown(shared / name, 12345, 12345)
        if kind == "huge":
            os.truncate(shared / name, 100 << 30)
        if kind != "link":
            assert find_files(shared / "work") == []
        os.seteuid(NOBODY)
        try:
            assert find_files(shared / "work") == []
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["clusterjob.toml", "pyproject.toml"])
def test_too_deeply_nested_config_file_is_a_config_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[tool.clusterjob]\nx = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        find_files(tmp_path)


def test_config_file_of_user_in_sticky_directory_is_used(clone: Clone) -> None:
    clone.root.chmod(0o1777)
    assert (
        resolve({}, "local", environ={}, directory=clone.root, backends=BACKENDS).values[
            "max_restarts"
        ]
        == 1
    )


# -- (b) every command that executes a setting needs trust -----------------------------------------


SETUP = '[defaults] setup = ["touch {}"]'
SSH_CONFIG = '[clusters.hpc] set = {{"ssh_config": "ssh_config", "connect_timeout": 2}}'
HOSTS = '[clusters.hpc] hosts = "evil"'


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        ("run --cluster local train.py", (SETUP,)),
        ("run --cluster local -- ./run.sh", (SETUP,)),
        ("submit --cluster local -m pkg", (SETUP,)),
        ("doctor --cluster local", (SETUP,)),
        ("doctor --cluster hpc", (SETUP, SSH_CONFIG, HOSTS, '[clusters.hpc] backend = "ssh"')),
        ("hosts --cluster hpc", (SETUP, SSH_CONFIG, HOSTS)),
        ("hosts trust evil --cluster hpc --fingerprint SHA256:x", (SSH_CONFIG,)),
    ],
)
def test_every_command_is_refused_until_config_file_is_trusted(
    clone: Clone, args: str, lines: tuple[str, ...]
) -> None:
    assert_refused(clone.call(*args.split()), *(line.format(clone.mark) for line in lines))
    assert not clone.executed


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("y\n", 0)])
@pytest.mark.usefixtures("plain_python")
def test_command_on_terminal_asks_once_and_goes_on(clone: Clone, answer: str, code: int) -> None:
    args = ("run", "--cluster", "local", "train.py")
    found, shown = clone.on_terminal(answer, *args)
    assert (found, "trained" in shown) == (code, code == 0), shown
    assert clone.executed is (code == 0)
    assert clone.call(*args).code == code, "the answer is kept"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "cluster = 'hpc'\n[clusters.hpc]\nbackend = 'mlp'\n",
            ['cluster = "hpc"', '[clusters.hpc] backend = "mlp"'],
        ),
        (
            "cluster = 'slurm'\n[defaults]\nlogin = 'evil'\n",
            ['cluster = "slurm"', '[defaults] login = "evil"'],
        ),
        (
            "[defaults]\nenv = {LD_PRELOAD = './evil.so'}\n",
            ['[defaults] env = {"LD_PRELOAD": "./evil.so"}'],
        ),
        ("[defaults]\npython = './evil'\n", ['[defaults] python = "./evil"']),
        ("[defaults]\ncontainer = 'evil.sif'\n", ['[defaults] container = "evil.sif"']),
        ("[defaults]\nworkdir = 'sub'\n", ['[defaults] workdir = "sub"']),
        ("[defaults]\ntemplate = 'evil.j2'\n", ['[defaults] template = "evil.j2"']),
        ("[defaults]\nsweep = 'config=evil'\n", ['[defaults] sweep = "config=evil"']),
        (
            '[defaults]\nname = "\\u001b]0;x"\nsetup = "a\\u202eb\\nc"\n',
            ['[defaults] setup = "a\\u202eb\\nc"'],
        ),
        (
            (
                "cluster = 'slurm'\n[defaults]\nnodes = 2\npartition = 'gpu'\ntime = '1h'\n"
                "[clusters.slurm]\nmem = '1G'\n"
            ),
            [],
        ),
    ],
)
def test_settings_that_execute_or_redirect_need_trust(
    clone: Clone, text: str, lines: list[str]
) -> None:
    clone.config(text)
    if not lines:
        resolve({}, None, environ={}, directory=clone.root, backends=BACKENDS, executes=True)
        return
    with pytest.raises(Untrusted) as caught:
        resolve({}, None, environ={}, directory=clone.root, backends=BACKENDS, executes=True)
    assert sorted(caught.value.lines) == sorted(lines)
    assert {line.text() for line in trust.risky_settings(find_files(clone.root)[-1].data)} >= set(
        lines
    ) - {'cluster = "slurm"'}


def test_setting_overridden_on_command_line_needs_no_trust(clone: Clone) -> None:
    clone.config("[defaults]\npython = './evil'\n")
    assert (
        resolve(
            {"python": "python3"},
            "local",
            environ={},
            directory=clone.root,
            backends=BACKENDS,
            executes=True,
        ).values["python"]
        == "python3"
    )


def test_new_setting_needs_trust_until_listed_as_harmless() -> None:
    """A setting needs trust unless HARMLESS lists it."""
    assert sorted(OPTIONS.keys() - trust.HARMLESS) == sorted(
        {
            "env",
            "workdir",
            "python",
            "setup",
            "template",
            "set",
            "hosts",
            "hostfile",
            "login",
            "container",
            "sweep",
            "transport",
            "uv",
            "env_archive",
            "env_cache",
            "notify",
            "notify_cmd",
            "include_secrets",
            "secret",
        }
    )
    assert OPTIONS.keys() >= trust.HARMLESS


def test_user_configuration_needs_no_trust(tmp_path: Path) -> None:
    own = Path(os.environ["XDG_CONFIG_HOME"]) / "clusterjob" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "cluster = 'hpc'\n[defaults]\nsetup = 'true'\n"
        "[clusters.hpc]\nbackend = 'ssh'\nhosts = 'a'\n"
    )
    assert resolve(
        {}, None, environ={}, directory=tmp_path, backends=BACKENDS, executes=True
    ).values["setup"] == ("true",)


# -- clusterjob trust ------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_python")
def test_trust_ends_when_config_file_or_a_file_it_names_changes(
    clone: Clone, outside: Path
) -> None:
    args = ("run", "--cluster", "local", str(outside))
    for change in (
        lambda: None,
        lambda: clone.config(
            (clone.root / "clusterjob.toml").read_text().replace("touch", "command touch")
        ),
        lambda: (clone.root / "ssh_config").write_text("ProxyCommand evil\n"),
    ):
        change()
        assert clone.call(*args).code == 2
        assert clone.call("trust", str(clone.root / "clusterjob.toml"), "--yes").code == 0
        assert clone.call(*args).code == 0
    (clone.root / "clusterjob.toml").write_text(
        (clone.root / "clusterjob.toml").read_text().replace("max_restarts = 1", "nodes = 1")
    )
    assert clone.call(*args).code == 0


@pytest.mark.parametrize("options", ["['ssh_config=ssh_config']", "{ssh_config = 'ssh_config'}"])
def test_trust_ends_when_ssh_configuration_in_set_changes(clone: Clone, options: str) -> None:
    path = clone.config(f"[defaults]\nset = {options}\n")
    trust.record(path, project_file(path).data)
    assert trust.is_trusted(path, project_file(path).data)
    (clone.root / "ssh_config").write_text("ProxyCommand evil\n")
    assert not trust.is_trusted(path, project_file(path).data)


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize(
    "setting",
    [
        "hostfile = 'named'",
        "template = 'named'",
        "secret = ['X=named']",
        "set = {ssh_config = 'named'}",
    ],
    ids=lambda text: text[:6],
)
def test_pipe_device_or_huge_file_named_in_config_is_refused_by_name(
    clone: Clone, setting: str, kind: str
) -> None:
    named = clone.root / "named"
    if kind == "pipe":
        os.mkfifo(named)
    elif kind == "device":
        named.symlink_to("/dev/zero")
    else:
        named.touch()
        os.truncate(named, 100 << 30)
    path = clone.config(f"[defaults]\n{setting}\n")
    with pytest.raises(ConfigError, match="named is no regular file of at most"):
        resolve({}, "local", environ={}, directory=clone.root, backends=BACKENDS)
    if not setting.startswith("secret"):  # trust does not cover the content of a secret
        with pytest.raises(
            ConfigError, match=r"cannot be trusted: .*named is no regular file of at most"
        ):
            trust.record(path, project_file(path).data)


def test_trust_of_one_path_does_not_cover_same_content_elsewhere(
    clone: Clone, tmp_path: Path
) -> None:
    assert clone.call("trust", "--yes").code == 0
    other = Clone(tmp_path / "other", clone.commands)
    other.config((clone.root / "clusterjob.toml").read_text())
    assert_refused(other.call("doctor", "--cluster", "local"))


def test_trust_without_terminal_needs_yes_and_shows_lines(clone: Clone) -> None:
    done = clone.call("trust")
    assert done.code == 2
    assert f'  [defaults] setup = ["touch {clone.mark}"]\n' in done.err
    assert "--yes" in done.err
    assert_refused(clone.call("doctor", "--cluster", "local"))


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("y\n", 0)])
def test_trust_on_terminal_asks_for_confirmation(clone: Clone, answer: str, code: int) -> None:
    assert clone.on_terminal(answer, "trust")[0] == code
    assert (clone.call("doctor", "--cluster", "hpc").code == 2) is (code == 1)


def test_trust_record_is_private_and_ignored_when_others_can_write_it(clone: Clone) -> None:
    before = os.umask(0)
    try:
        assert clone.on_terminal("", "trust", "--yes")[0] == 0
    finally:
        os.umask(before)
    place = Path(os.environ["XDG_CONFIG_HOME"]) / "clusterjob" / "trusted.json"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    file = find_files(clone.root)[-1]
    assert trust.is_trusted(file.path, file.data)
    place.chmod(0o666)
    assert not trust.is_trusted(file.path, file.data), "others could have written it"


# -- (d) commands that execute nothing -------------------------------------------------------------


def test_read_only_commands_execute_nothing_of_project(clone: Clone) -> None:
    (clone.root / "evil.j2").write_text(
        f"{{{{ cycler.__init__.__globals__.os.system('touch {clone.mark}') }}}}"
    )
    executable(clone.root / "fake-python", f"#!/bin/sh\ntouch {clone.mark}\n")
    text = (
        f"[defaults]\nsetup = 'touch {clone.mark}'\npython = './fake-python'\n"
        "env = {LD_PRELOAD = './evil.so'}\n"
    )
    clone.config(f"cluster = 'hpc'\n{text}{clone.profile()}")
    for args in (
        ["env"],
        ["submit", "--dry-run", "train.py"],
        ["render", "train.py"],
        ["render", "--cluster", "local", "--", "true"],
        ["config"],
        ["config", "--json"],
        ["status"],
        ["list"],
        ["--help"],
        ["trust"],
    ):
        done = clone.call(*args)
        assert done.code == (2 if args == ["trust"] else 0), done
    assert clone.call("render", "--template", "evil.j2", "train.py").code == 2
    assert not clone.executed


@pytest.mark.parametrize(
    ("answers", "trusted"), [("", False), ("\n\nn\n", False), ("\n\ny\n", True)]
)
def test_init_runs_no_interpreter_of_project_and_asks_before_it_is_trusted(
    clone: Clone, answers: str, trusted: bool
) -> None:
    """Without answers, init takes what it finds (--yes)."""
    python = clone.root / ".venv" / "bin" / "python"
    (clone.root / "clusterjob.toml").unlink()
    (clone.root / ".venv/lib/python3.99/site-packages/torch").mkdir(parents=True)
    (clone.root / ".venv/lib/python3.99/site-packages/torch/__init__.py").touch()
    python.parent.mkdir()
    executable(python, f'#!/bin/sh\ntouch {clone.mark}\nexec {sys.executable} "$@"\n')
    code, shown = clone.on_terminal(answers, "init", *([] if answers else ["--yes"]))
    assert (code, clone.executed) == (0, False), shown
    assert str(python) in shown
    assert ("`clusterjob trust` trusts the file" in shown) is not trusted
    file = project_file(clone.root)
    assert file.data["clusters"]["local"]["python"] == str(python)
    assert trust.is_trusted(file.path, file.data) is trusted
    if not trusted:
        assert_refused(clone.call("doctor", "--cluster", "local"))
        assert not clone.executed


def test_function_needs_trust_as_a_script_does(clone: Clone) -> None:
    (clone.root / "ask.py").write_text(
        textwrap.dedent(
            """\
            import clusterjob

            def work():
                return 7

            if __name__ == "__main__":
                print(clusterjob.submit(work, cluster="local").result())
            """
        )
    )
    argv = [sys.executable, "ask.py"]
    done = subprocess.run(argv, cwd=clone.root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, clone.executed) == (1, "", False)
    assert "Untrusted" in done.stderr
    assert clone.call("trust", "--yes").code == 0
    done = subprocess.run(argv, cwd=clone.root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
