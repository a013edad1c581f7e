"""A driver for `--launcher ray`, and the Ray processes of this machine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from procs import wait_until

from clusterjob import Job

_NO_RAY = importlib.util.find_spec("ray") is None


def needs_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs Ray."""
    alone = pytest.mark.usefixtures("_only_ray")(test)
    return pytest.mark.skipif(_NO_RAY, reason="Ray is missing: pip install ray")(alone)


# Runs a task on each node, then does what its argument says.
DRIVER = """
    import os, pathlib, signal, sys, time, ray

    ray.init(logging_level="ERROR", log_to_driver=False)  # RAY_ADDRESS names the cluster

    @ray.remote
    def token():
        return os.environ["RAY_AUTH_TOKEN_PATH"]

    tokens = [
        ray.get(token.options(resources={f"clusterjob_node{node}": 0.1}).remote())
        for node in (0, 1)
    ]
    print("rank", os.environ.get("RANK"), "nodes", len(set(tokens)), flush=True)
    print("tokens", *tokens, flush=True)
    pathlib.Path("ready").touch()
    if sys.argv[1] == "wait":
        time.sleep(1000)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]))
"""


def ray_processes(job: Job[object]) -> list[int]:
    """Return the processes of Ray that belong to a job: other tests may run Ray, too."""
    ours = f"CLUSTERJOB_JOB_ID={job.id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours in environ and re.search(rb"raylet|gcs_server|ray::|ray\.scripts|/ray/", words):
            found.append(int(folder.name))
    return found


def wait_for_end_of_ray(job: Job[object]) -> None:
    """Wait until the ended job has left no process and no directory of Ray.

    The driver has printed the files in these directories, if it ran.
    """
    wait_until(lambda: not ray_processes(job), 5.0, "no Ray process 5 s after the end")
    folders = [Path(path).parent for path in re.findall(r" (/\S+/token)\b", job.logs())]
    wait_until(lambda: not any(map(Path.exists, folders)), 5.0, "no directory of Ray is left")
