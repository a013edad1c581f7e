"""The GPUs of this machine without the package's own readers, and a fake nvidia-smi command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from launching import executable

SMI_SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "$(dirname "$0")/gpus" ;;
  --query-compute-apps=*) cat "$(dirname "$0")/apps" ;;
esac
"""


def installed_gpus() -> int:
    """Return the number of GPUs that nvidia-smi lists; 0 without it or without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


class FakeSmi:
    """A fake nvidia-smi command on a host.

    Args:
        directory: a new directory for the command.
        prefix: the beginning of the GPUs' UUIDs.
    """

    def __init__(self, directory: Path, prefix: str = "GPU-000") -> None:
        self.directory = directory
        self.prefix = prefix
        directory.mkdir(parents=True)
        executable(directory / "nvidia-smi", SMI_SCRIPT)
        self.set_gpus([3, 3, 3, 3])

    def set_gpus(
        self, used: list[int], apps: dict[int, list[tuple[int, str]]] | None = None
    ) -> None:
        """Set the used memory of each GPU (MiB) and the processes on each GPU."""
        rows = [
            f"{index}, {self.prefix}{index}, {mib}, 81559, NVIDIA H100, 80GB\n"
            for index, mib in enumerate(used)
        ]
        (self.directory / "gpus").write_text("".join(rows))
        lines = [
            f"{self.prefix}{index}, {pid}, {name}\n"
            for index, users in (apps or {}).items()
            for pid, name in users
        ]
        (self.directory / "apps").write_text("".join(lines))


class FakeNvml:
    """A fake libnvidia-ml.so.1, built with gcc; a process with its `variables` loads it.

    Args:
        directory: a new directory for the library.
        gpus: the number of GPUs.
        old: whether functions of newer drivers are missing.
    """

    def __init__(self, directory: Path, gpus: int = 2, *, old: bool = False) -> None:
        directory.mkdir(parents=True)
        self.library = directory / "libnvidia-ml.so.1"
        self._state = directory / "state"
        source = Path(__file__).with_name("nvml.c")
        defined = ["-DOLD"] if old else []
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", *defined, "-o", str(self.library), str(source)],
            check=True,
        )
        self.variables = {"LD_LIBRARY_PATH": str(directory), "FAKE_NVML": str(self._state)}
        self._values: dict[tuple[object, str], int] = {("-", "count"): gpus}
        for gpu in range(gpus):
            self.set(gpu, use=80 + gpu, memory=40 << 30, total=80 << 30, power=350_500)
            self.set(gpu, temperature=61, sm=1980, mem=2619, ecc=0, xid=0)

    def set(self, gpu: object, **values: int) -> None:
        """Set values of a GPU, or of the machine if `gpu` is ``-``."""
        for name, value in values.items():
            self._values[gpu, name] = value
        lines = [f"{gpu} {name} {value}\n" for (gpu, name), value in self._values.items()]
        part = self._state.with_suffix(".part")
        part.write_text("".join(lines))
        part.replace(self._state)
