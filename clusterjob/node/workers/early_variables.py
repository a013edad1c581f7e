"""Find environment variables that a script sets before it imports torch.

A forked worker has inherited an imported torch, which has already read these variables.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from clusterjob.node.workers import hook

# Variables that torch 2.13 and the libraries it loads read at import. An extra name costs
# time; a missing name breaks scripts.
_READ_BY_IMPORT = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|MKLDNN|DNNL|ONEDNN|NPY|KINETO|PYTORCH|TORCH|TQDM)_\w+"
    r"|TORCHDYNAMO_EXTENDED_\w+"
)
_READ_LATER = re.compile(
    r"TORCH_(NCCL|FR|GLOO)_\w+|TORCH_HOME|TORCH_EXTENSIONS_DIR|TORCH_CUDA_ARCH_LIST"
    r"|KMP_DUPLICATE_LIB_OK"
)
# `_apply` makes torch read these variables again.
_READ_AGAIN = ("TORCH_DISTRIBUTED_DEBUG", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def matters(name: str) -> bool:
    """Return whether the import of torch reads this variable."""
    return _READ_BY_IMPORT.fullmatch(name) is not None and _READ_LATER.fullmatch(name) is None


# -- before the fork: variables that the source of the script sets ---------------------------------


def set_in(source: bytes, name: str, environ: Mapping[str, str]) -> str | None:
    """Return the variable that a script sets before it imports torch, and the line.

    Only the statements of the main file outside of functions are checked. `apply_at_import` handles
    the rest.

    Args:
        source: the script.
        name: the name of its file.
        environ: the environment that the program inherits.

    Returns:
        A sentence with the file, the line and the variable. None if the script sets no variable,
        or only variables that a forked worker can still apply.
    """
    try:
        if b"environ" not in source and b"putenv" not in source:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the worker shows the error
    for statement in _flat(statements):
        if _imports_torch(statement):
            return None
        for variable in _changed_by(statement, environ):
            if matters(variable) and variable not in _READ_AGAIN:
                return (
                    f"{name} line {statement.lineno} sets {variable},"
                    " which torch reads while it is imported"
                )
    return None


def _flat(statements: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield statements in order, with each compound statement replaced by its inner statements.

    Statements inside functions and classes are left out.
    """
    for statement in statements:
        if isinstance(
            statement, ast.If | ast.Try | ast.With | ast.For | ast.While | ast.ExceptHandler
        ):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from _flat(getattr(statement, block, ()))
        elif isinstance(statement, ast.stmt):
            yield statement


def _imports_torch(statement: ast.stmt) -> bool:
    names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        names = [statement.module or ""]
    return any(name.partition(".")[0] == "torch" for name in names)


def _changed_by(statement: ast.stmt, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that a statement sets to another value, or removes."""
    if isinstance(statement, ast.Assign | ast.Delete | ast.AugAssign):
        value = _text(getattr(statement, "value", None))
        for target in (
            [statement.target] if isinstance(statement, ast.AugAssign) else statement.targets
        ):
            name = (
                _text(target.slice)
                if isinstance(target, ast.Subscript) and _is_environ(target.value)
                else None
            )
            if name is not None and (value is None or environ.get(name) != value):
                yield name
    elif (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
    ):
        yield from _changed_by_call(statement.value, statement.value.func, environ=environ)


def _changed_by_call(
    call: ast.Call, function: ast.Attribute, environ: Mapping[str, str]
) -> Iterator[str]:
    method, words = function.attr, [_text(argument) for argument in call.args]
    if method not in ("putenv", "unsetenv") and not _is_environ(function.value):
        return
    if method == "update":
        tables = [argument for argument in call.args if isinstance(argument, ast.Dict)]
        given = [
            (_text(key), each)
            for table in tables
            for key, each in zip(table.keys, table.values, strict=True)
        ]
        given += [(key.arg, key.value) for key in call.keywords]
        yield from (
            name
            for name, value in given
            if name is not None and (_text(value) is None or environ.get(name) != _text(value))
        )
    elif words and words[0] is not None:
        old = environ.get(words[0])
        changes = {
            "putenv": words[-1] is None or words[-1] != old,
            "setdefault": old is None,
            "pop": old is not None,
            "unsetenv": old is not None,
        }
        if changes.get(method):
            yield words[0]


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# -- after the fork: variables that the script has set when it imports torch -----------------------


def apply_at_import() -> None:
    """Apply changed variables when this process imports torch.

    Print one message that names the changed variables that torch can no longer apply. Until the
    import, the modules of torch are removed from sys.modules; the first import restores all.
    """
    if "torch" in sys.modules:
        names = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
        sys.meta_path.insert(
            0, _Preloaded({name: sys.modules.pop(name) for name in names}, dict(os.environ))
        )


class _Preloaded:
    """Finder and loader for the torch that the forkserver has imported (sys.meta_path protocol)."""

    def __init__(self, modules: dict[str, ModuleType], before: dict[str, str]) -> None:
        self._modules, self._before = modules, before

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return torch's spec with a loader of the preloaded module; None for other modules."""
        if name != "torch" or self not in sys.meta_path:
            return None
        spec: ModuleSpec | None = hook.spec_of_others(self, name, path, target)
        if spec is not None:
            spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Restore all modules in sys.modules, and return torch."""
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Apply the variables that have changed since the fork."""
        # Restore torch's own loader: this loader is used only once.
        module.__spec__.loader = module.__loader__  # type: ignore[union-attr]
        changed = [
            name
            for name in {**self._before, **os.environ}
            if matters(name) and self._before.get(name) != os.environ.get(name)
        ]
        left = [name for name in changed if not _apply(module, name)]
        if left:
            text = (
                f"torch was imported before this script set {', '.join(sorted(left))}:"
                " use --env NAME=VALUE, or --start exec"
            )
            print(f"clusterjob: {text}", file=sys.stderr, flush=True)


def _apply(torch: Any, name: str) -> bool:
    """Make torch read one variable again; return whether that is possible."""
    if name == "TORCH_DISTRIBUTED_DEBUG" and hasattr(torch.distributed, "set_debug_level_from_env"):
        torch.distributed.set_debug_level_from_env()
        return True
    if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        number = (
            os.environ.get("MKL_NUM_THREADS")
            or os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        )
        if number.isascii() and number.isdecimal() and int(number):
            torch.set_num_threads(int(number))
            return True
    return False
