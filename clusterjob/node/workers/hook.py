"""Apply clusterjob's changes in each Python process of a job: imports, torch, signals.

Forked workers inherit the hook from the forkserver. Every other Python process of a job loads a
copy of this file: `write` makes a ``sitecustomize`` which imports it, and then the user's own. So
this file is short, imports only built-in modules at its start, and works in Python 3.7.
"""

from __future__ import annotations

import _frozen_importlib  # `importlib` is slower to import
import _frozen_importlib_external as machinery
import os
import sys

# Not typing.TYPE_CHECKING: importing typing would slow down every start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType, ModuleType
    from typing import Any

# Any Python loads it, 2.7 too. Python's site module ignores that no other sitecustomize exists
# (docs.python.org/3/library/site.html).
_SITECUSTOMIZE = """\
import os, sys
if sys.version_info >= (3, 7):  # older ones have no torch that needs the patches
    import clusterjob_hook
    clusterjob_hook.load()
    if "RANK" in os.environ:  # those below a rank too: they offer their stacks without harm
        import clusterjob_hook.offer
        clusterjob_hook.offer.offer()
own = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
this = sys.modules.pop("sitecustomize")  # Python 2.7 frees what has no reference
import sitecustomize
"""
_HERE = os.path.dirname(os.path.abspath(__file__))
_TOP = os.environ.get("CLUSTERJOB_CODE_ORIGIN", "")
_SNAPSHOT = os.environ.get("CLUSTERJOB_CODE_TREE", "")


def write(job_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Write the directory that loads the hook; return the variables by which Python finds it.

    If that fails, there are none: the job runs without the hook.

    Args:
        job_dir: the job's directory.
        environ: the environment that the processes inherit.
    """
    import inspect
    import secrets

    from clusterjob.node.stacks import offer
    from clusterjob.node.workers import torch_patches

    directory = job_dir / "python"
    modules = {"__init__": sys.modules[__name__], "torch_patches": torch_patches, "offer": offer}
    texts = {"sitecustomize": _SITECUSTOMIZE} | {
        f"clusterjob_hook/{name}": inspect.getsource(module) for name, module in modules.items()
    }
    try:
        for name, text in texts.items():
            path = directory / f"{name}.py"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            own = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            own.write_text(text)
            own.replace(path)  # nodes that share the directory write the same content
    except OSError:
        return {}
    found = (str(directory), environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def load() -> None:
    """Apply the hook in a process that the forkserver has not forked."""
    if _SNAPSHOT:
        _run_submitted_script()
        import_submitted_code()
    if "CLUSTERJOB_TASK_RANK" not in os.environ:  # set with --launcher srun
        patch()


# -- the submitted code: directories of its tree stand for their snapshot --------------------------


def import_submitted_code() -> None:
    """Let imports find the snapshot that the variables name.

    So an editable installation that adds its directory to sys.path is that of the snapshot.
    """
    if _TOP and _SNAPSHOT and _SnapshotFinder not in sys.path_hooks:
        sys.path_hooks.insert(0, _SnapshotFinder)
        for path in list(sys.path_importer_cache):
            if _submitted(path) is not None:
                del sys.path_importer_cache[path]


def _run_submitted_script() -> None:
    """Replace this process by one that runs the submitted version of its script.

    Nothing happens if the script is the submitted version, is not in the tree, or is new.
    """
    words, own = list(getattr(sys, "orig_argv", ())), getattr(sys, "argv", None) or [""]
    if own[0] in ("", "-", "-c", "-m") or words[-len(own) :][:1] != own[:1]:
        return
    script = _submitted(own[0])
    if script is not None and os.path.isfile(script):
        words[-len(own)] = script
        os.execv(sys.executable, words)


def _submitted(path: str) -> str | None:
    """Return the snapshot's version of a path in the tree; None if there is none."""
    top, snapshot, real = map(os.path.realpath, (_TOP, _SNAPSHOT, path))
    if not _TOP or (real != top and not real.startswith(top + os.sep)):
        return None
    found = snapshot + real[len(top) :]
    # A link in the snapshot leads to a file that the snapshot leaves out.
    return found if os.path.exists(found) and os.path.realpath(found) == found else None


class _SnapshotFinder(machinery.FileFinder):
    """Find modules in the snapshot of a directory, then those that are new in the directory."""

    def __init__(self, path: str) -> None:
        found = _submitted(path)
        if found is None or not os.path.isdir(found):
            raise ImportError("not in the code of the job", path=path)
        loaders = machinery._get_supported_file_loaders()  # type: ignore[attr-defined]
        super().__init__(found, *loaders)
        self._current = machinery.FileFinder(path, *loaders)

    def find_spec(self, name: str, target: Any = None) -> Any:
        """Return the spec of a module; None if neither directory has it."""
        return super().find_spec(name, target) or self._current.find_spec(name, target)

    def invalidate_caches(self) -> None:
        """Notice new files."""
        super().invalidate_caches()
        self._current.invalidate_caches()


# -- patches of modules ----------------------------------------------------------------------------


def patch() -> None:
    """Patch modules now if they are loaded, else when they are imported.

    Do nothing if the hook is installed already: by the parent process, or by an outer job.
    """
    if any(getattr(finder, "of_clusterjob", False) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _PatchingFinder())
    for name, change in _PATCHED.items():
        if name in sys.modules:
            change(sys.modules[name])
    show = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        """Show an uncaught exception; see Python's documentation."""
        _strip(error)
        show(kind, error, trace)

    sys.excepthook = excepthook


def _strip(error: Any) -> None:
    """Remove the frames of the hook and its patches from the traceback of an exception."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            called = frame.tb_next
            own = os.path.dirname(called.tb_frame.f_code.co_filename) == _HERE
            if own and called.tb_next is not None:
                frame.tb_next = called.tb_next
            else:
                frame = called
        error = error.__cause__ or error.__context__


class _PatchingFinder:
    """Finder that adds the patches to the loaders of some modules (sys.meta_path protocol)."""

    of_clusterjob = True

    def __init__(self) -> None:
        self._finding = ""  # the module that the other finders are asked for

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module to patch; None for all other modules."""
        if name not in _PATCHED or name == self._finding:  # another finder may ask all finders
            return None
        self._finding = name
        try:
            spec = _frozen_importlib._find_spec(name, path, target)  # type: ignore[attr-defined]
        finally:
            self._finding = ""
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _PATCHED[name](module)

            spec.loader.exec_module = exec_module
        return spec


def _call(function: str, *arguments: Any, **options: Any) -> None:
    """Call a function of `torch_patches`; do nothing if the job's directory was removed."""
    try:
        from . import torch_patches  # of a copy of this file, the copy beside it
    except ImportError:
        return
    getattr(torch_patches, function)(*arguments, **options)


def _report_sigterm(module: Any) -> None:
    """Report when a handler of SIGTERM begins and ends; the program sees its own handlers.

    After a failure, a worker that saves nothing is killed early.
    """
    set_handler, get_handler = module.signal, module.getsignal

    def own(handler: Any) -> Any:
        return getattr(handler, "of_program", handler)

    def signal(signalnum: int, handler: Any) -> Any:
        """Set a signal's handler; see Python's documentation."""
        if signalnum != module.SIGTERM or not callable(handler):
            return own(set_handler(signalnum, handler))

        def reported(number: int, frame: FrameType | None) -> None:
            _call("send", "WorkerTerminating", ended=False)
            try:
                handler(number, frame)
            finally:
                _call("send", "WorkerTerminating", ended=True)

        reported.of_program = handler  # type: ignore[attr-defined]
        return own(set_handler(signalnum, reported))

    module.signal = signal
    module.getsignal = lambda signalnum: own(get_handler(signalnum))


# What follows the import of each module.
_PATCHED = {
    "torch.distributed.distributed_c10d": lambda module: _call("patch_groups", module),
    "torch.distributed.rendezvous": lambda module: _call("patch_stores", module),
    "signal": _report_sigterm,
}
