"""Run `clusterjob exec`, `shell` and `forward` against a running job."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from procs import TEST_TIMEOUT, wait_until

CLUSTERJOB = (sys.executable, "-m", "clusterjob")
# Each rank creates the file up<RANK> in its working directory, then waits for the file `leave`.
GUEST = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.02)
"""


class Inside:
    """A running job, as the commands see it.

    Args:
        job_id: its id.
        directory: the directory in which the commands run.
    """

    def __init__(self, job_id: str, directory: Path) -> None:
        self.id = job_id
        self.directory = directory

    def popen(self, verb: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        return subprocess.Popen(
            [*CLUSTERJOB, verb, self.id, *words], cwd=self.directory, **given | options
        )

    def exec(
        self, *words: str, code: int = 0, data: bytes = b"", verb: str = "exec"
    ) -> tuple[bytes, bytes]:
        """Run a command to its end; return its stdout and stderr."""
        with self.popen(verb, *words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(data, TEST_TIMEOUT)
        assert process.returncode == code, (process.returncode, out[-2000:], err)
        return out, err

    def shell(self, text: str, *options: str, code: int = 0) -> str:
        """Run a line of bash inside the job; return its stdout."""
        return self.exec(*options, "--", "bash", "-c", text, code=code)[0].decode()

    @contextlib.contextmanager
    def forwarded(
        self, *words: str, **options: Any
    ) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
        """Run `forward`; yield the process and the local ports. It is killed afterwards."""
        count = sum(not word.startswith("-") and word != "1" for word in words)
        with self.popen("forward", *words, text=True, stderr=subprocess.PIPE, **options) as process:
            try:
                lines = [process.stdout.readline() for _ in range(count)]
                ports = [re.match(r"http://127\.0\.0\.1:(\d+) is", line) for line in lines]
                assert all(ports), (lines, process.poll())
                yield process, [int(port[1]) for port in ports if port]
            finally:
                process.kill()


def write_script(directory: Path, text: str = GUEST) -> str:
    (directory / "guest.py").write_text(textwrap.dedent(text))
    return "guest.py"


def submit(directory: Path, *options: str, program: Sequence[str] = (), ranks: int = 4) -> Inside:
    """Submit a job of `GUEST` and wait until its ranks are up."""
    words = program or (write_script(directory),)
    done = subprocess.run(
        [*CLUSTERJOB, "submit", *options, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = Inside(done.stdout.split()[-1], directory)
    wait_until(
        lambda: all((directory / f"up{rank}").exists() for rank in range(ranks)), TEST_TIMEOUT
    )
    return job


@contextlib.contextmanager
def running(directory: Path, *options: str, **more: Any) -> Iterator[Inside]:
    """Submit a job with `submit`; cancel it afterwards."""
    job = submit(directory, *options, **more)
    try:
        yield job
    finally:
        subprocess.run([*CLUSTERJOB, "cancel", job.id], check=True, stderr=subprocess.DEVNULL)
