"""Write the directory on the workers' PYTHONPATH that loads `hook` into Python processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from clusterjob.node.stacks import offer
from clusterjob.node.workers import hook, snapshot_imports, torch_patches

_NAME = "python"
# Python's site module imports sitecustomize (docs.python.org/3/library/site.html).
_FILES = {
    f"{hook.PATCHES}.py": torch_patches,
    f"{hook.SNAPSHOT}.py": snapshot_imports,
    f"{hook.STACKS}.py": offer,
    "sitecustomize.py": hook,
}


def write(job_dir: Path) -> Path | None:
    """Write the directory and return it.

    Return None if that fails; the job then runs without the hook.
    """
    directory = job_dir / _NAME
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, mod in _FILES.items():
            own = directory / f".{name}.{secrets.token_hex(4)}"
            own.write_text(mod.__loader__.get_source(mod.__name__))  # type: ignore[union-attr]
            own.replace(directory / name)  # nodes that share the directory write the same content
    except OSError:
        return None
    return directory


def variables(environ: Mapping[str, str], directory: Path | None) -> dict[str, str]:
    """Return the variables with which Python processes find the directory.

    Args:
        environ: the environment that the processes inherit.
        directory: the result of `write`.
    """
    if directory is None:
        return {}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(directory), environ.get("PYTHONPATH"))))
    }
