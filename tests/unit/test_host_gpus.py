"""GPU selection on a host, with a fake nvidia-smi command and real locks."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvidia import FakeSmi
from procs import TEST_TIMEOUT

from clusterjob.node.system import devices


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSmi]:
    smi = FakeSmi(tmp_path / "smi")
    monkeypatch.setenv("PATH", f"{smi.directory}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "lock_directories", lambda: [smi.directory])
    return smi


def uuids_of(locks: devices.Locks) -> list[str]:
    devices.release(locks)
    return list(locks)


def test_read_gpus_parses_memory_and_processes(smi: FakeSmi) -> None:
    smi.set_gpus([3, 70000], {1: [(os.getpid(), "python, with a comma"), (10**7, "/opt/x/other")]})
    first, second = devices.read_gpus({})
    assert (first.index, first.uuid, first.name, first.used, first.idle) == (
        0,
        "GPU-0000",
        "NVIDIA H100, 80GB",
        3 << 20,
        True,
    )
    assert second.processes == ((os.getpid(), "python, with a comma"), (10**7, "/opt/x/other"))
    user = pwd.getpwuid(os.getuid()).pw_name
    assert second.describe() == (
        f"1 NVIDIA H100, 80GB: {user}'s python, with a comma (pid {os.getpid()}),"
        " another user's other (pid 10000000), 73.4 of 86 GB used"
    )


def test_host_without_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.read_gpus({}) == []


def test_failing_nvidia_smi_raises_its_output(smi: FakeSmi) -> None:
    (smi.directory / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Unable to determine the device handle'\nexit 15\n"
    )
    with pytest.raises(OSError, match="nvidia-smi fails: Unable to determine"):
        devices.read_gpus({})


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,1", [1]),
        ("GPU-0003, 1", [3, 1]),
        ("-1", []),
        ("x", []),
        ("2,MIG-1", [2]),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(
    smi: FakeSmi, listed: str | None, wanted: list[int]
) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.index for gpu in devices.read_gpus(environ)] == wanted


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("0,-1,2", ["0"]),
        ("-1", []),
        ("0,1,0", ["0", "1"]),
        ("0,,2", ["0"]),
        ("2,MIG-1", ["2", "MIG-1"]),
        ("none", []),
    ],
)
def test_host_server_shares_the_gpus_that_its_login_sees(
    monkeypatch: pytest.MonkeyPatch, listed: str, found: list[str]
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda _environ: 8)
    environ = {"CUDA_VISIBLE_DEVICES": listed}
    with pytest.raises(devices.TooFewGpusError, match=f"^{len(found)} GPUs"):
        devices.share(len(found) + 1, environ)
    assert devices.share(len(found), environ) is None, "the login sees exactly these"
    for count in range(len(found)):
        assert devices.share(count, environ) == ",".join(found[:count])


def test_pick_auto_returns_idle_visible_gpus(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3, 3], {2: [(1, "init")]})
    assert uuids_of(devices.pick("a", "auto", count=2, environ={})) == ["GPU-0000", "GPU-0003"]
    assert uuids_of(
        devices.pick("a", "auto", count=1, environ={"CUDA_VISIBLE_DEVICES": "3,0"})
    ) == ["GPU-0003"]
    assert uuids_of(devices.pick("a", "auto", count=None, environ={})) == ["GPU-0000", "GPU-0003"]
    held = devices.pick("a", "auto", count=1, environ={})
    assert uuids_of(devices.pick("b", "auto", count=None, environ={})) == ["GPU-0003"]
    devices.release(held)


def test_pick_with_too_few_idle_gpus_names_holders(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3], {2: [(1, "trainer")]})
    held = devices.pick("other-job", "auto", count=1, environ={})
    with pytest.raises(devices.TooFewGpusError) as caught:
        devices.pick("mine", "auto", count=2, environ={})
    with pytest.raises(
        devices.TooFewGpusError, match=r"^no GPU is idle: 0 job other-job; 1 NVIDIA"
    ):
        devices.pick("mine", "auto", count=None, environ={})
    devices.release(held)
    text = str(caught.value)
    assert text.startswith(
        "0 idle GPUs where 2 are asked for: 0 job other-job;"
        " 1 NVIDIA H100, 80GB: 2.1 of 86 GB used; 2 NVIDIA"
    )
    assert "trainer (pid 1)" in text
    assert uuids_of(devices.pick("mine", "auto", count=1, environ={})) == ["GPU-0000"], (
        "the failed attempt must hold no GPU"
    )


def test_pick_of_listed_gpus_refuses_held_and_missing_gpus(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3], {2: [(1, "trainer")]})
    held = devices.pick("a", "2,1", count=2, environ={})
    assert [*held] == ["GPU-0002", "GPU-0001"]
    with pytest.raises(devices.TooFewGpusError, match="GPU 1 is held by job a"):
        devices.pick("b", "0,1", count=2, environ={})
    devices.release(held)
    with pytest.raises(devices.TooFewGpusError, match="GPU 1 is held by"):
        devices.pick("b", "1,GPU-0001", count=2, environ={})
    devices.release(devices.pick("b", "1", count=1, environ={}))  # nothing keeps its lock
    with pytest.raises(
        devices.TooFewGpusError, match="GPU 7 does not exist; existing GPUs: 0, 1, 2"
    ):
        devices.pick("b", "7", count=1, environ={})


def test_concurrent_picks_return_different_gpus(smi: FakeSmi) -> None:
    code = """
import os, sys
from clusterjob.node.system import devices
from pathlib import Path
devices.lock_directories = lambda: [Path(sys.argv[1])]
try:
    held = devices.pick(str(os.getpid()), "auto", 1, {})
    print(*held, flush=True)
except devices.TooFewGpusError:
    print("none", flush=True)
sys.stdin.read()
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, smi.directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    output_lines = [
        process.stdout.readline().strip() for process in started if process.stdout is not None
    ]
    for process in started:
        process.communicate("", timeout=TEST_TIMEOUT)
    assert sorted(output_lines) == ["GPU-0000", "GPU-0001", "GPU-0002", "GPU-0003", "none", "none"]


def test_reservation_lasts_until_inheriting_process_exits(smi: FakeSmi) -> None:
    held = devices.pick("a", "auto", count=4, environ={})
    child = subprocess.Popen(["sleep", "1000"], pass_fds=devices.descriptors(held))
    devices.release(held)
    try:
        with pytest.raises(devices.TooFewGpusError, match="0 job a; 1 job a"):
            devices.pick("b", "auto", count=1, environ={})
    finally:
        child.kill()
        child.wait()
    assert uuids_of(devices.pick("b", "auto", count=4, environ={})) == [
        "GPU-0000",
        "GPU-0001",
        "GPU-0002",
        "GPU-0003",
    ]


def test_lock_directory_is_private_to_user() -> None:
    status = devices.lock_directories()[0].stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.getuid())
