"""Import the submitted code of a job: directories of its tree stand for their snapshot.

Forked workers call `install`. Every other Python process of a job loads a copy of this file from
`hook`. So this file is short, imports only built-in modules, and works in Python 3.7.
"""

from __future__ import annotations

import _frozen_importlib_external as machinery  # `importlib.machinery` is slower to import
import os
import sys

# Not typing.TYPE_CHECKING: importing typing would slow down every start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def install(environ: Mapping[str, str]) -> None:
    """Let imports find the snapshot that the variables name.

    So an editable installation that adds its directory to sys.path is that of the snapshot.
    """
    tree = _Tree.of(environ)
    if tree is None or any(getattr(hook, "of_clusterjob", False) for hook in sys.path_hooks):
        return

    def hook(path: str) -> _Finder:
        return _Finder(tree, path)

    hook.of_clusterjob = True  # type: ignore[attr-defined]
    sys.path_hooks.insert(0, hook)
    for path in list(sys.path_importer_cache):
        if tree.kept(path) is not None:
            del sys.path_importer_cache[path]


def run_kept_script(environ: Mapping[str, str]) -> None:
    """Replace this process by one that runs the submitted version of its script.

    Nothing happens if the script is the submitted version, is not in the tree, or is new.
    """
    tree = _Tree.of(environ)
    words = list(getattr(sys, "orig_argv", ()))
    script = sys.argv[0] if getattr(sys, "argv", None) else ""
    if tree is None or script in ("", "-", "-c", "-m") or len(words) < len(sys.argv):
        return
    kept = tree.kept(script)
    if kept is not None and os.path.isfile(kept) and words[-len(sys.argv)] == script:
        words[-len(sys.argv)] = kept
        try:
            os.execv(sys.executable, words)
        except OSError:
            pass  # run the current version


class _Tree:
    """A directory and its snapshot."""

    def __init__(self, top: str, snapshot: str) -> None:
        self._top = top
        self._snapshot = snapshot

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _Tree | None:
        top, snapshot = environ.get("CLUSTERJOB_CODE_ORIGIN"), environ.get("CLUSTERJOB_CODE_TREE")
        if not top or not snapshot:
            return None
        return cls(os.path.realpath(top), os.path.realpath(snapshot))

    def kept(self, path: str) -> str | None:
        """Return the snapshot's version of a path in the tree; None if there is none."""
        return self._moved(path, self._top, self._snapshot)

    def current(self, path: str) -> str | None:
        """Return the path in the tree for a path in the snapshot; None if there is none."""
        return self._moved(path, self._snapshot, self._top)

    def _moved(self, path: str, old: str, new: str) -> str | None:
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError):
            return None
        if real != old and not real.startswith(old + os.sep):
            return None
        moved = new + real[len(old) :]
        # A link in the snapshot leads to a file that the snapshot leaves out.
        return moved if os.path.exists(moved) and os.path.realpath(moved) == moved else None


class _Finder(machinery.FileFinder):
    """Find modules in the snapshot of a directory, then those that are new in the directory."""

    def __init__(self, tree: _Tree, path: str) -> None:
        kept, current = tree.kept(path), path
        if kept is None:
            kept, moved = path, tree.current(path)
            if moved is None:
                raise ImportError("not in the code of the job", path=path)
            current = moved
        if not os.path.isdir(kept):
            raise ImportError("no directory", path=path)
        loaders = machinery._get_supported_file_loaders()  # type: ignore[attr-defined]
        super().__init__(kept, *loaders)
        self._current = machinery.FileFinder(current, *loaders)

    def find_spec(self, name: str, target: Any = None) -> Any:
        """Return the spec of a module; None if neither directory has it."""
        found = super().find_spec(name, target)
        return self._current.find_spec(name, target) if found is None else found

    def invalidate_caches(self) -> None:
        """Notice new files."""
        super().invalidate_caches()
        self._current.invalidate_caches()
