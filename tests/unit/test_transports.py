"""The choice of a transport, the stream over a process, and errors from the output of ssh."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import executable, write_tree

from clusterjob.core.hosts import Host
from clusterjob.errors import HostError, SpecError
from clusterjob.remote import connect, openssh_transport
from clusterjob.remote.process_channel import ProcessChannel
from clusterjob.remote.protocol import PROGRESS_BYTES, Deadline
from clusterjob.remote.sessions import Place
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.ssh_options import ConnectionSettings
from clusterjob.remote.transport import ConnectOptions, DroppedError

PLAIN = Target("gpu1", "10.0.0.1", port=22, user="me")


@pytest.fixture(autouse=True)
def _no_ticket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")


def needs(transport: str = "auto", **fields: Any) -> bool:
    return connect.needs_openssh(replace(PLAIN, **fields), ConnectOptions(transport=transport))


def test_auto_uses_openssh_for_what_paramiko_lacks(tmp_path: Path) -> None:
    files = {
        "token.pub": "sk-ssh-ed25519@openssh.com AAAA me\n",
        "plain.pub": "ssh-ed25519 AAAA me\n",
        "known": "@cert-authority 10.0.0.1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA==\n",
    }
    write_tree(tmp_path, **files)
    names = ("plain", "token", "absent", "known")
    plain, token, absent, known = (tmp_path / name for name in names)
    for wanted, fields in (
        (False, {}),
        (False, {"gssapi": True}),  # without a ticket, as on each Debian
        (True, {"control_path": "/run/m"}),
        (True, {"other_needs": ("PKCS11Provider",)}),
        (True, {"revoked_keys": (tmp_path / "revoked",)}),
        (True, {"transport": "openssh"}),
        (False, {"transport": "paramiko", "control_path": "/run/m"}),
        (True, {"identities": (plain, token)}),
        (False, {"identities": (plain, absent)}),
        (True, {"known_hosts": (known,)}),
    ):
        assert needs(**fields) == wanted, fields


def test_kerberos_ticket_selects_openssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "klist", '#!/bin/sh\n[ "$1 $KRB5CCNAME" = "-s FILE:mine" ]\n')
    assert not needs(gssapi=True)
    monkeypatch.setenv("KRB5CCNAME", "FILE:mine")
    assert (needs(gssapi=True), needs(gssapi=False)) == (True, False)


def test_without_ssh_only_required_features_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert not needs(control_path="/run/m")
    for fields in ({"revoked_keys": (tmp_path,)}, {"other_needs": ("PKCS11Provider",)}):
        with pytest.raises(HostError, match="needs the command ssh, which is not installed"):
            needs(**fields)
    with pytest.raises(HostError, match="transport = openssh needs"):
        needs(transport="openssh")


def test_transport_of_record_is_kept_and_older_record_means_auto() -> None:
    data = Place((Host("gpu1"),), "python3", transport="openssh").to_json()
    assert Place.from_json(data).transport == "openssh"
    del data["transport"]
    assert Place.from_json(data).transport == "auto"


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(100)", "import os\nwhile True: os.write(2, b'x' * 10000)"]
)
def test_process_without_output_times_out_in_both_directions(code: str) -> None:
    stream = channel(code, timeout=0.3)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        stream.recv(1)

    def fill() -> None:
        while True:
            stream.send(b"x" * 65536)

    with pytest.raises(TimeoutError):
        fill()
    assert time.monotonic() - begin < 10
    assert not stream.closed
    stream.close()
    with pytest.raises(OSError, match="closed"):
        stream.recv(1)


def test_unknown_transport_is_refused() -> None:
    assert ConnectionSettings.of({"transport": "openssh"}).transport == "openssh"
    with pytest.raises(SpecError, match="transport: 'telnet' is unknown"):
        ConnectionSettings.of({"transport": "telnet"})


# -- the stream over a process -------------------------------------------------------------------


def channel(code: str, timeout: float = 20.0) -> ProcessChannel:
    return ProcessChannel([sys.executable, "-c", code], timeout)


def test_process_that_floods_stderr_is_not_blocked() -> None:
    stream = channel("import os; os.write(2, b'x' * 3_000_000 + b'last'); os.write(1, b'done')")
    assert stream.recv(100) == b"done"
    assert stream.wait_for_exit() == 0
    while (text := stream.read_stderr()) and not text.endswith(b"last"):
        assert len(text) <= 1 << 16
    assert text.endswith(b"last")
    stream.close()


def test_stdin_is_closed_alone_and_exit_code_returned() -> None:
    stream = channel("import sys; print(len(sys.stdin.read())); sys.exit(3)")
    assert stream.send(b"abc") == 3
    stream.shutdown_write()
    assert stream.recv(10) == b"3\n"
    assert stream.recv(10) == b""
    assert stream.wait_for_exit() == 3
    stream.close()


def test_host_that_always_makes_progress_has_a_total_time() -> None:
    deadline, begin = Deadline(0.2, total=0.4), time.monotonic()

    def progress() -> None:
        while deadline.left():
            deadline.progress(PROGRESS_BYTES)
            time.sleep(0.01)

    with pytest.raises(TimeoutError):
        progress()
    assert 0.4 <= time.monotonic() - begin < 5


# -- errors of ssh -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        ("ssh: connect to host a port 22: Connection refused", "connect to host a port 22", ""),
        ("me@a: Permission denied (publickey).", "the host accepts only publickey", "ssh gpu1"),
        (
            "me@a: Permission denied (keyboard-interactive,password).",
            "it requires an answer from me: keyboard-interactive,password",
            "clusterjob login gpu1",
        ),
        (
            "unix_listener: cannot bind to path /a/b: No such file or directory",
            "cannot bind to path /a/b",
            "make the directory of ControlPath",
        ),
        ("", "ssh gives no reason", "ssh -v gpu1"),
    ],
)
def test_output_of_ssh_becomes_error_with_hint(text: str, why: str, hint: str) -> None:
    error = openssh_transport._failure(PLAIN, text)
    assert isinstance(error, HostError)
    assert why in error.message
    assert hint in error.hint


@given(st.text())
def test_any_output_of_ssh_becomes_one_bounded_line(text: str) -> None:
    error = openssh_transport._failure(PLAIN, text * 20)
    if not isinstance(error, DroppedError):
        assert isinstance(error, HostError)
        assert error.message.isprintable()
        assert len(error.message) < 400
