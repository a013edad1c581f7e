"""Whether a host is fit for a job: its interpreter, torch, its disk; and which machine it is, whatever it is called."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clusterjob.node import processes
from clusterjob.node.visit import cards

_SETUP_PATIENCE = 300.0  # seconds for setup lines and the start of the interpreter

# What the job's own interpreter is asked, where that is not the one that runs this. Any Python 3 understands it.
_QUESTION = """
import importlib.util, json, sys
print("clusterjob-fit " + json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable,
                                      "torch": importlib.util.find_spec("torch") is not None}))
"""


def check(home: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what the submitter has to know before anything is sent.

    Args:
        home: where all of ours lies on this host.
        request: ``need``, the bytes that will be written; ``torch``, whether the job needs torch; ``own``, whether the
            interpreter that runs this is the job's.
    """
    troubles = []
    free = _free(home)
    if free < request["need"]:
        troubles.append(f"disk full: {_megabytes(free)} are free in {home} where {_megabytes(request['need'])} are needed")
    if ":" in str(home):
        troubles.append(f"its directory {home} holds a colon, which PYTHONPATH cannot carry")
    if request["own"]:
        has_torch = importlib.util.find_spec("torch") is not None
        troubles += _misfit(list(sys.version_info[:3]), sys.executable, has_torch=has_torch, needs_torch=request["torch"])
    server = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "troubles": troubles,
        "identity": _identity(),
        "reached_at": server[2] if len(server) == 4 else "",
        "host": os.uname().nodename,
        "home": str(home),
        "time": time.time(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": importlib.util.find_spec("torch") is not None if request["own"] else None,
        "free": free,
        "gpus": [card.text() for card in cards.visible(cards.read_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))]
        if request.get("gpus")
        else [],
    }


def interpreter(job_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what is wrong with the interpreter that the job's script will find: after its setup lines, where it will run.

    Args:
        job_dir: the job's directory on this host.
        request: ``python``, ``setup`` (lines), ``workdir`` (relative to the job's directory, or absolute), ``torch``.
    """
    lines = [f"cd -- {shlex.quote(str(job_dir / request['workdir']))} || exit 1"]
    for index, line in enumerate(request["setup"]):
        lines.append(f"{{ :\n{line}\n}} < /dev/null >&2 || {{ echo 'clusterjob-setup {index}'; exit 1; }}")
    python = shlex.quote(request["python"])
    lines.append(f"command -v -- {python} > /dev/null || {{ echo clusterjob-none; exit 1; }}")
    lines.append(f"exec {python} -c {shlex.quote(_QUESTION)}")
    try:
        asked = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, stdin=subprocess.DEVNULL, timeout=_SETUP_PATIENCE, check=False,
            env=work_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"troubles": [f"its setup lines take longer than {_SETUP_PATIENCE:g} s"]}
    last = (asked.stdout.decode(errors="replace").strip().splitlines() or [""])[-1]
    said = (asked.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    word, _, rest = last.partition(" ")
    if word == "clusterjob-fit":
        found = json.loads(rest)
        return {"troubles": _misfit(found["version"], found["executable"], has_torch=found["torch"], needs_torch=request["torch"])}
    if word == "clusterjob-setup":
        return {"troubles": [f"a setup line failed: {request['setup'][int(rest)]}" + (f" ({said})" if said else "")]}
    if word == "clusterjob-none":
        return {"troubles": [f"there is no interpreter {request['python']}"]}
    return {"troubles": [f"its interpreter {request['python']} cannot be started" + (f": {said}" if said else "")]}


def _misfit(version: list[int], executable: str, *, has_torch: bool, needs_torch: bool) -> list[str]:
    if version[:2] < [3, 10]:
        return [f"Python too old: {executable} is {'.'.join(map(str, version))}, 3.10 or newer is needed"]
    if needs_torch and not has_torch:
        return [f"no torch: {executable} does not find it"]
    return []


def work_environment() -> dict[str, str]:
    """Return the environment that a job starts from: this login's, without what another job may have left in it."""
    from clusterjob.node.contract import LAUNCH_VARIABLES

    return {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES and not name.startswith("CLUSTERJOB_")}


def _free(home: Path) -> int:
    place = home
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _identity() -> str:
    """Return what tells machines apart, whatever names and addresses lead to them: containers on one kernel are several."""
    spaces = []
    for name in ("net", "pid"):
        try:
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            spaces.append("")
    return ":".join([processes.boot_id(), *spaces])
