"""What each entry point loads, in fresh processes: the command line nothing heavy, the node half
the standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from procs import PATIENCE

import clusterjob

SOURCE = Path(clusterjob.__file__).parent.parent
HEAVY = {
    "torch",
    "numpy",
    "paramiko",
    "jinja2",
    "submitit",
    "rich",
    "pynvml",
    "cryptography",
    "platformdirs",
    "pydantic",
    "asyncio",
}
THIRD_PARTY = HEAVY - {"asyncio"} | {
    "typer",
    "click",
    "tomli",
    "cloudpickle",
    "yaml",
    "markupsafe",
    "nacl",
    "bcrypt",
}
REPORT = "import json, os, sys; os.write(3, json.dumps(sorted(sys.modules)).encode())"
NODE_MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for room in ("node", "worker")
    for path in (SOURCE / "clusterjob" / room).rglob("*.py")
    if path.name not in ("__main__.py", "main.py")
)


def loaded(*command: str, code: int = 0, cwd: Path | None = None) -> set[str]:
    """Run Python with a command line that ends by `REPORT`; return the modules that were loaded."""
    read, write = os.pipe()
    script = f"import os; os.dup2({write}, 3) if {write} != 3 else None\n"
    try:
        arguments = [*command[:-1], script + command[-1]]
        done = subprocess.run(
            [sys.executable, *arguments],
            pass_fds=[write],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            cwd=cwd,
        )
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as stream:
        data = stream.read()
    assert done.returncode == code, done.stderr
    return set(json.loads(data))


def after_main(*arguments: str) -> str:
    """Return a program that runs the command line to its end and then reports."""
    argv = ["clusterjob", *arguments]
    return f"import sys; sys.argv = {argv!r}\nfrom clusterjob.__main__ import main\ncode = main()\n{REPORT}\nsys.exit(code)"


def top_levels(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def nothing() -> set[str]:
    """What an interpreter of this environment loads by itself, .pth files included."""
    return loaded("-c", REPORT)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["submit", "--help"], ["run", "--help"], ["logs", "--help"], ["--version"]],
)
def test_help_loads_nothing_heavy(nothing: set[str], arguments: list[str]) -> None:
    modules = loaded("-c", after_main(*arguments)) - nothing
    assert "clusterjob.cli" in modules
    assert top_levels(modules) & HEAVY == set()
    forbidden = (
        "clusterjob.backends",
        "clusterjob.core.jobs",
        "clusterjob.core.render",
        "clusterjob.node.agent",
    )
    assert not [name for name in modules if name.startswith(forbidden)]


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "--json"], ["status"], ["env"], ["env", "--json"], ["config", "--json"]],
)
def test_questions_load_no_torch_and_no_connection(nothing: set[str], arguments: list[str]) -> None:
    modules = loaded("-c", after_main(*arguments)) - nothing
    assert (
        top_levels(modules) & {"torch", "numpy", "paramiko", "jinja2", "submitit", "rich"} == set()
    )


def test_submitting_loads_no_torch_and_no_connection(nothing: set[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    modules = loaded("-c", after_main("submit", "--dry-run", "script.py"), cwd=tmp_path) - nothing
    assert "jinja2" in modules
    assert top_levels(modules) & {"torch", "numpy", "paramiko", "submitit", "rich"} == set()


def test_launch_loads_nothing_of_the_submit_half(nothing: set[str]) -> None:
    modules = loaded("-c", after_main("launch", "--no-such-option"), code=2) - nothing
    assert top_levels(modules) & THIRD_PARTY == set()
    ours = {name for name in modules if name.startswith("clusterjob.")}
    assert all(
        name.startswith(("clusterjob.node", "clusterjob.errors", "clusterjob.__main__"))
        for name in ours
    ), ours


def test_the_package_itself_loads_nothing(nothing: set[str]) -> None:
    modules = loaded("-c", f"import clusterjob\n{REPORT}") - nothing
    assert {name for name in modules if name.startswith("clusterjob")} == {"clusterjob"}
    assert top_levels(modules) & HEAVY == set()


@pytest.mark.parametrize("name", sorted(clusterjob.__all__))
def test_each_public_name_is_there_and_loads_no_torch(nothing: set[str], name: str) -> None:
    modules = (
        loaded("-c", f"import clusterjob\nassert clusterjob.{name} is not None\n{REPORT}") - nothing
    )
    assert top_levels(modules) & (HEAVY - {"platformdirs"}) == set()


def test_public_names_that_are_not_there_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = clusterjob.no_such_name
    assert set(clusterjob.__all__) >= {
        "JobSpec",
        "JobState",
        "Program",
        "Resources",
        "Topology",
        "Worker",
        "__version__",
    }


@pytest.mark.parametrize("module", ["clusterjob.bootstrap", "clusterjob.node", *NODE_MODULES])
def test_the_node_half_loads_the_standard_library_alone(module: str) -> None:
    """Without site-packages: what is not of the standard library would not be found."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {module}\n{REPORT}"
    modules = loaded("-I", "-S", "-c", code)
    strangers = top_levels(modules) - set(sys.stdlib_module_names) - {"clusterjob", "__main__"}
    assert strangers == set()
    assert not top_levels(modules) & {"pip", "ensurepip", "tkinter"}


@pytest.mark.parametrize(
    "module", ["clusterjob.bootstrap", "clusterjob.node.launch", "clusterjob.node.agent"]
)
def test_the_node_half_loads_no_torch_where_there_is_one(nothing: set[str], module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    modules = loaded("-c", f"import {module}\n{REPORT}") - nothing
    assert top_levels(modules) & THIRD_PARTY == set()


def test_the_node_half_takes_nothing_of_the_submit_half() -> None:
    names = "clusterjob.node.launch, clusterjob.node.agent, clusterjob.node.zip.main"
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {names}\n{REPORT}"
    modules = {name for name in loaded("-I", "-S", "-c", code) if name.startswith("clusterjob")}
    allowed = ("clusterjob.node", "clusterjob.errors")
    assert all(name == "clusterjob" or name.startswith(allowed) for name in modules), modules


def test_modules_can_be_imported_in_any_order() -> None:
    """No cycle hides behind the order in which the tests happen to import."""
    names = sorted(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in (SOURCE / "clusterjob").rglob("*.py")
        if path.name not in ("__main__.py", "main.py") and "templates" not in path.parts
    )
    forget = (
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('clusterjob')]"
    )
    code = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n    {forget}\n{REPORT}"
    assert "typer" in loaded("-W", "error", "-c", code)


def test_a_worker_s_import_of_bootstrap_does_without_typing() -> None:
    """It is most of what the import would cost; -S, because an environment's .pth files may import
    it.
    """
    code = "import sys, clusterjob.bootstrap; sys.exit(sorted({'typing', 'importlib.metadata', 'torch'} & sys.modules.keys()) or 0)"
    assert (
        subprocess.run(
            [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
        ).stderr
        == ""
    )
