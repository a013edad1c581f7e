"""Run a script of the compatibility table under torchrun or clusterjob; return its outcome."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from launching import environment, free_port
from procs import command_line, kill_all, own_processes

SCRIPTS = Path(__file__).resolve().parent / "scripts"
EXPECTED = Path(__file__).resolve().parent / "expected.json"
HUNG = 20.0  # seconds until a torchrun that is known to hang is stopped; a normal run takes 4 s
_LEFT = (
    10.0  # seconds for processes to end after their launcher; they need 0.5 s on an idle machine
)
_SHOWN = 2000  # characters of output that are recorded; longer output is recorded as a digest


@dataclass(frozen=True)
class Case:
    """One script, how it is started and its expected outcome under clusterjob.

    Attributes:
        id: name of the script, with a variant if the script has several cases.
        program: the script and its arguments, or ``-m`` and a module, or ``--`` and a command;
            ``{port}`` is a free port.
        nproc, nodes: the size of the run.
        code: exit code under clusterjob.
        message: regular expression that clusterjob's stderr must match.
        differs: fields of `Outcome` that differ between torchrun and clusterjob.
        why: the reason for `differs`.
        out, files, left: expected output of the ranks, files and processes left under clusterjob,
            for the fields in `differs`.
        starts: start methods of the workers, ``fork`` and ``exec``; a command has only ``exec``.
        quick: whether the first start is in the normal test run; the others are marked slow.
        needs: required modules; if one is missing, the case is skipped.
        stdin: text on the launcher's standard input; None for /dev/null.
        send: signal to the launcher's process group after each rank has created its file
            ``ready<rank>``.
        restarts: --max-restarts.
        limit: maximum seconds under clusterjob.
    """

    id: str
    program: tuple[str, ...]
    nproc: int = 2
    nodes: int = 1
    code: int = 0
    message: str = ""
    differs: tuple[str, ...] = ()
    why: str = ""
    out: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    starts: tuple[str, ...] = ("fork",)
    quick: bool = False
    needs: tuple[str, ...] = ()
    stdin: str | None = None
    send: int | None = None
    restarts: int = 0
    limit: float = 90.0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nproc * self.nodes


@dataclass
class Outcome:
    """Outcome of a run.

    Attributes:
        code: exit code of the launcher; None when the run hung and was stopped.
        out: stdout of each rank, by rank.
        files: contents of the written files by name: text, or ``binary``.
        left: last argument of each process that outlived its launcher.
        err: the launcher's own stderr; not recorded.
        seconds: wall time; not recorded.
    """

    code: int | None
    out: list[str]
    files: dict[str, str]
    left: list[str]
    err: str = ""
    seconds: float = 0.0
    ranks_err: list[str] = field(default_factory=list)

    def recorded(self) -> dict[str, Any]:
        """Return the fields that expected.json contains."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name in ("code", "out", "files", "left")
        }


def under_clusterjob(case: Case, directory: Path, start: str) -> Outcome:
    """Run a case with ``clusterjob run`` on this machine.

    Args:
        case: what to run.
        directory: an empty directory for the run.
        start: ``fork`` or ``exec``.
    """
    home = directory / "home"
    argv = [sys.executable, "-m", "clusterjob", "run", "--cluster", "local"]
    argv += ["--nodes", str(case.nodes), "--nproc-per-node", str(case.nproc)]
    argv += ["--python", sys.executable, "--max-restarts", str(case.restarts), "--start", start]
    work = _work(directory)
    run = _run([[*argv, *_program(case)]], case, work, {"CLUSTERJOB_HOME": str(home)}, case.limit)
    run.files = _files(work)
    for job in (home / "jobs").glob("*"):
        run.out, run.ranks_err = (
            [
                _text(job, f"logs/node*/rank{rank}.*{stream}", work)
                for rank in range(case.world_size)
            ]
            for stream in ("out", "err")
        )
    return run


def under_torchrun(case: Case, directory: Path, limit: float | None = None) -> Outcome:
    """Run a case with one torchrun per node; the arguments are those of `under_clusterjob`."""
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(case.nproc),
        "--max-restarts",
        str(case.restarts),
    ]
    argv += ["--redirects", "3"]
    work = _work(directory)
    program = _program(case)
    if program[0] == "--":
        program[0] = "--no-python"
    commands = []
    port = str(free_port())
    for node in range(case.nodes):
        logs = ["--log-dir", str(directory / f"torchrun{node}")]
        rendezvous = ["--standalone"]
        if case.nodes > 1:
            rendezvous = [
                "--nnodes",
                str(case.nodes),
                "--node-rank",
                str(node),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                port,
            ]
        commands.append([*argv, *logs, *rendezvous, *program])
    run = _run(commands, case, work, {}, limit or case.limit)
    run.files = _files(work)
    ranks = [
        (directory / f"torchrun{rank // case.nproc}", rank % case.nproc)
        for rank in range(case.world_size)
    ]
    run.out = [_text(logs, f"*/attempt_*/{local}/stdout.log", work) for logs, local in ranks]
    run.ranks_err = [_text(logs, f"*/attempt_*/{local}/stderr.log", work) for logs, local in ranks]
    return run


def differences(case: Case, torchrun: Mapping[str, Any], ours: Outcome) -> list[str]:
    """Return one line for each difference from the table and from the record of torchrun."""
    found = []
    if ours.code != case.code:
        found.append(f"exit code {ours.code} in the place of {case.code}")
    if "code" not in case.differs and (torchrun["code"] == 0) != (case.code == 0):
        found.append(
            f"torchrun ends with {torchrun['code']}, clusterjob with {case.code}, "
            "and nothing says why"
        )
    if case.message and not re.search(case.message, ours.err):
        found.append(f"stderr does not match {case.message!r}")
    out = list(case.out) if "out" in case.differs else torchrun["out"]
    if case.code == 0 and ours.out != out:
        found.append(f"stdout of the ranks: {ours.out} in the place of {out}")
    if "files" in case.differs:
        if sorted(ours.files) != sorted(case.files):
            found.append(f"files: {sorted(ours.files)} in the place of {sorted(case.files)}")
    elif ours.files != torchrun["files"]:
        found.append(f"files: {ours.files} in the place of {torchrun['files']}")
    left = list(case.left) if "left" in case.differs else torchrun["left"]
    if ours.left != left:
        found.append(f"processes left: {ours.left} in the place of {left}")
    return found


def skip_without(case: Case) -> None:
    """Skip the test if a package of the case is not installed."""
    for name in case.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: tools/setup.sh does that")


def expected() -> dict[str, dict[str, Any]]:
    """Return the recorded outcomes of torchrun by case id."""
    return json.loads(EXPECTED.read_text())


def _program(case: Case) -> list[str]:
    return [word.replace("{port}", str(free_port())) for word in case.program]


def _work(directory: Path) -> Path:
    return Path(
        shutil.copytree(SCRIPTS, directory / "work", ignore=shutil.ignore_patterns("__pycache__"))
    )


def _run(
    commands: list[list[str]], case: Case, work: Path, extra: Mapping[str, str], limit: float
) -> Outcome:
    binaries = os.path.dirname(sys.executable)
    variables = environment(work.parent, {"PATH": f"{binaries}:{os.environ['PATH']}", **extra})
    stderr = work.parent / "stderr.txt"
    begin = time.monotonic()
    with stderr.open("wb") as err, contextlib.ExitStack() as stack:
        stdin: Any = subprocess.DEVNULL
        if case.stdin is not None:
            stdin = stack.enter_context(tempfile.TemporaryFile(dir=work.parent))
            stdin.write(case.stdin.encode())
            stdin.seek(0)
        started = [
            subprocess.Popen(
                argv,
                cwd=work,
                env=variables,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )
            for argv in commands
        ]
        end = begin + limit
        if case.send is not None:
            _send(case, started, work, end)
        codes: list[int | None] = []
        for process in started:
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        seconds = time.monotonic() - begin
        if None in codes:
            _stop(started)
        left = _left(wait=None not in codes)
    code = None if None in codes else max(codes, key=lambda value: abs(value or 0))
    return Outcome(code, [], {}, left, stderr.read_text(errors="replace"), seconds)


def _send(case: Case, started: list[subprocess.Popen[bytes]], work: Path, end: float) -> None:
    """Signal the process groups of the launchers, like a terminal, when all ranks are ready."""
    while not all((work / f"ready{rank}").exists() for rank in range(case.world_size)):
        if time.monotonic() > end or all(process.poll() is not None for process in started):
            return
        time.sleep(0.02)
    for process in started:
        assert case.send is not None
        os.killpg(process.pid, case.send)


def _stop(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.terminate()
    end = time.monotonic() + 5
    while own_processes() and time.monotonic() < end:
        time.sleep(0.05)
        for process in started:
            process.poll()
    kill_all(own_processes())
    for process in started:
        process.wait(10)


def _left(*, wait: bool) -> list[str]:
    end = time.monotonic() + _LEFT
    while (pids := own_processes()) and wait and time.monotonic() < end:
        time.sleep(0.02)
    names = sorted(command_line(pid).rpartition(" ")[2] for pid in pids)
    kill_all(pids)
    return names


def _files(work: Path) -> dict[str, str]:
    """Return the files that a run has written, by path; existing files are left out."""
    found = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        if path.is_dir() or "__pycache__" in name or (SCRIPTS / name).exists():
            continue
        text = path.read_bytes()
        found[name] = (
            text.decode()
            if path.suffix in (".txt", ".json") or ".rank" in path.suffix
            else "binary"
        )
    return found


def _text(directory: Path, pattern: str, work: Path) -> str:
    """Return the joined text of the matching files, with the run's path replaced by WORK."""
    data = b"".join(path.read_bytes() for path in sorted(directory.glob(pattern)))
    return _shorten(data.replace(str(work).encode(), b"WORK"))


def _shorten(data: bytes) -> str:
    """Return output as text, or a digest of long output."""
    if len(data) > _SHOWN:
        return f"{len(data)} bytes, sha256 {sha256(data).hexdigest()}"
    return data.decode(errors="backslashreplace")
