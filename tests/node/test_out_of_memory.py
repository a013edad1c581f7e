"""Workers that the kernel kills because memory runs out are reported as such.

The tests use real cgroups with a memory limit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import executable
from procs import TEST_TIMEOUT, wait_until

LIMIT = 200 << 20
# Rank 1 uses more memory than the limit, itself or in a child, or another process kills it.
USES_MEMORY = """
    import os, signal, sys, time
    def take():
        memory = bytearray(400 << 20)
        for offset in range(0, len(memory), 4096):
            memory[offset] = 1
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "itself":
            take()
        elif sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif (child := os.fork()) == 0:
            take()
            os._exit(0)
        else:
            os.waitpid(child, 0)
            raise RuntimeError(f"DataLoader worker (pid {child}) is killed by signal: Killed. ")
    time.sleep(1000)
"""


def own_cgroup() -> tuple[Path, bool] | None:
    """Return where to create a cgroup that counts memory, and whether it is version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}"), False
        if not controllers and Path(f"/sys/fs/cgroup{path}/memory.max").exists():
            return Path(f"/sys/fs/cgroup{path}").parent, True
    return None


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Yield a cgroup with a limit of 200 MiB."""
    found = own_cgroup()
    if found is None:
        pytest.skip("the memory controller of cgroups is not mounted")
    parent, unified = found
    group = parent / f"clusterjob-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"cannot create a cgroup with a limit: {error}; run as root")
    with contextlib.suppress(OSError):  # the file does not exist without swap
        (group / ("memory.swap.max" if unified else "memory.memsw.limit_in_bytes")).write_text(
            "0" if unified else str(LIMIT)
        )
    yield group
    wait_until(
        lambda: not (group / "cgroup.procs").read_text(),
        TEST_TIMEOUT,
        "the end of all processes of the cgroup",
    )
    end = time.monotonic() + TEST_TIMEOUT
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # the cgroup still counts a zombie
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("itself", "killed by SIGKILL (out of memory: the kernel killed it)"),
        ("child", "is killed by signal: Killed. (out of memory: the kernel killed it)"),
        ("killed", "killed by SIGKILL\n"),
    ],
)
def test_worker_killed_by_kernel_is_reported_as_out_of_memory(
    cgroup: Path, tmp_path: Path, how: str, message: str
) -> None:
    (tmp_path / "takes.py").write_text(textwrap.dedent(USES_MEMORY))
    python = executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    run = [
        sys.executable,
        "-m",
        "clusterjob",
        "run",
        "--cluster",
        "local",
        "--python",
        str(python),
        "--nproc-per-node",
        "2",
        "takes.py",
        how,
    ]
    argv = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *run]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == (1 if how == "child" else 137), done.stderr
    assert message in done.stderr
    assert "FAILED: rank 1 " in done.stderr
