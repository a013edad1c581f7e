"""No probe of `doctor` imports a module from the working directory.

That directory may be a cloned repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctoring import doctor, light_torch
from launching import new_folder
from ssh_network import python_without_torch

from clusterjob.node.host_server import host_check

MODULES = ("json", "torch", "importlib", "site", "warnings", "contextlib", "signal", "clusterjob")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory whose modules write a marker file when they are imported."""
    clone = new_folder(tmp_path / "clone")
    for name in MODULES:
        (clone / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n"
        )
    monkeypatch.chdir(clone)
    return clone


@pytest.mark.parametrize("more", ["", ":."])
def test_doctor_in_clone_imports_no_module_of_the_clone(
    clone: Path, tmp_path: Path, more: str
) -> None:
    python, library = str(python_without_torch(tmp_path)), light_torch(tmp_path / "lib")
    args = (
        "--cluster",
        "local",
        "--python",
        python,
        "--env",
        f"PYTHONPATH={library}{more}",
        "--workdir",
        str(clone),
    )
    # The tests start `python -m clusterjob`, which in the clone would itself import from there.
    found = doctor(*args, cwd="/")
    assert (found.state("interpreter"), found.state("torch")) == ("ok", "ok")
    assert not (tmp_path / "executed").exists()


def test_interpreter_probe_finds_torch_on_python_path_but_not_in_clone(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(python_without_torch(tmp_path))

    def finds_torch() -> bool:
        where: dict[str, Any] = {"setup": (), "env": {}, "workdir": str(clone)}
        return host_check.interpreter("", Path("/"), "", python, **where)["torch"]

    assert not finds_torch()
    monkeypatch.setenv("PYTHONPATH", str(light_torch(tmp_path / "lib")))
    assert finds_torch()
    assert not (tmp_path / "executed").exists()
