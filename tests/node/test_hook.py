"""The hook: each Python process of a job loads it as sitecustomize, before the user's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hooked import hooked_path, python
from launching import ROOT

from clusterjob.node.workers import hook

LOADED = (
    "import sys; print(sum(getattr(finder, 'of_clusterjob', False) for finder in sys.meta_path), "
    "'torch' in sys.modules)"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return hooked_path(tmp_path)


def test_sitecustomize_of_user_runs_and_hook_directory_is_not_on_sys_path(path: str) -> None:
    completed = python(
        path,
        f"""
        import sitecustomize
        {LOADED}
        print(sys.from_site, sitecustomize.__file__.endswith("own/sitecustomize.py"),
              {path.partition(os.pathsep)[0]!r} in sys.path)
    """,
    )
    assert (completed.stdout, completed.stderr) == ("1 False\nTrue True False\n", "")


def test_usercustomize_of_user_runs_if_python_enables_it(path: str) -> None:
    base = Path(sys.base_prefix) / "bin" / "python3"  # a virtual environment has no user site
    completed = python(
        path,
        "import site, sys; print(site.ENABLE_USER_SITE == hasattr(sys, 'from_user'))",
        interpreter=str(base),
    )
    assert (completed.stdout, completed.stderr) == ("True\n", "")


def test_error_in_sitecustomize_of_user_is_shown_as_without_hook(path: str) -> None:
    own = Path(path.split(os.pathsep)[1]) / "sitecustomize.py"
    own.write_text("import a_module_that_is_missing\n")
    assert python(path, "print(1)").stderr == python(str(own.parent), "print(1)").stderr != ""


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_python_that_ignores_pythonpath_runs_without_hook(path: str, flag: str) -> None:
    completed = python(path, LOADED, flag)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "0 False\n", "")


def interpreter(version: str) -> str:
    """Return an interpreter of this version; skip the test if there is none."""
    # The shims of pyenv on PATH refuse to run a version that is not selected.
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [
        *versions.glob(f"{version}.*/bin/python{version}"),
        *Path("/usr/bin").glob(f"python{version}"),
    ]
    return str(found[0]) if found else pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
@pytest.mark.parametrize(
    "own", ["import sys; sys.from_site = True", "import a_module_that_is_missing", None]
)
def test_old_python_prints_same_output_as_without_hook(
    path: str, version: str, own: str | None
) -> None:
    other, directory = interpreter(version), Path(path.split(os.pathsep)[1])
    (directory / "sitecustomize.py").unlink()
    if own is not None:
        (directory / "sitecustomize.py").write_text(own + "\n")
    code = "import sys; print(hasattr(sys, 'from_site'))"
    ended = [python(each, code, "-B", interpreter=other) for each in (path, str(directory))]
    assert [each.stdout for each in ended] == [f"{own is not None and 'from_site' in own}\n"] * 2
    assert ended[0].stderr == ended[1].stderr


def test_hook_of_job_inside_another_job_is_installed_once(path: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    inner = hook.write(tmp_path / "inner", {"PYTHONPATH": path})["PYTHONPATH"]
    completed = python(inner, f"{LOADED}; print(sys.from_site)")
    assert (completed.stdout, completed.stderr) == ("1 False\nTrue\n", "")


def test_missing_hook_directory_is_no_error(tmp_path: Path) -> None:
    assert python(str(tmp_path / "gone"), LOADED).stdout == "0 False\n"
    assert hook.write(tmp_path / "gone", {"PYTHONPATH": "/mine"}) == {}


def test_process_outside_job_keeps_behaviour_of_torch(path: str) -> None:
    completed = python(
        path,
        """
        import os
        os.environ |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "h", "MASTER_PORT": "1",
        }
        import sys, torch.distributed
        # Not by attribute: the package has a function of this name.
        rendezvous = sys.modules['torch.distributed.rendezvous']
        wrapped = hasattr(rendezvous._create_c10d_store, "__wrapped__")
        print(rendezvous._torchelastic_use_agent_store(), wrapped)
    """,
    )
    assert completed.stdout == "True True\n", completed.stderr


def test_torch_is_patched_once_beside_other_import_finders(path: str) -> None:
    completed = python(
        path,
        """
        import sys

        class Old:
            def find_module(self, name, path=None):
                return None

        class Chaining:
            busy = False

            def find_spec(self, name, path=None, target=None):
                if self.busy or "torch.distributed.rendezvous" != name:
                    return None
                self.busy = True
                try:
                    finders = [each for each in sys.meta_path if hasattr(each, "find_spec")]
                    found = (finder.find_spec(name, path, target) for finder in finders)
                    return next(filter(None, found))
                finally:
                    self.busy = False

        sys.meta_path[:0] = [Chaining()]
        sys.meta_path.insert(2, Old())  # after the finder of the hook
        sys.meta_path.insert(3, Chaining())
        import torch.distributed
        create = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
        print(hasattr(create, "__wrapped__"), hasattr(create.__wrapped__, "__wrapped__"))
    """,
    )
    assert completed.stdout == "True False\n", completed.stderr


def test_hook_imports_only_future_module() -> None:
    completed = python(
        str(ROOT),
        "import sys; before = set(sys.modules)\n"
        "from clusterjob.node.workers import hook; hook.patch()\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(name for name in new if not name.startswith('clusterjob')))",
    )
    assert completed.stdout == "['__future__']\n", completed.stderr
