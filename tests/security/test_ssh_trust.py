"""Revoked keys, unconfirmed keys and user names with shell commands are refused.

The tests use real servers.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from procs import checked_output
from ssh_network import SshNetwork
from sshsite import Site, hostname, refusal
from terminals import Terminal

from clusterjob.core.hosts import Host
from clusterjob.remote import control_master, ssh_config
from clusterjob.remote.pool import Pool
from clusterjob.remote.transport import ConnectOptions


@pytest.fixture(params=["list", "krl"])
def revoked(request: pytest.FixtureRequest, ssh_network: SshNetwork, tmp_path: Path) -> Path:
    """Revoke the key of gpu1, in both forms that RevokedHostKeys accepts."""
    listed = tmp_path / "revoked.pub"
    listed.write_text(f"# compromised\n\n{ssh_network.hosts['gpu1'].public_key} gpu1\n")
    if request.param == "krl":
        checked_output("ssh-keygen", "-q", "-k", "-f", tmp_path / "krl", listed)
        listed = tmp_path / "krl"
    ssh_network.write_config(RevokedHostKeys=str(listed))
    return listed


def test_host_with_revoked_key_is_refused(
    ssh_network: SshNetwork, pool: Pool, revoked: Path
) -> None:
    assert refusal(pool, "gpu1").message == f"gpu1: its key is revoked ({revoked})"
    assert hostname(pool, "gpu2") == "gpu2"
    ssh_network.write_config(RevokedHostKeys=str(revoked), StrictHostKeyChecking="no")
    assert "is revoked" in refusal(pool, "gpu1").message


def test_hosts_trust_does_not_record_revoked_key(site: Site, revoked: Path) -> None:
    site.ssh_network.known_hosts.write_text("")
    host = site.ssh_network.hosts["gpu1"]
    args = [
        "hosts",
        "trust",
        "gpu1",
        "--set",
        f"ssh_config={site.ssh_network.config}",
        "--fingerprint",
        host.fingerprint,
    ]
    code, _, err = site.run(*args)
    assert (code, "is revoked" in err) == (1, True)
    assert site.ssh_network.known_hosts.read_text() == ""


@pytest.mark.parametrize("transport", ["auto", "paramiko", "openssh"])
def test_revoked_keys_are_not_ignored_where_openssh_is_not_used(
    ssh_network: SshNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    (tmp_path / "revoked").write_text(f"{ssh_network.hosts['gpu1'].public_key}\n")
    ssh_network.write_config(RevokedHostKeys=str(tmp_path / "revoked"))
    options = ConnectOptions(10.0, ssh_config=ssh_network.config, transport=transport)
    pool = Pool(options)
    if transport != "paramiko":
        monkeypatch.setenv("PATH", str(tmp_path))  # without the command ssh
    message = refusal(pool, "gpu1").message
    assert "RevokedHostKeys" in message or "transport = openssh needs the command ssh" in message
    pool.close()


def test_socket_in_directory_that_others_could_use_is_not_opened(
    ssh_network: SshNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ssh_config.resolve(Host("gpu1"), ssh_network.config)
    with tempfile.TemporaryDirectory(prefix="cj", dir="/tmp") as name:  # a short path
        directory = Path(name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("CLUSTERJOB_HOME", str(directory / ("long" * 30)))
        (directory / "clusterjob").mkdir()
        (directory / "clusterjob").chmod(0o750)
        last = Path(f"/tmp/clusterjob-{os.geteuid()}")
        assert control_master.private_path(target).parent == last
        (directory / "clusterjob").chmod(0o700)
        path = control_master.private_path(target)
        assert path.parent == directory / "clusterjob"
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            os.chown(path, 65534, 65534)
            assert not control_master.is_open(path), "it belongs to another user"
        own = control_master.path_for_login(target)
        assert own in control_master._candidates(target)
        (directory / "clusterjob").rename(directory / "elsewhere")
        (directory / "clusterjob").symlink_to("elsewhere")
        assert own not in control_master._candidates(target), "another user may change the link"


@pytest.mark.parametrize("content", [None, b"SSHKRL\n\0nonsense"])
def test_unreadable_file_of_revoked_keys_refuses_every_host(
    ssh_network: SshNetwork, pool: Pool, tmp_path: Path, content: bytes
) -> None:
    if content is not None:
        (tmp_path / "revoked").write_bytes(content)
    ssh_network.write_config(RevokedHostKeys=str(tmp_path / "revoked"))
    assert "cannot" in refusal(pool, "gpu2").message


def test_hosts_trust_without_fingerprint_records_a_key_on_a_terminal_only(site: Site) -> None:
    ssh_network = site.ssh_network
    ssh_network.known_hosts.write_text("")
    args = ["hosts", "trust", "gpu1", "--set", f"ssh_config={ssh_network.config}"]
    _, _, err = site.run(*args, code=1)
    assert ssh_network.hosts["gpu1"].fingerprint in err
    assert "--fingerprint" in err
    assert ssh_network.known_hosts.read_text() == ""
    argv = [*CLUSTERJOB, *args]
    with Terminal(argv, cwd=site.directory, controlling=True) as terminal:
        assert terminal.finish() == 0, terminal.shown
    assert ssh_network.hosts["gpu1"].public_key in ssh_network.known_hosts.read_text()


@pytest.mark.parametrize(
    "user",
    [
        "$(touch${IFS}$M)",
        "root;touch${IFS}$M;",
    ],
)
def test_user_name_with_shell_command_is_refused_before_proxy_command_runs(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    site.ssh_network.write_config("Match host gpu1\n  ProxyCommand echo %r; nc %h %p\n")
    mark = tmp_path / "mark"
    monkeypatch.setenv("M", str(mark))
    args = ["hosts", "--hosts", f"{user}@gpu1", "--set", f"ssh_config={site.ssh_network.config}"]
    site.run(*args, code=2)
    assert not mark.exists()
