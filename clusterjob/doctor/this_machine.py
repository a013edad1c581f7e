"""Doctor checks of this machine: directory, disk, bash, interpreter, GPUs, network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterjob.core import gpus, node_zip, python_env
from clusterjob.core.spec import JobSpec
from clusterjob.core.state_home import home, unchecked_home
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import CheckFinding, CheckStep, failed, ok, warning
from clusterjob.errors import OTHER_HOME
from clusterjob.node.host_server import host_check
from clusterjob.node.system import files

_TIMEOUT = 5.0  # maximum seconds to resolve a name
_SLOW_NAME = 1.0  # seconds; a slower resolution is a warning


class Machine:
    """The checks of this machine for one job.

    Args:
        spec: the job.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._answer: Mapping[str, Any] = {}

    def check_steps(self) -> list[CheckStep]:
        """Return the checks of a machine that runs jobs."""
        own = [
            CheckStep("interpreter", self._interpreter, needs=("bash",)),
            CheckStep("torch", lambda: [fitness.torch(self._answer)], needs=("interpreter",)),
            CheckStep(
                "start", lambda: [fitness.start(self._answer, self._spec.start)], needs=("torch",)
            ),
            CheckStep("GPUs", self._gpus, needs=("torch",)),
        ]
        if python_env.travels(self._spec):
            own = [CheckStep("interpreter", lambda: [fitness.prepared(self._spec)])]
        return [
            CheckStep("bash", lambda: [bash()]),
            *own,
            CheckStep("loopback", lambda: [loopback()]),
            CheckStep("host name", lambda: [host_name()]),
        ]

    def _interpreter(self) -> Iterator[CheckFinding]:
        spec = self._spec
        with tempfile.TemporaryDirectory(prefix="clusterjob-doctor-") as folder:
            archive = Path(folder) / node_zip.NAME
            archive.write_bytes(node_zip.node_zip(node_zip.cache_directory()))
            self._answer = host_check.interpreter(
                str(archive),
                Path("/"),
                job="",
                python=spec.python,
                setup=spec.setup,
                env=spec.env,
                workdir=str(spec.workdir),
                imports=True,
            )
        yield fitness.interpreter(self._answer)

    def _gpus(self) -> Iterator[CheckFinding]:
        resources = self._spec.resources
        wanted = (
            None if resources.gpus_per_node is None else resources.gpus_per_node * resources.nodes
        )
        installed = len(gpus.visible_gpus(os.environ))
        yield fitness.gpus(installed, self._answer, wanted=wanted, required=self._spec.require_gpus)


def directory_checks() -> list[CheckStep]:
    """Return the checks of the directory that holds jobs and their records."""
    place = unchecked_home()
    return [
        CheckStep("directory", lambda: [directory()]),
        CheckStep(
            "disk",
            lambda: [fitness.space(shutil.disk_usage(_nearest(place)).free, str(place))],
            needs=("directory",),
        ),
    ]


def directory() -> CheckFinding:
    """Check that the job directory is writable.

    Raises:
        RecordError: another user could change it.
    """
    place = home()
    try:
        if not place.exists():
            nearest = _nearest(place)
            if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
                return failed(f"{place} cannot be made: {nearest} cannot be written", OTHER_HOME)
            return ok(f"{place} will be created with the first job")
        probe = place / f".doctor-{os.getpid()}"
        try:
            files.write_atomic(probe, b"x" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return failed(f"{place} cannot be written: {error.strerror}", OTHER_HOME)
    return ok(f"{place} is writable")


def _nearest(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place


def bash() -> CheckFinding:
    """Check bash, which runs the scripts of clusterjob."""
    path = shutil.which("bash")
    if path is None:
        return failed("bash is not on PATH", "install bash: job scripts need it")
    try:
        asked = subprocess.run(
            [path, "-c", 'printf %s "$BASH_VERSION"'],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return failed(
            f"{path} cannot be run: {getattr(error, 'strerror', None) or 'it does not exit'}",
            "reinstall bash",
        )
    if not asked.stdout or asked.returncode != 0:
        return failed(f"{path} is not a working bash", "reinstall bash")
    return ok(f"{path} {asked.stdout}")


def loopback() -> CheckFinding:
    """Check the loopback interface, which agents and workers of one machine use."""
    hint = "`ip link show lo` must show UP; /etc/hosts must have `localhost`"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _TIMEOUT).close()
    except OSError as error:
        return failed(f"127.0.0.1 cannot be reached: {error.strerror or error}", hint)
    found, _ = _resolved("localhost")
    if "127.0.0.1" not in found:
        return warning(
            f"localhost resolves to {', '.join(found) or 'nothing'}, not 127.0.0.1", hint
        )
    return ok("127.0.0.1 is reachable, and localhost resolves to it")


def host_name() -> CheckFinding:
    """Check that the host name resolves; gloo needs it unless an interface is set."""
    name = socket.gethostname()
    found, seconds = _resolved(name)
    hint = f"add a line `ADDRESS {name}` to /etc/hosts"
    if not found:
        return warning(f"{name} does not resolve", hint)
    if seconds > _SLOW_NAME:
        return warning(f"{name} took {seconds:.1f} s to resolve", hint)
    return ok(f"{name} resolves to {', '.join(found)}")


def _resolved(name: str) -> tuple[list[str], float]:
    """Return the addresses of a name and the seconds that the resolution took.

    The list is empty if the name does not resolve before the timeout.
    """
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    begin = time.monotonic()
    thread = threading.Thread(target=ask, name="clusterjob-doctor", daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return found.copy(), time.monotonic() - begin
