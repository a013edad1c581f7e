"""`clusterjob doctor` on this machine: each check passes, or fails for a real fault."""

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
from procs import TEST_TIMEOUT
from ssh_network import python_without_torch

LOCAL = ("--cluster", "local")


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """Return an interpreter without torch."""
    return str(python_without_torch(tmp_path))


@pytest.fixture
def light(tmp_path: Path, plain: str) -> list[str]:
    """Return options of a job whose interpreter has a fake torch that imports fast."""
    return ["--python", plain, "--env", f"PYTHONPATH={light_torch(tmp_path / 'lib')}"]


def home() -> Path:
    return Path(os.environ["CLUSTERJOB_HOME"])


def test_doctor_on_working_machine_reports_ok() -> None:
    found = doctor(
        *LOCAL, "--python", sys.executable, "--nodes", "2", "--nproc-per-node", "4", first=True
    )
    assert found.fit
    assert found.message("job") == "2 nodes with 4 workers each"
    assert (
        found.message("interpreter")
        == f"{sys.executable}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    )
    assert re.match(r"\d+\.\d+\.\d+\S* for .*, with .*gloo", found.message("torch"))
    assert found.message("start") == "forked from one process that has imported torch"
    assert [
        found.state(name)
        for name in ("directory", "disk", "bash", "torch", "start", "GPUs", "loopback")
    ] == ["ok"] * 7
    assert found.state("host name") in ("ok", "warning")
    assert not home().exists(), "it makes nothing"


def test_doctor_prints_checks_and_exits_with_1_on_failure(tmp_path: Path, plain: str) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [*CLUSTERJOB, "doctor", *LOCAL, *options]
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT
        )

    good = run("--python", plain, "--env", f"PYTHONPATH={light_torch(tmp_path / 'lib')}")
    assert (good.returncode, good.stderr) == (0, "")
    assert "ok       torch         2.9.0 for the CPU only, with gloo\n" in good.stdout
    bad = run("--python", plain)
    assert (bad.returncode, bad.stderr) == (1, "")
    lines = bad.stdout.splitlines()
    at = lines.index(f"failed   torch         no torch: {sys.executable} does not find it")
    assert (
        lines[at + 1]
        == f"{'':23}hint: `{sys.executable} -m pip install torch`, or choose another interpreter"
        " with --python"
    )
    assert lines[at + 2] == "unknown  start         not checked: it needs 'torch'"


def test_doctor_with_bad_arguments_exits_with_2(tmp_path: Path) -> None:
    for options in (
        ["--cluster", "nowhere"],
        ["--cluster", "local", "--nodes", "none"],
        ["script.py"],
    ):
        done = subprocess.run(
            [*CLUSTERJOB, "doctor", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT,
        )
        assert (done.returncode, done.stdout) == (2, ""), done
        assert "clusterjob: error: " in done.stderr


def test_doctor_of_plugin_backend_without_checks_reports_error(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("class Theirs: pass\n")
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[clusterjob.backends]\ntheirs = theirs:Theirs\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    argv = [*CLUSTERJOB, "doctor", "--cluster", "theirs"]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT, env=env
    )
    assert done.returncode == 1
    assert "error: the theirs backend has no checks of its own" in done.stderr


# -- the interpreter and torch ---------------------------------------------------------------------


def test_missing_interpreter_fails_interpreter_check() -> None:
    found = doctor(*LOCAL, "--python", "/nowhere/python")
    assert found.failed == ["interpreter"]
    assert found.message("interpreter") == "there is no interpreter /nowhere/python"
    assert [found.state(name) for name in ("torch", "start", "GPUs", "loopback")] == [
        "unknown",
        "unknown",
        "unknown",
        "ok",
    ]


def test_old_or_broken_interpreter_fails_interpreter_check(tmp_path: Path) -> None:
    old, none = tmp_path / "old", tmp_path / "none"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable}"
        ' -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[-1])" "$@"\n'
    )
    none.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    for path, message in (
        (old, "is 3.8.1, 3.10 or newer is needed"),
        (none, f"its interpreter {none} cannot be started: broken"),
    ):
        path.chmod(0o755)
        found = doctor(*LOCAL, "--python", str(path))
        assert found.failed == ["interpreter"]
        assert message in found.message("interpreter")


def test_setup_lines_run_before_interpreter_check(tmp_path: Path, plain: str) -> None:
    found = doctor(
        *LOCAL, "--python", plain, "--setup", "true", "--setup", "module-that-is-not load cuda"
    )
    assert found.failed == ["interpreter"]
    assert "a setup line failed: module-that-is-not load cuda (bash: " in found.message(
        "interpreter"
    )
    library = light_torch(tmp_path / "lib")
    assert (
        doctor(
            *LOCAL, "--python", plain, "--setup", f"export PYTHONPATH={shlex.quote(str(library))}"
        ).state("torch")
        == "ok"
    )


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_broken_torch_fails_torch_check(
    tmp_path: Path, light: list[str], text: str, message: str
) -> None:
    (tmp_path / "lib" / "torch" / "__init__.py").write_text(text)
    found = doctor(*LOCAL, *light)
    assert found.failed == ["torch"]
    assert message in found.message("torch")
    assert found.state("start") == found.state("GPUs") == "unknown"


@pytest.mark.parametrize(
    ("mode", "state", "message"),
    [
        (
            "auto",
            "warning",
            "by exec, each worker imports torch: 2 threads run after the import of torch",
        ),
        ("fork", "failed", "--start fork is impossible: 2 threads run after the import of torch"),
        ("exec", "ok", "by exec, because of --start exec"),
    ],
)
def test_threads_after_import_torch_make_fork_unsafe(
    tmp_path: Path, light: list[str], mode: str, state: str, message: str
) -> None:
    """A fork copies the locks of a thread that is left after the import, but not the thread."""
    with (tmp_path / "lib" / "torch" / "__init__.py").open("a") as file:
        file.write(
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        )
    found = doctor(*LOCAL, *light, "--start", mode)
    assert (found.state("start"), found.message("start")) == (state, message)
    assert found.fit == (state != "failed")


def test_too_few_gpus_warn_or_fail_if_required(light: list[str]) -> None:
    found = doctor(*LOCAL, *light, "--nodes", "2", "--gpus-per-node", "512")
    assert found.state("GPUs") == "warning"
    assert "but the job needs 1024: the job would be a rehearsal on the CPU" in found.message(
        "GPUs"
    )
    assert found.fit
    strict = doctor(*LOCAL, *light, "--nodes", "2", "--gpus-per-node", "512", "--require-gpus")
    assert strict.failed == ["job", "GPUs"]


# -- the directory of jobs -------------------------------------------------------------------------


def test_home_that_cannot_be_created_fails_directory_check(
    tmp_path: Path, light: list[str]
) -> None:
    (tmp_path / "file").touch()
    found = doctor(
        *LOCAL, *light, env={**os.environ, "CLUSTERJOB_HOME": str(tmp_path / "file" / "below")}
    )
    assert found.failed == ["directory"]
    assert f"cannot be made: {tmp_path / 'file'} cannot be written" in found.message("directory")
    assert found.state("disk") == "unknown"
    assert "CLUSTERJOB_HOME" in found.hints("directory")
    colon = doctor(*LOCAL, *light, env={**os.environ, "CLUSTERJOB_HOME": str(tmp_path / "a:b")})
    assert colon.failed == ["job"]
    assert "contains a colon" in colon.message("job")


def test_world_writable_home_fails_directory_check(light: list[str]) -> None:
    home().mkdir(parents=True, exist_ok=True)
    home().chmod(0o777)
    found = doctor(*LOCAL, *light)
    assert found.failed == ["directory"]
    assert "everyone can write to it (mode 0777)" in found.message("directory")


def test_read_only_or_full_disk_fails_check(light: list[str]) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting a file system takes root")
    home().mkdir(parents=True, exist_ok=True)
    at = shlex.quote(str(home()))

    def on(options: str) -> list[str]:
        mount = f'mount -t tmpfs -o {options} tmpfs {at} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, "sh"]

    read_only = doctor(*LOCAL, *light, prefix=on("ro"))
    assert read_only.failed == ["directory"]
    assert read_only.message("directory") == f"{home()} cannot be written: Read-only file system"
    full = doctor(*LOCAL, *light, prefix=on("size=8m"))
    assert full.failed == ["disk"]
    assert re.fullmatch(r"disk full: \S+ MB free in .*", full.message("disk"))


# -- the machine -----------------------------------------------------------------------------------


def test_missing_or_broken_bash_fails_bash_check(tmp_path: Path) -> None:
    found = doctor(*LOCAL, env={**os.environ, "PATH": str(tmp_path)})
    assert found.failed == ["bash"]
    assert found.state("interpreter") == found.state("torch") == "unknown"
    (tmp_path / "bash").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bash").chmod(0o755)
    assert "is not a working bash" in doctor(
        *LOCAL, env={**os.environ, "PATH": str(tmp_path)}
    ).message("bash")


def test_missing_loopback_fails_and_unresolved_host_name_warns(light: list[str]) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("network namespaces need root")
    found = doctor(*LOCAL, *light, prefix=["unshare", "--net"])
    assert found.failed == ["loopback"]
    assert found.message("loopback").startswith("127.0.0.1 cannot be reached: ")
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
    assert (unnamed.state("host name"), unnamed.message("host name")) == (
        "warning",
        "no-such-host-of-ours does not resolve",
    )


def test_doctor_json_is_one_document(light: list[str]) -> None:
    argv = [*CLUSTERJOB, "doctor", *LOCAL, "--json", *light]
    document = json.loads(
        subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=TEST_TIMEOUT
        ).stdout
    )
    assert {key: document[key] for key in ("schema", "cluster", "backend", "fit")} == {
        "schema": 1,
        "cluster": "local",
        "backend": "local",
        "fit": True,
    }
    assert {frozenset(check) for check in document["checks"]} == {
        frozenset(["name", "state", "message", "hint"])
    }
