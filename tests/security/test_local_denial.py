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
    assert gpus.lock_directory() == runtime
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(squatted))
    with pytest.raises(OSError, match="the directory is not this user's"):
        gpus.lock_directory()
