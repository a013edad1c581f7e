"""What the job's interpreter makes of a machine, for `clusterjob doctor`: torch as it imports, its
GPUs, and whether a fork is safe.

It runs in that interpreter, in a process of its own, so that whatever a broken torch does there
harms nobody.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

from clusterjob.node.workers import preload


def facts() -> dict[str, Any]:
    """Return what is found.

    Returns:
        ``fork``: why workers would be started by exec, empty if they are forked; ``torch``: its
            version, empty without it;
        ``broken``: why it is there and cannot be imported. With torch: ``seconds`` of its import,
            ``cuda``: the version that it was built
        for, empty for the CPU alone, ``gpus``: how many it sees, ``trouble``: what it says of the
        driver, ``backends``: those of torch.distributed.
    """
    begin = time.monotonic()
    why = preload.warm_up()
    seconds = time.monotonic() - begin
    torch = sys.modules.get("torch")
    there = torch is not None and hasattr(torch, "__version__")
    broken = why or "" if preload.has_torch() and not there else ""
    found = {"torch": "", "broken": broken, "fork": why or _fork(), "seconds": seconds}
    if there:
        found |= _of_torch(torch)
    return found


def _fork() -> str:
    """Return why this process cannot be forked; empty if it can."""
    try:
        child = os.fork()
    except OSError as error:
        return f"fork: {error.strerror}"
    if child == 0:
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"a forked process ended with {status}" if status else ""


def _of_torch(torch: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except Exception as error:  # a driver that is broken; any error may come of it
            count, trouble = 0, f"{type(error).__name__}: {error}"
        else:
            trouble = str(said[0].message) if said else ""
    distributed = torch.distributed
    there = [
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    built_for = torch.version.cuda or getattr(torch.version, "hip", None) or ""
    first = trouble.strip().partition("\n")[0]
    return {
        "torch": str(torch.__version__),
        "cuda": str(built_for),
        "gpus": count,
        "trouble": first,
        "backends": there,
    }


def main() -> None:
    """Print the facts as one word and an object, whatever an import prints before."""
    text = json.dumps(facts())
    sys.stdout.flush()
    os.write(1, f"\nclusterjob-facts {text}\n".encode())
    os._exit(0)  # what torch has started is not waited for
