"""Count the functions that a worker's exception runs through until its line is printed.

A job of one node and one worker raises an exception. Every process of the job records its calls of
the package's functions. The count is of distinct functions, and of their files, in all processes
together, from the moment before the exception to the moment at which `clusterjob run` has printed
which rank failed. Run it with the Python of the project's environment: .venv/bin/python
tools/exception_path.py [--list].
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from pathlib import Path

# The file <pid> gets a line for each call: the time in ns, the file, and the function.
RECORDER = """\
import os, sys, threading, time
def record(frame, event, _):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or "/clusterjob/" not in name or code.co_name.startswith("<"):
        return
    name = name.rpartition("/clusterjob/")[2]
    line = f"{time.monotonic_ns()} {name} {getattr(code, 'co_qualname', code.co_name)}\\n"
    file = os.open(f"%s/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)
sys.setprofile(record)
threading.setprofile(record)
"""
SCRIPT = """\
import time
time.sleep(1)  # the job has started
print("raised", time.monotonic_ns(), flush=True)
raise ValueError("a worker's exception")
"""


def traced_python(directory: Path, records: Path) -> Path:
    """Return a Python that records calls, with the packages of this one."""
    venv.create(directory, symlinks=True)
    python = directory / "bin/python"
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())
    (site / "recorder.py").write_text(RECORDER % records)
    own = sysconfig.get_path("purelib")
    (site / "recorder.pth").write_text(
        f"{Path(__file__).parents[1]}\nimport site; site.addsitedir({own!r})\nimport recorder\n"
    )
    return python


def main() -> None:
    """Run the job and print the count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print each function")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        records, script = directory / "records", directory / "script.py"
        records.mkdir()
        script.write_text(SCRIPT)
        python = traced_python(directory / "venv", records)
        job = subprocess.Popen(
            [python, "-m", "clusterjob", "run", "--cluster", "local", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": name},
            cwd=directory,
        )
        begin = end = 0
        assert job.stdout is not None
        for line in job.stdout:
            sys.stderr.write(line)
            if "raised " in line:
                begin = int(line.rpartition(" ")[2])
            elif begin and "clusterjob:" in line and "a worker's exception" in line and not end:
                end = time.monotonic_ns()
        job.wait()
        if not end:
            sys.exit("the job has not printed which rank failed")
        found: Counter[tuple[str, str]] = Counter()
        processes = set()
        for path in records.iterdir():
            for line in path.read_text().splitlines():
                moment, file, function = line.split(" ", 2)
                if begin <= int(moment) <= end:
                    found[file, function] += 1
                    processes.add(path.name)
    if options.list:
        for (file, function), count in sorted(found.items()):
            print(f"{count:6} {file} {function}")
    print(
        f"{len(found)} functions in {len({file for file, _ in found})} files, "
        f"in {len(processes)} processes"
    )


if __name__ == "__main__":
    main()
