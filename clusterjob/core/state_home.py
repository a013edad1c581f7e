"""The directory of this user's records, jobs and shared connections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of records and jobs.

    It is CLUSTERJOB_HOME, else ``clusterjob`` in the user's state directory (~/.local/state).
    """
    if environ.get("CLUSTERJOB_HOME"):
        return Path(environ["CLUSTERJOB_HOME"]).expanduser().absolute()
    from platformdirs.unix import Unix  # the same directories on macOS

    return Unix("clusterjob").user_state_path
