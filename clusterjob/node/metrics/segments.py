"""The names of the files with a node's samples, in ``logs/node<k>/``.

- ``metrics.<n>``: a segment of half an hour with every sample. The newest segments are kept; an
  older one is removed as a whole.
- ``metrics.thinned``: one sample per minute for the whole job: rates are means, levels are peaks.

A segment begins with a line of the `NodeFacts`; in ``metrics.thinned`` each attempt does. Each
other line is a sample; see `clusterjob.node.metrics.lines`. `clusterjob.insight.sample_files` reads
them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SEGMENT = re.compile(r"metrics\.(\d{1,9})", re.ASCII)


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment in a node's log directory."""
    return directory / f"metrics.{number}"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments in a node's log directory, ascending."""
    try:
        matches = map(_SEGMENT.fullmatch, os.listdir(directory))
    except OSError:
        return []
    return sorted(int(match[1]) for match in matches if match)
