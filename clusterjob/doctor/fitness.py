"""What is found on a machine, judged: interpreter, torch, how workers are started there, GPUs,
disk.

An `answer` is what `clusterjob.node.host_server.host_check.facts` returns, on whichever machine it
was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterjob.core.units import show_size
from clusterjob.doctor.engine import Finding, failed, ok, warning

NEEDED, LITTLE = (
    50_000_000,
    1 << 30,
)  # bytes that are to be free: for a job at all; without a warning
_SLOW_IMPORT = 15.0  # seconds

Answer = Mapping[str, Any]


def interpreter(answer: Answer) -> Finding:
    """Judge the interpreter that the job's script will find, after its setup lines."""
    if answer["unfit"]:
        hint = (
            "the setup line has to work on its own"
            if answer["setup"]
            else "--python names another interpreter"
        )
        return failed(answer["unfit"], hint)
    return ok(f"{answer['executable']}, Python {'.'.join(map(str, answer['version']))}")


def torch(answer: Answer, *, needed: bool = True) -> Finding:
    """Judge torch as that interpreter imports it.

    Args:
        answer: what the machine answered.
        needed: whether a job without torch makes no sense.
    """
    facts, executable = answer["facts"], answer["executable"]
    shown = f"`{executable} -c 'import torch'` shows all of it"
    if facts is None:
        return failed(
            f"importing torch ends the interpreter: {answer['died'] or 'without a word'}", shown
        )
    if facts["broken"]:
        return failed(facts["broken"], shown)
    if not facts["torch"]:
        judge = failed if needed else warning
        words, hint = (
            f"no torch: {executable} does not find it",
            f"`{executable} -m pip install torch`, or --python names another",
        )
        return judge(words, hint)
    words = f"{facts['torch']} for {accelerator(facts)}, with {' and '.join(facts['backends']) or 'no backend of torch.distributed'}"
    if not facts["backends"]:
        return failed(words, "this build of torch cannot train on several processes")
    if facts["seconds"] > _SLOW_IMPORT:
        return warning(
            f"{words}; its import takes {facts['seconds']:.0f} s",
            "an environment on a local disk is read faster",
        )
    return ok(words)


def has_torch(answer: Answer) -> bool:
    """Return whether torch is there and can be imported."""
    return answer["facts"] is not None and bool(answer["facts"]["torch"])


def accelerator(facts: Answer) -> str:
    """Return what torch was built for."""
    return f"CUDA {facts['cuda']}" if facts["cuda"] else "the CPU alone"


def start(answer: Answer, mode: str) -> Finding:
    """Judge how workers would be started: from a process that has imported torch, or each by
    itself.

    Args:
        answer: what the machine answered.
        mode: the job's ``--start``.
    """
    why = answer["facts"]["fork"]
    if mode == "exec":
        return ok("by exec, as --start says")
    if not why:
        return ok("forked from one process that has imported torch")
    if mode == "fork":
        return failed(f"--start fork is impossible: {why}", "--start auto takes exec then")
    return warning(
        f"by exec, each importing torch for itself: {why}",
        "--start exec asks for that, and this line is ok then",
    )


def gpus(installed: int, answer: Answer, wanted: int | None, *, required: bool) -> Finding:
    """Judge a machine's GPUs: what the driver has, what torch sees of them, and what the job wants.

    Args:
        installed: how many the driver shows to this login.
        answer: what the machine answered.
        wanted: how many the job wants there; None if it does not say.
        required: whether fewer are an error, not a rehearsal on the CPU.
    """
    seen = answer["facts"]["gpus"]
    installed = max(installed, seen)
    if wanted and installed < wanted:
        words = f"{_count(installed)} where {wanted} are asked for"
        if required:
            return failed(words, "fewer --gpus-per-node, or another cluster")
        return warning(
            f"{words}: the job would be a rehearsal on the CPU",
            "fewer --gpus-per-node; --require-gpus makes this an error",
        )
    if wanted == 0 or not installed:
        return ok("none" if not installed else f"{_count(installed)}, hidden from the job")
    if seen == installed:
        return ok(
            f"{_count(installed)}, and torch sees {'it' if installed == 1 else 'all of them'}"
        )
    if not answer["facts"]["cuda"]:
        why, hint = (
            "it is built for the CPU alone",
            "https://pytorch.org/get-started lists the builds for each driver",
        )
    else:
        why, hint = (
            answer["facts"]["driver_error"] or "it gives no reason",
            "`nvidia-smi` shows the driver's version, and which cards it has",
        )
    judge = failed if wanted else warning
    return judge(f"{_count(installed)}, of which torch sees {seen}: {why}", hint)


def _count(number: int) -> str:
    return "no GPU" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"


def space(free: int, where: str) -> Finding:
    """Judge the bytes that are free where jobs lie."""
    words = f"{show_size(free)} free in {where}"
    if free < NEEDED:
        return failed(
            f"disk full: {words}",
            "logs and the job's own files have to go somewhere; CLUSTERJOB_HOME names another place",
        )
    return (
        warning(words, "logs grow; old jobs' directories may be removed")
        if free < LITTLE
        else ok(words)
    )
