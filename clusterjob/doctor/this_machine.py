"""This machine before there is a job: what `doctor` looks at where jobs run here, or are submitted
from here.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterjob.core import gpus, node_zip
from clusterjob.core.records import home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import Finding, Look, failed, ok, warning
from clusterjob.node.host_server import host_check
from clusterjob.node.system import files

_PATIENCE = 5.0  # seconds for a name to resolve
_SLOW_NAME = 1.0  # seconds


class Machine:
    """This machine, as jobs would find it.

    Args:
        spec: the job that it is looked at for.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._answer: Mapping[str, Any] = {}

    def looks(self) -> list[Look]:
        """Return the looks at a machine that jobs run on."""
        return [
            *directory_looks(),
            Look("bash", bash),
            Look("interpreter", self._interpreter, needs=("bash",)),
            Look("torch", lambda: [fitness.torch(self._answer)], needs=("interpreter",)),
            Look(
                "start", lambda: [fitness.start(self._answer, self._spec.start)], needs=("torch",)
            ),
            Look("GPUs", self._gpus, needs=("torch",)),
            Look("loopback", loopback),
            Look("host name", host_name),
        ]

    def _interpreter(self) -> Iterator[Finding]:
        spec = self._spec
        with tempfile.TemporaryDirectory(prefix="clusterjob-doctor-") as folder:
            archive = Path(folder) / node_zip.NAME
            archive.write_bytes(node_zip.node_zip(node_zip.cache_directory()))
            request = {"python": spec.python, "setup": list(spec.setup), "env": dict(spec.env)}
            self._answer = host_check.facts(str(spec.workdir), request, node_zip=str(archive))
        yield fitness.interpreter(self._answer)

    def _gpus(self) -> Iterator[Finding]:
        resources = self._spec.resources
        wanted = (
            None if resources.gpus_per_node is None else resources.gpus_per_node * resources.nodes
        )
        installed = len(gpus.visible_gpus(os.environ))
        yield fitness.gpus(installed, self._answer, wanted=wanted, required=self._spec.require_gpus)


def directory_looks() -> list[Look]:
    """Return the looks at the place where jobs and their records lie."""
    return [
        Look("directory", lambda: [directory(home())]),
        Look(
            "disk",
            lambda: [fitness.space(shutil.disk_usage(_nearest(home())).free, str(home()))],
            needs=("directory",),
        ),
    ]


def directory(place: Path) -> Finding:
    """Judge the place where jobs lie: whether it can be written, by the user alone."""
    hint = "CLUSTERJOB_HOME names another place"
    try:
        if not place.exists():
            nearest = _nearest(place)
            if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
                return failed(f"{place} cannot be made: {nearest} cannot be written", hint)
            return ok(f"{place} will be made with the first job")
        mode = place.stat()
        probe = place / f".doctor-{os.getpid()}"
        try:
            files.write_atomic(probe, b"x" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return failed(f"{place} cannot be written: {error.strerror}", hint)
    bits = stat.S_IMODE(mode.st_mode)
    if mode.st_uid not in (os.geteuid(), 0):
        return failed(
            f"{place} belongs to another user (uid {mode.st_uid}), who could replace what jobs run",
            hint,
        )
    if bits & 0o022 and not bits & stat.S_ISVTX:
        others = "everyone" if bits & 0o002 else "its group"
        judge = failed if bits & 0o002 else warning
        return judge(
            f"{place} has the mode {bits:04o}: {others} could replace what jobs run",
            f"chmod go-w {place}",
        )
    return ok(f"{place} can be written (mode {bits:04o})")


def _nearest(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place


def bash() -> Iterator[Finding]:
    """Judge bash, which runs every script of ours."""
    path = shutil.which("bash")
    if path is None:
        yield failed("bash is not on PATH", "scripts of jobs are written for it: install it")
        return
    try:
        asked = subprocess.run(
            [path, "-c", 'printf %s "$BASH_VERSION"'],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield failed(
            f"{path} cannot be run: {getattr(error, 'strerror', None) or 'it does not end'}",
            "install it anew",
        )
        return
    if not asked.stdout or asked.returncode != 0:
        yield failed(f"{path} is no bash that works", "install it anew")
        return
    yield ok(f"{path} {asked.stdout}")


def loopback() -> Iterator[Finding]:
    """Judge the loopback, over which the agents and the workers of this machine meet."""
    hint = "`ip link show lo` has to say UP; `localhost` belongs into /etc/hosts"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, _PATIENCE):
                pass
    except OSError as error:
        yield failed(f"127.0.0.1 cannot be reached: {error.strerror or error}", hint)
        return
    found, _ = _resolved("localhost")
    if "127.0.0.1" not in found:
        yield warning(f"localhost is {', '.join(found) or 'not known'}, and not 127.0.0.1", hint)
        return
    yield ok("127.0.0.1 is reached, and is localhost")


def host_name() -> Iterator[Finding]:
    """Judge this machine's own name, which gloo looks up where no interface is named."""
    name = socket.gethostname()
    found, seconds = _resolved(name)
    hint = f"a line `ADDRESS {name}` in /etc/hosts"
    if not found:
        yield warning(f"{name} does not resolve", hint)
    elif seconds > _SLOW_NAME:
        yield warning(f"{name} took {seconds:.1f} s to resolve", hint)
    else:
        yield ok(f"{name} is {', '.join(found)}")


def _resolved(name: str) -> tuple[list[str], float]:
    """Return a name's addresses, none where there are none in time, and the seconds that it took."""
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    begin = time.monotonic()
    thread = threading.Thread(target=ask, name="clusterjob-doctor", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found.copy(), time.monotonic() - begin
