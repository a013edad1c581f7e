"""Commands, shells and port forwards inside a job on this machine."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from docs_commands import SESSIONS
from inside_job import CLUSTERJOB, LEFT, Inside, get, of_command, running
from launching import executable
from procs import TEST_TIMEOUT, all_pids, below, command_line, stat_fields, wait_until
from terminals import Terminal, show

from clusterjob.core import polling
from clusterjob.core.records import Records
from clusterjob.node.verdict import JobState

FULL = os.strerror(errno.ENOSPC)
TWO_NODES = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "2")


@pytest.fixture
def job(tmp_path: Path, plain_python: str) -> Iterator[Inside]:
    with running(tmp_path, *TWO_NODES) as started:
        yield started


@pytest.fixture
def small(tmp_path: Path, plain_python: str) -> Iterator[Inside]:
    with running(tmp_path, "--cluster", "local", ranks=1) as started:
        yield started


# -- exec ----------------------------------------------------------------------------------------


def test_exec_has_environment_directory_and_streams_of_rank(job: Inside) -> None:
    text = "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $PWD; echo wrong >&2; exit 7"
    out, err = job.exec("--rank", "3", "--", "bash", "-c", text, code=7)
    assert (out.decode(), err) == (f"3 1 4 1 {job.directory}\n", b"wrong\n")
    assert job.shell("echo $RANK") == "0\n"
    assert job.shell("echo $RANK", "--node", "1") == "2\n"


def test_exec_exit_code_is_that_of_a_shell(small: Inside) -> None:
    (small.directory / "plain").write_text("#!/bin/true\n")
    for words, code, message in (
        (("bash", "-c", "kill -9 $$"), 137, ""),
        (("/no/such/program",), 127, "clusterjob: /no/such/program: No such file or directory\n"),
        (("./plain",), 126, "clusterjob: ./plain: Permission denied\n"),
    ):
        assert small.exec(*words, code=code)[1].decode() == message


@pytest.mark.slow
def test_exec_with_odd_streams(small: Inside) -> None:
    """Stdin is closed; stdout is full or a pipe whose reader ends; a shell has no terminal."""
    program = " ".join(CLUSTERJOB)
    three = f"{program} exec {small.id} -- bash -c 'cat; echo up; exit 3'"
    for line, code, out, err in (
        (f"{three} <&-", 3, "up\n", ""),
        (
            f"{three} >/dev/full",
            3,
            "",
            f"bash: line 1: echo: write error: {FULL}\n",
        ),
        (
            f"{program} exec {small.id} -- yes | head -1; echo ${{PIPESTATUS[0]}}",
            0,
            "y\n141\n",
            "",
        ),
        (
            f"{program} shell {small.id}",
            2,
            "",
            (
                "clusterjob: error: a shell needs a terminal as stdin and stdout\n"
                f"  hint: `clusterjob exec {small.id} -- COMMAND` needs none\n"
            ),
        ),
    ):
        done = subprocess.run(
            ["bash", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TEST_TIMEOUT, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (code, out, err), line


@pytest.mark.slow
def test_exec_on_all_nodes_labels_lines_and_returns_first_code(job: Inside) -> None:
    out, err = job.exec(
        "--all", "--", "bash", "-c", "cat; echo up $RANK; printf end; exit $RANK", code=2
    )
    lines = out.decode().splitlines()
    assert sorted(lines) == [
        "[node 0] end", "[node 0] up 0", "[node 1] end", "[node 1] up 2",
    ]  # fmt: skip
    assert err == b""
    for words, message in (
        (("--rank", "4", "true"), f"job {job.id} has no rank 4\n  hint: its ranks are 0 to 3"),
        (
            ("--node", "0", "--rank", "2", "true"),
            "rank 2 is not on node 0\n  hint: it is on",
        ),
        (("--all", "--rank", "2", "true"), "--all is every node\n  hint: remove --node"),
        ((), "there is no command\n  hint: clusterjob exec"),
    ):
        _, err = job.exec(*words, code=2)
        assert err.decode().startswith(f"clusterjob: error: {message}")
        assert err.count(b"\n") == 2


def test_killed_client_leaves_no_process(small: Inside) -> None:
    small.check_killed_client(node=0)
    wait_until(lambda: not of_command("node.inside"), LEFT, "the end")
    assert polling.status(Records().find(small.id)).state is JobState.RUNNING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_client_without_terminal_ends_command(small: Inside, number: int) -> None:
    options = {"stderr": subprocess.PIPE}
    with small.popen("exec", "--", "bash", "-c", "echo up; sleep 7777", **options) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(TEST_TIMEOUT) in (128 + number, -number)
        assert process.stderr.read() == b""
    wait_until(lambda: not of_command("sleep 7777"), LEFT, "the end")


@pytest.mark.slow
def test_end_of_job_ends_command_with_255(small: Inside) -> None:
    with small.popen("exec", "--", "bash", "-c", "echo up; sleep 7777") as process:
        assert process.stdout.readline() == b"up\n"
        (small.directory / "leave").touch()
        assert process.wait(TEST_TIMEOUT) == 255
    assert not of_command("sleep 7777")
    for words, verb in ((["true"], "exec"), ([], "shell")):
        _, err = small.exec(*words, verb=verb, code=255)
        assert err.decode().startswith(f"clusterjob: error: job {small.id} has ended: SUCCEEDED\n")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_exec_finds_rank_of_each_start_and_its_secret(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cr3t-4711")
    with running(tmp_path, *TWO_NODES, "--secret", "API_KEY", "--start", start) as job:
        monkeypatch.delenv("API_KEY")
        assert job.shell("echo $API_KEY") == "s3cr3t-4711\n"
        files = [path for path in Records().find(job.id).job_dir.rglob("*") if path.is_file()]
        assert {path.name for path in files if b"s3cr3t-4711" in path.read_bytes()} <= {"secrets"}
        assert job.shell("echo $RANK $LOCAL_RANK $MASTER_PORT", "--rank", "3").split()[:2] == [
            "3", "1",
        ]  # fmt: skip
        assert job.shell("echo $RANK", "--node", "1") == "2\n"


# -- shell ---------------------------------------------------------------------------------------


def test_shell_follows_size_and_keys_and_restores_terminal(job: Inside) -> None:
    job.check_shell(rank=2, where="echo $RANK$GROUP_RANK", answer="21")


@pytest.mark.slow
def test_end_of_job_ends_shell_and_restores_terminal(small: Inside) -> None:
    with Terminal([*CLUSTERJOB, "shell", small.id], controlling=True) as terminal:
        before = terminal.attributes
        terminal.read_until(b" rank 0)")
        (small.directory / "leave").touch()
        assert terminal.finish() == 255
        assert terminal.attributes == before
        assert f"clusterjob: error: job {small.id} has ended".encode() in terminal.shown


@pytest.mark.slow
def test_killed_program_is_one_line(small: Inside) -> None:
    words = ("--", "bash", "-c", "echo up; exec sleep 7777")
    with small.popen("exec", *words, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        [program] = [pid for pid in below(process.pid) if "inside" in command_line(pid)]
        os.kill(program, signal.SIGKILL)
        assert process.wait(TEST_TIMEOUT) == 255
        assert process.stderr.read() == b"clusterjob: error: node 0: the connection broke\n"
    wait_until(lambda: not of_command("sleep 7777"), LEFT, "the end")


@pytest.mark.slow
def test_exec_gives_command_a_terminal_if_there_is_one(small: Inside) -> None:
    line = "test -t 0 -a -t 1 -a -t 2 && echo 'a t'ty || echo 'no t'ty"
    for words, code, wanted in (
        ((small.id, "--", "sh", "-c", line), 0, "a tty"),
        (
            (small.id, "--", "/no/such/program"),
            127,
            "clusterjob: /no/such/program: No such file or directory\n",
        ),
    ):
        ended, shown = show([*CLUSTERJOB, "exec", *words], controlling=True)
        assert (ended, wanted in shown) == (code, True)


# -- forward -------------------------------------------------------------------------------------


def states() -> list[list[str]]:
    """Return the state and the parent of each process, zombies too."""
    return [fields[:2] for pid in all_pids() if (fields := stat_fields(pid))]


def test_forward_carries_several_connections_and_large_answers(job: Inside) -> None:
    for name, size in (("large", 3_000_000), ("huge", 20_000_000)):
        (job.directory / name).write_bytes(bytes(size))
    with (
        job.served(1, sys.executable) as (_, port),
        job.forwarded(f"0:{port}", "--node", "1", start_new_session=True) as (process, [local]),
    ):
        # A client that does not read its answer blocks no other connection.
        slow = socket.create_connection(("127.0.0.1", local))
        slow.sendall(b"GET /huge HTTP/1.0\r\n\r\n")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: get(local, "large"), range(4)))
        assert all(answer.endswith(bytes(3_000_000)) for answer in answers)
        slow.close()  # the connection is reset, as by an aborted download; the others continue
        assert get(local, "large").endswith(bytes(3_000_000))
        wait_until(lambda: ["Z", str(process.pid)] not in states(), LEFT, "the end of a relay")
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as the terminal
        assert process.wait(TEST_TIMEOUT) == 130
        assert time.monotonic() < begin + 5.0, "it waits for no end of the job"


@pytest.mark.slow
def test_forward_passes_half_close(small: Inside) -> None:
    echo = (
        "import socket, sys; server = socket.create_server(('127.0.0.1', 0));"
        "print(server.getsockname()[1], flush=True); sock, _ = server.accept(); data = b'';\n"
        "while more := sock.recv(65536): data += more\n"
        "sock.sendall(data[::-1]); sock.close()"
    )
    with small.popen("exec", "--", sys.executable, "-S", "-c", echo) as server:
        port = int(server.stdout.readline())
        with (
            small.forwarded(f"0:{port}") as (_, [local]),
            socket.create_connection(("127.0.0.1", local), TEST_TIMEOUT) as sock,
        ):
            sock.sendall(b"abc" * 100_000)
            sock.shutdown(socket.SHUT_WR)
            with sock.makefile("rb") as stream:
                assert stream.read() == b"cba" * 100_000
        assert server.wait(TEST_TIMEOUT) == 0


@pytest.mark.slow
def test_forward_takes_next_free_port_and_says_what_fails(small: Inside) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        _, err = small.exec(f"{port}:80", verb="forward", code=1)
        assert b"cannot be used: Address already in use\n  hint: 0:80 takes a free port" in err
        with small.forwarded(str(port)) as (_, [local]):
            assert local != port
    with small.forwarded("0:9") as (process, [local]):
        with socket.create_connection(("127.0.0.1", local), TEST_TIMEOUT) as sock:
            assert sock.recv(1) == b""
        assert process.stderr.readline() == "clusterjob: node 0: port 9: Connection refused\n"
        (small.directory / "leave").touch()
        assert process.wait(TEST_TIMEOUT) == 255
        assert process.stderr.read() == f"clusterjob: error: job {small.id} has ended\n"


@pytest.mark.slow
def test_commands_of_troubleshooting_page(
    tmp_path: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [session] = [each for each in SESSIONS if "test_inside_local" in each.runner]
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho a GPU of rank $RANK\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with running(tmp_path, *TWO_NODES) as job:
        execute, shell, forward = (
            [*CLUSTERJOB, *shlex.split(each.replace("train-e7trvw", job.id))[1:]]
            for each in session.commands
        )
        assert subprocess.check_output(execute) == b"a GPU of rank 3\n"
        with Terminal(shell, controlling=True) as terminal:
            terminal.read_until(f"({job.id} rank 0)".encode())
            terminal.type(b"exit\r")
            assert terminal.finish() == 0
        with subprocess.Popen(forward, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        assert re.fullmatch(
            r"http://127\.0\.0\.1:\d+ is forwarded to port 6006 of node 0 \(.+\)\n", line
        )
