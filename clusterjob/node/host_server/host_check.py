"""Whether a host is fit for a job: its interpreter, torch, its disk; and which machine it is,
whatever it is called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import gpus
from clusterjob.node.system import processes

_SETUP_PATIENCE = 300.0  # seconds for setup lines and the start of the interpreter

# `python -c` looks for modules in the working directory first, which may be a clone that nobody has
# read.
_NOTHING_FROM_HERE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
import os
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.realpath(os.getcwd())]
"""

# What the job's own interpreter is asked, where that is not the one that runs this. Any Python 3
# understands it.
_QUESTION = """
import importlib.util, json, sys
print("clusterjob-fit " + json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable,
                                      "torch": importlib.util.find_spec("torch") is not None}))
"""


# The same, of an interpreter that is asked for all: one that is too old says no more than that.
_QUESTION_OF_FACTS = """
import json, sys
print("clusterjob-fit " + json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable}))
sys.stdout.flush()
if sys.version_info >= (3, 10):
    from clusterjob.node.host_server.torch_probe import main
    main()
"""


def check(home: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what the submitter has to know before anything is sent.

    Args:
        home: where all of ours lies on this host.
        request: ``need``, the bytes that will be written; ``torch``, whether the job needs torch;
            ``own``, whether the interpreter that runs this is the job's.
    """
    troubles = []
    free = _free(home)
    if free < request["need"]:
        troubles.append(
            f"disk full: {_megabytes(free)} are free in {home} where {_megabytes(request['need'])} are needed"
        )
    if ":" in str(home):
        troubles.append(f"its directory {home} holds a colon, which PYTHONPATH cannot carry")
    if request["own"]:
        has_torch = importlib.util.find_spec("torch") is not None
        troubles += _misfit(
            list(sys.version_info[:3]),
            sys.executable,
            has_torch=has_torch,
            needs_torch=request["torch"],
        )
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
        "gpus": [
            card.text()
            for card in gpus.visible(gpus.read_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        ]
        if request.get("gpus")
        else [],
    }


def interpreter(job_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what is wrong with the interpreter that the job's script will find: after its setup
    lines, where it will run.

    Args:
        job_dir: the job's directory on this host.
        request: ``python``, ``setup`` (lines), ``workdir`` (relative to the job's directory, or
            absolute), ``torch``.
    """
    directory = str(job_dir / request["workdir"])
    answer = _ask(directory, request["python"], setup=request["setup"], question=_QUESTION)
    found = answer.said("fit")
    if found is None:
        return {"troubles": [answer.trouble]}
    return {
        "troubles": _misfit(
            found["version"],
            found["executable"],
            has_torch=found["torch"],
            needs_torch=request["torch"],
        )
    }


def facts(directory: str, request: dict[str, Any], node_zip: str) -> dict[str, Any]:
    """Return what the job's interpreter makes of this machine: what
    `clusterjob.node.host_server.torch_probe` finds, asked of it.

    Args:
        directory: where the setup lines run.
        request: ``python``; ``setup``, lines; ``env``, variables of the job's.
        node_zip: path of the package as it travels.

    Returns:
        ``trouble``: why there is no fit interpreter, empty if there is; ``setup``: whether a setup
            line failed; ``version`` and
        ``executable`` as far as they are known; ``facts``, which are None where the interpreter
        died in the import of torch, and ``died``, how it ended then.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request["env"].items()]
    path = f'export PYTHONPATH={shlex.quote(node_zip)}"${{PYTHONPATH:+:$PYTHONPATH}}" OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"'
    answer = _ask(
        directory,
        request["python"],
        setup=request["setup"],
        question=_QUESTION_OF_FACTS,
        before=exports,
        after=[path],
    )
    found, told = answer.said("fit"), answer.said("facts")
    if found is None:
        return {
            "trouble": answer.trouble,
            "setup": answer.failed_at is not None,
            "version": None,
            "executable": "",
            "facts": None,
            "died": "",
        }
    trouble = "; ".join(
        _misfit(found["version"], found["executable"], has_torch=True, needs_torch=False)
    )
    return {"trouble": trouble, "setup": False, **found, "facts": told, "died": answer.end}


@dataclass(frozen=True)
class _Answer:
    """What became of a question to the job's interpreter: its words by name, else why there is
    none.
    """

    words: dict[str, Any]
    trouble: str
    failed_at: int | None
    end: str

    def said(self, name: str) -> Any:
        return self.words.get(name)


def _ask(
    directory: str,
    python: str,
    setup: Sequence[str],
    question: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> _Answer:
    """Run the job's setup lines, then its interpreter with a question; `before` and `after` those
    are other lines for bash.
    """
    lines = [f"cd -- {shlex.quote(directory)} || exit 1", *before]
    for index, line in enumerate(setup):
        lines.append(
            f"{{ :\n{line}\n}} < /dev/null >&2 || {{ echo 'clusterjob-setup {index}'; exit 1; }}"
        )
    quoted = shlex.quote(python)
    lines.append(f"command -v -- {quoted} > /dev/null || {{ echo clusterjob-none; exit 1; }}")
    lines += [*after, f"exec {quoted} -c {shlex.quote(_NOTHING_FROM_HERE + question)}"]
    try:
        asked = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, stdin=subprocess.DEVNULL,
            timeout=_SETUP_PATIENCE, check=False, env=work_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _Answer(
            {}, f"its setup lines take longer than {_SETUP_PATIENCE:g} s", failed_at=None, end=""
        )
    except OSError as error:
        return _Answer({}, f"bash cannot be run: {error.strerror}", failed_at=None, end="")
    said = (asked.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    words: dict[str, Any] = {}
    failed_at = None
    trouble = f"its interpreter {python} cannot be started" + (f": {said}" if said else "")
    for line in asked.stdout.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word in ("clusterjob-fit", "clusterjob-facts"):
            words[word.removeprefix("clusterjob-")] = json.loads(rest)
        elif word == "clusterjob-setup":
            failed_at = int(rest)
            trouble = f"a setup line failed: {setup[failed_at]}" + (f" ({said})" if said else "")
        elif word == "clusterjob-none":
            trouble = f"there is no interpreter {python}"
    code = asked.returncode
    end = "" if code == 0 else f"signal {-code}" if code < 0 else f"exit code {code}"
    return _Answer(
        words, trouble, failed_at=failed_at, end=end + (f": {said}" if said and code else "")
    )


def _misfit(
    version: list[int], executable: str, *, has_torch: bool, needs_torch: bool
) -> list[str]:
    if version[:2] < [3, 10]:
        return [
            f"Python too old: {executable} is {'.'.join(map(str, version))}, 3.10 or newer is needed"
        ]
    if needs_torch and not has_torch:
        return [f"no torch: {executable} does not find it"]
    return []


def work_environment() -> dict[str, str]:
    """Return the environment that a job starts from: this login's, without what another job may
    have left in it.
    """
    from clusterjob.node.contract import LAUNCH_VARIABLES

    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith("CLUSTERJOB_")
    }


def _free(home: Path) -> int:
    place = home
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _identity() -> str:
    """Return what tells machines apart, whatever names and addresses lead to them: containers on
    one kernel are several.
    """
    spaces = []
    for name in ("net", "pid"):
        try:
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            spaces.append("")
    return ":".join([processes.boot_id(), *spaces])
