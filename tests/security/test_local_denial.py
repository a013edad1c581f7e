"""Another local user occupies directories; this makes no job wait or fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterjob.node.host_server import gpus

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_gpu_lock_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, runtime = tmp_path / "common", tmp_path / "runtime"
    common.mkdir()
    runtime.mkdir(mode=0o700)
    squatted = common / f"clusterjob-gpus-{os.getuid()}"
    squatted.mkdir()
    os.chown(squatted, NOBODY, NOBODY)
    monkeypatch.setattr(gpus, "_TMP", str(common))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert [path for path in gpus.lock_directories() if not str(path).startswith("/run/")] == [
        runtime
    ]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(squatted))
    if not Path(f"/run/user/{os.getuid()}").exists():
        with pytest.raises(OSError, match="the directory is not this user's"):
            gpus.lock_directories()


def test_session_without_runtime_directory_sees_gpu_locks_of_session_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(gpus, "_TMP", str(tmp_path))
    gpu = gpus.Gpu(0, "GPU-test", name="H100", used=0, total=1)
    first, second = gpus.Reservation("a"), gpus.Reservation("b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert first.take(gpu) == ""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    try:
        assert second.take(gpu) == "job a"
    finally:
        first.release()
    assert second.take(gpu) == ""
    second.release()
