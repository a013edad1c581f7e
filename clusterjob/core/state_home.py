"""The directory of this user's records, jobs and shared connections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from clusterjob.errors import OTHER_HOME, RecordError
from clusterjob.node.system import private_dirs

_FOLDERS = (
    "records", "jobs", "snapshots", "ssh", "ssh_configs", "slurm", "fetched", "bad_hosts"
)  # fmt: skip


def home() -> Path:
    """Return the directory of records and jobs, which only this user can change.

    Raises:
        RecordError: other users could change it, or files of jobs in it.
    """
    place = unchecked_home()
    try:
        why = private_dirs.exposed(place, *_FOLDERS)
    except OSError as error:
        raise RecordError(
            f"{error.filename} cannot be read: {error.strerror}", OTHER_HOME
        ) from error
    if why:
        raise RecordError(why, f"remove the permission with chmod go-w, or {OTHER_HOME}")
    return place


def unchecked_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the place of the directory of records and jobs.

    It is CLUSTERJOB_HOME, else ``clusterjob`` in the user's state directory (~/.local/state).
    """
    if environ.get("CLUSTERJOB_HOME"):
        return Path(environ["CLUSTERJOB_HOME"]).expanduser().absolute()
    from platformdirs.unix import Unix  # the same directories on macOS

    return Unix("clusterjob").user_state_path
