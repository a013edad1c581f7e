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
    from typing import Any

_TOP = os.environ.get("CLUSTERJOB_CODE_ORIGIN", "")
_SNAPSHOT = os.environ.get("CLUSTERJOB_CODE_TREE", "")


def install() -> None:
    """Let imports find the snapshot that the variables name.

    So an editable installation that adds its directory to sys.path is that of the snapshot.
    """
    if _TOP and _SNAPSHOT and _Finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _Finder)
        for path in list(sys.path_importer_cache):
            if _kept(path) is not None:
                del sys.path_importer_cache[path]


def run_kept_script() -> None:
    """Replace this process by one that runs the submitted version of its script.

    Nothing happens if the script is the submitted version, is not in the tree, or is new.
    """
    words, own = list(getattr(sys, "orig_argv", ())), getattr(sys, "argv", None) or [""]
    if own[0] in ("", "-", "-c", "-m") or words[-len(own) :][:1] != own[:1]:
        return
    kept = _kept(own[0])
    if kept is not None and os.path.isfile(kept):
        words[-len(own)] = kept
        os.execv(sys.executable, words)


def _kept(path: str) -> str | None:
    """Return the snapshot's version of a path in the tree; None if there is none."""
    top, snapshot, real = map(os.path.realpath, (_TOP, _SNAPSHOT, path))
    if not _TOP or (real != top and not real.startswith(top + os.sep)):
        return None
    kept = snapshot + real[len(top) :]
    # A link in the snapshot leads to a file that the snapshot leaves out.
    return kept if os.path.exists(kept) and os.path.realpath(kept) == kept else None


class _Finder(machinery.FileFinder):
    """Find modules in the snapshot of a directory, then those that are new in the directory."""

    def __init__(self, path: str) -> None:
        kept = _kept(path)
        if kept is None or not os.path.isdir(kept):
            raise ImportError("not in the code of the job", path=path)
        loaders = machinery._get_supported_file_loaders()  # type: ignore[attr-defined]
        super().__init__(kept, *loaders)
        self._current = machinery.FileFinder(path, *loaders)

    def find_spec(self, name: str, target: Any = None) -> Any:
        """Return the spec of a module; None if neither directory has it."""
        found = super().find_spec(name, target)
        return self._current.find_spec(name, target) if found is None else found

    def invalidate_caches(self) -> None:
        """Notice new files."""
        super().invalidate_caches()
        self._current.invalidate_caches()
