"""CUDA_VISIBLE_DEVICES has one parser: local jobs, nodes and host servers read it alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterjob.errors import UsageError
from clusterjob.node.host_server import gpus
from clusterjob.node.host_server.gpus import Gpu
from clusterjob.node.system import devices

INSTALLED = [Gpu(index, f"GPU-{index}", name="H100", used=0, total=80 << 30) for index in range(4)]

CASES = [
    ("0,-1,2", ["0"]),
    ("-1", []),
    ("0,1,0", ["0", "1"]),
    ("0,,2", ["0"]),
    ("2,MIG-1", ["2", "MIG-1"]),
    ("none", []),
]


@pytest.mark.parametrize(("listed", "found"), CASES)
def test_list_ends_at_the_first_invalid_or_repeated_entry(listed: str, found: list[str]) -> None:
    assert devices.cuda_devices(listed) == found


@pytest.mark.parametrize(("listed", "found"), CASES)
def test_local_job_counts_the_same_gpus(listed: str, found: list[str]) -> None:
    assert devices.listed_gpus(listed, 4) == found


@pytest.mark.parametrize(("listed", "found"), CASES)
def test_host_server_shows_the_same_gpus(listed: str, found: list[str]) -> None:
    shown = gpus.visible(INSTALLED, listed)
    assert [gpu.uuid if gpu.uuid.startswith("MIG") else str(gpu.index) for gpu in shown] == found


@pytest.mark.parametrize(("listed", "found"), CASES)
def test_host_server_shares_the_same_gpus(listed: str, found: list[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": listed}
    with pytest.raises(gpus.TooFewGpusError, match=f"^{len(found)} GPUs"):
        gpus.share(len(found) + 1, environ)
    assert gpus.share(len(found), environ) is None, "the login sees exactly these"
    for count in range(len(found)):
        assert gpus.share(count, environ) == ",".join(found[:count])


def test_gpu_after_an_invalid_entry_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_DEVICES", str(tmp_path))
    environ = {"CUDA_VISIBLE_DEVICES": "0,-1,2"}
    assert devices.choose_gpus(["0"], environ) == ["0"]
    with pytest.raises(UsageError, match="GPU 2 is not available here"):
        devices.choose_gpus(["2"], environ)
