"""A directory that another user can change runs no code and blocks no job."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import command
from launching import environment, write_tree
from packed_env import Preparation, archive
from procs import TEST_TIMEOUT

from clusterjob.core import node_zip
from clusterjob.core.hosts import Host
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.spec import JobSpec
from clusterjob.node.program import Program
from clusterjob.node.system import private_dirs
from clusterjob.remote import session
from clusterjob.remote.sessions import Place

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, NOBODY, NOBODY)


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize("plant", [give_away, open_to_all])
@pytest.mark.parametrize("words", ["list", "clean --all"])
def test_no_command_reads_home_that_another_user_can_change(
    tmp_path: Path, plant: Callable[[Path], None], words: str
) -> None:
    home, mark = tmp_path / "home", tmp_path / "executed"
    (tmp_path / "ssh_config").write_text(f"Host *\n  ProxyCommand touch {mark}\n")
    place = Place(
        (Host("gpu1"),), "python3", ssh_config=tmp_path / "ssh_config", transport="openssh"
    )
    record = Record(
        "theirs-1",
        "theirs",
        cluster="ssh",
        backend="ssh",
        job_dir=home / "jobs" / "theirs-1",
        nodes=1,
        submitted_at="2026-01-01T00:00:00.000Z",
        spec=JobSpec(Program("command", "true"), tmp_path).to_json(),
        handle=Handle("ssh", "theirs-1", data=place.to_json()),
    )
    Records(home / "records").save(record)
    private_dirs.make(record.job_dir)
    plant(home)
    done = command(tmp_path, *words.split(), code=1, CLUSTERJOB_HOME=str(home))
    assert not mark.exists()
    assert done.stdout == ""
    assert f"clusterjob: error: {home} is not safe for jobs: " in done.stderr


@pytest.mark.parametrize("plant", [give_away, open_to_all, lambda path: path.chmod(0o1777)])
def test_launch_refuses_job_directory_that_another_user_can_change(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    job, target = tmp_path / "job", tmp_path / "profile"
    target.write_text("mine\n")
    (job / "logs" / "node0").mkdir(parents=True)
    (job / "logs" / "node0" / "rank0.out").symlink_to(target)
    plant(job)
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = command(tmp_path, "launch", "train.py", code=1, CLUSTERJOB_JOB_DIR=str(job))
    assert f"clusterjob: the job directory {job} is not safe" in done.stderr
    assert target.read_text() == "mine\n"


@pytest.mark.parametrize("plant", [give_away, open_to_all])
def test_host_home_that_another_user_can_change_swaps_no_code(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    """The other user replaces the zip between the check of its digest and the import."""
    home, mark, good = tmp_path / "home", tmp_path / "executed", node_zip.node_zip()
    digest = hashlib.sha256(good).hexdigest()
    (home / "node").mkdir(parents=True)
    fifo, evil = home / "node" / f"{digest}.pyz", home / "evil"
    os.mkfifo(fifo)
    with zipfile.ZipFile(evil, "w") as planted:
        planted.writestr("clusterjob/__init__.py", f"open({str(mark)!r}, 'w')")
    plant(home)

    def swap() -> None:
        with fifo.open("wb") as stream:
            evil.replace(fifo)
            stream.write(good)

    attacker = threading.Thread(target=swap)
    attacker.start()
    done = subprocess.run(
        [sys.executable, "-c", session._BOOT],
        input=f"{digest} {len(good)} {home}\n",
        cwd="/",
        env=environment(tmp_path, {"PYTHONPATH": ""}),
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    attacker.join()
    assert not mark.exists(), done
    assert done.stdout.startswith(f"clusterjob-session broken {home} is not safe for jobs"), done


def test_environment_cache_made_by_another_user_blocks_no_job(tmp_path: Path) -> None:
    preparation = Preparation.of(tmp_path, env_archive=archive(tmp_path, "tar"))
    base = Path(preparation.spec.env_cache)
    base.chmod(0o1777)
    name = f"clusterjob-env-{os.geteuid()}"
    for taken in (base / name, base / f"{name}.0123456789"):
        (taken / "x").mkdir(parents=True)
        give_away(taken)
    python, value, err = preparation.run()
    own = Path(python).parents[3]
    assert (own.parent, value) == (base, "1"), err
    assert (own.stat().st_uid, own.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert preparation.run() == (python, value, ""), "the second job finds it"
    os.rename(own, tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    os.lchown(own, NOBODY, NOBODY)
    assert Path(preparation.run()[0]).parents[3] != own


def test_caches_and_settings_of_another_user_are_not_used(tmp_path: Path) -> None:
    cache, settings = tmp_path / "cache" / "clusterjob", tmp_path / "config" / "clusterjob"
    write_tree(settings, **{"config.toml": '[defaults]\nsetup = ["touch executed"]\n'})
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    cache.mkdir(parents=True)
    (cache / "archive-digests.json").symlink_to(victim)
    give_away(tmp_path / "cache")
    give_away(tmp_path / "config")
    done = command(
        tmp_path,
        "run",
        "--cluster",
        "local",
        "--",
        "true",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        XDG_CONFIG_HOME=str(tmp_path / "config"),
        CLUSTERJOB_HOME=str(tmp_path / "home"),
    )
    assert "config.toml is ignored: it belongs to uid 65534" in done.stderr
    assert not (tmp_path / "executed").exists()
    assert [path.name for path in cache.iterdir()] == ["archive-digests.json"]
    assert victim.read_text() == "mine\n"
