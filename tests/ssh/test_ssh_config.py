"""Resolution of a host's SSH settings by a real `ssh -G`.

Without an ssh binary, paramiko reads the configuration.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from ssh_network import require_ssh_network

from clusterjob.core.hosts import Host
from clusterjob.errors import HostError
from clusterjob.remote.ssh_config import resolve

HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)


@pytest.fixture(autouse=True)
def _ssh() -> None:
    require_ssh_network()


def write(directory: Path, text: str, name: str = "config") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_all_supported_options_of_alias_are_resolved(tmp_path: Path) -> None:
    write(tmp_path, "Host gpu1\n  HostName 10.0.0.1\n  Port 2222\n", "more")
    config = write(
        tmp_path,
        f"""
        Include {tmp_path}/more
        Host gpu*
          User trainer
          IdentityFile ~/.ssh/lab_%r
          CertificateFile {tmp_path}/lab-cert.pub
          IdentitiesOnly yes
          IdentityAgent {tmp_path}/agent
          ProxyJump me@bastion:2200,second
          UserKnownHostsFile {tmp_path}/known {tmp_path}/older
          GlobalKnownHostsFile /etc/keys
          StrictHostKeyChecking accept-new
          HostKeyAlias lab
          HashKnownHosts yes
          ConnectTimeout 7
        """,
    )
    target = resolve(Host("gpu1"), config)
    assert (target.label, target.hostname, target.port, target.user) == (
        "gpu1",
        "10.0.0.1",
        2222,
        "trainer",
    )
    assert target.identities == (HOME / ".ssh" / "lab_trainer",)
    assert target.certificates == (tmp_path / "lab-cert.pub",)
    assert target.identities_only
    assert target.agent == str(tmp_path / "agent")
    assert target.jumps == (Host("bastion", "me", port=2200), Host("second"))
    assert target.known_hosts == (tmp_path / "known", tmp_path / "older")
    assert target.system_known_hosts == (Path("/etc/keys"),)
    assert (target.strict, target.key_alias, target.hash_names, target.connect_timeout) == (
        "accept-new",
        "lab",
        True,
        7.0,
    )


def test_unconfigured_host_gets_ssh_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere/agent")
    target = resolve(Host("gpu1"), write(tmp_path, ""))
    assert (target.hostname, target.port, target.user) == (
        "gpu1",
        22,
        pwd.getpwuid(os.getuid()).pw_name,
    )
    assert (target.strict, target.jumps, target.proxy_command, target.connect_timeout) == (
        "ask",
        (),
        "",
        None,
    )
    assert target.agent == "/nowhere/agent"
    assert HOME / ".ssh" / "id_ed25519" in target.identities
    assert target.known_hosts[0] == HOME / ".ssh" / "known_hosts"


OPENSSH = """
ControlPath /run/m-%h-%p-%r
ControlMaster auto
ControlPersist 10m
GSSAPIAuthentication yes
PKCS11Provider /usr/lib/token.so
"""


@pytest.mark.parametrize(
    ("host", "text", "expected"),
    [
        (
            Host("gpu1", "other", port=99),
            "Host gpu1\n User trainer\n Port 2222\n",
            {"user": "other", "port": 99},
        ),
        *(
            (Host("a"), f"StrictHostKeyChecking {written}\n", {"strict": strict})
            for written, strict in (
                ("no", "no"), ("off", "no"), ("yes", "yes"), ("ask", "ask"),
                ("accept-new", "accept-new"),
            )
        ),
        (
            Host("a"),
            "ProxyJump none\nIdentityAgent none\nProxyCommand none\n",
            {"jumps": (), "agent": "", "proxy_command": ""},
        ),
        (
            Host("a", "me", port=7),
            "Host a\n HostName a.lab\n ProxyCommand nc %h %p %% %r\n",
            {"proxy_command": "nc a.lab 7 % me"},
        ),
        (
            Host("a", "me", port=7),
            OPENSSH,
            {
                "control_path": "/run/m-a-7-me", "persists": True, "gssapi": True,
                "other_needs": ("PKCS11Provider",),
            },
        ),
        (
            Host("a"),
            "ControlPath none\nControlMaster no\n",
            {"control_path": "", "persists": False, "gssapi": False, "other_needs": ()},
        ),
    ],
)  # fmt: skip
def test_values_of_options_are_resolved(
    tmp_path: Path, host: Host, text: str, expected: dict[str, object]
) -> None:
    target = resolve(host, write(tmp_path, text))
    assert {name: getattr(target, name) for name in expected} == expected


def test_arguments_of_ssh_name_configuration_port_and_user(tmp_path: Path) -> None:
    target = resolve(Host("a", "me", port=7), write(tmp_path, OPENSSH))
    assert target.arguments == ("-F", f"{tmp_path}/config", "-p", "7", "-l", "me", "--", "a")


def test_invalid_configuration_is_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="gpu1: ssh refuses its configuration") as caught:
        resolve(Host("gpu1"), write(tmp_path, "Nonsense yes\n"))
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_configuration_is_read_without_ssh_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = write(
        tmp_path,
        f"Host gpu1\n HostName 10.0.0.1\n Port 2222\n User trainer\n IdentityFile {tmp_path}/key\n",
    )
    target = resolve(Host("gpu1"), config)
    assert (target.hostname, target.port, target.user, target.identities) == (
        "10.0.0.1",
        2222,
        "trainer",
        (tmp_path / "key",),
    )
    assert target.known_hosts[0] == HOME / ".ssh" / "known_hosts"
    assert resolve(Host("b", None, port=7), config).port == 7
