"""`clusterjob doctor` on this machine: each check as it is when all is well, and each made to fail
for real.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doctoring import CLUSTERJOB, doctor, light_torch
from procs import PATIENCE
from sshworld import python_without_torch

LOCAL = ("--cluster", "local")


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """An interpreter that finds no torch."""
    return str(python_without_torch(tmp_path))


@pytest.fixture
def light(tmp_path: Path, plain: str) -> list[str]:
    """Options of a job whose interpreter finds a torch that is imported at once."""
    return ["--python", plain, "--env", f"PYTHONPATH={light_torch(tmp_path / 'lib')}"]


def home() -> Path:
    return Path(os.environ["CLUSTERJOB_HOME"])


def test_a_machine_that_is_fit() -> None:
    found = doctor(
        *LOCAL, "--python", sys.executable, "--nodes", "2", "--nproc-per-node", "4", first=True
    )
    assert found.fit
    assert found.words("job") == "2 nodes with 4 workers each"
    assert (
        found.words("interpreter")
        == f"{sys.executable}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    )
    assert re.match(r"\d+\.\d+\.\d+\S* for .*, with .*gloo", found.words("torch"))
    assert found.words("start") == "forked from one process that has imported torch"
    assert [
        found.state(name)
        for name in ("directory", "disk", "bash", "torch", "start", "GPUs", "loopback")
    ] == ["ok"] * 7
    assert found.state("host name") in ("ok", "warning")
    assert not home().exists(), "it makes nothing"


def test_its_lines_and_its_exit_code(tmp_path: Path, plain: str) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [*CLUSTERJOB, "doctor", *LOCAL, *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)

    good = run("--python", plain, "--env", f"PYTHONPATH={light_torch(tmp_path / 'lib')}")
    assert (good.returncode, good.stderr) == (0, "")
    assert "ok       torch         2.9.0 for the CPU alone, with gloo\n" in good.stdout
    bad = run("--python", plain)
    assert (bad.returncode, bad.stderr) == (1, "")
    lines = bad.stdout.splitlines()
    at = lines.index(f"failed   torch         no torch: {sys.executable} does not find it")
    assert (
        lines[at + 1]
        == f"{'':23}hint: `{sys.executable} -m pip install torch`, or --python names another"
    )
    assert lines[at + 2] == "unknown  start         not checked: it needs 'torch'"


def test_wrong_use(tmp_path: Path) -> None:
    for words in (
        ["--cluster", "nowhere"],
        ["--cluster", "local", "--nodes", "none"],
        ["script.py"],
    ):
        done = subprocess.run(
            [*CLUSTERJOB, "doctor", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stdout) == (2, ""), done
        assert "clusterjob: error: " in done.stderr


def test_a_backend_of_another_package_need_not_have_checks(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("class Theirs: pass\n")
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[clusterjob.backends]\ntheirs = theirs:Theirs\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    argv = [*CLUSTERJOB, "doctor", "--cluster", "theirs"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=PATIENCE, env=env
    )
    assert done.returncode == 1
    assert "error: the theirs backend has no checks of its own" in done.stderr


# -- the interpreter and torch ---------------------------------------------------------------------------------------------


def test_no_interpreter() -> None:
    found = doctor(*LOCAL, "--python", "/nowhere/python")
    assert found.failed == ["interpreter"]
    assert found.words("interpreter") == "there is no interpreter /nowhere/python"
    assert [found.state(name) for name in ("torch", "start", "GPUs", "loopback")] == [
        "unknown",
        "unknown",
        "unknown",
        "ok",
    ]


def test_an_interpreter_that_is_too_old_or_none(tmp_path: Path) -> None:
    old, none = tmp_path / "old", tmp_path / "none"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[-1])" "$@"\n'
    )
    none.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    for path, words in (
        (old, "is 3.8.1, 3.10 or newer is needed"),
        (none, f"its interpreter {none} cannot be started: broken"),
    ):
        path.chmod(0o755)
        found = doctor(*LOCAL, "--python", str(path))
        assert found.failed == ["interpreter"]
        assert words in found.words("interpreter")


def test_a_setup_line_that_fails_and_one_that_finds_torch(tmp_path: Path, plain: str) -> None:
    found = doctor(
        *LOCAL, "--python", plain, "--setup", "true", "--setup", "module-that-is-not load cuda"
    )
    assert found.failed == ["interpreter"]
    assert "a setup line failed: module-that-is-not load cuda (bash: " in found.words("interpreter")
    library = light_torch(tmp_path / "lib")
    assert (
        doctor(
            *LOCAL, "--python", plain, "--setup", f"export PYTHONPATH={shlex.quote(str(library))}"
        ).state("torch")
        == "ok"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "import torch failed: libcudart.so.12: cannot open shared",
        ),
        ("import os; os.kill(os.getpid(), 11)", "importing torch ends the interpreter: signal 11"),
        (
            "import os, sys; print('no licence', file=sys.stderr); os._exit(7)",
            "importing torch ends the interpreter: exit code 7: no licence",
        ),
        (
            "import no_such_module_of_torch_s",
            "import torch failed: No module named 'no_such_module_of_torch_s'",
        ),
    ],
)
def test_a_torch_that_is_broken(tmp_path: Path, light: list[str], text: str, words: str) -> None:
    (tmp_path / "lib" / "torch" / "__init__.py").write_text(text)
    found = doctor(*LOCAL, *light)
    assert found.failed == ["torch"]
    assert words in found.words("torch")
    assert found.state("start") == found.state("GPUs") == "unknown"


@pytest.mark.parametrize(
    ("mode", "state", "words"),
    [
        (
            "auto",
            "warning",
            "by exec, each importing torch for itself: 2 threads run after the import of torch",
        ),
        ("fork", "failed", "--start fork is impossible: 2 threads run after the import of torch"),
        ("exec", "ok", "by exec, as --start says"),
    ],
)
def test_a_fork_that_is_not_safe(
    tmp_path: Path, light: list[str], mode: str, state: str, words: str
) -> None:
    """A thread is left after the import: a fork would copy its locks, and not it."""
    with (tmp_path / "lib" / "torch" / "__init__.py").open("a") as file:
        file.write(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        )
    found = doctor(*LOCAL, *light, "--start", mode)
    assert (found.state("start"), found.words("start")) == (state, words)
    assert found.fit == (state != "failed")


def test_fewer_gpus_than_asked_for(light: list[str]) -> None:
    found = doctor(*LOCAL, *light, "--nodes", "2", "--gpus-per-node", "512")
    assert found.state("GPUs") == "warning"
    assert "where 1024 are asked for: the job would be a rehearsal on the CPU" in found.words(
        "GPUs"
    )
    assert found.fit
    strict = doctor(*LOCAL, *light, "--nodes", "2", "--gpus-per-node", "512", "--require-gpus")
    assert strict.failed == ["job", "GPUs"]


# -- the place of jobs -----------------------------------------------------------------------------------------------------


def test_a_home_that_cannot_be_made_or_written(tmp_path: Path, light: list[str]) -> None:
    (tmp_path / "file").touch()
    found = doctor(
        *LOCAL, *light, env={**os.environ, "CLUSTERJOB_HOME": str(tmp_path / "file" / "below")}
    )
    assert found.failed == ["directory"]
    assert f"cannot be made: {tmp_path / 'file'} cannot be written" in found.words("directory")
    assert found.state("disk") == "unknown"
    assert "CLUSTERJOB_HOME" in found.hints("directory")
    colon = doctor(*LOCAL, *light, env={**os.environ, "CLUSTERJOB_HOME": str(tmp_path / "a:b")})
    assert colon.failed == ["job"]
    assert "holds a colon" in colon.words("job")


def test_a_home_that_everybody_may_write(light: list[str]) -> None:
    home().mkdir(parents=True, exist_ok=True)
    home().chmod(0o777)
    found = doctor(*LOCAL, *light)
    assert found.failed == ["directory"]
    assert "has the mode 0777: everyone could replace what jobs run" in found.words("directory")


def test_a_disk_that_is_read_only_and_one_that_is_full(light: list[str]) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting a file system takes root")
    home().mkdir(parents=True, exist_ok=True)
    at = shlex.quote(str(home()))

    def on(options: str) -> list[str]:
        mount = f'mount -t tmpfs -o {options} tmpfs {at} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, "sh"]

    read_only = doctor(*LOCAL, *light, prefix=on("ro"))
    assert read_only.failed == ["directory"]
    assert read_only.words("directory") == f"{home()} cannot be written: Read-only file system"
    little = doctor(*LOCAL, *light, prefix=on("size=8m"))
    assert little.failed == ["disk"]
    assert re.fullmatch(r"disk full: \S+ MB free in .*", little.words("disk"))


# -- the machine -----------------------------------------------------------------------------------------------------------


def test_no_bash(tmp_path: Path) -> None:
    found = doctor(*LOCAL, env={**os.environ, "PATH": str(tmp_path)})
    assert found.failed == ["bash"]
    assert found.state("interpreter") == found.state("torch") == "unknown"
    (tmp_path / "bash").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bash").chmod(0o755)
    assert "is no bash that works" in doctor(
        *LOCAL, env={**os.environ, "PATH": str(tmp_path)}
    ).words("bash")


def test_no_loopback_and_a_name_that_does_not_resolve(light: list[str]) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("network namespaces need root")
    found = doctor(*LOCAL, *light, prefix=["unshare", "--net"])
    assert found.failed == ["loopback"]
    assert found.words("loopback").startswith("127.0.0.1 cannot be reached: ")
    named = [
        "unshare",
        "--uts",
        "--net",
        "sh",
        "-c",
        'hostname no-such-host-of-ours; ip link set lo up; exec "$@"',
        "sh",
    ]
    unnamed = doctor(*LOCAL, *light, prefix=named)
    assert unnamed.fit
    assert unnamed.state("loopback") == "ok"
    assert (unnamed.state("host name"), unnamed.words("host name")) == (
        "warning",
        "no-such-host-of-ours does not resolve",
    )


def test_the_json_is_one_document(light: list[str]) -> None:
    argv = [*CLUSTERJOB, "doctor", *LOCAL, "--json", *light]
    said = json.loads(
        subprocess.run(argv, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    )
    assert {key: said[key] for key in ("schema", "cluster", "backend", "fit")} == {
        "schema": 1, "cluster": "local", "backend": "local", "fit": True,
    }  # fmt: skip
    assert all(set(check) == {"name", "state", "words", "hint"} for check in said["checks"])
