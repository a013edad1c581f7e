"""Python processes of a job import the submitted code, and run the submitted scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import new_folder, write_tree
from procs import TEST_TIMEOUT

from clusterjob.node.workers import hook

SHOW = 'import sys, part, src_mod; print("{0}", part.V, src_mod.V, sys.argv[1:])\n'


class Tree:
    """A tree, its snapshot from before an edit, and Python processes of a job in the tree."""

    def __init__(self, tmp_path: Path) -> None:
        self.current = tmp_path / "current"
        self.kept = tmp_path / "kept" / "current"
        self.write("old")
        (self.current / "data").mkdir()
        shutil.copytree(self.current, self.kept)
        (self.kept / "data").rmdir()
        (self.kept / "data").symlink_to(self.current / "data")
        self.write("new")
        own = {"PYTHONPATH": f"{self.current}/src"}
        self.environ = (
            os.environ
            | hook.write(tmp_path, own)
            | {
                "CLUSTERJOB_CODE_ORIGIN": str(self.current),
                "CLUSTERJOB_CODE_TREE": str(self.kept),
            }
        )

    def write(self, version: str) -> None:
        write_tree(
            self.current,
            **{
                "part.py": f"V = {version!r}\n",
                "main.py": SHOW.format(version),
                "pack/__init__.py": "",
                "pack/tool.py": SHOW.format(version),
                "space/inner.py": f"V = {version!r}\n",
                "src/src_mod.py": f"V = {version!r}\n",
            },
        )

    def python(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            env=self.environ,
            cwd=cwd or self.current,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return (done.stdout + done.stderr * bool(code)).strip()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("main.py", "-c", "x"),
        ("./main.py", "-c", "x"),
        ("-u", "-X", "utf8", "main.py", "-c", "x"),
        ("-m", "main", "-c", "x"),
        ("-m", "pack.tool", "-c", "x"),
    ],
    ids=" ".join,
)
def test_script_or_module_and_its_imports_are_old(tree: Tree, words: tuple[str, ...]) -> None:
    assert tree.python(*words) == "old old old ['-c', 'x']"


def test_imports_of_command_from_current_directory_and_path_changes_are_old(tree: Tree) -> None:
    assert tree.python("-c", "import part, space.inner as s; print(part.V, s.V)") == "old old"
    text = "import sys; sys.path[:0] = ['..', '../src']; import part, src_mod; print(part.V)"
    assert tree.python("-c", text, cwd=tree.current / "data") == "old"
    text = "import pkgutil, pack; print([m.name for m in pkgutil.iter_modules(pack.__path__)])"
    assert tree.python("-c", text) == "['tool']"
    assert tree.python("-c", "import part; print(part.__file__)") == str(tree.kept / "part.py")


def test_module_and_script_that_are_new_are_found(tree: Tree) -> None:
    write_tree(
        tree.current,
        **{"made.py": "V = 'made'\n", "later.py": "import part, made; print(part.V, made.V)\n"},
    )
    assert tree.python("later.py") == "old made"
    assert tree.python("-c", "import later") == "old made"


def test_file_that_snapshot_leaves_out_is_current(tree: Tree) -> None:
    (tree.current / "data" / "loose.py").write_text("import part; print('loose', part.V)\n")
    assert tree.python("data/loose.py", cwd=tree.current, code=1).endswith("named 'part'")
    tree.environ["PYTHONPATH"] += f":{tree.current}"
    assert tree.python("data/loose.py") == "loose old"


def test_editable_installation_on_sys_path_is_old(tree: Tree, tmp_path: Path) -> None:
    site = new_folder(tmp_path / "site")
    (site / "edited.pth").write_text(f"{tree.current / 'src'}\n")
    tree.environ["PYTHONPATH"] = tree.environ["PYTHONPATH"].partition(":")[0]
    text = f"import site; site.addsitedir({str(site)!r}); import src_mod; print(src_mod.V)"
    assert tree.python("-c", text, cwd=tmp_path) == "old"


def test_children_of_a_process_are_old(tree: Tree) -> None:
    text = """
import multiprocessing, part, subprocess, sys
def child(queue):
    import src_mod
    queue.put((part.V, src_mod.V))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), subprocess.check_output([sys.executable, "main.py"], text=True))
    process.join()
"""
    (tree.kept / "spawns.py").write_text(text)
    (tree.current / "spawns.py").write_text("raise SystemExit('new')")
    assert tree.python("spawns.py") == "('old', 'old') old old old []"


def test_python_without_snapshot_is_unchanged(tree: Tree) -> None:
    del tree.environ["CLUSTERJOB_CODE_TREE"]
    assert tree.python("main.py") == "new new new []"


def test_removed_snapshot_falls_back_to_current_files(tree: Tree) -> None:
    shutil.rmtree(tree.kept)
    assert tree.python("main.py") == "new new new []"
