"""Host check: interpreter, torch and disk of a host, and the identity of the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.environments.worker_variables import LAUNCH_VARIABLES
from clusterjob.node.system import devices, network, processes

Object = dict[str, Any]  # of JSON
_SETUP_TIMEOUT = 300.0  # seconds for setup lines and the start of the interpreter
_OLDEST = (3, 10)  # of the interpreters that run workers

# Code for the job's interpreter; it must run in any Python 3. `python -c` searches the working
# directory for modules first, and its files may not be trusted.
_PROBE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
import os
here = os.path.realpath(os.getcwd())
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
import importlib.util, json
print("clusterjob-interpreter " + json.dumps({
    "version": list(sys.version_info[:3]), "executable": sys.executable,
    "torch": importlib.util.find_spec("torch") is not None,
}))
sys.stdout.flush()
"""
# More code, which imports torch, with the path of the node zip.
_FACTS = """
if sys.version_info >= (3, 10):
    sys.path.insert(0, {zip!r})
    from clusterjob.node.host_server.torch_probe import main
    main()
"""


def check(home: Path, need: int, *, torch: bool, own: bool, with_gpus: bool = False) -> Object:
    """Check this host before the submitter sends anything.

    Args:
        home: clusterjob's directory on this host.
        need: the bytes that will be written.
        torch: whether the job needs torch.
        own: whether the host server runs in the job's interpreter.
        with_gpus: whether to list the GPUs.

    Returns:
        ``errors``: why the host is unfit. The other fields are facts about the host.
    """
    errors = []
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need:
        errors.append(
            f"disk full: {free / 1e6:.0f} MB are free in {home}, {need / 1e6:.0f} MB are needed"
        )
    has_torch = importlib.util.find_spec("torch") is not None if own else None
    if torch and has_torch is False:
        errors.append(f"no torch: {sys.executable} does not find it")
    return {
        "errors": errors,
        # It does not depend on names and addresses; containers on one kernel differ.
        "identity": f"{processes.machine()} {processes.namespace(os.getpid(), 'net')}",
        "addresses": _addresses(),
        "host": os.uname().nodename,
        "home": str(home),
        "time": time.time(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": has_torch,
        "free": free,
        "gpus": [gpu.describe() for gpu in devices.read_gpus(os.environ)] if with_gpus else [],
    }


def interpreter(
    node_zip: str,
    home: Path,
    job: str,
    python: str,
    setup: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    *,
    imports: bool = False,
) -> Object:
    """Check the interpreter that a job's script will find after its setup lines.

    Args:
        node_zip: path of the node zip.
        home: clusterjob's directory on this host.
        job: the job; empty for none.
        python: the interpreter.
        setup: shell lines.
        env: variables of the job.
        workdir: the directory in which the setup lines run: absolute, or relative to the job's.
        imports: whether to run `clusterjob.node.host_server.torch_probe`.

    Returns:
        ``unfit``: why the interpreter is unfit, or empty. ``setup``: whether a setup line failed.
        ``version``, ``executable``, and whether it finds ``torch``, if known. ``facts``: those of
        the probe; None if the interpreter died while it imported torch. ``died``: how it ended in
        that case.
    """
    directory = home / "jobs" / job / Path(workdir).expanduser()
    code = _PROBE + (_FACTS.format(zip=node_zip) if imports else "")
    quoted = shlex.quote(python)
    lines = [
        f"cd -- {shlex.quote(str(directory))} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        *(
            f"{{ :\n{line}\n}} < /dev/null >&2 || {{ echo 'clusterjob-setup {index}'; exit 1; }}"
            for index, line in enumerate(setup)
        ),
        f"command -v -- {quoted} > /dev/null || {{ echo 'clusterjob-none '; exit 1; }}",
        f"exec {quoted} -c {shlex.quote(code)}",
    ]
    answer: Object = {"version": None, "executable": "", "torch": None, "facts": None, "died": ""}
    try:
        asked = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_SETUP_TIMEOUT,
            check=False,
            env=work_environment(),
        )
    except subprocess.TimeoutExpired:
        why = f"its setup lines take longer than {_SETUP_TIMEOUT:g} s"
        return answer | {"unfit": why, "setup": False}
    printed = asked.stdout.decode(errors="replace").splitlines()
    said = dict(line.split(" ", 1) for line in printed if line.startswith("clusterjob-"))
    stderr = (asked.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    unfit = ""
    if "clusterjob-interpreter" in said:
        answer |= json.loads(said["clusterjob-interpreter"])
        if tuple(answer["version"]) < _OLDEST:
            version = ".".join(map(str, answer["version"]))
            unfit = f"Python too old: {answer['executable']} is {version}, 3.10 or newer is needed"
    elif "clusterjob-setup" in said:
        line = setup[int(said["clusterjob-setup"])]
        unfit = f"a setup line failed: {line}" + (f" ({stderr})" if stderr else "")
    elif "clusterjob-none" in said:
        unfit = f"there is no interpreter {python}"
    else:
        unfit = f"its interpreter {python} cannot be started" + (f": {stderr}" if stderr else "")
    if "clusterjob-facts" in said:
        answer["facts"] = json.loads(said["clusterjob-facts"])
    if asked.returncode:
        status = asked.returncode
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        answer["died"] = how + (f": {stderr}" if stderr else "")
    return answer | {"unfit": unfit, "setup": "clusterjob-setup" in said}


def work_environment() -> dict[str, str]:
    """Return the environment of a new job: this login's, without the variables of another job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith("CLUSTERJOB_")
    }


def _addresses() -> list[str]:
    """Return this machine's addresses without loopback and link-local ones.

    The address of this connection comes first, then IPv4.
    """
    local = ("127.", "169.254.", "::1", "fe80:")
    server = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # absent without sshd
    found = (each for each in network.interfaces() if not each.startswith(local))
    return sorted(found, key=lambda address: address not in server)
