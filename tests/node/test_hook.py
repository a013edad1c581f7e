"""The hook that every Python process of a job loads as sitecustomize, before the user's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hooked import hooked_path, python
from launching import ROOT

from clusterjob.node.workers import hook_directory

LOADED = "import sys; print(sum(getattr(finder, 'of_clusterjob', False) for finder in sys.meta_path), 'torch' in sys.modules)"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return hooked_path(tmp_path)


def test_the_users_sitecustomize_runs_and_the_hooks_directory_is_not_on_sys_path(path: str) -> None:
    told = python(path, f"""
        import sitecustomize
        {LOADED}
        print(sys.from_site, sitecustomize.__file__.endswith("own/sitecustomize.py"), {path.partition(os.pathsep)[0]!r} in sys.path)
    """)  # fmt: skip
    assert (told.stdout, told.stderr) == ("1 False\nTrue True False\n", "")


def test_the_users_usercustomize_runs_where_python_runs_it(path: str) -> None:
    base = Path(sys.base_prefix) / "bin" / "python3"  # a virtual environment has none
    told = python(
        path,
        "import site, sys; print(site.ENABLE_USER_SITE == hasattr(sys, 'from_user'))",
        interpreter=str(base),
    )
    assert (told.stdout, told.stderr) == ("True\n", "")


def test_an_error_in_the_users_sitecustomize_is_shown_as_always(path: str) -> None:
    own = Path(path.split(os.pathsep)[1]) / "sitecustomize.py"
    own.write_text("import a_module_that_is_missing\n")
    assert python(path, "print(1)").stderr == python(str(own.parent), "print(1)").stderr != ""


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_pythons_that_load_no_sitecustomize_of_pythonpath_run_without_the_hook(
    path: str, flag: str
) -> None:
    told = python(path, LOADED, flag)
    assert (told.returncode, told.stdout, told.stderr) == (0, "0 False\n", "")


def interpreter(version: str) -> str:
    """Return an interpreter of this version; the test is skipped where there is none."""
    versions = (
        Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    )  # what it puts on PATH refuses to run
    found = [
        *versions.glob(f"{version}.*/bin/python{version}"),
        *Path("/usr/bin").glob(f"python{version}"),
    ]
    return str(found[0]) if found else pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
@pytest.mark.parametrize(
    "own", ["import sys; sys.from_site = True", "import a_module_that_is_missing", None]
)
def test_an_old_python_says_no_more_than_without_the_hook(
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


@pytest.mark.parametrize(("version", "installed"), [("2.7", False), ("3.6", False), ("3.7", True)])
def test_the_hook_is_installed_in_pythons_for_which_its_changes_are_written(
    path: str, version: str, installed: bool
) -> None:
    other = interpreter(version)
    code = "import sys; print(any(hasattr(finder, 'of_clusterjob') for finder in sys.meta_path))"
    assert python(path, code, interpreter=other).stdout == f"{installed}\n"
    if installed:
        changes = Path(path.partition(os.pathsep)[0]) / "clusterjob_torch_changes.py"
        told = python("", f"import runpy; runpy.run_path({str(changes)!r})", interpreter=other)
        assert (told.returncode, told.stderr) == (0, "")


def test_the_hook_of_a_job_inside_another_is_installed_once(path: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    inner = hook_directory.variables(
        {"PYTHONPATH": path}, hook_directory.write(tmp_path / "inner")
    )["PYTHONPATH"]
    told = python(inner, f"{LOADED}; print(sys.from_site)")
    assert (told.stdout, told.stderr) == ("1 False\nTrue\n", "")


def test_the_hook_outlives_its_directory_and_does_without_one(tmp_path: Path) -> None:
    assert python(str(tmp_path / "gone"), LOADED).stdout == "0 False\n"
    assert hook_directory.write(tmp_path / "gone") is None
    assert hook_directory.variables({"PYTHONPATH": "/mine"}, None) == {}


def test_a_process_that_is_no_job_of_ours_has_torchs_own_behaviour(path: str) -> None:
    told = python(path, """
        import os
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        import sys, torch.distributed
        rendezvous = sys.modules['torch.distributed.rendezvous']  # the package has a function of this name
        print(rendezvous._torchelastic_use_agent_store(), hasattr(rendezvous._create_c10d_store, "__wrapped__"))
    """)  # fmt: skip
    assert told.stdout == "True True\n", told.stderr


def test_other_finders_neither_stop_the_import_of_torch_nor_change_it_twice(path: str) -> None:
    told = python(path, """
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
                    found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
                    return next(filter(None, found))
                finally:
                    self.busy = False

        sys.meta_path[:0] = [Chaining()]
        sys.meta_path.insert(2, Old())  # after the hook's own
        sys.meta_path.insert(3, Chaining())
        import torch.distributed
        create = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
        print(hasattr(create, "__wrapped__"), hasattr(create.__wrapped__, "__wrapped__"))
    """)  # fmt: skip
    assert told.stdout == "True False\n", told.stderr


def test_every_import_of_the_hook_is_of_the_standard_library() -> None:
    told = python(
        str(ROOT),
        "import sys; before = set(sys.modules); from clusterjob.node.workers import hook; hook.install()\n"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('clusterjob')))",
    )
    assert told.stdout == "['__future__']\n", told.stderr
