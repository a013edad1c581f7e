"""Turn facts about a machine into findings: interpreter, torch, start method, GPUs, disk.

An `answer` is the return value of `clusterjob.node.host_server.host_check.interpreter` for the
checked machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterjob.core.spec import JobSpec
from clusterjob.core.units import show_size
from clusterjob.doctor.engine import CheckFinding, failed, ok, unknown, warning

# Free bytes: below NEEDED a job cannot run, below LITTLE there is a warning.
NEEDED, LITTLE = 50_000_000, 1 << 30
_SLOW_IMPORT = 15.0  # seconds; a slower import of torch is a warning

Answer = Mapping[str, Any]


def interpreter(answer: Answer) -> CheckFinding:
    """Check the interpreter that the job's script finds after its setup lines."""
    if answer["unfit"]:
        hint = (
            "run the setup line in a shell: it must succeed on its own"
            if answer["setup"]
            else "use --python to name another interpreter"
        )
        return failed(answer["unfit"], hint)
    return ok(f"{answer['executable']}, Python {'.'.join(map(str, answer['version']))}")


def prepared(spec: JobSpec) -> CheckFinding:
    """Return the finding for an environment that each node prepares when the job starts."""
    return unknown(
        f"each node prepares the environment of {'--uv' if spec.uv else '--env-archive'} when a job"
        " starts: neither interpreter nor torch is checked",
        "check with a short `clusterjob run`",
    )


def torch(answer: Answer, *, needed: bool = True) -> CheckFinding:
    """Check torch as the job's interpreter imports it.

    Args:
        answer: the facts about the machine.
        needed: whether missing torch is a failure; else it is a warning.
    """
    facts, executable = answer["facts"], answer["executable"]
    shown = f"`{executable} -c 'import torch'` shows the whole error"
    if facts is None:
        return failed(
            f"importing torch ends the interpreter: {answer['died'] or 'no output'}", shown
        )
    if facts["broken"]:
        return failed(facts["broken"], shown)
    if not facts["torch"]:
        finding = failed if needed else warning
        return finding(
            f"no torch: {executable} does not find it",
            f"`{executable} -m pip install torch`, or choose another interpreter with --python",
        )
    message = (
        f"{facts['torch']} for {accelerator(facts)}, with "
        f"{' and '.join(facts['backends']) or 'no backend of torch.distributed'}"
    )
    if not facts["backends"]:
        return failed(message, "this build of torch cannot train on several processes")
    if facts["seconds"] > _SLOW_IMPORT:
        return warning(
            f"{message}; its import takes {facts['seconds']:.0f} s",
            "put the environment on a local disk",
        )
    return ok(message)


def has_torch(answer: Answer) -> bool:
    """Return whether torch is installed and can be imported."""
    return answer["facts"] is not None and bool(answer["facts"]["torch"])


def accelerator(facts: Answer) -> str:
    """Return the accelerator that torch was built for."""
    return f"CUDA {facts['cuda']}" if facts["cuda"] else "the CPU only"


def start(answer: Answer, mode: str) -> CheckFinding:
    """Check how workers will start: forked from a forkserver that preloads torch, or by exec.

    Args:
        answer: the facts about the machine.
        mode: the job's ``--start``.
    """
    why = answer["facts"]["fork"]
    if mode == "exec":
        return ok("by exec, because of --start exec")
    if not why:
        return ok("forked from one process that has imported torch")
    if mode == "fork":
        return failed(f"--start fork is impossible: {why}", "--start auto uses exec instead")
    return warning(
        f"by exec, each worker imports torch: {why}",
        "--start exec chooses it and removes this warning",
    )


def gpus(installed: int, answer: Answer, wanted: int | None, *, required: bool) -> CheckFinding:
    """Compare the GPUs of the driver, the GPUs that torch sees, and the GPUs that the job needs.

    Args:
        installed: number of GPUs that the driver shows to this user.
        answer: the facts about the machine.
        wanted: number of GPUs that the job needs on the machine; None if the job does not set it.
        required: whether too few GPUs are an error; else the job is a rehearsal on the CPU.
    """
    seen = answer["facts"]["gpus"]
    installed = max(installed, seen)
    if wanted and installed < wanted:
        message = f"{_count(installed)}, but the job needs {wanted}"
        if required:
            return failed(message, "request fewer --gpus-per-node, or use another cluster")
        return warning(
            f"{message}: the job would be a rehearsal on the CPU",
            "request fewer --gpus-per-node; --require-gpus makes this an error",
        )
    if wanted == 0 or not installed:
        return ok("none" if not installed else f"{_count(installed)}, hidden from the job")
    if seen == installed:
        return ok(
            f"{_count(installed)}, and torch sees {'it' if installed == 1 else 'all of them'}"
        )
    why = answer["facts"]["driver_error"] or "torch gives no reason"
    hint = "`nvidia-smi` shows the driver's version and its GPUs"
    if not answer["facts"]["cuda"]:
        why = "torch is built for the CPU only"
        hint = "https://pytorch.org/get-started lists the builds for each driver"
    finding = failed if wanted else warning
    return finding(f"{_count(installed)}, of which torch sees {seen}: {why}", hint)


def _count(number: int) -> str:
    return "no GPU" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"


def space(free: int, where: str) -> CheckFinding:
    """Check the free disk space for the job directories."""
    message = f"{show_size(free)} free in {where}"
    if free < NEEDED:
        return failed(
            f"disk full: {message}",
            "delete files, or set CLUSTERJOB_HOME: logs and job files need space",
        )
    return (
        warning(message, "remove directories of old jobs: logs grow")
        if free < LITTLE
        else ok(message)
    )
