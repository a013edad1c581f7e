"""Starts in every Python process of a job: has torch.distributed changed (`torch_changes`) at the
moment when a program imports it.

Forked workers have it from the forkserver. All other Python processes of a job load a copy of this
file as ``sitecustomize`` (`hook_directory`), so it is short, imports the standard library alone,
and suits Python 2.7 and 3.6 too, for which it does nothing: types are in comments.
"""

import os
import sys

# Not typing's: this is loaded at every start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

CHANGES_FILE = "clusterjob_torch_changes.py"  # beside the copy
_CHANGED = {
    "torch.distributed.distributed_c10d": "keep_groups",
    "torch.distributed.rendezvous": "choose_store",
}
_MARK = "_changed_by_clusterjob"


def install():
    # type: () -> None
    """Have torch.distributed changed: now where it is loaded already, else when it is imported.
    Once is enough.
    """
    if any(getattr(finder, "of_clusterjob", False) for finder in sys.meta_path):
        return  # of this process's parent, or of the job around this one
    for name in _CHANGED:
        if name in sys.modules:
            _change(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the modules that are to be changed, with a loader that changes them; the protocol of
    sys.meta_path.
    """

    of_clusterjob = True

    def find_spec(self, name, path=None, target=None):
        # type: (str, Any, Any) -> ModuleSpec | None
        """Return where a module is; None for all but those that are to be changed."""
        if name not in _CHANGED:
            return None
        for finder in sys.meta_path:
            find_spec = (
                None if finder is self else getattr(finder, "find_spec", None)
            )  # some have find_module alone
            spec = None if find_spec is None else find_spec(name, path, target)  # type: ModuleSpec | None
            if spec is not None:
                _change_after(spec.loader)
                return spec
        return None


def _change_after(loader):
    # type: (Any) -> None
    execute = loader.exec_module

    def exec_module(module):
        # type: (ModuleType) -> None
        execute(module)
        _change(module)

    loader.exec_module = exec_module


def _change(module):
    # type: (ModuleType) -> None
    changes = _changes()
    if changes is not None and not hasattr(
        module, _MARK
    ):  # a finder that asks the others may have it changed twice
        setattr(module, _MARK, True)
        getattr(changes, _CHANGED[module.__name__])(module)


def _changes():
    # type: () -> Any
    """Return the module with the changes; None where the job's directory is gone, and the job with
    it.
    """
    if __name__ != "sitecustomize":
        from clusterjob.node.workers import torch_patches

        return torch_patches
    name = CHANGES_FILE[: -len(".py")]
    if name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, os.path.join(_HERE, CHANGES_FILE))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except OSError:
            return None
        sys.modules[name] = module
    return sys.modules[name]


def _run_hidden_sitecustomize():
    # type: () -> None
    """Import the sitecustomize that this one hides, as Python's site module would have."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if (
            getattr(error, "name", None) != __name__ and str(error) != "No module named " + __name__
        ):  # Python 2.7's has no name
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    _HERE = os.path.dirname(os.path.abspath(__file__))
    if sys.version_info >= (3, 7):  # which each torch needs that is changed
        install()
    _run_hidden_sitecustomize()
