"""The submitter's side of `exec`, `shell` and `forward`: states, answers, ports, lines."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inside_job import ScriptedNodes, record_of
from procs import TEST_TIMEOUT

from clusterjob.backends import base
from clusterjob.cli import output
from clusterjob.core.byte_link import ProcessLink
from clusterjob.core.inside import command, connection, forward
from clusterjob.core.inside.forward import Port, listen
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, SubmitError, UsageError
from clusterjob.node.inside import streams
from clusterjob.node.verdict import JobState

MakeRecord = Callable[..., Record]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRecord:
    return functools.partial(record_of, tmp_path, monkeypatch, nodes=4, nproc=2)


def answer(**data: Any) -> bytes:
    return streams.MARKER + json.dumps(data).encode() + b"\n"


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
        connection.check(record(ScriptedNodes(state, reason="why")))
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
            connection.check(record(backend, **fields), **target)
        assert caught.value.hint
    assert not isinstance(base.load("mlp"), base.Executor)


def test_node_of_rank_is_found_from_what_nodes_answer(record: MakeRecord) -> None:
    answers = {
        3: answer(error={"why": "rank", "first": 11, "count": 3, "world": 14}),
        1: b"a banner\n" + answer(rank=5, host="gpu3\x1b[2J"),
    }
    backend = ScriptedNodes(JobState.RUNNING, answers.pop)
    made = record(backend, nproc=None)
    entered = connection.enter(made, backend, {"argv": ["x"]}, rank=5)  # type: ignore[arg-type]
    assert (entered.rank, entered.node, answers) == (5, 1, {})
    assert "\x1b" not in entered.host
    entered.close()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "node 0: the last line"),
        (b"noise\n", "node 0: the last line"),
        (b"x" * 60_000, "node 0: the last line"),
        (streams.MARKER + b"{\n", "node 0: it sends a malformed answer"),
        (streams.MARKER + b'{"rank": "x"}\n', "node 0: it sends a malformed answer"),
        (
            streams.MARKER + b'{"x":' + b"[" * 60_000 + b"\n",
            "node 0: it sends a malformed answer",
        ),
        (
            streams.MARKER + b'{"rank":1,"y":' + b"[" * 60_000 + b"\n",
            "node 0: it sends a malformed answer",
        ),
        (answer(error={"why": "absent"}), "job t-1: no worker runs on node 0"),
        (answer(error={"why": "rank", "first": 1, "count": 0}), "job t-1: no worker runs on nod"),
        (
            answer(error={"why": "starting"}),
            "job t-1: no worker runs on node 0; a job of an older version cannot be entered",
        ),
    ],
)
def test_hostile_answers_are_one_line(record: MakeRecord, sent: bytes, message: str) -> None:
    backend = ScriptedNodes(JobState.RUNNING, lambda _: sent)
    made = record(backend)
    with pytest.raises(InsideError) as caught:
        connection.enter(made, backend, {}, rank=0)  # type: ignore[arg-type]
    assert "\n" not in caught.value.message
    shown = f"{caught.value.message} {caught.value.hint}"
    assert all(part in shown for part in message.split("; "))


def test_errors_of_backend_get_exit_code_255(record: MakeRecord) -> None:
    def refuse(_: int) -> bytes:
        raise SubmitError("srun: no", "a hint")

    backend = ScriptedNodes(JobState.RUNNING, refuse)
    with pytest.raises(InsideError, match="srun: no") as caught:
        connection.enter(record(backend), backend, {})  # type: ignore[arg-type]
    assert (caught.value.exit_code, caught.value.hint) == (255, "a hint")


def test_ctrl_c_does_not_wait_for_node_that_does_not_answer(record: MakeRecord) -> None:
    ended = threading.Event()

    def never(_: int) -> bytes:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        ended.wait(TEST_TIMEOUT)
        return b""

    made = record(ScriptedNodes(JobState.RUNNING, never))
    try:
        for start in (
            lambda: command.run(made, ["x"], node=None, rank=None, terminal=False, warn=print),
            lambda: command.run_on_all(made, ["x"], show=print, warn=print),
            lambda: forward.run(made, [Port(6006)], node=None, show=print, warn=print),
        ):
            with pytest.raises(KeyboardInterrupt):
                start()
    finally:
        ended.set()


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


def entered_with(record: MakeRecord, end: bytes) -> Any:
    """Return the connection to a node that has sent the end of its command."""
    frame = struct.pack(">BII", streams.CONTROL, 0, len(end)) + end + b"\n"
    made = record(ScriptedNodes(JobState.RUNNING, lambda _: streams.MARKER + b"{}\n" + frame))
    return connection.enter(made, connection.check(made), {})


@pytest.mark.parametrize("end", [b"[" * 30_000, b'{"code":' * 3_000])
def test_deeply_nested_end_of_node_is_one_error(record: MakeRecord, end: bytes) -> None:
    with (
        contextlib.closing(entered_with(record, end)) as entered,
        pytest.raises(InsideError, match="a malformed end"),
    ):
        entered.handle(streams.wait_for_any([entered.streams], [], 1.0))


def test_node_that_reads_nothing_after_the_end_does_not_block(
    record: MakeRecord,
) -> None:
    with contextlib.closing(entered_with(record, b'{"code": 3, "ended": false}')) as entered:
        for _ in range(10):  # more than a pipe holds
            entered.streams.send(streams.DATA, 0, payload=bytes(streams.MAX_PAYLOAD))
        entered.handle(streams.wait_for_any([entered.streams], [], 1.0))
        assert (entered.finished, entered.exit_code()) == (True, 3)


def test_error_output_without_end_fills_no_memory() -> None:
    link = ProcessLink(["bash", "-c", "yes x | head -c 3000000 >&2; echo the end >&2"], os.environ)
    with contextlib.closing(link):
        assert link.error() == "the end"
        assert len(link._errors._kept) <= 1 << 14


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("exit 5", "its process ended with 5"),
        ("echo 'srun: error: no such node' >&2; exit 1", "srun: error: no such node"),
        ("exit 0", ""),
    ],
)
def test_link_tells_why_it_ended_and_not_that_srun_binds_no_cpus(text: str, shown: str) -> None:
    note = "echo 'srun: cluster configuration lacks support for cpu binding' >&2"
    link = ProcessLink(["/bin/sh", "-c", f"{note}; {text}"], {})
    assert link.error() == shown
    link.close()
