"""Another local user occupies directories; this makes no job wait or fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import new_folder
from nvidia import FakeSmi

from clusterjob.node.system import devices

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_gpu_lock_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, runtime = tmp_path / "common", tmp_path / "runtime"
    common.mkdir()
    runtime.mkdir(mode=0o700)
    squatted = new_folder(common / f"clusterjob-gpus-{os.getuid()}")
    os.chown(squatted, NOBODY, NOBODY)
    monkeypatch.setattr(devices, "_TMP", str(common))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert runtime in (found := devices.lock_directories())
    assert squatted not in found
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(squatted))
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # who has no /run/user/54321
    with pytest.raises(OSError, match="the directory is not this user's"):
        devices.lock_directories()


@pytest.mark.parametrize("lost", ["common", "XDG_RUNTIME_DIR"])
def test_gpu_is_locked_in_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    smi = FakeSmi(tmp_path / "smi")
    smi.set_gpus([3])
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("PATH", f"{smi.directory}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "_TMP", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    held = devices.pick("a", "auto", count=1, environ={})
    if lost == "common":  # a cleaner of /tmp removes files that are old
        (tmp_path / f"clusterjob-gpus-{os.getuid()}" / "GPU-0000").unlink()
    else:  # a login without a session
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(devices.TooFewGpusError, match="0 job a"):
        devices.pick("b", "auto", count=1, environ={})
    devices.release(held)
