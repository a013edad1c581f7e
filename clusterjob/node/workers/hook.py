"""Apply the patches of torch and of imports in every Python process; offer its stacks.

Forked workers inherit the hook from the forkserver. Every other Python process of a job loads a
copy of this file as ``sitecustomize`` (`worker_process.write_hook`). So this file is short and
imports only the standard library. It also runs in Python 2.7 and 3.6, where it does nothing; for
them, types are in comments.
"""

import os
import sys

# Not typing.TYPE_CHECKING: importing typing would slow down every start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

# In the same directory as the copy of this file.
PATCHES = "clusterjob_torch_patches"
SNAPSHOT = "clusterjob_snapshot_imports"
STACKS = "clusterjob_stacks"
# What is patched when it is imported, and the function of `torch_patches` that does it.
_PATCHED = {
    "torch.distributed.distributed_c10d": "patch_groups",
    "torch.distributed.rendezvous": "patch_stores",
    "torch": "note_import",  # it takes seconds, which the job's phase shows
    "signal": "",  # see `_report_sigterm`
}
_MARK = "_patched_by_clusterjob"
_HERE = os.path.dirname(os.path.abspath(__file__))


def install():
    # type: () -> None
    """Patch modules now if they are loaded, else when they are imported.

    Do nothing if the hook is installed already.
    """
    if any(getattr(finder, "of_clusterjob", False) for finder in sys.meta_path):
        return  # the parent process or an outer job has installed it
    for name in _PATCHED:
        if name in sys.modules:
            _patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
    show = sys.excepthook

    def excepthook(kind, error, trace):
        # type: (Any, Any, Any) -> None
        """Show an uncaught exception; see Python's documentation."""
        _strip(error)
        show(kind, error, trace)

    sys.excepthook = excepthook


def _strip(error):
    # type: (Any) -> None
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


class _Finder:
    """Finder that adds the patches to the loaders of some modules (sys.meta_path protocol)."""

    of_clusterjob = True

    def find_spec(self, name, path=None, target=None):
        # type: (str, Any, Any) -> Any
        """Return the spec of a module to patch; None for all other modules."""
        if name not in _PATCHED:
            return None
        spec = None
        for finder in list(sys.meta_path):
            # Some finders have only find_module. Two hooks would call each other without an end.
            find = getattr(finder, "find_spec", None)
            if spec is None and find is not None and not getattr(finder, "of_clusterjob", False):
                spec = find(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                # type: (ModuleType) -> None
                if name == "torch":
                    _call("tell", "import")
                execute(module)
                _patch(module)

            spec.loader.exec_module = exec_module
        return spec


def _patch(module):
    # type: (ModuleType) -> None
    if hasattr(module, _MARK):  # a finder that calls all finders causes a second call
        return
    setattr(module, _MARK, True)
    if module.__name__ == "signal":
        _report_sigterm(module)
    else:
        _call(_PATCHED[module.__name__], module)


def _report_sigterm(module):
    # type: (Any) -> None
    """Report when a handler of SIGTERM begins and ends; the program sees its own handlers.

    After a failure, a worker that saves nothing is killed early.
    """
    set_handler, get_handler = module.signal, module.getsignal

    def own(handler):
        # type: (Any) -> Any
        return getattr(handler, "of_program", handler)

    def signal(signalnum, handler):
        # type: (Any, Any) -> Any
        """Set a signal's handler; see Python's documentation."""
        if signalnum != module.SIGTERM or not callable(handler):
            return own(set_handler(signalnum, handler))

        def reported(number, frame):
            # type: (int, Any) -> None
            _call("send", "WorkerHandler", state="begun")
            try:
                handler(number, frame)
            finally:
                _call("send", "WorkerHandler", state="ended")

        reported.of_program = handler  # type: ignore[attr-defined]
        earlier = own(set_handler(signalnum, reported))
        _call("send", "WorkerHandler", state="set")
        return earlier

    module.signal = signal
    module.getsignal = lambda signalnum: own(get_handler(signalnum))


def _call(function, *arguments, **options):
    # type: (str, Any, Any) -> None
    """Call a function of `torch_patches`; do nothing if the job's directory was removed."""
    if __name__ != "sitecustomize":
        from clusterjob.node.workers import torch_patches as patches
    else:
        if PATCHES not in sys.modules:
            sys.path.insert(0, _HERE)
            try:
                __import__(PATCHES)
            except ImportError:
                return
            finally:
                sys.path.remove(_HERE)
        patches = sys.modules[PATCHES]
    getattr(patches, function)(*arguments, **options)


def _run_hidden_sitecustomize():
    # type: () -> None
    """Import the sitecustomize that this file hides, as Python's site module would do."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        # Python 2.7's ImportError has no name.
        if getattr(error, "name", None) != __name__ and str(error) != "No module named " + __name__:
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 7):  # every torch version that needs the patches requires 3.7
        try:
            if os.environ.get("CLUSTERJOB_CODE_TREE"):
                imports = __import__(SNAPSHOT)
                imports.run_kept_script()
                imports.install()
            # The processes below a rank have RANK too; they offer their stacks without harm.
            if "RANK" in os.environ:
                __import__(STACKS).offer()
        except ImportError:  # the job's directory was removed
            pass
        if "CLUSTERJOB_TASK_RANK" not in os.environ:  # set with --launcher srun
            install()
    _run_hidden_sitecustomize()
