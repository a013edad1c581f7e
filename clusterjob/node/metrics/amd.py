"""Read the state of AMD GPUs from the files of the amdgpu driver.

Source: the kernel's Documentation/gpu/amdgpu (thermal.rst, driver-misc.rst, ras.rst).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from clusterjob.node.metrics.samples import Gpu, GpuSample
from clusterjob.node.system import files
from clusterjob.node.system.devices import listed_gpus

_VENDOR = "0x1002"


class Amd:
    """The AMD GPUs that a job may use.

    Args:
        environ: ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES select the GPUs, by index.
        root: replaces ``/`` in tests.

    Raises:
        OSError: there is no such GPU.
    """

    def __init__(self, environ: Mapping[str, str], root: str = "") -> None:
        drm = Path(f"{root}/sys/class/drm")
        names = sorted(
            (name for name in os.listdir(drm) if re.fullmatch(r"card\d+", name)),
            key=lambda name: int(name[4:]),
        )
        devices = [drm / name / "device" for name in names]
        boards = [
            board for board in devices if files.read_text(board / "vendor", 16).strip() == _VENDOR
        ]
        places = list(enumerate(boards))
        for variable in (
            "ROCR_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
        ):  # the second counts the rest
            listed = listed_gpus(environ.get(variable), len(places))
            places = [places[int(entry)] for entry in listed if entry.isdigit()]
        if not places:
            raise OSError("there is no AMD GPU of the job")
        self._boards = [board for _, board in places]
        self._hwmon = [
            next(iter(sorted(board.glob("hwmon/hwmon*"))), board) for board in self._boards
        ]
        self.gpus = tuple(
            Gpu(
                index,
                files.read_text(board / "unique_id", 40).strip(),
                name=files.read_text(board / "product_name", 80).strip() or "AMD GPU",
                memory=_number(board / "mem_info_vram_total") or 0,
            )
            for index, board in places
        )

    def sample(self) -> tuple[GpuSample, ...]:
        """Return the state of each GPU."""
        return tuple(map(_sample, self._boards, self._hwmon))


def _sample(board: Path, hwmon: Path) -> GpuSample:
    power = _number(hwmon / "power1_average")
    if power is None:
        power = _number(hwmon / "power1_input")
    temperature = _number(hwmon / "temp1_input")
    errors = re.search(
        r"^ue: (\d+)", files.read_text(board / "ras/umc_err_count", 200), re.MULTILINE
    )
    return GpuSample(
        _number(board / "gpu_busy_percent"),
        _number(board / "mem_info_vram_used"),
        power=None if power is None else power / 1e6,  # from microwatts
        temperature=None if temperature is None else temperature / 1000,
        sm_clock=_megahertz(hwmon / "freq1_input"),
        memory_clock=_megahertz(hwmon / "freq2_input"),
        ecc=int(errors[1]) if errors else None,
    )


def _megahertz(path: Path) -> int | None:
    value = _number(path)
    return None if value is None else value // 10**6


def _number(path: Path) -> int | None:
    text = files.read_text(path, 40).strip()
    return int(text) if text.isdecimal() else None
