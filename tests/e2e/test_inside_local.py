"""Commands, shells and port forwards inside a job on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import SESSIONS
from inside_job import CLUSTERJOB, LEFT, Inside, of_command, running
from procs import TEST_TIMEOUT, below, command_line, wait_until
from terminals import Terminal

from clusterjob.core import polling
from clusterjob.core.records import Records
from clusterjob.node.verdict import JobState

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
    out, err = job.exec(
        "--rank", "3", "--",
        "bash", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK; pwd; echo wrong >&2; exit 7",
        code=7,
    )  # fmt: skip
    assert out.decode().split() == ["3", "1", "4", "1", str(job.directory)]
    assert err == b"wrong\n"
    assert job.shell("echo $RANK") == "0\n"
    assert job.shell("echo $RANK", "--node", "1") == "2\n"


@pytest.mark.slow
def test_exec_passes_binary_data_and_ends_of_file(small: Inside) -> None:
    data = os.urandom(3 << 20) + b"\n\0\xff"
    assert small.exec("cat", data=data)[0] == data


@pytest.mark.slow
def test_exec_passes_50_megabytes_in_both_directions(small: Inside) -> None:
    data = os.urandom(50_000_000)
    out, _ = small.exec("--", "bash", "-c", "tee >(sha256sum >&2)", data=data)
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()


@pytest.mark.slow
def test_exec_with_closed_stdin_and_unwritable_stdout(small: Inside) -> None:
    line = f"{' '.join(CLUSTERJOB)} exec {small.id} -- bash -c 'cat; echo up; exit 3'"
    for redirection, code, out, err in (
        ("<&-", 3, "up\n", ""),
        (">&-", 3, "", ""),  # as for `run`, the output is discarded
        (">/dev/full", 1, "", "clusterjob: error: No space left on device: standard output\n"),
    ):
        done = subprocess.run(
            ["bash", "-c", f"{line} {redirection}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_exec_exit_code_is_that_of_a_shell(small: Inside) -> None:
    (small.directory / "plain").write_text("#!/bin/true\n")
    for words, code, message in (
        (("bash", "-c", "kill -9 $$"), 137, ""),
        (("/no/such/program",), 127, "clusterjob: /no/such/program: No such file or directory\n"),
        (("./plain",), 126, "clusterjob: ./plain: Permission denied\n"),
    ):
        assert small.exec(*words, code=code)[1].decode() == message


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


@pytest.mark.slow
def test_exec_command_ends_when_reader_of_its_output_ends(small: Inside) -> None:
    piped = f"{' '.join(CLUSTERJOB)} exec {small.id} -- yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", piped], capture_output=True, timeout=TEST_TIMEOUT, check=True
    )
    assert done.stdout == b"y\n141\n"


@pytest.mark.slow
def test_exec_forwards_ctrl_c_and_returns_code_of_command(small: Inside) -> None:
    small.check_interrupt()


def test_killed_client_leaves_no_process(small: Inside) -> None:
    small.check_killed_client(node=0)
    wait_until(lambda: not of_command("node.inside"), LEFT, "the end")
    assert polling.status(Records().find(small.id)).state is JobState.RUNNING


@pytest.mark.slow
def test_end_of_job_ends_command_with_255(small: Inside) -> None:
    with small.popen("exec", "--", "bash", "-c", "echo up; sleep 7777") as process:
        assert process.stdout.readline() == b"up\n"
        (small.directory / "leave").touch()
        assert process.wait(TEST_TIMEOUT) == 255
    assert not of_command("sleep 7777")
    _, err = small.exec("true", code=255)
    assert err.decode().startswith(
        f"clusterjob: error: job {small.id} has ended: SUCCEEDED\n  hint:"
    )


@pytest.mark.slow
def test_secret_reaches_command_and_no_other_file(
    tmp_path: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cr3t-4711")
    with running(tmp_path, "--cluster", "local", "--secret", "API_KEY", ranks=1) as job:
        monkeypatch.delenv("API_KEY")
        assert job.shell("echo $API_KEY") == "s3cr3t-4711\n"
        found = [
            path.name
            for path in Records().find(job.id).job_dir.rglob("*")
            if path.is_file() and b"s3cr3t-4711" in path.read_bytes()
        ]
    assert found in ([], ["secrets"])


@pytest.mark.slow
def test_wrong_targets_are_one_line_with_hint(job: Inside) -> None:
    for words, message, hint in (
        (("--rank", "4", "true"), f"job {job.id} has no rank 4", "its ranks are 0 to 3"),
        (("--node", "2", "true"), f"job {job.id} has no node 2", "its nodes are 0 to 1"),
        (("--node", "0", "--rank", "2", "true"), "rank 2 is not on node 0", "node 0 has ranks 0"),
        (("--all", "--rank", "2", "true"), "--all is every node", "remove --node"),
        ((), "there is no command", "clusterjob exec"),
    ):
        _, err = job.exec(*words, code=2)
        lines = err.decode().splitlines()
        assert lines[0] == f"clusterjob: error: {message}"
        assert lines[1].startswith(f"  hint: {hint}")
        assert len(lines) == 2


@pytest.mark.slow
def test_command_of_next_round_sees_its_restart_count(tmp_path: Path, plain_python: str) -> None:
    text = """
        import os, pathlib, sys, time
        round = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path(f"up{round}").touch()
        while not os.path.exists(f"leave{round}"):
            time.sleep(0.02)
        sys.exit(1)
    """
    script = tmp_path / "again.py"
    script.write_text(textwrap.dedent(text))
    with running(
        tmp_path, "--cluster", "local", "--max-restarts", "1", program=[str(script)], ranks=1
    ) as job:
        assert job.shell("echo $TORCHELASTIC_RESTART_COUNT") == "0\n"
        (tmp_path / "leave0").touch()
        wait_until((tmp_path / "up1").exists, TEST_TIMEOUT)
        assert job.shell("echo $TORCHELASTIC_RESTART_COUNT") == "1\n"
        record = Records().find(job.id)
        (tmp_path / "leave1").touch()
        wait_until(lambda: polling.status(record).state.final, TEST_TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--start", "fork"), ("--start", "exec"), ("--launcher", "torchrun")]
)
def test_exec_finds_rank_of_each_start(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path, *TWO_NODES, *options) as job:
        assert job.shell("echo $RANK $LOCAL_RANK $MASTER_PORT", "--rank", "3").split()[:2] == [
            "3", "1",
        ]  # fmt: skip
        assert job.shell("echo $RANK", "--node", "1") == "2\n"


# -- shell ---------------------------------------------------------------------------------------


def test_shell_follows_size_and_keys_and_restores_terminal(job: Inside) -> None:
    job.check_shell(rank=2, where="echo $RANK$GROUP_RANK", answer="21")


@pytest.mark.slow
def test_broken_connection_restores_terminal(small: Inside) -> None:
    with Terminal([*CLUSTERJOB, "shell", small.id], controlling=True) as terminal:
        before = terminal.attributes
        terminal.read_until(b" rank 0)")
        [program] = [pid for pid in below(terminal.process.pid) if "inside" in command_line(pid)]
        os.kill(program, signal.SIGKILL)
        assert terminal.finish() == 255
        assert terminal.attributes == before
        assert b"node 0: the connection broke" in terminal.shown


@pytest.mark.slow
def test_exec_gives_command_a_terminal_if_there_is_one(small: Inside) -> None:
    for words, wanted in (((), b"a tty"), (("-T",), b"no tty")):
        line = "test -t 0 -a -t 1 -a -t 2 && echo 'a t'ty || echo 'no t'ty"
        argv = [*CLUSTERJOB, "exec", *words, small.id, "--", "sh", "-c", line]
        with Terminal(argv, controlling=True) as terminal:
            assert terminal.finish() == 0
            assert wanted in terminal.shown
    argv = [*CLUSTERJOB, "exec", small.id, "--", "/no/such/program"]
    with Terminal(argv, controlling=True) as terminal:
        assert terminal.finish() == 127
        assert b"clusterjob: /no/such/program: No such file or directory\r\n" in terminal.shown


@pytest.mark.slow
def test_hung_up_terminal_ends_client_and_command(small: Inside) -> None:
    text = "trap '' HUP TERM; echo up; sleep 7777 & sleep 7777; wait"
    argv = [*CLUSTERJOB, "exec", small.id, "--", "bash", "-c", text]
    with Terminal(argv, controlling=True) as terminal:
        terminal.read_until(b"up\r\n")
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.finish() == 129
    wait_until(lambda: not of_command("sleep 7777"), LEFT, "the end")


@pytest.mark.slow
def test_shell_checks_job_before_terminal(small: Inside) -> None:
    _, err = small.exec(code=2, verb="shell")
    assert err.decode() == (
        "clusterjob: error: a shell needs a terminal as stdin and stdout\n"
        f"  hint: `clusterjob exec {small.id} -- COMMAND` needs none\n"
    )
    (small.directory / "leave").touch()
    wait_until(lambda: polling.status(Records().find(small.id)).state.final, TEST_TIMEOUT)
    _, err = small.exec(code=255, verb="shell")
    assert err.decode().startswith(f"clusterjob: error: job {small.id} has ended: SUCCEEDED\n")


# -- forward -------------------------------------------------------------------------------------

SERVER = """
import http.server, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = bytes(int(self.path[1:])) if self.path[1:].isdigit() else os.environ["RANK"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
pathlib.Path("port.part").write_text(str(server.server_address[1]))
os.rename("port.part", "port")
server.serve_forever()
"""


@contextlib.contextmanager
def served(small: Inside, *options: str) -> Iterator[int]:
    """Run an HTTP server inside the job; yield its port, on loopback."""
    with small.popen("exec", *options, "--", sys.executable, "-c", SERVER) as server:
        try:
            wait_until((small.directory / "port").exists, TEST_TIMEOUT)
            yield int((small.directory / "port").read_text())
        finally:
            server.terminate()


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TEST_TIMEOUT)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def test_forward_carries_several_connections_and_large_answers(job: Inside) -> None:
    with (
        served(job, "--node", "1") as port,
        job.forwarded(f"0:{port}", "--node", "1") as (process, [local]),
    ):
        assert get(local, "/") == b"2"
        # A client that does not read its answer blocks no other connection.
        slow = socket.create_connection(("127.0.0.1", local))
        slow.sendall(b"GET /20000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(len(get(local, "/3000000"))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TEST_TIMEOUT)
        assert answers == [3_000_000] * 4
        slow.close()  # the connection is reset, as by an aborted download; the others continue
        assert get(local, "/") == b"2"
        assert len(get(local, "/3000000")) == 3_000_000
        process.send_signal(signal.SIGINT)
        assert process.wait(TEST_TIMEOUT) == 130


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
        assert err.decode() == (
            f"clusterjob: error: port {port} of this machine cannot be used: Address already in use"
            "\n  hint: 0:80 takes a free port\n"
        )
        with small.forwarded(str(port)) as (_, [local]):
            assert local != port
    with small.forwarded("0:9") as (process, [local]):
        with socket.create_connection(("127.0.0.1", local), TEST_TIMEOUT) as sock:
            assert sock.recv(1) == b""
        assert process.stderr.readline() == "clusterjob: node 0: port 9: Connection refused\n"
        (small.directory / "leave").touch()
        assert process.wait(TEST_TIMEOUT) == 255
        assert process.stderr.read() == f"clusterjob: error: job {small.id} has ended\n"
    for word in ("x", "0", "70000", "1:2:3"):
        small.exec(word, verb="forward", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["tensorboard", "debugpy", "jupyter"])
def test_tools_on_loopback_work_through_forward(small: Inside, tool: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (small.directory / "runs").mkdir()
    argv = {
        "tensorboard": ["-m", "tensorboard.main", "--logdir", "runs", "--port", str(port)],
        "debugpy": ["-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client", "-c",
                    "print('attached')"],
        "jupyter": ["-m", "jupyter", "server", "--allow-root", "--no-browser", f"--port={port}",
                    "--IdentityProvider.token=t", "--ServerApp.port_retries=0"],
    }[tool]  # fmt: skip
    pytest.importorskip({"jupyter": "jupyter_server"}.get(tool, tool))
    with small.popen("exec", "--", sys.executable, *argv, stderr=subprocess.PIPE) as server:
        try:
            with small.forwarded(f"0:{port}") as (_, [local]):
                answer = _answer_of(tool, local)
        finally:
            server.terminate()
            server.communicate(timeout=TEST_TIMEOUT)
    assert answer


def _answer_of(tool: str, port: int) -> bool:
    """Talk to a server through the forwarded port, as soon as it is up."""

    def answers() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if tool == "jupyter":
                return b'"started"' in get(port, "/api/status?token=t")
            if tool == "tensorboard":
                return b'"version"' in get(port, "/data/environment")
            with socket.create_connection(("127.0.0.1", port), TEST_TIMEOUT) as sock:
                sock.settimeout(TEST_TIMEOUT)
                return b'"event"' in sock.recv(4096)  # empty before the server listens
        return False

    return wait_until(answers, TEST_TIMEOUT, f"the answer of {tool}")


@pytest.mark.slow
def test_commands_of_troubleshooting_page(
    tmp_path: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [session] = [each for each in SESSIONS if "test_inside_local" in each.runner]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho a GPU of rank $RANK\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with running(tmp_path, *TWO_NODES) as job:
        execute, shell, forward = (
            [*CLUSTERJOB, *shlex.split(each.replace("train-e7trvw", job.id))[1:]]
            for each in session.commands
        )
        done = subprocess.run(execute, capture_output=True, timeout=TEST_TIMEOUT, check=True)
        assert done.stdout == b"a GPU of rank 3\n"
        with Terminal(shell, controlling=True) as terminal:
            terminal.read_until(f"({job.id} rank 0)".encode())
            terminal.type(b"exit\r")
            assert terminal.finish() == 0
        with subprocess.Popen(forward, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(TEST_TIMEOUT) == 130
        assert re.fullmatch(
            r"http://127\.0\.0\.1:\d+ is forwarded to port 6006 of node 0 \(.+\)\n", line
        )
