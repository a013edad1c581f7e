"""`clusterjob doctor` on this machine: each check passes, or fails for a real fault."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doctoring import CLUSTERJOB, doctor, light_torch
from launching import write_tree
from procs import TEST_TIMEOUT

from clusterjob.core.records import home

LOCAL = ("--cluster", "local")


@pytest.fixture
def light(tmp_path: Path, plain_python: str) -> list[str]:
    """Return options of a job whose interpreter has a fake torch that imports fast."""
    return ["--python", plain_python, "--env", f"PYTHONPATH={light_torch(tmp_path / 'lib')}"]


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLUSTERJOB, "doctor", *options], env=os.environ | variables, capture_output=True,
        text=True, check=False, timeout=TEST_TIMEOUT,
    )  # fmt: skip


def test_doctor_on_working_machine_reports_ok() -> None:
    found = doctor(
        *LOCAL, "--python", sys.executable, "--nodes", "2", "--nproc-per-node", "4", first=True
    )
    assert found.fit
    assert found.message("job") == "2 nodes with 4 workers each"
    version = ".".join(map(str, sys.version_info[:3]))
    assert found.message("interpreter") == f"{sys.executable}, Python {version}"
    assert re.match(r"\d+\.\d+\.\d+\S* for .*, with .*gloo", found.message("torch"))
    assert found.message("start") == "forked from one process that has imported torch"
    names = ("directory", "disk", "bash", "torch", "start", "GPUs", "loopback")
    assert {found.state(name) for name in names} == {"ok"}
    assert not home().exists(), "it makes nothing"


def test_doctor_prints_checks_and_exits_with_1_on_failure(
    light: list[str], plain_python: str
) -> None:
    good = run(*LOCAL, *light)
    assert (good.returncode, good.stderr) == (0, "")
    assert "ok       torch         2.9.0 for the CPU only, with gloo\n" in good.stdout
    document = json.loads(run(*LOCAL, "--json", *light).stdout)
    assert {frozenset(check) for check in document.pop("checks")} == {
        frozenset(["name", "state", "message", "hint"])
    }
    assert document == {"schema": 1, "cluster": "local", "backend": "local", "fit": True}
    bad = run(*LOCAL, "--python", plain_python)
    assert (bad.returncode, bad.stderr) == (1, "")
    assert (
        f"failed   torch         no torch: {sys.executable} does not find it\n"
        f"{'':23}hint: `{sys.executable} -m pip install torch`, or choose another interpreter"
        " with --python\nunknown  start         not checked: it needs 'torch'\n"
    ) in bad.stdout


def test_doctor_of_plugin_backend_without_checks_reports_error(tmp_path: Path) -> None:
    files = {
        "theirs.py": "class Theirs: pass\n",
        "theirs-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1\n",
        "theirs-1.dist-info/entry_points.txt": "[clusterjob.backends]\ntheirs = theirs:Theirs\n",
    }
    write_tree(tmp_path, **files)
    done = run("--cluster", "theirs", PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert done.returncode == 1
    assert "error: the theirs backend has no checks of its own" in done.stderr


OLD = "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[-1])"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f'exec {sys.executable} -c "{OLD}" "$@"',
            "is 3.8.1, 3.10 or newer is needed",
        ),
        ("echo broken >&2; exit 3", "cannot be started: broken"),
        ("", "there is no interpreter "),
    ],
    ids=["old", "broken", "missing"],
)
def test_old_broken_or_missing_interpreter_fails_interpreter_check(
    tmp_path: Path, script: str, message: str
) -> None:
    path = tmp_path / "python"
    if script:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    found = doctor(*LOCAL, "--python", str(path))
    assert found.failed == ["interpreter"]
    assert message in found.message("interpreter")
    states = [found.state(name) for name in ("torch", "start", "GPUs", "loopback")]
    assert states == ["unknown", "unknown", "unknown", "ok"]


# -- the interpreter and torch ---------------------------------------------------------------------


def test_setup_lines_run_before_interpreter_check(tmp_path: Path, plain_python: str) -> None:
    options = (*LOCAL, "--python", plain_python, "--setup")
    found = doctor(*options, "true", "--setup", "module-that-is-not load cuda")
    assert found.failed == ["interpreter"]
    failed = "a setup line failed: module-that-is-not load cuda (bash: "
    assert failed in found.message("interpreter")
    library = shlex.quote(str(light_torch(tmp_path / "lib")))
    assert doctor(*options, f"export PYTHONPATH={library}").state("torch") == "ok"


def test_missing_required_gpus_fail_job_and_gpus(light: list[str]) -> None:
    found = doctor(*LOCAL, *light, "--gpus-per-node", "512", "--require-gpus")
    assert found.failed == ["job", "GPUs"]


@pytest.mark.parametrize(
    ("below", "check", "message"),
    [
        ("file/below", "directory", "cannot be made: {}/file cannot be written"),
        ("a:b", "job", "contains a colon"),
    ],
)
def test_home_that_cannot_be_used_fails_check(
    tmp_path: Path, light: list[str], below: str, check: str, message: str
) -> None:
    (tmp_path / "file").touch()
    found = doctor(*LOCAL, *light, env={**os.environ, "CLUSTERJOB_HOME": str(tmp_path / below)})
    assert found.failed == [check]
    assert message.format(tmp_path) in found.message(check)


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


# -- the directory of jobs -------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
@pytest.mark.parametrize(
    ("options", "check", "message"),
    [
        ("ro", "directory", ".* cannot be written: Read-only file system"),
        ("size=8m", "disk", r"disk full: \S+ MB free in .*"),
    ],
)
def test_read_only_or_full_disk_fails_check(
    light: list[str], options: str, check: str, message: str
) -> None:
    home().mkdir(parents=True, exist_ok=True)
    mount = f'mount -t tmpfs -o {options} tmpfs {shlex.quote(str(home()))} && exec "$@"'
    found = doctor(*LOCAL, *light, prefix=["unshare", "--mount", "sh", "-c", mount, "sh"])
    assert found.failed == [check]
    assert re.fullmatch(message, found.message(check))


# -- the machine -----------------------------------------------------------------------------------


def test_missing_or_broken_bash_fails_bash_check(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    found = doctor(*LOCAL, env=env)
    assert found.failed == ["bash"]
    assert found.state("interpreter") == found.state("torch") == "unknown"
    (tmp_path / "bash").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bash").chmod(0o755)
    assert "is not a working bash" in doctor(*LOCAL, env=env).message("bash")


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_missing_loopback_fails_and_unresolved_host_name_warns(light: list[str]) -> None:
    found = doctor(*LOCAL, *light, prefix=["unshare", "--net"])
    assert found.failed == ["loopback"]
    assert found.message("loopback").startswith("127.0.0.1 cannot be reached: ")
    rename = 'hostname no-such-host-of-ours; ip link set lo up; exec "$@"'
    named = ["unshare", "--uts", "--net", "sh", "-c", rename, "sh"]
    unnamed = doctor(*LOCAL, *light, prefix=named)
    assert (unnamed.fit, unnamed.state("loopback")) == (True, "ok")
    assert unnamed.state("host name") == "warning"
    assert unnamed.message("host name") == "no-such-host-of-ours does not resolve"
