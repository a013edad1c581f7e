"""Another user of the machine who takes names, fills backlogs and squats directories: he holds
nobody up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PATIENCE, environment, free_port, script

from clusterjob.node.host_server import gpus
from clusterjob.worker import once_per_host, siblings

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def stranger(code: str, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code as another user until the end of the block; it says "there" once it has done its
    worst.
    """
    text = (
        "import os, socket, sys\nos.setuid(65534)\n"
        + textwrap.dedent(code)
        + "\nprint('there', flush=True)\nsys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", text, *arguments]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(directory)
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


FILL = """
held = socket.socket(socket.AF_UNIX)
held.bind("\\0" + sys.argv[1])
held.listen(0)
others = []
while True:
    other = socket.socket(socket.AF_UNIX)
    other.setblocking(False)
    try:
        other.connect("\\0" + sys.argv[1])
    except BlockingIOError:
        break
    others.append(other)
"""


def test_a_name_with_a_full_backlog_silences_nobody_and_holds_nobody_up(tmp_path: Path) -> None:
    subject = os.urandom(8).hex()
    name = f"clusterjob-speaks-{os.getuid()}-{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
    code = f"from clusterjob.worker import once_per_host as speaker; print(bool(speaker.take_turn({subject!r})))"
    with stranger(FILL, tmp_path, name):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert ended.stdout == "True\n", ended.stderr


def test_processes_that_ask_often_do_not_fill_their_own_backlog() -> None:
    subject = os.urandom(8).hex()
    mine = once_per_host.take_turn(subject)
    assert mine is not None
    with mine:
        for _ in range(10_000):
            assert once_per_host.take_turn(subject) is None


MEET = """
    import multiprocessing, os, sys, time
    from clusterjob.worker import siblings

    def child(rank, told):
        if rank:
            told.wait()
        print(rank, siblings.meet(rank), flush=True)
        if not rank:
            while not os.path.exists("seen"):  # its sign
                time.sleep(0.01)
            told.set()
            time.sleep(20)

    if __name__ == "__main__":
        told = multiprocessing.Event()
        started = [multiprocessing.Process(target=child, args=(rank, told)) for rank in (0, 1)]
        for process in started:
            process.start()
        started[1].join()
        started[0].kill()
        started[0].join()
"""

# Finds the sign of rank 0, which all can see, fills what it can of its backlog, and puts up signs
# of its own beside it.
MISLEAD = """
import time
names = []
while not names:
    with open("/proc/net/unix") as table:
        words = [line.split()[-1].split("-") for line in table if "@clusterjob-" in line]
    names = ["-".join(each)[1:] for each in words if len(each) == 4 and len(each[1]) == 32]  # others have other names
    time.sleep(0.01)
name = names[0]
others = []
while len(others) < 10000:
    other = socket.socket(socket.AF_UNIX)
    other.setblocking(False)
    try:
        other.connect("\\0" + name)
    except OSError:
        break
    others.append(other)
prefix = "-".join(name.split("-")[:2]) + "-"
signs = []
for text in ("4242", "4243-" + name.rpartition("-")[2], "1"):
    signs.append(socket.socket(socket.AF_UNIX))
    signs[-1].bind("\\0" + prefix + text)
    signs[-1].listen(0)
"""


# The kernel shows a name as it is: this one makes an empty line, and one of blanks, in the table.
BREAK_LINES = """
sign = socket.socket(socket.AF_UNIX)
sign.bind("\\0a\\n\\n  \\nb")
"""


def test_a_name_of_several_lines_breaks_no_meeting(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    with stranger(BREAK_LINES, tmp_path):
        ended = subprocess.run(
            [sys.executable, str(script(tmp_path, MEET))], cwd=tmp_path, env=environment(tmp_path),
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    ports = dict(line.split() for line in ended.stdout.splitlines())
    assert ports.keys() == {"0", "1"}, ended.stderr
    assert ports["0"] == ports["1"]


def test_children_of_one_parent_meet_beside_false_signs_and_a_full_backlog(tmp_path: Path) -> None:
    path = script(tmp_path, MEET)
    meeting = subprocess.Popen(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with stranger(MISLEAD, tmp_path):
            (tmp_path / "seen").touch()
            out, err = meeting.communicate(timeout=PATIENCE)
    finally:
        meeting.kill()
        meeting.wait()
    said = dict(line.split() for line in out.splitlines())
    assert said.keys() == {"0", "1"}, err
    assert said["0"] == said["1"]


def test_the_sign_of_a_rank_0_that_has_ended_leads_nowhere(tmp_path: Path) -> None:
    """Its name was there for all to see; the port may be anybody's now."""
    code = """
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    """
    port = free_port()
    with stranger(code, tmp_path, str(port)):
        assert not siblings._is_ours(port)
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert siblings._is_ours(own.getsockname()[1])


# -- the locks of GPUs -------------------------------------------------------------------------------------------------


def test_a_lock_directory_that_somebody_else_made_first_is_done_without(
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


def test_a_login_without_a_runtime_directory_sees_the_locks_of_one_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(gpus, "_TMP", str(tmp_path))
    card = gpus.Gpu(0, "GPU-test", name="H100", used=0, total=1)
    first, second = gpus.Reservation("a"), gpus.Reservation("b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert first.take(card) == ""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    try:
        assert second.take(card) == "job a"
    finally:
        first.release()
    assert second.take(card) == ""
    second.release()
