"""GPU samples: NVML through a fake library in C, AMD through a fake tree of sysfs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvidia import FakeNvml

from clusterjob.node.metrics.sources import amd_gpus

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt install gcc")

# Prints the GPUs and a sample at once, and another sample after each line on stdin.
READ = """
import json, os, sys, time
from clusterjob.node.metrics import sources
try:
    source = sources.Nvml(os.environ)
except OSError as error:
    sys.exit(str(error))
print(json.dumps([vars(gpu) for gpu in source.read()[0]]), flush=True)
while True:
    print(json.dumps([vars(sample) for sample in source.read()[1]]), flush=True)
    if not sys.stdin.readline():
        break
"""


class Reader:
    """A process that has loaded the fake library."""

    def __init__(self, nvml: FakeNvml, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READ],
            env=os.environ | nvml.variables | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.gpus = self._line()
        self.first = self._line() if self.gpus else None

    def sample(self) -> list[dict[str, Any]]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> str:
        return self.process.communicate()[1]


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path / "nvml")


def test_nvml_gives_use_memory_power_temperature_clocks_ecc_and_xid(nvml: FakeNvml) -> None:
    reader = Reader(nvml)
    assert [(gpu["index"], gpu["uuid"], gpu["name"], gpu["memory"]) for gpu in reader.gpus] == [
        (0, "GPU-0000-fake", "Fake H100", 80 << 30),
        (1, "GPU-0001-fake", "Fake H100", 80 << 30),
    ]
    assert reader.first[1] == {
        "use": 81,
        "memory": (40 << 30) - (1 << 20),  # without the driver's reserve, as nvidia-smi
        "power": 350.5,
        "temperature": 61,
        "sm_clock": 1980,
        "memory_clock": 2619,
        "ecc": 0,
        "xid": 0,
    }
    nvml.set(1, use=3, ecc=2, xid=79)
    changed = reader.sample()[1]
    assert (changed["use"], changed["ecc"], changed["xid"]) == (3, 2, 79)
    assert reader.sample()[1]["xid"] == 79  # the latest one is kept
    assert reader.sample()[0]["xid"] == 0
    assert reader.end() == ""


def test_values_that_a_gpu_lacks_or_has_lost_are_none(nvml: FakeNvml) -> None:
    nvml.set(0, power=-1, ecc=-1, temperature=-1)
    nvml.set(1, xid=-1)
    reader = Reader(nvml)
    assert reader.first[1]["xid"] is None, "the driver reports none of this GPU"
    unknown = {name for name, value in reader.first[0].items() if value is None}
    assert unknown == {"power", "ecc", "temperature"}
    nvml.set(0, lost=1)
    lost, other = reader.sample()
    assert {name for name, value in lost.items() if value is not None} == {"xid"}
    assert other["use"] == 81
    reader.end()
    nvml.set(0, lost=2)  # also its handle is gone when the job starts
    late = Reader(nvml)
    assert [gpu["index"] for gpu in late.gpus] == [1]
    late.end()


def test_old_driver_without_some_functions_gives_the_others(tmp_path: Path) -> None:
    reader = Reader(FakeNvml(tmp_path / "nvml", old=True))
    sample = reader.first[0]
    unknown = ("memory", "ecc", "xid")
    assert (sample["use"], *(sample[name] for name in unknown)) == (80, None, None, None)
    reader.end()


@pytest.mark.parametrize(
    ("listed", "indices"),
    [("1", [1]), ("1,0", [1, 0]), ("GPU-0001-fake", [1]), ("0,-1,1", [0]), ("5", None), ("", None)],
)
def test_cuda_visible_devices_selects_the_gpus(
    nvml: FakeNvml, listed: str, indices: list[int] | None
) -> None:
    reader = Reader(nvml, CUDA_VISIBLE_DEVICES=listed)
    found = None if reader.gpus is None else [gpu["index"] for gpu in reader.gpus]
    assert found == indices
    error = reader.end()
    assert ("NVML finds no GPU of the job" in error) == (indices is None)


def test_mig_device_has_the_values_that_nvml_gives_for_it(nvml: FakeNvml) -> None:
    nvml.set(15, memory=5 << 30, total=10 << 30)
    reader = Reader(nvml, CUDA_VISIBLE_DEVICES="MIG-0f0f")
    assert [gpu["memory"] for gpu in reader.gpus] == [10 << 30]
    assert reader.first[0]["use"] is None
    assert reader.first[0]["memory"] == (5 << 30) - (1 << 20)
    reader.end()


def test_missing_driver_is_an_error_of_the_gpus_only(nvml: FakeNvml) -> None:
    nvml.set("-", init=9)
    assert "NVML finds no driver" in Reader(nvml).end()


def amd_card(root: Path, index: int, vendor: str = "0x1002", busy: int = 70) -> Path:
    device = root / f"sys/class/drm/card{index}/device"
    (device / "hwmon/hwmon3").mkdir(parents=True)
    for name, text in {
        "vendor": vendor,
        "gpu_busy_percent": str(busy),
        "mem_info_vram_used": str(7 << 30),
        "mem_info_vram_total": str(192 << 30),
        "unique_id": f"abc{index}",
        "product_name": "Fake MI300X",
        "hwmon/hwmon3/power1_average": "401000000",
        "hwmon/hwmon3/temp1_input": "55000",
        "hwmon/hwmon3/freq1_input": "2100000000",
        "hwmon/hwmon3/freq2_input": "1300000000",
    }.items():
        (device / name).write_text(text + "\n")
    return device


def test_amd_gives_the_values_of_sysfs(tmp_path: Path) -> None:
    amd_card(tmp_path, 0, vendor="0x1a03")  # the display adapter of a server
    device = amd_card(tmp_path, 1)
    (device / "ras").mkdir()
    (device / "ras/umc_err_count").write_text("ue: 4\nce: 9\n")
    read = amd_gpus({}, root=str(tmp_path))
    (gpu,), (sample,) = read()
    assert (gpu.index, gpu.uuid, gpu.name, gpu.memory) == (0, "abc1", "Fake MI300X", 192 << 30)
    assert (sample.use, sample.memory, sample.power, sample.temperature) == (70, 7 << 30, 401, 55)
    assert (sample.sm_clock, sample.memory_clock, sample.ecc, sample.xid) == (2100, 1300, 4, None)


def test_amd_without_files_has_no_values_and_variables_select(tmp_path: Path) -> None:
    for index in range(4):
        amd_card(tmp_path, index, busy=index)
    shutil.rmtree(tmp_path / "sys/class/drm/card3/device/hwmon")
    visible = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    read = amd_gpus(visible, root=str(tmp_path))
    (gpu,), (sample,) = read()
    assert gpu.index == 3
    assert (sample.use, sample.power, sample.ecc) == (3, None, None)
    with pytest.raises(OSError, match="no AMD GPU"):
        amd_gpus({"ROCR_VISIBLE_DEVICES": ""}, root=str(tmp_path))
