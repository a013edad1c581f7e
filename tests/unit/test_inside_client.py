"""The submitter's side of `exec`, `shell` and `forward`: states, answers, ports, lines."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inside_job import ScriptedNodes, record_of
from launching import executable, new_folder
from procs import TEST_TIMEOUT

from clusterjob.backends import base
from clusterjob.cli import output
from clusterjob.core import forward, inside
from clusterjob.core.forward import Port, listen
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, SubmitError, UsageError
from clusterjob.node import inside as node_inside
from clusterjob.node.inside import MARKER
from clusterjob.node.logs.events import EventLog
from clusterjob.node.verdict import JobState

MakeRecord = Callable[..., Record]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRecord:
    return functools.partial(record_of, tmp_path, monkeypatch, nodes=4, nproc=2)


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        (JobState.PENDING, 255, "job t-1 has not started: why"),
        (JobState.UNKNOWN, 255, "job t-1 cannot be reached: why"),
        (JobState.FAILED, 255, "job t-1 has ended: FAILED"),
    ],
)
def test_job_that_does_not_run_is_one_line(
    record: MakeRecord, state: JobState, code: int, message: str
) -> None:
    with pytest.raises(InsideError) as caught:
        inside.check(record(ScriptedNodes(state, reason="why")))
    assert (caught.value.exit_code, caught.value.message) == (code, message)
    assert "t-1" in caught.value.hint


def test_backend_without_the_feature_and_wrong_targets_are_refused(
    record: MakeRecord,
) -> None:
    class Plain:
        pass

    array = {"indices": [3, 5], "pieces": [0]}
    for backend, fields, target, message in (
        (Plain(), {}, {}, "the fake backend cannot run commands inside a job"),
        (ScriptedNodes(JobState.RUNNING), {}, {"node": 4}, "job t-1 has no node 4"),
        (ScriptedNodes(JobState.RUNNING), {}, {"rank": 8}, "job t-1 has no rank 8"),
        (
            ScriptedNodes(JobState.RUNNING),
            {"array": array},
            {},
            "job t-1 is an array: each element has",
        ),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            inside.check(record(backend, **fields), **target)
        assert caught.value.hint
    assert not isinstance(base.load("mlp"), base.Executor)


def test_node_of_rank_follows_from_events_and_job(record: MakeRecord) -> None:
    made = record(ScriptedNodes(JobState.RUNNING), nproc=None)
    log = EventLog(new_folder(made.job_dir) / "events.jsonl")
    for node, nproc in enumerate((3, 1, "x", 4)):
        log.add("joined", node_rank=node, nproc=nproc)
    ranks = [inside.node_of(made, None, rank) for rank in range(9)]
    assert ranks == [0, 0, 0, 1, 2, 3, 3, 3, 3]
    assert [inside.node_of(made, node, None) for node in (None, 2)] == [0, 2]
    for node, rank, message in ((None, 9, "has no rank 9"), (0, 3, "rank 3 is not on node 0")):
        with pytest.raises(UsageError, match=message) as caught:
            inside.node_of(made, node, rank)
        assert caught.value.hint


def test_errors_of_backend_get_exit_code_255(record: MakeRecord) -> None:
    def refuse(_: int) -> bytes:
        raise SubmitError("srun: no", "a hint")

    backend = ScriptedNodes(JobState.RUNNING, refuse)
    with pytest.raises(InsideError, match="srun: no") as caught:
        inside.start(record(backend), backend, 0, {})
    assert (caught.value.exit_code, caught.value.hint) == (255, "a hint")


def test_ctrl_c_does_not_wait_for_node_that_does_not_answer(record: MakeRecord) -> None:
    ended = threading.Event()

    def never(_: int) -> bytes:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        ended.wait(TEST_TIMEOUT)
        return b""

    made = record(ScriptedNodes(JobState.RUNNING, never), nodes=1)
    try:
        with pytest.raises(KeyboardInterrupt):
            inside.run_on_all(made, ["x"], show=print, warn=print)
    finally:
        ended.set()


@pytest.mark.parametrize(
    "sent", [b"", MARKER, MARKER + b"gpu1", b"x" * 100_000], ids=["none", "marker", "cut", "long"]
)
def test_relay_that_does_not_answer_ends_forward(record: MakeRecord, sent: bytes) -> None:
    made = record(ScriptedNodes(JobState.RUNNING, lambda _: sent))
    shown: list[str] = []
    assert forward.run(made, [Port(6006, 0)], node=None, show=shown.append, warn=print) == 255
    assert len(shown) == ("gpu1" in sent.decode())


@given(st.binary(max_size=50))
@example(b"-5\n")
@example(b"99999999\n")
def test_any_bytes_are_pieces_or_one_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        source = io.BytesIO(data)
        while piece := node_inside.read_piece(source):
            assert len(piece) <= node_inside.MAX_PIECE


def test_relay_goes_on_after_a_server_that_has_reset_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), TEST_TIMEOUT)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # sends a reset
        with client:
            with contextlib.suppress(OSError):
                client.recv(1)
            source = io.BytesIO(b"0\n\n4\n6006\n")
            node_inside.receive_pieces(source, client)
        assert node_inside.read_piece(source) == b"6006", "the port of the next connection"


def supervised(path: str, *words: str, before: str = "") -> tuple[int, str]:
    """Run a command line as around ssh and srun; return its exit code and stderr."""
    python = [sys.executable, "-c", "from clusterjob.node import inside; inside.main()"]
    done = subprocess.run(
        ["/bin/sh", "-c", f'{before} exec "$@"', "sh", *python],
        env=os.environ | {"PATH": path, node_inside.REQUEST: node_inside.encoded({"run": words})},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("code", "line", "wanted"),
    [
        (1, "srun: error: Unable to create step for job 7: Invalid account", 255),
        (1, "srun: error: n1: task 0: Exited with exit code 1", 1),
        (3, "srun: error: n1: task 0: Exited with exit code 3", 3),
    ],
)
def test_failure_of_srun_differs_from_that_of_its_command(
    tmp_path: Path, code: int, line: str, wanted: int
) -> None:
    executable(tmp_path / "srun", f"#!/bin/sh\necho '{line}' >&2\nexit {code}\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert supervised(path, "srun") == (wanted, f"{line}\n" if wanted == 255 else "")


def test_missing_srun_is_one_line(tmp_path: Path) -> None:
    line = "clusterjob: error: srun: No such file or directory\n"
    assert supervised(str(tmp_path), "srun") == (255, line)


def test_exit_code_is_known_where_the_caller_ignores_sigchld() -> None:
    assert supervised(os.environ["PATH"], "sh", "-c", "exit 7", before="trap '' CHLD;")[0] == 7


def test_process_that_a_command_leaves_behind_is_no_zombie(tmp_path: Path) -> None:
    left = f"(sleep 0.1 & echo $! > {tmp_path}/pid)"
    wait = f"while kill -0 $(cat {tmp_path}/pid); do sleep 0.05; done"
    assert supervised(os.environ["PATH"], "sh", "-c", f"{left}; {wait}")[0] == 0


@given(st.text(max_size=12))
@example("x")
@example("70000")
@example("1:2:3")
def test_port_text_is_a_port_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        port = Port.parse(text)
        assert 0 < port.remote < 65536
        assert port.local is None or 0 <= port.local < 65536


@pytest.mark.parametrize(
    ("text", "port"),
    [("6006", Port(6006)), ("0:6006", Port(6006, 0)), ("8080:6006", Port(6006, 8080))],
)
def test_port_here_stands_before_that_of_the_node(text: str, port: Port) -> None:
    assert Port.parse(text) == port


def test_busy_port_is_replaced_by_the_next_unless_it_is_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        with listen(Port(taken)) as other:
            host, port = other.getsockname()
        assert (host, port == taken) == ("127.0.0.1", False)
        with pytest.raises(ClusterJobError, match=f"port {taken} of this machine") as caught:
            listen(Port(80, taken))
    assert caught.value.hint == "0:80 takes a free port"


def test_node_lines_are_labelled_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output.NodeLines()
    for node, stream, data in (
        (0, 1, b"one\ntw"),
        (1, 1, b"other\r\n"),
        (0, 1, b"o\x1b]0;title\x07"),
        (0, 2, b"wrong\n"),
        (0, 1, b""),
        (1, 1, b""),
    ):
        lines.show(node, stream, data)
    out, err = capsys.readouterr()
    assert out.startswith("[node 0] one\n[node 1] other\n[node 0] two")
    assert not {"\x1b", "\x07"} & {*out}
    assert err == "[node 0] wrong\n"
