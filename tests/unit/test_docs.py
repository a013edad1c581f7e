"""The documentation covers all options, variables and modules, and its links work."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import reference
import typer
from launching import ROOT, write_tree

from clusterjob import bootstrap
from clusterjob.backends.local import backend as local
from clusterjob.backends.mlp import backend as mlp
from clusterjob.backends.slurm import backend as slurm
from clusterjob.backends.slurm import planning as slurm_planning
from clusterjob.cli import app, main
from clusterjob.core.spec import JobSpec
from clusterjob.node.program import Program
from clusterjob.worker.context import Context

DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.glob("*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return the text below a heading, or "" without such a heading.

    The text ends at the next heading of the same or a higher level.
    """
    match = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    return match[2] if match else ""


def options_of(command: Any) -> set[str]:
    return {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("-")
    }


def test_reference_page_equals_generated_text() -> None:
    page = read("reference.md")
    assert reference.filled(page) == page, "run `.venv/bin/python tools/reference.py`"
    for name in COMMANDS:
        assert section(page, f"`clusterjob {name}`"), f"no section for {name}"


def test_reference_page_lists_every_clusterjob_variable() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "clusterjob").rglob("*.py"))
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "templates").iterdir())
    named = {
        *re.findall(r"CLUSTERJOB_[A-Z_]+[A-Z]", code),
        *re.findall(r"export (CLUSTERJOB_\w+)", scripts),
    }
    assert named - {"CLUSTERJOB_KEY"} <= set(
        re.findall(r"CLUSTERJOB_[A-Z_]+[A-Z]", read("reference.md"))
    )


def test_backends_page_lists_every_template_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template_values: set[str] = set()

    def record_values(_template: object, values: dict[str, Any]) -> str:
        template_values.update(values)
        return ""

    spec = JobSpec(Program("command", "true"), workdir=tmp_path)
    for module, backend in (
        (local, local.LocalBackend()),
        (slurm_planning, slurm.SlurmBackend()),
        (mlp, mlp.MlpBackend()),
    ):
        monkeypatch.setattr(module, "render", record_values)
        backend.plan(spec)
    rows = re.findall(r"^\| `(\w+)` \|", section(read("backends.md"), "Variables"), re.MULTILINE)
    assert sorted(rows) == sorted(template_values)


def test_scripts_page_lists_init_arguments_and_context_members() -> None:
    for_bootstrap_alone = {"join_group", "holds_group", "close"}
    members = {name for name in vars(Context) if not name.startswith("_")} | {
        *inspect.signature(Context).parameters,
        "backend",
    }
    required = {*inspect.signature(bootstrap.init).parameters} | members - for_bootstrap_alone
    assert required <= set(re.findall(r"`(\w+)[`(]", read("scripts.md")))


def test_architecture_page_tree_equals_package_folders() -> None:
    tree = section(read("architecture.md"), "The tree")
    block = re.search(r"^```\n(.*?)^```$", tree, re.MULTILINE | re.DOTALL)
    ancestors: list[str] = []
    folders = set()
    for line in block[1].splitlines():
        name, *description = line.split()
        ancestors[(len(line) - len(line.lstrip())) // 2 :] = [name]
        assert description, f"{name} has no description"
        folders.add("".join(ancestors))
    assert folders == {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for path in (ROOT / "clusterjob").rglob("*.py")
    }


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
            path, _, anchor = link.partition("#")
            file = (page.parent / path).resolve() if path else page
            found = file.exists() and (not anchor or anchor in anchors(file))
            if not found and not re.match(r"[a-z]+:", link):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_mlp_page_commands_render_with_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = read("mlp.md")
    [profile, *_] = re.findall(r"^```toml$(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = re.findall(
        r"clusterjob (?:submit|run|render) (--cluster vemlp [^`\n]*[^`\n.])(?:`|$)",
        page,
        re.MULTILINE,
    )
    write_tree(tmp_path, **{"clusterjob.toml": profile, "train.py": ""})
    monkeypatch.chdir(tmp_path)
    assert [main(["render", *line.split()]) for line in lines] == [0, 0, 0]
