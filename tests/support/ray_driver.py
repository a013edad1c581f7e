"""A driver for `--launcher ray`, and the Ray processes of this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from procs import wait_until

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is missing: pip install ray"
)
# Runs a task on each node, then does what its argument says.
DRIVER = """
    import os, pathlib, sys, time, ray

    ray.init(logging_level="ERROR", log_to_driver=False)  # RAY_ADDRESS names the cluster

    @ray.remote
    def pid():
        return os.getpid()

    pids = [
        ray.get(pid.options(resources={f"clusterjob_node{node}": 0.1}).remote()) for node in (0, 1)
    ]
    print("rank", os.environ.get("RANK"), "pids", len(set(pids)), flush=True)
    pathlib.Path("ready").write_text(str(os.getpid()))
    if sys.argv[1] == "wait":
        time.sleep(1000)
    sys.exit(int(sys.argv[1]))
"""


def ray_processes() -> list[int]:
    """Return the processes of Ray on this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if re.search(rb"raylet|gcs_server|ray::|ray\.scripts|ray/_private", words):
            found.append(int(folder.name))
    return found


def wait_for_end_of_ray() -> None:
    wait_until(lambda: not ray_processes(), 5.0, "no Ray process 5 s after the end")
    wait_until(lambda: not list(Path("/tmp").glob("ray-*")), 5.0, "no directory of Ray is left")
