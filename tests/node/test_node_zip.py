"""The node zip: small, the same bytes each time, and enough for a host that has a Python and
nothing of ours.
"""

from __future__ import annotations

import ast
import bz2
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import PATIENCE

import clusterjob
from clusterjob.core import node_zip
from clusterjob.node.zip import importer

PACKAGE = Path(clusterjob.__file__).parent
CLEAN = {"PATH": os.environ["PATH"]}


def interpreters() -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the Pythons of this machine with their versions, as pyenv and PATH have them."""
    candidates = sorted(Path.home().glob(".pyenv/versions/*/bin/python3"))
    for minor in range(6, 20):
        candidates += [
            Path(folder) / f"python3.{minor}" for folder in os.environ["PATH"].split(os.pathsep)
        ]
    seen = set()
    for path in candidates:
        if path.is_file() and "shims" not in path.parts:
            asked = [str(path), "-c", "import sys; print(*sys.version_info[:2])"]
            done = subprocess.run(
                asked, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
            if done.returncode == 0:
                major, minor = map(int, done.stdout.split())
                if (major, minor) not in seen:
                    seen.add((major, minor))
                    yield (major, minor), str(path)


PYTHONS = dict(interpreters())
OLD = [version for version in PYTHONS if version < (3, 10)]
OTHERS = [version for version in PYTHONS if version >= (3, 10) and version != sys.version_info[:2]]


@pytest.fixture
def zip_file(tmp_path: Path) -> Path:
    path = tmp_path / node_zip.NAME
    path.write_bytes(node_zip.node_zip())
    return path


def test_the_same_package_gives_the_same_bytes(tmp_path: Path) -> None:
    again = "import hashlib, clusterjob.core.node_zip; print(hashlib.sha256(clusterjob.core.node_zip.node_zip()).hexdigest())"
    digests = set()
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed, "TZ": f"UTC{seed}"}
        done = subprocess.run(
            [sys.executable, "-c", again],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_zip_that_was_made_once_is_taken_again_until_the_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    made = node_zip.node_zip(cache)
    assert not cache.exists()
    node_zip.keep(made, cache)
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == made == node_zip.node_zip()
    assert kept.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(node_zip, "_make", lambda *_: pytest.fail("it was made again"))
    assert node_zip.node_zip(cache) == made
    monkeypatch.undo()
    kept.write_bytes(made[:1000])  # a file that somebody cut short
    assert node_zip.node_zip(cache) == made


def test_a_few_zips_of_other_sources_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    for number in range(8):
        monkeypatch.setattr(node_zip, "_fingerprint", lambda *_, number=number: f"of{number}")
        node_zip.keep(b"zip", cache)
        os.utime(cache / f"node-of{number}.pyz", (number, number))
    assert {path.name for path in cache.iterdir()} == {
        f"node-of{number}.pyz" for number in (3, 4, 5, 6, 7)
    }


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_zip_that_somebody_else_could_have_written_is_not_taken(
    tmp_path: Path, mode: int
) -> None:
    made = node_zip.node_zip()
    node_zip.keep(made, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(made.replace(b"__main__.py", b"__mein__.py"))
    assert node_zip.node_zip(tmp_path) != made
    kept.chmod(mode)
    assert node_zip.node_zip(tmp_path) == made


@pytest.mark.skipif(os.geteuid() != 0, reason="a file can be given to somebody else by root alone")
def test_a_zip_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    made = node_zip.node_zip()
    node_zip.keep(made, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(made.replace(b"__main__.py", b"__mein__.py"))
    os.chown(kept, 65534, 65534)
    assert node_zip.node_zip(tmp_path) == made


def test_it_is_small() -> None:
    size = len(node_zip.node_zip())
    print(f"the node zip has {size} bytes")
    assert size < node_zip.LIMIT == 150_000


def test_it_holds_what_a_job_needs_and_nothing_else() -> None:
    """All but what only submits jobs elsewhere; sources alone."""
    with zipfile.ZipFile(io.BytesIO(node_zip.node_zip())) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        texts = {name: archive.read(name) for name in names}
    block = json.loads(bz2.decompress(texts.pop(f"clusterjob/{importer.NAME}")))
    assert not set(block) & set(texts)
    texts |= {name: text.encode() for name, text in block.items()}
    modules = {
        f"clusterjob/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")
    }
    modules = {
        name: path
        for name, path in modules.items()
        if not name.removeprefix("clusterjob/").startswith(node_zip.LEFT_OUT)
    }
    assert set(texts) == {"__main__.py", *modules}
    assert {
        "clusterjob/api/functions.py",
        "clusterjob/core/jobs.py",
        "clusterjob/backends/local/backend.py",
    } < set(block)
    texts["clusterjob/__init__.py"] = texts["clusterjob/__init__.py"].removesuffix(
        node_zip._INSTALL.encode()
    )
    for name, path in modules.items():
        told, packed = ast.parse(path.read_text()), ast.parse(texts[name])
        assert told_away(told) == told_away(packed), name
        assert [node.lineno for node in statements(told)] == [
            node.lineno for node in statements(packed)
        ], name
    assert b"\n    # " not in texts["clusterjob/node/agent.py"]
    assert texts["__main__.py"] == (PACKAGE / "node" / "zip" / "main.py").read_bytes()


def test_all_of_it_is_there_for_whoever_asks_in_a_job(zip_file: Path, tmp_path: Path) -> None:
    """Its code has its file, its lines and its place; what it leaves out is the installed
    package's.
    """
    code = """
import inspect, sys
import clusterjob
assert "bz2" not in sys.modules
import clusterjob.core.units as units, clusterjob.backends.slurm.flags, clusterjob.cli.job_options, clusterjob.backends.ssh.backend
from clusterjob import JobSpec
print(units.__file__, units.__spec__.origin, inspect.getsource(units.show_size).splitlines()[0])
print(clusterjob.backends.slurm.flags.__file__, clusterjob.backends.ssh.backend.__file__, clusterjob.backends.base.__file__)
try:
    units.parse_size("x")
except Exception as error:
    import traceback
    print(traceback.extract_tb(error.__traceback__)[-1].line)
import importlib.util
assert importlib.util.find_spec("clusterjob.nothing") is None
"""
    environ = {**CLEAN, "PYTHONPATH": str(zip_file)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file = f"{zip_file}/clusterjob/core/units.py"
    assert done.stdout.splitlines()[0] == f"{file} {file} def show_size(size: int) -> str:"
    left_out = [f"{PACKAGE}/backends/slurm/flags.py", f"{PACKAGE}/backends/ssh/backend.py"]
    assert done.stdout.splitlines()[1].split() == [
        *left_out,
        f"{zip_file}/clusterjob/backends/base.py",
    ]
    assert done.stdout.splitlines()[2].startswith("raise SpecError(")
    command = [sys.executable, "-m", "clusterjob", "submit", "--help"]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Start a job and print its id" in done.stdout, done.stderr


@pytest.mark.parametrize("version", ["0.0.9", None])
def test_installed_package_of_another_version_is_refused(
    zip_file: Path, tmp_path: Path, version: str | None
) -> None:
    """Its modules and those of the zip would not fit; where there is none, there is nothing to
    submit with.
    """
    if version is not None:
        (tmp_path / "site" / "clusterjob" / "cli").mkdir(parents=True)
        (tmp_path / "site" / "clusterjob" / "__init__.py").write_text(
            f'__version__ = "{version}"\n'
        )
        (tmp_path / "site" / "clusterjob" / "cli" / "__init__.py").touch()
    environ = {**CLEAN, "PYTHONPATH": f"{zip_file}:{tmp_path / 'site'}"}
    asked = [
        sys.executable,
        "-S",
        "-c",
        "from clusterjob import submit, spawn, JobSpec; import clusterjob.cli",
    ]
    done = subprocess.run(
        asked, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    if version is None:
        assert last == "ModuleNotFoundError: No module named 'clusterjob.cli'"
    else:
        assert last.startswith(
            f"ImportError: this job came with clusterjob {clusterjob.__version__}, and {tmp_path}/site/clusterjob/__init__.py"
        )


def told_away(tree: ast.Module) -> str:
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
def test_it_runs_a_job_from_anywhere_with_nothing_installed(
    zip_file: Path, tmp_path: Path, flags: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, clusterjob; print(os.environ['RANK'], sys.argv[1:], clusterjob.__file__, clusterjob.__version__)\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environ = {**CLEAN, "CLUSTERJOB_JOB_DIR": str(tmp_path / "job")}
    command = [sys.executable, *flags, str(zip_file), "--start", "fork", str(script), "--flag"]
    done = subprocess.run(
        command,
        env=environ,
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    path = zip_file / "clusterjob" / "__init__.py"
    assert done.stdout == f"[0] 0 ['--flag'] {path} {clusterjob.__version__}\n"
    assert list(elsewhere.iterdir()) == []


def test_what_is_wrong_is_said_without_a_traceback(zip_file: Path) -> None:
    command = [sys.executable, "-I", "-S", str(zip_file)]
    done = subprocess.run(
        [*command, "--nodez"],
        env=CLEAN,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("clusterjob: ")
    assert "Traceback" not in done.stderr


def test_it_is_imported_from_pythonpath_before_an_installed_one(
    zip_file: Path, tmp_path: Path
) -> None:
    code = "import clusterjob, clusterjob.node.agent, clusterjob.core.spec, json\n"
    code += "print(json.dumps([clusterjob.__file__, clusterjob.__version__]))"
    environ = {**CLEAN, "PYTHONPATH": str(zip_file)}
    for flags in ([], ["-S"]):
        done = subprocess.run(
            [sys.executable, *flags, "-c", code],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == [
            str(zip_file / "clusterjob" / "__init__.py"),
            clusterjob.__version__,
        ]


@pytest.mark.parametrize(
    "version",
    OLD or [pytest.param(None, marks=pytest.mark.skip(reason="no Python before 3.10 here"))],
)
def test_an_old_python_is_told_in_its_own_words(
    zip_file: Path, tmp_path: Path, version: tuple[int, int]
) -> None:
    ends = tmp_path / "job" / "ends"
    ends.mkdir(parents=True)
    environ = {**CLEAN, "CLUSTERJOB_JOB_DIR": str(tmp_path / "job"), "CLUSTERJOB_NODE_RANK": "3"}
    command = [PYTHONS[version], str(zip_file), "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1
    said = re.fullmatch(
        rf"clusterjob: (\S+ is Python {version[0]}\.{version[1]}: 3\.10 or newer is needed)\n",
        done.stderr,
    )
    assert said, done.stderr
    code, _, message = (ends / "node3.refused").read_text().partition("\n")
    assert (code, message.strip()) == ("1", f"{os.uname().nodename}: {said[1]}")


@pytest.mark.parametrize(
    "version", OTHERS or [pytest.param(None, marks=pytest.mark.skip(reason="no other Python here"))]
)
def test_other_pythons_run_it(zip_file: Path, tmp_path: Path, version: tuple[int, int]) -> None:
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
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) in (
        [f"[{rank}] {version[0]} {version[1]}" for rank in (0, 1)],
        [f"[0-1] {version[0]} {version[1]}"],
    )
    assert done.stderr == "clusterjob: SUCCEEDED\n"
