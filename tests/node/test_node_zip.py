"""The node zip: small, reproducible, and enough for a host that has only a Python."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import new_folder
from procs import TEST_TIMEOUT, checked_output

import clusterjob
from clusterjob.core import node_zip

PACKAGE = Path(clusterjob.__file__).parent
CLEAN = {"PATH": os.environ["PATH"]}


def interpreters() -> Iterator[tuple[tuple[int, int], str]]:
    """Yield version and path of each Python 3 of this machine, from pyenv and PATH."""
    for minor in range(6, 20):
        found = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")]
        for folder in os.environ["PATH"].split(os.pathsep):
            found.append(Path(folder, f"python3.{minor}"))
        for path in found:
            if path.is_file() and "shims" not in path.parts:
                yield (3, minor), str(path)


PYTHONS = dict(interpreters())
OLD_VERSIONS = [version for version in PYTHONS if version < (3, 10)]
OTHER_VERSIONS = [
    version for version in PYTHONS if version >= (3, 10) and version != sys.version_info[:2]
]


@pytest.fixture
def zip_file(tmp_path: Path) -> Path:
    path = tmp_path / node_zip.NAME
    path.write_bytes(node_zip.node_zip())
    return path


def test_node_zip_of_same_package_has_same_bytes(tmp_path: Path) -> None:
    code = (
        "import hashlib, clusterjob.core.node_zip; "
        "print(hashlib.sha256(clusterjob.core.node_zip.node_zip()).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed, "TZ": f"UTC{seed}"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_cached_zip_is_reused_and_damaged_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    built = node_zip.node_zip(cache)
    assert not cache.exists()
    node_zip.keep(built, cache)
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == built == node_zip.node_zip()
    assert kept.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(node_zip, "_make", lambda *_: pytest.fail("the zip was built again"))
    assert node_zip.node_zip(cache) == built
    monkeypatch.undo()
    kept.write_bytes(built[:1000])  # a truncated file
    assert node_zip.node_zip(cache) == built


def test_cache_keeps_five_newest_zips_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for number in range(8):
        monkeypatch.setattr(node_zip, "_fingerprint", lambda *_, number=number: f"of{number}")
        node_zip.keep(b"zip", cache)
        os.utime(cache / f"node-of{number}.pyz", (number, number))
    assert {path.name for path in cache.iterdir()} == {
        f"node-of{number}.pyz" for number in (3, 4, 5, 6, 7)
    }


@pytest.mark.parametrize(("mode", "owner"), [(0o620, 0), (0o602, 0), (0o600, 65534)])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_cached_zip_that_other_users_can_write_is_ignored(
    tmp_path: Path, mode: int, owner: int
) -> None:
    built = node_zip.node_zip()
    node_zip.keep(built, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(built.replace(b"__main__.py", b"__mein__.py"))
    assert node_zip.node_zip(tmp_path) != built
    kept.chmod(mode)
    os.chown(kept, owner, owner)
    assert node_zip.node_zip(tmp_path) == built


def test_node_zip_is_below_size_limit() -> None:
    size = len(node_zip.node_zip())
    print(f"the node zip has {size} bytes")
    assert size < node_zip.LIMIT == 200_000


def test_node_zip_holds_only_modules_that_jobs_need(zip_file: Path) -> None:
    """It holds sources only, without the modules that submit jobs."""
    with zipfile.ZipFile(zip_file) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {"__main__.py", "clusterjob/__init__.py"}
        main = archive.read("__main__.py")
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import clusterjob;"
        "sys.meta_path[0]._find('');"
        "modules = sys.meta_path[0]._modules.values();"
        "json.dump([(file, text.decode()) for file, text in modules], sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, zip_file], capture_output=True, check=True
    )
    texts = dict(json.loads(done.stdout))
    modules = {
        f"clusterjob/{path.relative_to(PACKAGE).as_posix()}": path
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(node_zip.LEFT_OUT)
    }
    for name in ("__init__", "node/zip_importer", "node/zip_main"):
        modules.pop(f"clusterjob/{name}.py")
    assert set(texts) == set(modules)
    assert "clusterjob/api/spawning.py" in texts
    assert "clusterjob/core/jobs.py" not in texts
    for name, path in modules.items():
        source, packed = ast.parse(path.read_text()), ast.parse(texts[name])
        assert without_docstrings(source) == without_docstrings(packed), name
        assert [node.lineno for node in statements(source)] == [
            node.lineno for node in statements(packed)
        ], name
    assert "\n    # " not in texts["clusterjob/node/agent/agent.py"]
    assert main.decode() == node_zip.bare((PACKAGE / "node" / "zip_main.py").read_text())


def test_process_opens_node_zip_three_times(zip_file: Path) -> None:
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
sys.path.insert(0, sys.argv[1])
from clusterjob import bootstrap
import clusterjob.node.launch
print(opened.count(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, zip_file], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


def test_modules_in_zip_and_modules_left_out_can_be_imported_in_job(
    zip_file: Path, tmp_path: Path
) -> None:
    """Modules in the zip have a file, source lines and tracebacks.

    Modules that the zip leaves out come from the installed package.
    """
    code = """
import inspect, sys
import clusterjob
assert "json" not in sys.modules
import clusterjob.node.system.ranges as ranges, clusterjob.backends.slurm.flags
import clusterjob.cli.job_options, clusterjob.backends.ssh.backend
from clusterjob import JobSpec
print(ranges.__file__, inspect.getsource(ranges.expand_hostlist).splitlines()[0])
from clusterjob.backends import base, slurm, ssh
print(slurm.flags.__file__, ssh.backend.__file__, base.__file__)
try:
    ranges.expand_hostlist("[")
except Exception as error:
    import traceback
    print(traceback.extract_tb(error.__traceback__)[-1].line)
import importlib.util
assert importlib.util.find_spec("clusterjob.nothing") is None
"""
    environ = {**CLEAN, "PYTHONPATH": str(zip_file)}
    out = checked_output(sys.executable, "-c", code, env=environ, cwd=tmp_path)
    file = f"{zip_file}/clusterjob/node/system/ranges.py"
    assert out.splitlines()[0] == f"{file} def expand_hostlist(text: str) -> list[str]:"
    left_out = [f"{PACKAGE}/backends/slurm/flags.py", f"{PACKAGE}/backends/ssh/backend.py"]
    assert out.splitlines()[1].split() == [
        *left_out,
        f"{PACKAGE}/backends/base.py",
    ]
    assert out.splitlines()[2].startswith("raise PlacementError(")
    command = [sys.executable, "-m", "clusterjob", "submit", "--help"]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Start a job in the background and print its id" in done.stdout, done.stderr


@pytest.mark.parametrize("version", ["0.0.9", None])
def test_installed_package_of_other_version_or_missing_one_is_refused(
    zip_file: Path, tmp_path: Path, version: str | None
) -> None:
    """The zip lacks the modules that submit jobs; modules of another version are not used."""
    if version is not None:
        (tmp_path / "site" / "clusterjob" / "cli").mkdir(parents=True)
        (tmp_path / "site" / "clusterjob" / "__init__.py").write_text(
            f'__version__ = "{version}"\n'
        )
        (tmp_path / "site" / "clusterjob" / "cli" / "__init__.py").touch()
    environ = {**CLEAN, "PYTHONPATH": f"{zip_file}:{tmp_path / 'site'}"}
    command = [
        sys.executable,
        "-S",
        "-c",
        "from clusterjob import submit, spawn, JobSpec; import clusterjob.cli",
    ]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    if version is None:
        assert last == "ModuleNotFoundError: No module named 'clusterjob.cli'"
    else:
        assert last.startswith(
            f"ImportError: this job uses clusterjob {clusterjob.__version__}, "
            f"but {tmp_path}/site/clusterjob/__init__.py"
        )


def test_module_that_submits_can_be_imported_without_installed_package(
    zip_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from clusterjob import Job, submit\n"
        "def train(job: Job[int] | None = None):\n    return 1\n"
    )
    code = "import train; print(train.train()); train.submit(train.train)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**CLEAN, "PYTHONPATH": str(zip_file)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1\n", done.stderr
    assert "clusterjob.submit needs an installation of clusterjob here" in done.stderr


def without_docstrings(tree: ast.Module) -> str:
    """Return a module without docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.dump(tree, include_attributes=False)


def statements(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


@pytest.mark.parametrize("flags", [["-I"], ["-I", "-S"]])
def test_node_zip_runs_job_without_installed_packages(
    zip_file: Path, tmp_path: Path, flags: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, clusterjob; "
        "print(os.environ['RANK'], sys.argv[1:], clusterjob.__file__, clusterjob.__version__)\n"
    )
    elsewhere = new_folder(tmp_path / "elsewhere")
    environ = {**CLEAN, "CLUSTERJOB_JOB_DIR": str(tmp_path / "job")}
    command = [sys.executable, *flags, str(zip_file), "--start", "fork", str(script), "--flag"]
    out = checked_output(*command, env=environ, cwd=elsewhere)
    path = zip_file / "clusterjob" / "__init__.py"
    assert out == f"[0] 0 ['--flag'] {path} {clusterjob.__version__}\n"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "version",
    OLD_VERSIONS
    or [pytest.param(None, marks=pytest.mark.skip(reason="no Python before 3.10 here"))],
)
def test_old_python_is_refused_with_required_version(
    zip_file: Path, tmp_path: Path, version: tuple[int, int]
) -> None:
    ends = new_folder(tmp_path / "job" / "ends")
    environ = {**CLEAN, "CLUSTERJOB_JOB_DIR": str(tmp_path / "job"), "CLUSTERJOB_NODE_RANK": "3"}
    command = [PYTHONS[version], str(zip_file), "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT
    )
    assert done.returncode == 1
    match = re.fullmatch(
        rf"clusterjob: (\S+ is Python {version[0]}\.{version[1]}: 3\.10 or newer is needed)\n",
        done.stderr,
    )
    assert match, done.stderr
    code, _, message = (ends / "node3.refused").read_text().partition("\n")
    assert (code, message.strip()) == ("1", f"{os.uname().nodename}: {match[1]}")


@pytest.mark.parametrize(
    "version",
    OTHER_VERSIONS or [pytest.param(None, marks=pytest.mark.skip(reason="no other Python here"))],
)
def test_node_zip_runs_under_other_python_versions(
    zip_file: Path, tmp_path: Path, version: tuple[int, int]
) -> None:
    environ = {**CLEAN, "CLUSTERJOB_JOB_DIR": str(tmp_path / "job")}
    code = "import sys; print(*sys.version_info[:2])"
    command = [
        PYTHONS[version],
        "-I",
        "-S",
        str(zip_file),
        "--nproc-per-node",
        "2",
        "--",
        PYTHONS[version],
        "-c",
        code,
    ]
    done = subprocess.run(
        command,
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) in (
        [f"[{rank}] {version[0]} {version[1]}" for rank in (0, 1)],
        [f"[0-1] {version[0]} {version[1]}"],
    )
    assert done.stderr == "clusterjob: SUCCEEDED\n"
