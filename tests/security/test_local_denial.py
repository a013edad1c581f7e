"""Another local user takes socket names, fills backlogs and occupies directories.

This makes no job wait or fail.
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
from launching import TEST_TIMEOUT, environment, free_port, script

from clusterjob.node.host_server import gpus
from clusterjob.worker import once_per_host, siblings

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def other_user(code: str, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code as another user until the end of the block; it prints "there" when ready."""
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


def test_socket_name_with_full_backlog_neither_suppresses_notice_nor_blocks(tmp_path: Path) -> None:
    subject = os.urandom(8).hex()
    name = f"clusterjob-notice-{os.getuid()}-{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
    code = (
        "from clusterjob.worker import once_per_host; "
        f"print(bool(once_per_host.lock_subject({subject!r})))"
    )
    with other_user(FILL, tmp_path, name):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
    assert ended.stdout == "True\n", ended.stderr


def test_repeated_lock_requests_do_not_fill_own_backlog() -> None:
    subject = os.urandom(8).hex()
    mine = once_per_host.lock_subject(subject)
    assert mine is not None
    with mine:
        for _ in range(10_000):
            assert once_per_host.lock_subject(subject) is None


FIND_PORT = """
    import multiprocessing, os, sys, time
    from clusterjob.worker import siblings

    def child(rank, printed):
        if rank:
            printed.wait()
        print(rank, siblings.find_port(rank), flush=True)
        if not rank:
            while not os.path.exists("seen"):  # the socket name of rank 0
                time.sleep(0.01)
            printed.set()
            time.sleep(20)

    if __name__ == "__main__":
        printed = multiprocessing.Event()
        started = [multiprocessing.Process(target=child, args=(rank, printed)) for rank in (0, 1)]
        for process in started:
            process.start()
        started[1].join()
        started[0].kill()
        started[0].join()
"""

# Finds the socket name of rank 0, which is public, fills its backlog as far as possible, and adds
# false socket names.
MISLEAD = """
import time
names = []
while not names:
    with open("/proc/net/unix") as table:
        parts = [line.split()[-1].split("-") for line in table if "@clusterjob-" in line]
    # Other sockets of clusterjob have names of another form.
    names = ["-".join(each)[1:] for each in parts if len(each) == 4 and len(each[1]) == 32]
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
false_names = []
for text in ("4242", "4243-" + name.rpartition("-")[2], "1"):
    false_names.append(socket.socket(socket.AF_UNIX))
    false_names[-1].bind("\\0" + prefix + text)
    false_names[-1].listen(0)
"""


# The kernel prints a name unchanged. This name adds an empty and a blank line to /proc/net/unix.
BREAK_LINES = """
named = socket.socket(socket.AF_UNIX)
named.bind("\\0a\\n\\n  \\nb")
"""


def test_siblings_find_port_despite_socket_name_with_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    with other_user(BREAK_LINES, tmp_path):
        ended = subprocess.run(
            [sys.executable, str(script(tmp_path, FIND_PORT))],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
    ports = dict(line.split() for line in ended.stdout.splitlines())
    assert ports.keys() == {"0", "1"}, ended.stderr
    assert ports["0"] == ports["1"]


def test_siblings_find_port_despite_false_socket_names_and_full_backlog(tmp_path: Path) -> None:
    path = script(tmp_path, FIND_PORT)
    process_group = subprocess.Popen(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with other_user(MISLEAD, tmp_path):
            (tmp_path / "seen").touch()
            out, err = process_group.communicate(timeout=TEST_TIMEOUT)
    finally:
        process_group.kill()
        process_group.wait()
    ports = dict(line.split() for line in out.splitlines())
    assert ports.keys() == {"0", "1"}, err
    assert ports["0"] == ports["1"]


def test_port_of_ended_rank_0_in_use_by_another_user_is_not_accepted(tmp_path: Path) -> None:
    """The socket name was public, so another user may listen on the port now."""
    code = """
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    """
    port = free_port()
    with other_user(code, tmp_path, str(port)):
        assert not siblings._is_ours(port)
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert siblings._is_ours(own.getsockname()[1])


# -- GPU locks -----------------------------------------------------------------------------------


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
