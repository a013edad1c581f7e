"""Apply the patches of torch and of imports in every Python process; offer its stacks.

Forked workers inherit the hook from the forkserver. Every other Python process of a job loads a
copy of this file as ``sitecustomize`` (`hook_directory`). So this file is short and imports only
the standard library. It also runs in Python 2.7 and 3.6, where it does nothing; for them, types are
in comments.
"""

import os
import sys

# Not typing.TYPE_CHECKING: importing typing would slow down every start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

# In the same directory as the copy of this file.
PATCHES_FILE = "clusterjob_torch_patches.py"
SNAPSHOT_FILE = "clusterjob_snapshot_imports.py"
STACKS_FILE = "clusterjob_stacks.py"
PHASES_FILE = "clusterjob_rank_phases.py"
DUMPS_FILE = "clusterjob_flight_dumps.py"
WAITS_FILE = "clusterjob_collective_waits.py"
# The patches of each module, as (module of the package, its copy, function).
_CHANGED = {
    "torch.distributed.distributed_c10d": (
        ("torch_patches", PATCHES_FILE, "keep_groups"),
        ("rank_phases", PHASES_FILE, "report_phases"),
        ("flight_dumps", DUMPS_FILE, "watch"),
        ("collective_waits", WAITS_FILE, "measure"),
    ),
    "torch.distributed.rendezvous": (("torch_patches", PATCHES_FILE, "choose_store"),),
    "torch": (),  # its import takes seconds, which the job's phase shows
    "signal": (),
}
_MARK = "_changed_by_clusterjob"
_HERE = os.path.dirname(os.path.abspath(__file__))


def install():
    # type: () -> None
    """Patch torch.distributed now if it is loaded, else when it is imported.

    Do nothing if the hook is installed already.
    """
    if any(getattr(finder, "of_clusterjob", False) for finder in sys.meta_path):
        return  # the parent process or an outer job has installed it
    for name in _CHANGED:
        if name in sys.modules:
            _change(sys.modules[name])
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
        spec = spec_of_others(self, name, path, target) if name in _CHANGED else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                # type: (ModuleType) -> None
                phases = _changes("rank_phases", PHASES_FILE) if name == "torch" else None
                if phases is not None:
                    phases.tell("import")
                try:
                    execute(module)
                finally:
                    if phases is not None:
                        phases.tell("imported")
                _change(module)

            spec.loader.exec_module = exec_module
        return spec


def spec_of_others(own, name, path, target):
    # type: (Any, str, Any, Any) -> Any
    """Return the spec that the finders of others find for a module; None without one."""
    for finder in sys.meta_path:
        # Two finders that call each other would do so without an end.
        skip = finder is own or getattr(finder, "of_clusterjob", False)
        # Some finders have only find_module.
        find = None if skip else getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def _change(module):
    # type: (ModuleType) -> None
    # Another finder that calls all finders may cause a second call.
    if hasattr(module, _MARK):
        return
    setattr(module, _MARK, True)
    if module.__name__ == "signal":
        _report_sigterm(module)
    for name, file, function in _CHANGED[module.__name__]:
        changes = _changes(name, file)
        if changes is not None:
            getattr(changes, function)(module)


def _report_sigterm(module):
    # type: (Any) -> None
    """Report when a handler of SIGTERM begins and ends; the program sees its own handlers.

    After a failure, a worker that saves nothing is killed early.
    """
    set_handler, get_handler = module.signal, module.getsignal

    class Reported:
        """A handler of SIGTERM."""

        def __init__(self, handler, send):
            # type: (Any, Any) -> None
            self.handler, self.send = handler, send

        def __call__(self, number, frame):
            # type: (int, Any) -> None
            self.send("WorkerHandler", state="begun")
            try:
                self.handler(number, frame)
            finally:
                self.send("WorkerHandler", state="ended")

    def own(handler):
        # type: (Any) -> Any
        return handler.handler if isinstance(handler, Reported) else handler

    def signal(signalnum, handler):
        # type: (Any, Any) -> Any
        """Set a signal's handler; see Python's documentation."""
        phases = None
        if callable(handler) and signalnum == module.SIGTERM:
            phases = _changes("rank_phases", PHASES_FILE)
        if phases is None:
            return own(set_handler(signalnum, handler))
        earlier = own(set_handler(signalnum, Reported(handler, phases.send)))
        phases.send("WorkerHandler", state="set")
        return earlier

    module.signal = signal
    module.getsignal = lambda signalnum: own(get_handler(signalnum))


def _changes(name, file):
    # type: (str, str) -> Any
    """Return a module with patches; None if the job's directory was removed."""
    if __name__ != "sitecustomize":
        from importlib import import_module

        return import_module("clusterjob.node.workers." + name)
    return _load(file)


def _load(file):
    # type: (str) -> Any
    """Return the module of a file beside this one; None if the job's directory was removed."""
    name = file[: -len(".py")]
    if name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, os.path.join(_HERE, file))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except OSError:
            return None
        sys.modules[name] = module
    return sys.modules[name]


def _use_snapshot():
    # type: () -> None
    imports = _load(SNAPSHOT_FILE) if os.environ.get("CLUSTERJOB_CODE_TREE") else None
    if imports is not None:
        imports.run_kept_script(os.environ)
        imports.install(os.environ)


def _offer_stacks():
    # type: () -> None
    # The processes below a rank have RANK too; they offer their stacks without harm.
    if "RANK" in os.environ:
        # Not `_load`, whose importlib.util takes several milliseconds.
        try:
            __import__(STACKS_FILE[: -len(".py")]).offer()
        except ImportError:  # the job's directory was removed
            pass


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
        _use_snapshot()
        _offer_stacks()
        if "CLUSTERJOB_TASK_RANK" not in os.environ:  # set with --launcher srun
            install()
    _run_hidden_sitecustomize()
