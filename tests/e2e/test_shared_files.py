"""A node of 8 ranks opens at most 50 files on the shared disk for a job with --env-archive."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What the import of torch loads; the whole environment of the tests has several GB.
PACKAGES = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx",
    "filelock", "fsspec", "jinja2", "markupsafe", "setuptools", "typing_extensions.py",
)  # fmt: skip


def pack(path: Path) -> Path:
    """Pack the interpreter and torch as venv-pack does, without headers and tests."""
    venv, site = Path(sys.prefix), Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    found = [str(site / name) for name in PACKAGES if (venv / site / name).exists()]
    programs = [str(each.relative_to(venv)) for each in (venv / "bin").glob("python*")]
    left_out = [f"--exclude=*/torch/{name}" for name in ("include", "test")]
    subprocess.run(
        ["tar", "-cf", path, "-C", venv, *left_out, "pyvenv.cfg", *programs, *found], check=True
    )
    return path


@pytest.mark.slow
def test_node_of_8_ranks_opens_at_most_50_files_on_the_shared_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("strace") is None or not (Path(sys.prefix) / "pyvenv.cfg").exists():
        pytest.skip("needs strace (`make packages`) and a virtual environment")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    bench = importlib.import_module("shared_files")
    shared, disk, first = (tmp_path / name for name in ("shared", "disk", "first"))
    for made in (shared, disk, first):
        made.mkdir()
    (first / "bash").write_text(bench._BASH)
    (first / "bash").chmod(0o755)
    shutil.copy(ROOT / "benchmarks" / "workers" / "first_all_reduce.py", shared / "train.py")
    base = bench.environment(shared / "home")
    places = (shared, Path(sys.prefix))
    options = ("--cluster", "local", "--nproc-per-node", "8", "--env-cache", str(disk))
    archive = ("--env-archive", str(pack(shared / "env.tar")))
    argv = [sys.executable, "-m", "clusterjob", "run", *options, *archive]
    opened = bench.count(
        [*argv, "train.py", str(disk / "done")],
        {**base, "PATH": f"{first}:{base['PATH']}"},
        tmp_path,
        places,
    )
    assert opened[str(shared / "train.py")], "the trace has the opens of the workers"
    assert opened.total() <= bench.TARGET == 50, opened.most_common()
