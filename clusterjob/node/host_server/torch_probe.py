"""Torch probe of `clusterjob doctor`: import torch, count its GPUs, check that fork is safe.

It runs in the job's interpreter, in a separate process, which a broken torch may crash.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

from clusterjob.node.workers import preload


def main() -> None:
    """Print facts about torch on a separate line, after any output of its import.

    ``fork``: why workers cannot be forked, or empty. ``torch``: its version; empty if torch is not
    installed. ``broken``: why an installed torch cannot be imported, or empty. ``seconds``:
    duration of the import. With torch also: ``cuda``: the CUDA version that it was built for; empty
    for CPU only. ``gpus``: number of GPUs that torch sees. ``driver_error``: torch's message about
    the driver. ``backends``: those of torch.distributed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    why = preload.preload_torch() or ""
    facts = {"torch": "", "broken": "", "fork": why, "seconds": time.monotonic() - begin}
    torch = sys.modules.get("torch")
    if hasattr(torch, "__version__"):
        facts |= _of_torch(torch)
    elif preload.has_torch():
        facts["broken"] = why
    sys.stdout.flush()
    os.write(1, f"\nclusterjob-facts {json.dumps(facts)}\n".encode())
    os._exit(0)  # do not wait for threads that torch started


def _of_torch(torch: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except Exception as error:  # a broken driver may cause any error
            count, message = 0, f"{type(error).__name__}: {error}"
        else:
            message = str(warned[0].message) if warned else ""
    distributed = torch.distributed
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or getattr(torch.version, "hip", None) or ""),
        "gpus": count,
        "driver_error": message.strip().partition("\n")[0],
        "backends": [
            name
            for name in ("gloo", "nccl")
            if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
        ],
    }
