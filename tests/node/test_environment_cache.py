"""Prepare a job's Python environment on a node: real archives, real uv, the bash script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from launching import executable, new_folder
from packed_env import (
    FORMS,
    MODULE,
    Preparation,
    archive,
    conda_archive,
    directory_env,
    tar_of,
    uv_project,
    wheel,
)
from procs import kill_all, wait_until

from clusterjob.core.python_env import UNUSED_DAYS

BIN = Path(sys.executable).parent  # has uv
WAIT = 60.0  # seconds; each step needs much less

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def uv_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_CACHE_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def program(directory: Path, name: str, text: str) -> str:
    """Write a program that is found first on PATH; return the new PATH."""
    folder = new_folder(directory / "first")
    executable(folder / name, f"#!/bin/bash\n{text}\n")
    return f"{folder}:{os.environ['PATH']}"


def path_without(directory: Path, *names: str) -> str:
    """Return a PATH with all programs of the system but these."""
    folder = new_folder(directory / "without")
    for source in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for entry in os.scandir(source):
            link = folder / entry.name
            if entry.name not in names and not os.path.lexists(link):
                link.symlink_to(entry.path)
    return str(folder)


# -- archives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_archive_of_each_form_is_prepared_once_and_shared(tmp_path: Path, form: str) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path, form))
    python, value, err = preparation.run()
    assert (value, python.startswith(str(preparation.cache))) == ("1", True), err
    assert "clusterjob: prepared the Python environment in" in err
    [entry] = preparation.entries()
    before = entry.stat().st_mtime_ns
    _, value, err = preparation.run()
    assert (value, err, entry.stat().st_mtime_ns) == ("1", "", before)
    assert preparation.cache.stat().st_mode & 0o777 == 0o700
    wait_until(
        lambda: not list(preparation.cache.glob("mounts/*")), WAIT, "the mounts end with the job"
    )


def test_squashfs_is_unpacked_without_squashfuse(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path, "squashfs"))
    _, value, err = preparation.run(PATH=path_without(tmp_path, "squashfuse"))
    assert value == "1", err
    [entry] = preparation.entries()
    assert not (entry / "image").exists()
    assert (entry / "env/bin/python").exists()


def test_mount_whose_server_was_killed_is_removed_by_the_next_job(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path, "squashfs"))
    job = preparation.start()
    job.stdout.readline()
    if not (mounts := list(preparation.cache.glob("mounts/*"))):
        job.communicate()
        pytest.skip("squashfuse cannot mount on this machine")
    [mount] = mounts
    server = [int(pid) for pid in subprocess.check_output(["pgrep", "-f", str(mount)]).split()]
    kill_all(server)
    job.communicate()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(mount)
    _, value, _ = preparation.run()
    assert value == "1"
    wait_until(lambda: not list(preparation.cache.glob("mounts/*")), WAIT, "no mount remains")


def test_conda_pack_archive_runs_conda_unpack_once(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=conda_archive(tmp_path))
    python, value, err = preparation.run()
    assert value == "1", err
    tool = Path(python).with_name("tool")
    assert tool.read_text().splitlines()[0] == "#!/usr/bin/env python"
    [entry] = preparation.entries()
    assert (entry / "env/bin/conda-unpack").exists()


def test_directory_at_the_top_of_an_archive_is_the_environment(tmp_path: Path) -> None:
    env = directory_env(tmp_path)
    path = tmp_path / "top.tar.gz"
    subprocess.run(["tar", "-czf", path, "-C", tmp_path, env.name], check=True)
    preparation = Preparation.of(tmp_path, env_archive=path)
    python, value, err = preparation.run()
    assert (value, python.endswith("/env/bin/python")) == ("1", True), err


def test_archive_that_changed_after_the_submission_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, "tar.gz")
    preparation = Preparation.of(tmp_path, env_archive=path)
    script = preparation.script().read_text()
    path.write_bytes(archive(tmp_path, "tar", value="2").read_bytes() + b"\0" * 512)
    changed = Preparation.of(tmp_path, env_archive=path)
    (tmp_path / "old.sh").write_text(script.replace("gzip -dc", "cat"))
    done = subprocess.run(
        ["bash", "old.sh"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert f"{path} has changed since the job was submitted" in done.stderr.splitlines()[-1]
    assert changed.run()[1] == "2", "the changed archive has another name in the cache"


def test_truncated_archive_is_refused_and_nothing_remains(tmp_path: Path) -> None:
    path = archive(tmp_path, "tar.gz")
    path.write_bytes(path.read_bytes()[:-300])
    preparation = Preparation.of(tmp_path, env_archive=path)
    assert "unexpected end of file" in preparation.refused()
    [entry] = preparation.entries()
    assert not entry.exists()


def test_archive_without_an_interpreter_is_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "x.tar", (tarfile.TarInfo("readme"), b"text"))
    assert "pack it with conda-pack" in Preparation.of(tmp_path, env_archive=path).refused()


def test_archive_writes_nothing_outside_of_its_entry(tmp_path: Path) -> None:
    outside, link = tmp_path / "outside", tarfile.TarInfo("link")
    outside.mkdir()
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    path = tar_of(
        tmp_path / "x.tar",
        (tarfile.TarInfo("../../../../escaped"), b"1"),
        (tarfile.TarInfo(f"{outside}/absolute"), b"1"),
        (link, b""),
        (tarfile.TarInfo("link/through"), b"1"),
    )
    preparation = Preparation.of(tmp_path, env_archive=path)
    preparation.refused()
    assert not list(outside.iterdir())
    assert not list(tmp_path.rglob("escaped"))
    assert not [entry for entry in preparation.entries() if entry.exists()]


@needs_root
def test_archive_with_a_device_is_refused(tmp_path: Path) -> None:
    device = tarfile.TarInfo("disk")
    device.type, device.devmajor, device.devminor = tarfile.BLKTYPE, 8, 0
    path = tar_of(tmp_path / "x.tar", (device, b""))
    assert "device files" in Preparation.of(tmp_path, env_archive=path).refused()


@pytest.mark.parametrize(
    ("form", "missing", "reason"),
    [
        ("tar.zst", ("zstd",), "there is no zstd on this machine: install it there, or load it"),
        ("squashfs", ("squashfuse", "unsquashfs"), "install squashfs-tools there"),
        ("uv", ("uv",), "there is no uv on this machine: install it there (pip install uv)"),
    ],
)
def test_missing_program_is_named(
    tmp_path: Path, form: str, missing: tuple[str, ...], reason: str
) -> None:
    if form == "uv":
        preparation = Preparation.of(uv_project(tmp_path), uv=True)
    else:
        preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path, form))
    assert reason in preparation.refused(PATH=path_without(tmp_path, *missing))


@needs_root
@pytest.mark.parametrize(
    ("form", "size"), [("tar.gz", "8k"), ("zip", "8k"), ("squashfs", "8k"), ("uv", "64k")]
)
def test_full_disk_is_named_and_left_empty(tmp_path: Path, form: str, size: str) -> None:
    disk = new_folder(tmp_path / "small")
    if form == "uv":
        preparation = Preparation.of(uv_project(tmp_path), uv=True, env_cache=str(disk))
    else:
        path = archive(tmp_path, form)
        preparation = Preparation.of(tmp_path, env_archive=path, env_cache=str(disk))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        reason = preparation.refused()
        assert "disk" in reason or "No space left on device" in reason
        # uv's own last step would say less
        assert form != "uv" or reason == f"the disk of {preparation.cache} is full"
        assert not [entry for entry in preparation.entries() if entry.exists()]
    finally:
        subprocess.run(["umount", disk], check=True)


# -- the cache -----------------------------------------------------------------------------------


def test_killed_builder_is_replaced_and_all_others_share_one_environment(tmp_path: Path) -> None:
    """Start four jobs at once; the first one that unpacks is killed in the middle."""
    os.mkfifo(tmp_path / "go")
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path)).with_variables(
        PATH=program(
            tmp_path,
            "gzip",
            f"echo $(ps -o sid= $$) >> {tmp_path}/builders\n"
            f'[ "$(wc -l < {tmp_path}/builders)" != 1 ] || read < {tmp_path}/go\n'
            'exec /bin/gzip "$@"',
        )
    )
    jobs = [preparation.start() for _ in range(4)]
    builders = tmp_path / "builders"
    wait_until(lambda: builders.exists() and builders.read_text().strip(), WAIT, "a builder")
    killed = int(builders.read_text())
    os.killpg(killed, signal.SIGKILL)
    found = [job.communicate(timeout=WAIT) for job in jobs]
    survivors = [out for job, (out, _) in zip(jobs, found, strict=True) if job.pid != killed]
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    assert survivors[0].splitlines()[1] == "1", found
    assert len(builders.read_text().split()) == 2, "only the killed job and one other unpack it"
    [entry] = preparation.entries()
    assert (entry / "complete").exists()


def test_environment_is_removed_by_age_unless_a_job_uses_it(tmp_path: Path) -> None:
    first = Preparation.of(tmp_path, env_archive=archive(tmp_path, value="1"))
    job = first.start()
    job.stdout.readline()
    [entry] = first.entries()
    old = time.time() - (UNUSED_DAYS + 1) * 86400
    os.utime(f"{entry}.lock", (old, old))
    (tmp_path / "b").mkdir()
    second = Preparation.of(
        tmp_path,
        env_archive=archive(tmp_path / "b", "tar", value="2"),
        env_cache=first.spec.env_cache,
    )
    assert second.run()[1] == "2"
    assert entry.exists(), "a job uses it"
    job.communicate()
    assert second.run()[1] == "2"
    assert not entry.exists()
    assert first.run()[1] == "1", "it is made again"
    os.utime(f"{entry}.lock", (old + 2 * 86400, old + 2 * 86400))
    assert second.run()[1] == "2"
    assert entry.exists(), f"it was used less than {UNUSED_DAYS} days ago"


@needs_root
def test_cache_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path))
    base = Path(preparation.spec.env_cache)
    base.chmod(0o777)
    assert "other users can replace files" in preparation.refused()
    base.chmod(0o1777)
    assert preparation.run()[1] == "1"


def test_missing_cache_directory_is_named(tmp_path: Path) -> None:
    preparation = Preparation.of(
        tmp_path, env_archive=archive(tmp_path), env_cache=str(tmp_path / "absent")
    )
    assert preparation.refused() == (
        f"there is no directory {tmp_path}/absent on this machine: --env-cache names another"
    )


def test_default_cache_is_in_tmpdir(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path), env_cache="")
    (tmp_path / "tmp").mkdir()
    python, _, err = preparation.run(TMPDIR=str(tmp_path / "tmp"))
    assert python.startswith(f"{tmp_path}/tmp/clusterjob-env-{os.geteuid()}/"), err


# -- uv ------------------------------------------------------------------------------------------


def test_uv_project_is_synced_once_and_imported_from_the_jobs_code(tmp_path: Path) -> None:
    preparation = Preparation.of(uv_project(tmp_path), uv=True)
    python, value, err = preparation.run()
    assert (value, python.startswith(str(preparation.cache))) == ("1", True), err
    [site] = Path(python).parents[1].glob("lib/python*/site-packages")
    assert (site / f"{MODULE}.py").exists()
    assert not list(site.glob("own*")), "the project itself is not installed"
    path = program(tmp_path, "uv", f'case $1 in python) exec {BIN}/uv "$@" ;; esac; exit 9')
    assert preparation.run(PATH=path)[:2] == (python, value), "no second sync"
    script = preparation.script().read_text()
    assert 'export PYTHONPATH="$PWD"/src' in script


def test_frozen_lock_decides_even_if_pyproject_has_changed(tmp_path: Path) -> None:
    uv_project(tmp_path)
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(
        text.replace("dependencies = [", 'dependencies = ["unknown-package", ')
    )
    preparation = Preparation.of(tmp_path, uv=True)
    assert preparation.run()[1] == "1"


def test_another_lock_makes_another_environment(tmp_path: Path) -> None:
    preparation = Preparation.of(uv_project(tmp_path), uv=True)
    first, _, _ = preparation.run()
    wheel(tmp_path / "wheels", value="2", version="2.0")
    text = (tmp_path / "pyproject.toml").read_text().replace("-1.0-", "-2.0-")
    (tmp_path / "pyproject.toml").write_text(text)
    subprocess.run(["uv", "lock", "-q", "--offline"], cwd=tmp_path, check=True)
    second, value, err = preparation.run()
    assert (value, second != first) == ("2", True), err


def test_damaged_wheel_shows_uvs_error(tmp_path: Path) -> None:
    uv_project(tmp_path)
    wheel(tmp_path / "wheels", value="other")  # not the one of the lock
    preparation = Preparation.of(tmp_path, uv=True)
    reason = preparation.refused()
    assert f"{MODULE}-1.0-py3-none-any.whl" in reason
    [entry] = preparation.entries()
    assert not entry.exists()


def test_uv_gets_the_passwords_of_indexes_and_no_other_secret(tmp_path: Path) -> None:
    preparation = Preparation.of(uv_project(tmp_path), uv=True)
    (tmp_path / "secrets").write_bytes(b"UV_INDEX_X_PASSWORD=a\nb\0OTHER=c\0")
    path = program(tmp_path, "uv", f'[ "$1" != sync ] || env > {tmp_path}/seen\nexec {BIN}/uv "$@"')
    _, value, err = preparation.run(PATH=path)
    assert value == "1", err
    seen = (tmp_path / "seen").read_text()
    assert "UV_INDEX_X_PASSWORD=a\nb\n" in seen
    assert "OTHER=" not in seen
