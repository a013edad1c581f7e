"""Count the files that a node opens on the shared file system for one job of 8 ranks.

The shared file system is a directory with the project, clusterjob's directory, the archive, and the
virtual environment with torch. strace counts each successful open below it. The exit code is 1 if
the target is missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from measuring import WORKERS, Failed, Row, command, environment, finish, run

RANKS = 8
TARGET = 50  # files
TRACE_TIMEOUT = 30.0  # seconds
# With -y, strace prints the full path of a descriptor. It splits calls that others interrupt.
_OPENED = re.compile(r"(?:open|openat|openat2|creat)(?:\(| resumed>).*\) += \d+<(?P<path>[^>]+)>")
# Traces the script of a node, and not the command that submits the job.
_BASH = """#!/bin/sh
if [ -n "$CLUSTERJOB_NODE_RANK" ] && [ -z "$TRACED" ]; then
  TRACED=1 exec strace -f -y -q -e trace=open,openat,openat2,creat -o "$TRACE" /bin/bash "$@"
fi
exec /bin/bash "$@"
"""


def opened(trace: Path, shared: Sequence[Path]) -> Counter[str]:
    """Return the opened paths below the shared directories, with the number of opens of each."""
    found = re.findall(_OPENED, trace.read_text(errors="replace"))
    return Counter(path for path in found if any(Path(path).is_relative_to(top) for top in shared))


def wait_for_end(trace: Path) -> None:
    """Wait until the trace has the end of its first process: the command may end before it.

    Raises:
        Failed: it has not ended after `TRACE_TIMEOUT`.
    """
    deadline = time.monotonic() + TRACE_TIMEOUT
    while time.monotonic() < deadline:
        text = trace.read_text(errors="replace")
        if re.search(rf"^{text.partition(' ')[0]} +\+\+\+ exited", text, re.MULTILINE):
            return
        time.sleep(0.05)
    raise Failed(f"the traced process has not ended after {TRACE_TIMEOUT:g} s")


def count(
    argv: Sequence[str], environ: Mapping[str, str], directory: Path, shared: Sequence[Path]
) -> Counter[str]:
    """Run a command with a traced node; return what the node opened on the shared directories."""
    trace = directory / "trace"
    trace.unlink(missing_ok=True)
    _, _, code, output = run([*argv], {**environ, "TRACE": str(trace)}, directory / "shared")
    if code != 0:
        raise Failed(f"{argv} ended with exit code {code}: {output[-2000:]}")
    wait_for_end(trace)
    return opened(trace, shared)


def measure(directory: Path, *, show: bool) -> list[Row]:
    """Return one row for each way to have the environment."""
    shared, disk, first = (directory / name for name in ("shared", "disk", "first"))
    for made in (shared, disk, first):
        made.mkdir()
    (first / "bash").write_text(_BASH)
    (first / "bash").chmod(0o755)
    venv = Path(sys.prefix)
    shutil.copy(WORKERS / "first_all_reduce.py", shared / "train.py")
    base = environment(shared / "home")
    environ = base | {"PATH": f"{first}:{base['PATH']}"}
    archive = shared / "env.tar"
    subprocess.run(["tar", "-cf", archive, "-C", venv, "."], check=True)
    ours = [command("clusterjob"), "run", "--cluster", "local", "--nproc-per-node", str(RANKS)]
    packed = ["--env-archive", str(archive), "--env-cache", str(disk)]
    program = ["train.py", str(disk / "done")]
    traced = ["strace", "-f", "-y", "-q", "-e", "trace=open,openat,openat2,creat"]
    torchrun = [*traced, "-o", str(directory / "trace"), command("torchrun")]
    places = (shared, venv)
    ways = {
        "--env-archive, first job of a node": ([*ours, *packed, *program], environ),
        "--env-archive, each later job": ([*ours, *packed, *program], environ),
        "--python on the shared disk": ([*ours, *program], environ),
        "torchrun on the shared disk": (
            [*torchrun, "--nproc-per-node", str(RANKS), *program],
            base,
        ),
    }
    results = {}
    for what, (argv, variables) in ways.items():
        results[what] = count(argv, variables, directory, places)
        print(f"{what}: {results[what].total()} files", file=sys.stderr, flush=True)
    other = float(results["torchrun on the shared disk"].total())
    rows = []
    for what, paths in results.items():
        if show:
            for path, number in paths.most_common(60):
                print(f"{number:5} {os.path.relpath(path, directory)}", file=sys.stderr)
            print(file=sys.stderr)
        total = float(paths.total())
        target = float(TARGET) if "--env-archive" in what else None
        rows.append(Row("files", f"{what} (files)", 1, total, total, other, None, target))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", action="store_true", help="print the most opened files")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        print("shared_files.py: install strace", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="clusterjob-bench-") as name:
        try:
            rows = measure(Path(name), show=options.show)
        except Failed as error:
            print(f"shared_files.py: {error}", file=sys.stderr)
            return 2
    return finish(rows, "torchrun", as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
