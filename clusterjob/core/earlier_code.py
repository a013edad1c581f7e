"""The code of an earlier job, which another job runs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EarlierCode:
    """Where the code of an earlier job is.

    Attributes:
        job_dir: the directory of that job, with the list of the files that it sent.
        facts: its `Record.code`.
    """

    job_dir: Path
    facts: Mapping[str, Any]
