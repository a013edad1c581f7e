"""Modules that each entry point loads, in fresh processes.

The command line loads nothing heavy; the node modules load only the standard library.
"""

from __future__ import annotations

import ast
import graphlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT

import clusterjob

SOURCE = Path(clusterjob.__file__).parent.parent
# What `clusterjob --help` loads besides the standard library and `clusterjob.cli`.
HELP_THIRD_PARTY = {"annotated_doc", "shellingham", "typer"}
HELP_MODULES = {
    "clusterjob.__main__",
    "clusterjob.core",
    "clusterjob.core.gpu_request",
    "clusterjob.core.job_secrets",
    "clusterjob.core.node_count",
    "clusterjob.core.notifications",
    "clusterjob.core.option",
    "clusterjob.core.options",
    "clusterjob.core.units",
    "clusterjob.errors",
    "clusterjob.node",
    "clusterjob.node.notifications",
    "clusterjob.node.program",
}
# An `if` with one of these does not run at import.
SKIPPED = {"TYPE_CHECKING", "__name__"}
REPORT = "import json, os, sys; os.write(3, json.dumps(sorted(sys.modules)).encode())"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (SOURCE / "clusterjob").rglob("*.py")
    if path.name not in ("__main__.py", "main.py") and "templates" not in path.parts
}
NODE_MODULES = sorted(
    name for name in MODULES if name.startswith(("clusterjob.node", "clusterjob.worker"))
)


def loaded(*command: str, code: int = 0, cwd: Path | None = None) -> set[str]:
    """Run Python with code that ends with `REPORT`; return the modules that were loaded."""
    read, write = os.pipe()
    script = f"import os; os.dup2({write}, 3) if {write} != 3 else None\n"
    try:
        arguments = [*command[:-1], script + command[-1]]
        done = subprocess.run(
            [sys.executable, *arguments],
            pass_fds=[write],
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
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
    """Return code that runs the command line and then reports the loaded modules."""
    argv = ["clusterjob", *arguments]
    return (
        f"import sys; sys.argv = {argv!r}\n"
        f"from clusterjob.__main__ import main\ncode = main()\n{REPORT}\nsys.exit(code)"
    )


def top_levels(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def third_party(modules: set[str]) -> set[str]:
    """Return the top-level packages that are neither clusterjob nor of the standard library."""
    return top_levels(modules) - set(sys.stdlib_module_names) - {"clusterjob", "__main__"}


def imported(path: Path) -> set[str]:
    """Return our modules that the top level of a module imports."""

    def statements(block: list[ast.stmt]) -> Iterator[ast.stmt]:
        for each in block:
            if isinstance(each, ast.If) and {*ast.unparse(each.test).split()} & SKIPPED:
                continue
            yield each
            for name in ("body", "orelse", "handlers", "finalbody"):
                if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from statements(getattr(each, name, []))

    found: set[str] = set()
    for each in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and each.module:
            within = {f"{each.module}.{alias.name}" for alias in each.names} & MODULES.keys()
            found |= within if len(within) == len(each.names) else within | {each.module}
    return found & MODULES.keys()


@pytest.fixture(scope="module")
def startup_modules() -> set[str]:
    """Return the modules that this interpreter loads at startup, with those of .pth files."""
    return loaded("-c", REPORT)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["submit", "--help"], ["run", "--help"], ["logs", "--help"], ["--version"]],
)
def test_help_loads_only_allowed_modules(startup_modules: set[str], arguments: list[str]) -> None:
    modules = loaded("-c", after_main(*arguments)) - startup_modules
    assert third_party(modules) == HELP_THIRD_PARTY
    ours = {name for name in modules if name.startswith("clusterjob.")}
    assert {name for name in ours if not name.startswith("clusterjob.cli")} == HELP_MODULES
    assert "asyncio" not in modules


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "--json"], ["status"], ["env"], ["env", "--json"], ["config", "--json"]],
)
def test_status_commands_load_no_torch_and_no_ssh(
    startup_modules: set[str], arguments: list[str]
) -> None:
    modules = loaded("-c", after_main(*arguments)) - startup_modules
    assert (
        top_levels(modules) & {"torch", "numpy", "paramiko", "jinja2", "submitit", "rich"} == set()
    )


def test_submit_loads_no_torch_and_no_ssh(startup_modules: set[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    modules = (
        loaded("-c", after_main("submit", "--dry-run", "script.py"), cwd=tmp_path) - startup_modules
    )
    assert "jinja2" in modules
    assert top_levels(modules) & {"torch", "numpy", "paramiko", "submitit", "rich"} == set()


def test_modules_that_submit_to_slurm_here_load_no_ssh(
    startup_modules: set[str],
) -> None:
    names = "clusterjob.backends.slurm.backend, clusterjob.backends.slurm.submit"
    modules = loaded("-c", f"import {names}, clusterjob.core.jobs\n{REPORT}") - startup_modules
    assert top_levels(modules) & {"torch", "numpy", "paramiko", "msgspec", "rich"} == set()
    assert not {name for name in modules if name.startswith("clusterjob.remote")}


def test_connection_loads_paramiko_without_invoke(startup_modules: set[str]) -> None:
    text = (
        "from clusterjob.remote import connect\n"
        "with connect._without_invoke(): from clusterjob.remote import paramiko_transport"
    )
    modules = loaded("-c", f"{text}\n{REPORT}") - startup_modules
    assert "paramiko" in top_levels(modules)
    assert top_levels(modules) & {"invoke", "yaml", "unittest"} == set()


def test_records_load_no_environment_families(startup_modules: set[str]) -> None:
    """`list` reads records; each family would make it slower."""
    modules = loaded("-c", f"import clusterjob.core.records\n{REPORT}") - startup_modules
    assert not {name for name in modules if name.startswith("clusterjob.node.environments.")}


def test_launch_loads_no_submission_modules(startup_modules: set[str]) -> None:
    modules = loaded("-c", after_main("launch", "--no-such-option"), code=2) - startup_modules
    assert third_party(modules) == set()
    ours = {name for name in modules if name.startswith("clusterjob.")}
    assert "clusterjob.node.options" in ours
    assert all(
        name.startswith(("clusterjob.node", "clusterjob.errors", "clusterjob.__main__"))
        for name in ours
    ), ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("clusterjob", {"clusterjob"}),
        ("clusterjob.bootstrap", {"clusterjob", "clusterjob.bootstrap", "clusterjob.errors"}),
    ],
)
def test_import_for_users_loads_only_allowed_modules(
    startup_modules: set[str], name: str, ours: set[str]
) -> None:
    modules = loaded("-c", f"import {name}\n{REPORT}") - startup_modules
    assert third_party(modules) == set()
    assert {module for module in modules if module.startswith("clusterjob")} == ours
    assert "asyncio" not in modules


@pytest.mark.parametrize("name", sorted(clusterjob.__all__))
def test_public_name_exists_and_loads_no_heavy_modules(
    startup_modules: set[str], name: str
) -> None:
    modules = (
        loaded("-c", f"import clusterjob\nassert clusterjob.{name} is not None\n{REPORT}")
        - startup_modules
    )
    assert third_party(modules) <= {"platformdirs"}
    assert "asyncio" not in modules


def test_unknown_public_name_raises_attribute_error() -> None:
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


def test_node_modules_load_only_standard_library() -> None:
    """Site-packages is disabled, so that an import of a third-party module fails."""
    names = ["clusterjob.bootstrap", *NODE_MODULES]
    assert {"clusterjob.node", "clusterjob.node.launch", "clusterjob.worker.call"} <= {*names}
    modules = loaded(
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\nimport {', '.join(names)}\n{REPORT}",
    )
    assert third_party(modules) == set()
    assert not top_levels(modules) & {"pip", "ensurepip", "tkinter"}


def test_node_modules_load_no_third_party_modules_if_installed(startup_modules: set[str]) -> None:
    names = "clusterjob.bootstrap, clusterjob.node.launch, clusterjob.node.agent.agent"
    modules = loaded("-c", f"import {names}\n{REPORT}") - startup_modules
    assert third_party(modules) == set()


def test_node_modules_import_no_submission_modules() -> None:
    names = "clusterjob.node.launch, clusterjob.node.agent.agent, clusterjob.node.zip.main"
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {names}\n{REPORT}"
    modules = {name for name in loaded("-I", "-S", "-c", code) if name.startswith("clusterjob")}
    allowed = ("clusterjob.node", "clusterjob.errors")
    assert all(name == "clusterjob" or name.startswith(allowed) for name in modules), modules


def test_each_module_can_be_imported_first() -> None:
    """No module imports itself through others, so that the order of imports does not matter."""
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert "clusterjob.node.options" in graph["clusterjob.node.launch"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    assert "typer" in loaded("-W", "error", "-c", f"import {', '.join(sorted(MODULES))}\n{REPORT}")


def test_bootstrap_import_does_not_load_typing() -> None:
    """`typing` would take most of the import time.

    -S, because .pth files of an environment may import it.
    """
    code = (
        "import sys, clusterjob.bootstrap; "
        "sys.exit(sorted({'typing', 'importlib.metadata', 'torch'} & sys.modules.keys()) or 0)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
        ).stderr
        == ""
    )
