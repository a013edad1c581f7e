"""Questions of a hostile host during the login: harmless on the terminal, few, and bounded."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko_host import paramiko_host

from clusterjob.errors import HostError
from clusterjob.remote import auth
from clusterjob.remote.paramiko_transport import connect
from clusterjob.remote.transport import ConnectOptions

HOSTILE = "\x1b]0;title\x07\x1b[2Jroot@laptop's sudo password\r\nforged: line" + "x" * 5000


class Asking(paramiko.ServerInterface):
    """Ask these questions again and again, whatever the answers."""

    def __init__(self, questions: int) -> None:
        self._query = paramiko.InteractiveQuery("title\x1b[31m", "instructions\x9b2J")
        for _ in range(questions):
            self._query.add_prompt(HOSTILE, True)

    def get_allowed_auths(self, username: str) -> str:
        return "keyboard-interactive"

    def check_auth_interactive(self, username: str, submethods: str) -> paramiko.InteractiveQuery:
        return self._query

    def check_auth_interactive_response(
        self, responses: list[str]
    ) -> int | paramiko.InteractiveQuery:
        return self._query


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """Let stdin be a terminal on which somebody answers each question; yield what it shows."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def answer() -> None:
        try:
            while data := os.read(ours, 65536):
                shown.extend(data)
                if data.endswith(b" "):
                    os.write(ours, b"answer\n")
        except OSError:
            pass

    thread = threading.Thread(target=answer)
    thread.start()
    stream = os.fdopen(theirs, "r+b", buffering=0)
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(auth, "_unanswered", set())
    yield shown
    stream.close()
    thread.join()
    os.close(ours)


def log_in(directory: Path, questions: int) -> HostError:
    """Log in to a host with so many questions at once; return the error."""
    with (
        paramiko_host(directory, Asking(questions)) as target,
        pytest.raises(HostError) as caught,
    ):
        connect(target, ConnectOptions(20.0))
    return caught.value


def test_endless_questions_of_host_end_and_control_no_terminal(
    terminal: bytearray, tmp_path: Path
) -> None:
    assert "it does not stop asking questions" in log_in(tmp_path, 1).message
    text = terminal.decode()
    assert text.count("sudo password") == 10
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert all(
        line.startswith("gpu1: ")
        for line in text.replace("answer", "").splitlines()
        if line.strip()
    )
    assert len(text) < 10 * 2000


@pytest.mark.parametrize("questions", [11, 1000])
def test_many_questions_at_once_are_refused(
    terminal: bytearray, tmp_path: Path, questions: int
) -> None:
    assert "the host asks too many questions at once" in log_in(tmp_path, questions).message
    assert not terminal
