"""A directory on the workers' PYTHONPATH: every Python process of a job loads `hook` from it when
it starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from clusterjob.node.workers import hook, torch_patches

_NAME = "python"
# Python's site module imports sitecustomize (docs.python.org/3/library/site.html).
_FILES = {hook.CHANGES_FILE: torch_patches, "sitecustomize.py": hook}


def write(job_dir: Path) -> Path | None:
    """Write the directory; return it, or None where it cannot be written: the job then runs as
    well, without the hook.
    """
    directory = job_dir / _NAME
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, module in _FILES.items():
            own = directory / f".{name}.{secrets.token_hex(4)}"
            own.write_text(module.__loader__.get_source(module.__name__))  # type: ignore[union-attr]
            own.replace(directory / name)  # nodes that share the directory write the same
    except OSError:
        return None
    return directory


def variables(environ: Mapping[str, str], directory: Path | None) -> dict[str, str]:
    """Return the variables with which Python processes find the directory.

    Args:
        environ: the environment that they inherit.
        directory: what `write` has returned.
    """
    if directory is None:
        return {}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(directory), environ.get("PYTHONPATH"))))
    }
