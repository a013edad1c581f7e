"""Connections to real sshd servers: reaching hosts, host keys, logins and their errors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from procs import checked_output, wait_until
from ssh_network import SshNetwork
from sshsite import hostname, refusal, run

from clusterjob.core.hosts import Host, parse_hosts
from clusterjob.errors import HostError
from clusterjob.remote import host_keys
from clusterjob.remote.pool import Pool, TaskOutcome, for_each
from clusterjob.remote.session import Session
from clusterjob.remote.transport import ConnectOptions

# Seconds; timeout of a phase in tests in which no server answers. Twice this timeout is less than
# the 2 s that paramiko waits for a second line.
SILENT = 0.75
SHORT = 3.0  # seconds; timeout of a phase in tests in which a server answers some phases
BOUND = 15.0  # seconds; a phase with timeout SILENT ends earlier, even on a busy machine


def attempts(ssh_network: SshNetwork, name: str) -> int:
    """Return how many logins the host's server has seen so far."""
    text = (ssh_network.directory / name / "sshd.log").read_text()
    return text.count("Accepted ") + text.count("Failed ") + text.count("userauth")


# -- hosts that can be reached -------------------------------------------------------------------


def test_hosts_are_reached_directly_and_through_one_bastion_connection(
    ssh_network: SshNetwork, pool: Pool
) -> None:
    bastion = ssh_network.hosts["bastion"]
    before = bastion.logins
    hosts = parse_hosts("gpu[1-3],inner[1-2]")
    outcome = for_each(hosts, lambda host: run(pool.connection(host), "hostname"))
    assert not outcome.errors
    assert [outcome.results[host][1].decode().strip() for host in hosts] == [
        "gpu1",
        "gpu2",
        "gpu3",
        "inner1",
        "inner2",
    ]
    assert bastion.logins - before == 1, "one connection to the bastion serves all"


CHAIN = (
    "Host middle\n  HostName 10.78.0.1\n  {}\n"
    "Host far\n  HostName 10.78.0.2\n  ProxyJump bastion,middle\n"
)
PROXY = "Host piped\n  HostName 10.77.0.1\n  ProxyCommand ssh -F {config} -W %h:%p gpu2\n"


@pytest.mark.parametrize(
    ("config", "text", "name"),
    [
        (CHAIN.format(""), "far", "inner2"),
        # The second jump host needs OpenSSH, and the others do not.
        (CHAIN.format("RevokedHostKeys /dev/null"), "far", "inner2"),
        (PROXY, "piped", "gpu1"),
        ("", "root@10.77.0.2:22", "gpu2"),
    ],
    ids=["chain", "chain with openssh", "proxy command", "address and port"],
)
def test_host_behind_others_is_reached(
    ssh_network: SshNetwork, pool: Pool, config: str, text: str, name: str
) -> None:
    ssh_network.write_config(config.format(config=ssh_network.config))
    assert hostname(pool, text) == name


def test_16_parallel_logins_succeed_although_max_startups_is_4(
    ssh_network: SshNetwork, pool: Pool
) -> None:
    gpu1 = ssh_network.hosts["gpu1"]
    gpu1.restart(MaxStartups="4:100:4")
    try:
        ssh_network.write_config(
            "".join(f"Host same{n}\n  HostName 10.77.0.1\n" for n in range(16))
        )
        outcome: TaskOutcome[Host, str] = for_each(
            [Host(f"same{n}") for n in range(16)], lambda host: hostname(pool, host.name)
        )
        assert not outcome.errors
        assert set(outcome.results.values()) == {"gpu1"}
    finally:
        gpu1.restart()


# -- hosts that cannot be reached ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "text", "message", "hint"),
    [
        (
            "",
            {},
            "no-such-host.invalid",
            "unknown host no-such-host.invalid",
            "`ssh -v no-such-host.invalid` shows each step",
        ),
        (
            "Host closed\n  HostName 10.77.0.1\n  Port 9\n",
            {},
            "closed",
            "connection refused (10.77.0.1:9)",
            "",
        ),
        (
            "Host beyond\n HostName 10.78.0.9\n Port 1\n ProxyJump bastion\n ConnectTimeout 8\n",
            {},
            "beyond",
            "not reached through bastion",
            "",
        ),
        (
            "Host one\n  ProxyJump two\nHost two\n  ProxyJump three\nHost three\n  ProxyJump two\n",
            {},
            "one",
            "one: ProxyJump leads in a circle over two",
            "correct ProxyJump in the ssh configuration",
        ),
        (
            "",
            {"IdentityFile": "/nonexistent/key"},
            "gpu1",
            "there is no key to log in with as root",
            "",
        ),
    ],
    ids=["unknown", "refused", "behind a bastion", "circle", "no key"],
)
def test_host_that_cannot_be_reached_is_reported(
    ssh_network: SshNetwork,
    pool: Pool,
    config: str,
    options: dict[str, str],
    text: str,
    message: str,
    hint: str,
) -> None:
    ssh_network.write_config(config, **options)
    error = refusal(pool, text)
    assert message in error.message
    assert hint in error.hint


def test_connection_timeout_is_reported_in_time(ssh_network: SshNetwork) -> None:
    ssh_network.hosts["gpu1"].run("ip", "route", "add", "blackhole", "10.77.0.100")
    pool = Pool(ConnectOptions(SILENT, lambda _: None, ssh_config=ssh_network.config))
    begin = time.monotonic()
    try:
        assert "no answer from 10.77.0.1:22 within 0.75 s" in refusal(pool, "gpu1").message
    finally:
        ssh_network.hosts["gpu1"].run("ip", "route", "del", "blackhole", "10.77.0.100")
    assert time.monotonic() - begin < BOUND


@contextlib.contextmanager
def listener(greeting: bytes = b"", *, close_connections: bool = False) -> Iterator[int]:
    """Listen on a TCP port: send a greeting, then stay silent or close the connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peer.sendall(greeting)
                    if close_connections:
                        peer.close()
                    else:
                        held.append(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in held:
                peer.close()


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"", "it accepts TCP and sends nothing for 0.75 s"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not complete the SSH handshake within 1.5 s"),
    ],
    ids=["silent", "banner only"],
)
def test_silent_or_non_ssh_server_is_given_up_within_timeout(
    ssh_network: SshNetwork, greeting: bytes, why: str
) -> None:
    pool = Pool(ConnectOptions(SILENT, lambda _: None, ssh_config=ssh_network.config))
    with listener(greeting) as port:
        ssh_network.write_config(f"Host hole\n  HostName 127.0.0.1\n  Port {port}\n")
        begin = time.monotonic()
        assert why in refusal(pool, "hole").message
        assert time.monotonic() - begin < BOUND * 2


@pytest.mark.slow
def test_server_that_closes_connections_is_retried_then_given_up(
    ssh_network: SshNetwork, pool: Pool
) -> None:
    with listener(close_connections=True) as port:
        ssh_network.write_config(f"Host hole\n  HostName 127.0.0.1\n  Port {port}\n")
        error = refusal(pool, "hole")
    assert "it closed the connection 6 times before it sent anything" in error.message
    assert "MaxStartups" in error.hint


def test_login_without_answer_is_given_up(ssh_network: SshNetwork) -> None:
    """The server is stopped after the handshake; its kernel still accepts data."""
    pool = Pool(ConnectOptions(SHORT, lambda _: None, ssh_config=ssh_network.config))
    original = host_keys.verify

    def freeze(*arguments: object, **options: object) -> None:
        original(*arguments, **options)  # type: ignore[arg-type]
        for pid in ssh_network.hosts["gpu1"].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    host_keys.verify = freeze  # type: ignore[assignment]
    try:
        with pytest.raises(HostError, match="it does not answer the login within 3 s"):
            pool.connection(Host("gpu1"))
    finally:
        host_keys.verify = original
        for pid in ssh_network.hosts["gpu1"].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_unusable_bastion_is_named(ssh_network: SshNetwork, pool: Pool) -> None:
    ssh_network.write_config("Host lost\n  HostName 10.78.0.1\n  ProxyJump nobody@bastion\n")
    with pytest.raises(HostError, match=r"^nobody@bastion: it accepts none of the keys of nobody"):
        pool.connection(Host("lost"))


# -- host keys -----------------------------------------------------------------------------------


def test_unknown_host_key_is_refused_before_login(ssh_network: SshNetwork, pool: Pool) -> None:
    ssh_network.known_hosts.write_text("")
    before = attempts(ssh_network, "gpu1")
    error = refusal(pool, "gpu1")
    assert (
        f"its key is unknown: ssh-ed25519 {ssh_network.hosts['gpu1'].fingerprint}" in error.message
    )
    assert "clusterjob hosts trust gpu1" in error.hint
    assert attempts(ssh_network, "gpu1") == before, "no login was tried"
    assert ssh_network.known_hosts.read_text() == ""


def test_changed_host_key_is_refused_and_shown(ssh_network: SshNetwork, pool: Pool) -> None:
    ssh_network.known_hosts.write_text(f"10.77.0.1 {ssh_network.hosts['gpu2'].public_key}\n")
    error = refusal(pool, "gpu1")
    assert (
        f"its key has changed: it shows ssh-ed25519 {ssh_network.hosts['gpu1'].fingerprint}"
        in error.message
    )
    assert f"{ssh_network.known_hosts}:1" in error.message


@pytest.mark.parametrize(
    ("strict", "transport"), [("ask", "auto"), ("no", "auto"), ("no", "openssh")]
)
def test_revoked_host_key_is_refused_with_every_strict_setting(
    ssh_network: SshNetwork, strict: str, transport: str
) -> None:
    """With StrictHostKeyChecking=no, ssh itself would use a key that is marked @revoked."""
    key = ssh_network.hosts["gpu1"].public_key
    ssh_network.known_hosts.write_text(f"10.77.0.1 {key}\n@revoked * {key}\n")
    ssh_network.write_config(StrictHostKeyChecking=strict)
    pool = Pool(ConnectOptions(10.0, ssh_config=ssh_network.config, transport=transport))
    assert "is revoked" in refusal(pool, "gpu1").message
    pool.close()


def test_host_key_in_system_known_hosts_is_accepted(ssh_network: SshNetwork, pool: Pool) -> None:
    system = ssh_network.directory / "system_known_hosts"
    system.write_text(ssh_network.known_hosts.read_text())
    ssh_network.known_hosts.write_text("")
    ssh_network.write_config(GlobalKnownHostsFile=str(system))
    assert hostname(pool, "gpu1") == "gpu1"


def test_accept_new_records_unknown_key_and_refuses_changed_key(
    ssh_network: SshNetwork, pool: Pool, warnings: list[str]
) -> None:
    ssh_network.known_hosts.write_text("")
    ssh_network.write_config(StrictHostKeyChecking="accept-new")
    assert hostname(pool, "gpu1") == "gpu1"
    assert (
        ssh_network.known_hosts.read_text() == f"10.77.0.1 {ssh_network.hosts['gpu1'].public_key}\n"
    )
    assert not warnings
    ssh_network.known_hosts.write_text(f"10.77.0.2 {ssh_network.hosts['gpu1'].public_key}\n")
    assert "its key has changed" in refusal(pool, "gpu2").message


def test_disabled_host_key_checking_warns_once(
    ssh_network: SshNetwork, pool: Pool, warnings: list[str]
) -> None:
    ssh_network.known_hosts.write_text(f"10.77.0.1 {ssh_network.hosts['gpu2'].public_key}\n")
    ssh_network.write_config(
        StrictHostKeyChecking="no", UserKnownHostsFile=f"{ssh_network.known_hosts}"
    )
    outcome = for_each(parse_hosts("gpu[1-3]"), pool.connection)
    assert not outcome.errors
    assert len(warnings) == 1
    assert "StrictHostKeyChecking" in warnings[0]


class Authority:
    """A certificate authority that signs host keys."""

    def __init__(self, ssh_network: SshNetwork, directory: Path) -> None:
        self.key = directory / "authority"
        checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        self.public = " ".join(Path(f"{self.key}.pub").read_text().split()[:2])
        self.ssh_network = ssh_network

    def certify(self, name: str, *, principal: str, validity: str) -> None:
        host = self.ssh_network.hosts[name]
        checked_output(
            "ssh-keygen",
            "-q",
            "-s",
            self.key,
            "-I",
            name,
            "-h",
            "-n",
            principal,
            "-V",
            validity,
            host.directory / "host_key.pub",
        )
        host.restart(HostCertificate=str(host.directory / "host_key-cert.pub"))

    def remove_certificate(self, name: str) -> None:
        host = self.ssh_network.hosts[name]
        (host.directory / "host_key-cert.pub").unlink(missing_ok=True)
        host.restart()


@pytest.fixture
def authority(ssh_network: SshNetwork, tmp_path: Path) -> Iterator[Authority]:
    made = Authority(ssh_network, tmp_path)
    yield made
    made.remove_certificate("gpu1")


def test_certificate_without_ssh_command_is_clear_error(
    ssh_network: SshNetwork, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_network.known_hosts.write_text(
        f"@cert-authority 10.77.0.* {ssh_network.hosts['gpu2'].public_key}\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refusal(pool, "gpu1")
    assert "(@cert-authority) needs the command ssh, which is not installed" in error.message
    assert error.hint == "install openssh-client"


@pytest.mark.parametrize(
    ("principal", "validity", "known", "why"),
    [
        ("10.77.0.1", "-1h:+1h", "@cert-authority 10.77.0.* {}", ""),
        ("gpu9", "-1h:+1h", "@cert-authority * {}", "name is not a listed principal"),
        ("10.77.0.1", "-2h:-1h", "@cert-authority * {}", "expired"),
        ("10.77.0.1", "-1h:+1h", "@cert-authority * {0}\n@revoked * {0}", "its key is revoked"),
        ("10.77.0.1", "-1h:+1h", "@cert-authority * {1}", "its key is unknown"),
    ],
)
def test_only_certificate_that_its_authority_vouches_for_is_accepted(
    ssh_network: SshNetwork,
    pool: Pool,
    authority: Authority,
    principal: str,
    validity: str,
    known: str,
    why: str,
) -> None:
    authority.certify("gpu1", principal=principal, validity=validity)
    other = ssh_network.hosts["gpu2"].public_key
    ssh_network.known_hosts.write_text(known.format(authority.public, other) + "\n")
    if why:
        assert why in refusal(pool, "gpu1").message
    else:
        assert hostname(pool, "gpu1") == "gpu1"


# -- login ---------------------------------------------------------------------------------------


def test_key_with_passphrase_but_no_agent_is_reported(
    ssh_network: SshNetwork, pool: Pool, tmp_path: Path
) -> None:
    checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "locked")
    ssh_network.write_config(IdentityFile=str(tmp_path / "locked"))
    assert "has a passphrase and no agent holds it (ssh-add)" in refusal(pool, "gpu1").message


def listens(path: Path) -> bool:
    """Return whether a process listens; the socket file appears a moment earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def agent_with(key: Path, directory: Path) -> Iterator[Path]:
    path = directory / "agent"
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: listens(path), 10, "the agent")
        subprocess.run(
            ["ssh-add", "-q", key],
            env={**os.environ, "SSH_AUTH_SOCK": str(path)},
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        yield path
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize(
    ("variable", "only", "reached"),
    [(False, "no", True), (True, "no", True), (False, "yes", False)],
    ids=["configured", "of the environment", "IdentitiesOnly"],
)
def test_key_that_only_ssh_agent_holds_logs_in_unless_others_are_excluded(
    ssh_network: SshNetwork,
    pool: Pool,
    tmp_path: Path,
    variable: bool,
    only: str,
    reached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agent_with(ssh_network.key, tmp_path) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        agent = "SSH_AUTH_SOCK" if variable else str(path)
        ssh_network.write_config(
            IdentityAgent=agent, IdentityFile="/nonexistent/key", IdentitiesOnly=only
        )
        if reached:
            assert hostname(pool, "gpu1") == "gpu1"
        else:
            assert "there is no key to log in with" in refusal(pool, "gpu1").message


def test_user_certificate_logs_in(ssh_network: SshNetwork, pool: Pool, tmp_path: Path) -> None:
    """The host trusts only an authority; the key itself is not in authorized_keys."""
    authority = tmp_path / "authority"
    checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", authority)
    checked_output("ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", tmp_path / "mine")
    checked_output(
        "ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "root", f"{tmp_path}/mine.pub"
    )
    certificate = (tmp_path / "mine-cert.pub").rename(tmp_path / "elsewhere.pub")
    gpu1 = ssh_network.hosts["gpu1"]
    gpu1.restart(TrustedUserCAKeys=f"{authority}.pub")
    try:
        ssh_network.write_config(IdentityFile=str(tmp_path / "mine"))
        assert "it accepts none of the keys" in refusal(pool, "gpu1").message
        ssh_network.write_config(
            IdentityFile=str(tmp_path / "mine"), CertificateFile=str(certificate)
        )
        assert hostname(pool, "gpu1") == "gpu1"
    finally:
        gpu1.restart()


def test_error_of_host_that_ends_early_is_read(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bash of the host may exit before the client has sent everything."""
    send = paramiko.Channel.send

    def late(channel: paramiko.Channel, data: bytes) -> int:
        if not data.startswith(b"{ exec"):  # input of the bash there
            wait_until(lambda: channel.closed, BOUND, "the end of bash")
        return send(channel, data)

    monkeypatch.setattr(paramiko.Channel, "send", late)
    session = Session(
        pool.connection(Host("gpu1")),
        "no-such-python",
        setup=(),
        home="~/.clusterjob",
        node_zip=b"",
        timeout=10.0,
    )
    with pytest.raises(HostError, match="no Python: there is no interpreter no-such-python"):
        session.ask("up", job="x", node=0)
