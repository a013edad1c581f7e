"""Host check: interpreter, torch and disk of a host, and the identity of the machine."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.environments.worker_variables import LAUNCH_VARIABLES
from clusterjob.node.host_server import gpus, requests
from clusterjob.node.system import files, processes

_SETUP_TIMEOUT = 300.0  # seconds for setup lines and the start of the interpreter

# `python -c` searches the working directory for modules first, and its files may not be trusted.
_SKIP_WORKING_DIRECTORY = """
import sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
import os
here = os.path.realpath(os.getcwd())
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
"""

# Code of `interpreter` for the job's interpreter. It must run in any Python 3.
_INTERPRETER_CODE = """
import importlib.util, json, sys
print("clusterjob-interpreter " + json.dumps({
    "version": list(sys.version_info[:3]), "executable": sys.executable,
    "torch": importlib.util.find_spec("torch") is not None,
}))
"""


# Code of `facts` for the job's interpreter. An interpreter that is too old reports its version.
_FACTS_CODE = """
import json, sys
print("clusterjob-interpreter " + json.dumps({
    "version": list(sys.version_info[:3]), "executable": sys.executable,
}))
sys.stdout.flush()
if sys.version_info >= (3, 10):
    from clusterjob.node.host_server.torch_probe import main
    main()
"""


def check(home: Path, request: requests.Check) -> dict[str, Any]:
    """Check this host before the submitter sends anything.

    Args:
        home: clusterjob's directory on this host.
        request: the job's needs.

    Returns:
        ``errors``: why the host is unfit. The other fields are facts about the host.
    """
    errors = []
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < request.need:
        errors.append(
            f"disk full: {free / 1e6:.0f} MB are free in {home}, "
            f"{request.need / 1e6:.0f} MB are needed"
        )
    if ":" in str(home):
        errors.append(f"its directory {home} contains a colon, which PYTHONPATH does not allow")
    has_torch = importlib.util.find_spec("torch") is not None if request.own else None
    if request.own:
        errors += _misfit(
            list(sys.version_info[:3]),
            sys.executable,
            torch=has_torch,
            needs_torch=request.torch,
        )
    return {
        "errors": errors,
        "identity": _identity(),
        "addresses": _addresses(),
        "host": os.uname().nodename,
        "home": str(home),
        "time": time.time(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": has_torch,
        "free": free,
        "gpus": [
            gpu.describe()
            for gpu in gpus.visible(gpus.read_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        ]
        if request.gpus
        else [],
    }


def interpreter(home: Path, request: requests.Fit) -> dict[str, Any]:
    """Check the interpreter that the job's script will find after its setup lines.

    Returns:
        ``errors``: why the interpreter is unfit; empty if it is fit.
    """
    directory = str(home / "jobs" / request.job / request.workdir)
    answer, why, _ = _ask(
        directory, request.python, setup=request.setup, question=_INTERPRETER_CODE
    )
    found = answer.get("interpreter")
    return {"errors": [why] if found is None else _misfit(**found, needs_torch=request.torch)}


def facts(request: requests.Facts, node_zip: str) -> dict[str, Any]:
    """Run `clusterjob.node.host_server.torch_probe` in the job's interpreter.

    Args:
        request: the interpreter, its setup lines, and the directory in which they run.
        node_zip: path of the node zip.

    Returns:
        ``unfit``: why the interpreter is unfit, or empty. ``setup``: whether a setup line failed.
        ``version`` and ``executable``, if known. ``facts``: the facts; None if the interpreter
        died while it imported torch. ``died``: how it ended in that case.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request.env.items()]
    path = (
        f'export PYTHONPATH={shlex.quote(node_zip)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        ' OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"'
    )
    answer, why, end = _ask(
        os.path.expanduser(request.workdir),
        request.python,
        setup=request.setup,
        question=_FACTS_CODE,
        before=exports,
        after=[path],
    )
    found = answer.get("interpreter")
    if found is None:
        nothing = {"version": None, "executable": "", "facts": None, "died": ""}
        return {"unfit": why, "setup": "setup" in answer, **nothing}
    unfit = "; ".join(_misfit(**found, torch=True, needs_torch=False))
    return {
        "unfit": unfit, "setup": False, **found, "facts": answer.get("facts"), "died": end,
    }  # fmt: skip


def _ask(
    directory: str,
    python: str,
    setup: Sequence[str],
    question: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> tuple[dict[str, Any], str, str]:
    """Run the job's setup lines in bash, then code in its interpreter.

    `before` and `after` are bash lines around the setup lines.

    Returns:
        The printed JSON objects by name, and with the name ``setup`` the index of a setup line that
        failed; why there is no ``interpreter``; how bash ended, empty for exit code 0.
    """
    lines = [f"cd -- {shlex.quote(directory)} || exit 1", *before]
    for index, line in enumerate(setup):
        lines.append(
            f"{{ :\n{line}\n}} < /dev/null >&2 || {{ echo 'clusterjob-setup {index}'; exit 1; }}"
        )
    quoted = shlex.quote(python)
    lines.append(f"command -v -- {quoted} > /dev/null || {{ echo clusterjob-none; exit 1; }}")
    lines += [*after, f"exec {quoted} -c {shlex.quote(_SKIP_WORKING_DIRECTORY + question)}"]
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
        return {}, f"its setup lines take longer than {_SETUP_TIMEOUT:g} s", ""
    except OSError as error:
        return {}, f"bash cannot be run: {error.strerror}", ""
    stderr = (asked.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    found: dict[str, Any] = {}
    why = f"its interpreter {python} cannot be started" + (f": {stderr}" if stderr else "")
    for line in asked.stdout.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word in ("clusterjob-interpreter", "clusterjob-facts", "clusterjob-setup"):
            found[word.removeprefix("clusterjob-")] = json.loads(rest)
        elif word == "clusterjob-none":
            why = f"there is no interpreter {python}"
    if "setup" in found:
        why = f"a setup line failed: {setup[found['setup']]}" + (f" ({stderr})" if stderr else "")
    code = asked.returncode
    end = "" if code == 0 else f"signal {-code}" if code < 0 else f"exit code {code}"
    return found, why, end + (f": {stderr}" if stderr and code else "")


def _misfit(
    version: list[int], executable: str, *, torch: bool | None, needs_torch: bool
) -> list[str]:
    if version[:2] < [3, 10]:
        found = ".".join(map(str, version))
        return [f"Python too old: {executable} is {found}, 3.10 or newer is needed"]
    if needs_torch and not torch:
        return [f"no torch: {executable} does not find it"]
    return []


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
    found = []
    lines = files.read_text("/proc/net/fib_trie").splitlines()
    for line, following in itertools.pairwise(lines):
        if following.strip() == "/32 host LOCAL" and "|-- " in line:
            found.append(line.partition("|-- ")[2].strip())
    for row in files.read_text("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, flags, _ = row.split()
        # Global scope, neither deprecated nor tentative.
        if scope == "00" and not int(flags, 16) & 0x60:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    distinct = [each for each in dict.fromkeys(found) if not each.startswith(("127.", "169.254."))]
    server = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # absent without sshd
    return sorted(distinct, key=lambda address: address not in server)


def _identity() -> str:
    """Return an identity of the machine that does not depend on its names and addresses.

    Containers on one kernel have different identities, because their network and PID namespaces
    differ.
    """
    own = os.getpid()
    spaces = (processes.namespace(own, name) for name in ("net", "pid"))
    return ":".join([processes.boot_id(), *spaces])
