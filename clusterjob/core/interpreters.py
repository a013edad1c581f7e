"""Find the Python environments of a project on this machine, for `clusterjob init`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_MOST = 8  # maximum number of interpreters


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter.

    Attributes:
        path: its path.
        origin: what it belongs to, such as "active virtual environment".
        has_torch: whether its directory has torch.
    """

    path: str
    origin: str
    has_torch: bool

    def describe(self) -> str:
        """Return its origin, and whether torch is missing."""
        return f"{self.origin}{'' if self.has_torch else ', without torch'}"


def find(directory: Path, environ: Mapping[str, str]) -> list[Interpreter]:
    """Return the interpreters that a job of a directory may use, those with torch first."""
    found = []
    for path, origin in list(dict(_candidates(directory, environ)).items())[:_MOST]:
        found.append(Interpreter(path, origin, has_torch=_has_torch(path)))
    return sorted(found, key=lambda one: not one.has_torch)


def _candidates(directory: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each path with its origin; the first one is the environment in use."""
    seen = set()
    for folder, origin in (
        (environ.get("VIRTUAL_ENV", ""), "active virtual environment"),
        (environ.get("CONDA_PREFIX", ""), "active conda environment"),
        (str(directory / ".venv"), "the project's .venv"),
        (str(directory / "venv"), "the project's venv"),
        (sys.prefix, "environment of clusterjob"),
        *((folder, "conda environment") for folder in _conda_environments()),
    ):
        path = os.path.join(os.path.abspath(folder), "bin", "python") if folder else ""
        if path and path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path, origin
    if (system := shutil.which("python3", path=environ.get("PATH"))) and system not in seen:
        yield system, "python3 on PATH"


def _conda_environments() -> list[str]:
    """Return the environments that conda has made for this user."""
    try:
        text = Path("~/.conda/environments.txt").expanduser().read_text(errors="replace")
    except (OSError, RuntimeError):
        return []
    return text[:100_000].splitlines()


def _has_torch(path: str) -> bool:
    """Return whether an interpreter's environment has torch; nothing of it is run."""
    folder = Path(path).parents[1]
    return any(True for _ in folder.glob("lib/python3*/*-packages/torch/__init__.py"))
