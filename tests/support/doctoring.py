"""Run `clusterjob doctor` and return its checks by name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import CLUSTERJOB, PACKAGE
from launching import write_tree
from procs import TEST_TIMEOUT

from clusterjob.core import node_zip

# A torch for tests of the environment: it reports its build and has no native code, which takes a
# second to load.
LIGHT_TORCH = """
__version__ = {version!r}
class version:
    cuda, hip = None, None
class cuda:
    is_available = staticmethod(lambda: False)
    is_initialized = staticmethod(lambda: False)
from torch import distributed
"""
LIGHT_DISTRIBUTED = """
is_available = is_gloo_available = lambda: True
is_nccl_available = lambda: False
"""


class Diagnosis:
    """The output of `doctor --json`."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert PACKAGE not in done.stderr, f"a traceback of ours\n{done.stderr}"
        assert done.returncode in (0, 1), (
            f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        output: dict[str, Any] = json.loads(done.stdout)
        assert output["schema"] == 1
        self.checks: list[dict[str, str]] = output["checks"]
        self.fit: bool = output["fit"]
        failed = [check for check in self.checks if check["state"] == "failed"]
        assert self.fit == (done.returncode == 0) == (not failed), self
        for check in self.checks:
            assert check["state"] in ("ok", "warning", "failed", "unknown")
            assert len(check["message"].splitlines()) == 1, check
            assert check["hint"] or check["state"] not in ("warning", "failed"), f"no hint: {check}"

    def __repr__(self) -> str:
        return "\n" + "\n".join(
            f"{check['state']:<8} {check['name']:<12} {check['message']} [{check['hint']}]"
            for check in self.checks
        )

    def named(self, name: str) -> list[dict[str, str]]:
        found = [check for check in self.checks if check["name"] == name]
        assert found, f"no check {name!r}:{self}"
        return found

    def state(self, name: str) -> str:
        """Return the worst state of all results of a check."""
        states = {check["state"] for check in self.named(name)}
        return next(state for state in ("failed", "warning", "unknown", "ok") if state in states)

    def message(self, name: str) -> str:
        return "\n".join(check["message"] for check in self.named(name))

    def hints(self, name: str) -> str:
        return "\n".join(check["hint"] for check in self.named(name))

    @property
    def failed(self) -> list[str]:
        return list(
            dict.fromkeys(check["name"] for check in self.checks if check["state"] == "failed")
        )


def doctor(
    *options: str, prefix: Sequence[str] = (), first: bool = False, **more: Any
) -> Diagnosis:
    """Run `doctor` with these options and return its output.

    Args:
        options: options of `doctor`.
        prefix: a command that runs it, such as unshare.
        first: run it without a node zip in the cache, like a user's first command. By default the
            zip is in the cache, because packing it takes longer than all checks.
        more: arguments of `subprocess.run`.
    """
    if not first:
        node_zip.keep(node_zip.node_zip(node_zip.cache_directory()), node_zip.cache_directory())
    argv = [*prefix, *CLUSTERJOB, "doctor", "--json", *options]
    return Diagnosis(
        subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=TEST_TIMEOUT,
            **more,
        )
    )


def light_torch(directory: Path, version: str = "2.9.0") -> Path:
    """Write a torch of this version that imports fast; return its directory for PYTHONPATH."""
    package = directory / "torch"
    (package / "distributed" / "nn").mkdir(parents=True)
    write_tree(
        package,
        **{
            "__init__.py": LIGHT_TORCH.format(version=version),
            "distributed/__init__.py": LIGHT_DISTRIBUTED,
        },
    )
    for name in ("__init__", "functional"):
        (package / "distributed" / "nn" / f"{name}.py").write_text("")
    return directory
