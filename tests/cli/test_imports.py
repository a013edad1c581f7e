"""Modules that each entry point loads, in fresh processes.

The command line loads nothing heavy; the node modules load only the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from launching import ROOT
from procs import TEST_TIMEOUT

import clusterjob

# What `clusterjob --help` loads besides the standard library and `clusterjob.cli`.
HELP_THIRD_PARTY = {"annotated_doc", "shellingham", "typer"}
HELP_MODULES = {
    "__main__",
    "core",
    "core.gpu_request",
    "core.job_secrets",
    "core.node_count",
    "core.notifications",
    "core.option",
    "core.options",
    "core.units",
    "errors",
    "node",
    "node.contract",
    "node.program",
}
REPORT = "import json, os, sys; os.write(3, json.dumps(sorted(sys.modules)).encode())"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "clusterjob").rglob("*.py")
    if path.name not in ("__main__.py", "main.py") and "templates" not in path.parts
}
NODE_MODULES = sorted(
    name for name in MODULES if name.startswith(("clusterjob.node", "clusterjob.worker"))
)


def loaded(*command: str, code: int = 0) -> set[str]:
    """Run Python with code that ends with `REPORT`; return the modules that were loaded."""
    read, write = os.pipe()
    script = f"import os; os.dup2({write}, 3) if {write} != 3 else None\n{command[-1]}"
    try:
        done = subprocess.run(
            [sys.executable, *command[:-1], script], pass_fds=[write], capture_output=True,
            text=True, timeout=TEST_TIMEOUT, check=False,
        )  # fmt: skip
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
    own = {"clusterjob", "__main__", "__mp_main__"}  # multiprocessing adds the last one
    return top_levels(modules) - set(sys.stdlib_module_names) - own


PARAMIKO = f"""
from clusterjob.remote import connect
with connect._without_invoke():
    from clusterjob.remote import paramiko_transport
{REPORT}
"""
SSH = {"paramiko", "clusterjob.remote"}
HEAVY = {"torch", "numpy", "submitit", "rich"}
# Code, modules that it loads, and modules that it must not load.
IMPORTS = [
    *(
        (after_main(*arguments), {"clusterjob.cli"}, {*HEAVY, *SSH, "jinja2"})
        for arguments in (["list"], ["status"], ["env"], ["config", "--json"])
    ),
    (after_main("submit", "--dry-run", "--", "true"), {"jinja2"}, {*HEAVY, *SSH}),
    (
        f"import clusterjob.backends.slurm.submit, clusterjob.core.jobs\n{REPORT}",
        {"clusterjob.core.jobs"},
        {*HEAVY, *SSH, "msgspec"},
    ),
    (
        PARAMIKO,
        {"paramiko"},
        {"invoke", "yaml", "unittest"},
    ),
    # `list` reads records; each family would make it slower.
    (
        f"import clusterjob.core.records\n{REPORT}",
        {"clusterjob.core.records"},
        {"clusterjob.node.environments"},
    ),
    (
        f"from clusterjob import *\n{REPORT}",
        {"clusterjob.api"},
        {*HEAVY, "paramiko", "typer", "jinja2", "asyncio"},
    ),
]


@pytest.fixture(scope="module")
def startup_modules() -> set[str]:
    """Return the modules that this interpreter loads at startup, with those of .pth files."""
    return loaded("-c", REPORT)


@pytest.mark.parametrize(
    ("code", "third", "allowed", "exit_code"),
    [
        *(
            (after_main(*words.split()), HELP_THIRD_PARTY, HELP_MODULES, 0)
            for words in ("--help", "submit --help", "run --help", "logs --help", "--version")
        ),
        (f"import clusterjob\n{REPORT}", set(), set(), 0),
        (f"import clusterjob.bootstrap\n{REPORT}", set(), {"bootstrap", "errors"}, 0),
        (after_main("launch", "--no-such-option"), set(), {"node", "errors", "__main__"}, 2),
    ],
)
def test_entry_point_loads_only_allowed_modules(
    startup_modules: set[str], code: str, third: set[str], allowed: set[str], exit_code: int
) -> None:
    """The allowed modules are below `clusterjob`; for help, also all of `clusterjob.cli`."""
    modules = loaded("-c", code, code=exit_code) - startup_modules
    assert third_party(modules) == third
    ours = {name.removeprefix("clusterjob.") for name in modules if name.startswith("clusterjob.")}
    if third:
        assert {name for name in ours if name.split(".")[0] != "cli"} == allowed
    else:
        assert {name.split(".")[0] for name in ours} <= allowed
    assert exit_code or "asyncio" not in modules


@pytest.mark.parametrize(("code", "wanted", "unwanted"), IMPORTS)
def test_entry_point_loads_nothing_that_it_does_not_need(
    startup_modules: set[str], code: str, wanted: set[str], unwanted: set[str]
) -> None:
    modules = loaded("-c", code) - startup_modules
    assert wanted <= modules
    within = tuple(f"{name}." for name in unwanted)
    assert not {name for name in modules if name in unwanted or name.startswith(within)}


def test_bootstrap_import_does_not_load_typing() -> None:
    """It would take most of the time. -S, because .pth files of an environment may import it."""
    modules = loaded("-S", "-c", f"import clusterjob.bootstrap\n{REPORT}")
    assert not modules & {"typing", "importlib.metadata", "torch"}


def test_unknown_public_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = clusterjob.no_such_name


def test_node_modules_load_only_standard_library_and_node_half() -> None:
    """Site-packages is disabled, so that an import of a third-party module fails."""
    names = ["clusterjob.bootstrap", *NODE_MODULES]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport {', '.join(names)}\n{REPORT}"
    modules = loaded("-I", "-S", "-c", code)
    assert third_party(modules) == set()
    assert not top_levels(modules) & {"pip", "ensurepip", "tkinter"}
    halves = {".".join(name.split(".")[:2]) for name in modules if name.startswith("clusterjob.")}
    assert halves == {f"clusterjob.{name}" for name in ("bootstrap", "errors", "node", "worker")}


def test_each_module_can_be_imported() -> None:
    code = f"import {', '.join(sorted(MODULES))}\n{REPORT}"
    assert loaded("-W", "error", "-c", code) >= MODULES
