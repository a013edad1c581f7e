"""Contents of the wheel and the sdist, and the command of an installed wheel."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ROOT
from procs import checked_output

import clusterjob

TEMPLATES = sorted(path.name for path in (ROOT / "templates").glob("*.j2"))

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="not run from a source tree"
)


def run(*command: str, cwd: Path, **variables: str) -> str:
    return checked_output(*command, cwd=cwd, env=os.environ | variables)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the sdist, and two wheels: from the source tree and from the unpacked sdist.

    The build downloads nothing and leaves no file in the source tree.
    """
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    before = set(os.listdir(ROOT))
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d"]
    run(*build, str(directory / "tree"), "-t", "sdist", "-t", "wheel", cwd=ROOT)
    [sdist] = (directory / "tree").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "unpacked", filter="data") if sys.version_info >= (
            3,
            12,
        ) else archive.extractall(directory / "unpacked")
    [unpacked] = (directory / "unpacked").iterdir()
    run(*build, str(directory / "rebuilt"), "-t", "wheel", cwd=unpacked)
    [wheel], [rebuilt] = (directory / "tree").glob("*.whl"), (directory / "rebuilt").glob("*.whl")
    assert set(os.listdir(ROOT)) == before
    return {"sdist": sdist, "wheel": wheel, "wheel of the sdist": rebuilt, "unpacked": unpacked}


@pytest.mark.parametrize("kind", ["wheel", "wheel of the sdist"])
def test_wheel_contains_package_and_templates(built: dict[str, Path], kind: str) -> None:
    with zipfile.ZipFile(built[kind]) as archive:
        names = set(archive.namelist())
        packed = {
            name.rpartition("/")[2]: archive.read(name)
            for name in names
            if name.startswith("clusterjob/templates/")
        }
    assert packed == {name: (ROOT / "templates" / name).read_bytes() for name in TEMPLATES}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "clusterjob").rglob("*.py")}
    assert modules <= names
    info = f"clusterjob-{clusterjob.__version__}.dist-info/"
    expected = ("clusterjob/", "hydra_plugins/clusterjob_launcher/", info)
    assert [name for name in names if not name.startswith(expected) or "__pycache__" in name] == []


def test_sdist_contains_files_to_build_and_test(built: dict[str, Path]) -> None:
    unpacked = built["unpacked"]
    assert unpacked.name == f"clusterjob-{clusterjob.__version__}"
    names = "pyproject.toml README.md LICENSE templates/node.sh.j2 tests/conftest.py"
    assert [name for name in names.split() if not (unpacked / name).is_file()] == []


def test_installed_wheel_renders_and_runs(built: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = str(built["wheel of the sdist"])
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(site), wheel, cwd=tmp_path)

    def python(*words: str) -> str:
        return run(sys.executable, *words, cwd=tmp_path, PYTHONPATH=str(site))

    (tmp_path / "script.py").write_text("import clusterjob; print(clusterjob.__file__)\n")
    where = "import clusterjob.core.render as render; print(render.template_directory())"
    assert python("-c", where).strip() == str(site / "clusterjob" / "templates")
    program = str(site / "bin" / "clusterjob")
    assert python(program, "--version") == f"clusterjob {clusterjob.__version__}\n"
    assert "clusterjob-node.pyz" in python(program, "render", "--nodes", "2", "script.py")
    output = python(program, "run", "--start", "exec", "script.py")
    assert output.endswith("clusterjob-node.pyz/clusterjob/__init__.py\n"), (
        "the workers import what was submitted"
    )
