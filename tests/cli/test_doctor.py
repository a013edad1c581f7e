"""`clusterjob doctor` on this machine: each check passes, or fails for a real fault."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doctoring import CLUSTERJOB, doctor, light_torch
from launching import executable, write_tree
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


# -- problems of this machine ----------------------------------------------------------------------

OLD = "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[-1])"
TORCH = "lib/torch/__init__.py"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")


@dataclass
class Problem:
    """A problem, and what `doctor` says; in its texts, ``{place}`` is the test's directory.

    Attributes:
        check: the only check that fails, or those that fail.
        message: a part of its message.
        files: programs and modules to write.
        options: options of `doctor`.
        home: the directory of jobs.
        mount: options of a file system that is mounted there.
        unknown: a check that is unknown, because it needs the one that fails.
    """

    check: str
    message: str
    files: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    home: str = ""
    mount: str = ""
    unknown: str = ""


PYTHON = ("--python", "{place}/python")
PROBLEMS = {
    "old interpreter": Problem(
        "interpreter",
        "is 3.8.1, 3.10 or newer is needed",
        {"python": f'#!/bin/sh\nexec {sys.executable} -c "{OLD}" "$@"\n'},
        PYTHON,
        unknown="torch",
    ),
    "broken interpreter": Problem(
        "interpreter",
        "cannot be started: broken",
        {"python": "#!/bin/sh\necho broken >&2; exit 3\n"},
        PYTHON,
        unknown="start",
    ),
    "no interpreter": Problem(
        "interpreter", "there is no interpreter ", options=PYTHON, unknown="GPUs"
    ),
    "setup line": Problem(
        "interpreter",
        "a setup line failed: module-that-is-not load cuda (bash: ",
        options=("--setup", "true", "--setup", "module-that-is-not load cuda"),
        unknown="torch",
    ),
    "missing GPUs": Problem("job GPUs", "", options=("--gpus-per-node", "512", "--require-gpus")),
    "home below a file": Problem(
        "directory",
        "cannot be made: {place}/file cannot be written",
        {"file": ""},
        home="file/below",
    ),
    "home with a colon": Problem("job", "contains a colon", home="a:b"),
    "missing library of torch": Problem(
        "torch",
        "import torch failed: libcudart.so.12: cannot open shared",
        {TORCH: "raise ImportError('libcudart.so.12: cannot open shared object file')"},
        unknown="start",
    ),
    "torch that kills": Problem(
        "torch",
        "importing torch ends the interpreter: signal 11",
        {TORCH: "import os; os.kill(os.getpid(), 11)"},
        unknown="GPUs",
    ),
    "torch that exits": Problem(
        "torch",
        "importing torch ends the interpreter: exit code 7: no licence",
        {TORCH: "import os, sys; print('no licence', file=sys.stderr); os._exit(7)"},
        unknown="start",
    ),
    "missing module of torch": Problem(
        "torch",
        "import torch failed: No module named 'no_such_module_of_torch_s'",
        {TORCH: "import no_such_module_of_torch_s"},
        unknown="start",
    ),
    "read-only disk": Problem(
        "directory", " cannot be written: Read-only file system", home="home", mount="ro"
    ),
    "full disk": Problem("disk", "disk full: ", home="home", mount="size=8m"),
}


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, id=name, marks=[as_root] if problem.mount else [])
        for name, problem in PROBLEMS.items()
    ],
)
def test_problem_fails_its_check(tmp_path: Path, light: list[str], problem: Problem) -> None:
    write_tree(tmp_path, **problem.files)
    for name in problem.files:
        (tmp_path / name).chmod(0o755)
    words = [word.format(place=tmp_path) for word in problem.options]
    env, prefix = dict(os.environ), []
    if problem.home:
        env["CLUSTERJOB_HOME"] = place = str(tmp_path / problem.home)
    if problem.mount:
        Path(place).mkdir()
        mount = f'mount -t tmpfs -o {problem.mount} tmpfs {shlex.quote(place)} && exec "$@"'
        prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    found = doctor(*LOCAL, *light, *words, env=env, prefix=prefix)
    assert found.failed == problem.check.split()
    assert problem.message.format(place=tmp_path) in found.message(found.failed[0])
    assert found.state("loopback") == "ok"
    assert not problem.unknown or found.state(problem.unknown) == "unknown"


def test_setup_lines_run_before_the_checks(tmp_path: Path, plain_python: str) -> None:
    library = shlex.quote(str(light_torch(tmp_path / "lib")))
    options = ("--python", plain_python, "--setup", f"export PYTHONPATH={library}")
    assert doctor(*LOCAL, *options).state("torch") == "ok"


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


# -- the machine -----------------------------------------------------------------------------------


def test_missing_or_broken_bash_fails_bash_check(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    found = doctor(*LOCAL, env=env)
    assert found.failed == ["bash"]
    assert found.state("interpreter") == found.state("torch") == "unknown"
    executable(tmp_path / "bash", "#!/bin/sh\nexit 0\n")
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
