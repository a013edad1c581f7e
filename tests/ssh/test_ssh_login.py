"""Second factors and passwords of real sshd servers; shared connections.

The codes are those of pam_oath (HOTP, RFC 4226), so no test depends on the time.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kerberos
import pytest
from procs import TEST_TIMEOUT, checked_output, wait_until
from ssh_network import SshHost, SshNetwork
from sshsite import Site, close_connections, hostname
from terminals import Terminal
from verdicts import wait_for_verdict

from clusterjob.core.hosts import Host
from clusterjob.errors import HostError
from clusterjob.node.verdict import JobState
from clusterjob.remote import connect, control_master, ssh_config
from clusterjob.remote.pool import Pool
from clusterjob.remote.transport import ConnectOptions

PASSWORD = "correct horse"
REACHED = "no torch"  # what `hosts` finds with the interpreter of the tests
PAM = """auth required pam_oath.so usersfile={users} window=20
account required pam_permit.so
session required pam_permit.so
"""


class Codes:
    """The one-time codes of root on a host; each is valid once."""

    def __init__(self, directory: Path) -> None:
        self._key = secrets.token_hex(20)
        self._used = 0
        self.users = directory / "users.oath"
        self.users.write_text(f"HOTP root - {self._key}\n")
        self.users.chmod(0o600)

    def next(self) -> str:
        code = checked_output("oathtool", "-c", self._used, self._key).strip()
        self._used += 1
        return code


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of shared connections of the test."""
    directory = Path(f"/tmp/cjr-{secrets.token_hex(4)}")  # short, and 0700
    directory.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory  # type: ignore[misc]
    subprocess.run(["rm", "-rf", directory], check=True)


@pytest.fixture
def codes(ssh_network: SshNetwork, tmp_path: Path, runtime: Path) -> Iterator[Codes]:
    """Let gpu1 require a key and a one-time code."""
    made = Codes(tmp_path)
    (tmp_path / "pam").write_text(PAM.format(users=made.users))
    host = ssh_network.hosts["gpu1"]
    host.mounts = {"/etc/pam.d/sshd": tmp_path / "pam"}
    host.restart(
        UsePAM="yes",
        KbdInteractiveAuthentication="yes",
        AuthenticationMethods="publickey,keyboard-interactive",
    )
    yield made
    plain(ssh_network, host)


@pytest.fixture
def password(ssh_network: SshNetwork, tmp_path: Path, runtime: Path) -> Iterator[str]:
    """Let gpu1 accept a password only."""
    hashed = checked_output("openssl", "passwd", "-6", PASSWORD).strip()
    (tmp_path / "shadow").write_text(f"root:{hashed}:19000:0:99999:7:::\nsshd:*:19000::::::\n")
    host = ssh_network.hosts["gpu1"]
    host.mounts = {"/etc/shadow": tmp_path / "shadow"}
    host.restart(PasswordAuthentication="yes", AuthenticationMethods="password")
    yield PASSWORD
    plain(ssh_network, host)


def plain(ssh_network: SshNetwork, host: SshHost) -> None:
    """Close the shared connection with a host, and start its sshd as before."""
    target = ssh_config.resolve(Host(host.name), ssh_network.config)
    if path := control_master.find(target):
        control_master.close(path)
    host.mounts = {}
    host.restart()


def sockets(runtime: Path) -> list[Path]:
    """Return the sockets of all shared connections."""
    return [path for path in runtime.rglob("*") if path.is_socket()]


class Commands:
    """Commands of the user, in the directory of the site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.options = ["--set", f"ssh_config={site.ssh_network.config}"]

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command without a terminal."""
        return self.site.run(*words, *self.options)

    def on_terminal(self, *words: str) -> Terminal:
        argv = [sys.executable, "-m", "clusterjob", *words, *self.options]
        return Terminal(argv, cwd=self.site.directory, controlling=True)


@pytest.fixture
def commands(site: Site) -> Commands:
    return Commands(site)


def hosts_of(site: Site, *names: str) -> list[str]:
    """Return the command that checks hosts; it shows `REACHED` for each that it reaches."""
    return ["hosts", "--hosts", ",".join(names), "--python", site.python]


def ask(host: str, transport: str, site: Site) -> None:
    """Make one connection to a host and close it."""
    options = ConnectOptions(10.0, ssh_config=site.ssh_network.config, transport=transport)
    with contextlib.closing(Pool(options)) as pool:
        assert hostname(pool, host) == host


# -- one login for all commands ------------------------------------------------------------------


def test_code_is_asked_once_for_all_commands_after_login(
    site: Site, commands: Commands, codes: Codes
) -> None:
    host = site.ssh_network.hosts["gpu1"]
    before = host.logins
    with commands.on_terminal("login", "gpu1") as terminal:
        terminal.answer(b"One-time password", codes.next())
        assert terminal.finish() == 0, terminal.shown
        assert b"gpu1: logged in as root" in terminal.shown
    record = site.submit("print('hello')", hosts="gpu1")
    close_connections()
    assert REACHED in commands.run(*hosts_of(site, "gpu1"))[1]
    for words in (["wait"], ["status"], ["logs"]):
        _, out, _ = site.run(*words, record.job_id, code=0)
    assert "hello" in out
    assert host.logins - before == 1
    assert "gpu1: already logged in as root" in commands.run("login", "gpu1")[2]
    assert "already logged in" in commands.run("login", "root@10.77.0.1:22")[2]
    code, _, err = commands.run("logout", "gpu1")
    assert (code, "gpu1: logged out" in err) == (0, True)
    code, _, err = commands.run("logout", "gpu1")
    assert (code, "gpu1: not logged in" in err) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "openssh", "paramiko"])
def test_host_that_asks_for_code_is_one_line_error_without_terminal(
    site: Site, commands: Commands, codes: Codes, transport: str
) -> None:
    code, out, err = commands.run(*hosts_of(site, "gpu1"), "--set", f"transport={transport}")
    assert code == 1
    assert "keyboard-interactive" in out
    hint = "log in once before, on a terminal: clusterjob login gpu1"
    if transport == "paramiko":  # which does not use the connection of the login
        hint = f'set transport = "auto"; {hint}'
    assert err == f"  hint: {hint}\n"
    error = site.refused(hosts="gpu1", set={"transport": transport})
    assert error.hint == hint
    assert re.fullmatch(r"gpu1: it requires [\w ]+ root: keyboard-interactive", error.message)
    code, _, err = commands.run("login", "gpu1")
    assert (code, err.count("\n")) == (1, 2)
    assert "it requires an answer from root: keyboard-interactive" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "code", "why"),
    [
        ("gpu[1-2]", 2, "names 2 hosts"),
        ("no-such-host.invalid", 1, "Could not resolve hostname"),
        ("-oProxyCommand=touch mark", 2, ""),
        ("gpu2", 1, "its key is unknown"),
    ],
)
def test_login_that_cannot_succeed_is_one_line_error(
    site: Site, commands: Commands, runtime: Path, host: str, code: int, why: str
) -> None:
    site.ssh_network.known_hosts.write_text("")
    found, _, err = commands.run("login", host)
    assert (found, why in err, "Traceback" in err) == (code, True, False), err
    assert err.startswith("clusterjob: error: ")
    assert err.count("\n") <= 2
    assert not site.path("mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["login", "ControlPersist"])
def test_dead_socket_is_replaced_and_parallel_logins_open_one_connection(
    site: Site, commands: Commands, runtime: Path, own: bool
) -> None:
    """ssh itself opens a second connection, which nobody can close."""
    ssh_network = site.ssh_network
    if own:
        ssh_network.write_config(
            ControlPath=str(runtime / "m-%C"), ControlMaster="auto", ControlPersist="60"
        )
    target = ssh_config.resolve(Host("gpu1"), ssh_network.config)
    path = control_master.path_for_login(target)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    before = ssh_network.hosts["gpu1"].logins
    words = hosts_of(site, "gpu1") if own else ["login", "gpu1"]
    both = [site.command(*words, *commands.options, stdin=subprocess.DEVNULL) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=TEST_TIMEOUT)
        assert REACHED in out or "logged in" in err
    assert ssh_network.hosts["gpu1"].logins - before == 1
    assert sockets(runtime) == [path]
    assert "logged out" in commands.run("logout", "gpu1")[2]


@pytest.mark.slow
def test_login_host_behind_bastion_is_shared(site: Site, commands: Commands, runtime: Path) -> None:
    bastion = site.ssh_network.hosts["bastion"]
    assert commands.run("login", "bastion")[0] == 0
    assert commands.run("login", "inner1")[0] == 0
    before = bastion.logins
    ask("inner1", "auto", site)
    ask("inner2", "auto", site)
    assert bastion.logins == before, "both ways through the shared connection"
    for name in ("inner1", "bastion"):
        assert commands.run("logout", name)[0] == 0


@pytest.mark.slow
def test_user_control_master_is_used_and_not_closed(
    site: Site, commands: Commands, codes: Codes, runtime: Path
) -> None:
    ssh_network, path = site.ssh_network, runtime / "m-%C"
    ssh_network.write_config(ControlPath=str(path), ControlMaster="auto", ControlPersist="60")
    argv = ["ssh", "-F", str(ssh_network.config), "gpu1", "true"]
    before = ssh_network.hosts["gpu1"].logins
    with Terminal(argv, controlling=True) as terminal:
        terminal.answer(b"One-time password", codes.next())
        assert terminal.finish() == 0
    assert REACHED in commands.run(*hosts_of(site, "gpu1"))[1]
    ask("gpu1", "auto", site)
    assert ssh_network.hosts["gpu1"].logins - before == 1
    assert len(list(runtime.glob("m-*"))) == 1, "the user's connection is still open"
    assert "already logged in" in commands.run("login", "gpu1")[2]
    assert commands.run("logout", "gpu1")[0] == 0
    wait_until(lambda: not list(runtime.glob("m-*")), 10, "the end of the connection")


# -- questions on the terminal -------------------------------------------------------------------


@pytest.mark.slow
def test_paramiko_asks_for_code_on_terminal(site: Site, commands: Commands, codes: Codes) -> None:
    argv = [*hosts_of(site, "gpu1"), "--set", "transport=paramiko", "--set", "connect_timeout=1"]
    with commands.on_terminal(*argv) as terminal:
        terminal.answer(b"gpu1: One-time password", "123")  # a wrong one is asked again
        terminal.read_until(b"gpu1: One-time password")
        time.sleep(3)  # a person takes longer than connect_timeout
        terminal.answer(b"gpu1: One-time password", codes.next())
        terminal.read_until(REACHED.encode())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_password_is_asked_and_never_shown(
    site: Site, commands: Commands, password: str, transport: str
) -> None:
    login = transport == "openssh"
    words = ["login", "gpu1"] if login else hosts_of(site, "gpu1")
    with commands.on_terminal(*words, "--set", f"transport={transport}") as terminal:
        terminal.answer(b"password:", password)
        terminal.read_until(b"logged in" if login else REACHED.encode())
        terminal.finish()
    assert password.encode() not in terminal.shown
    if login:
        assert REACHED in commands.run(*hosts_of(site, "gpu1"))[1]
    else:
        code, out, _ = commands.run(*hosts_of(site, "gpu1"))
        assert (code, "it requires more than a key from root: password" in out) == (1, True)


@pytest.mark.slow
def test_end_of_input_and_interrupt_end_question_and_restore_terminal(
    site: Site, commands: Commands, password: str
) -> None:
    for key, expected in ((b"\x04", 1), (b"\x03", 130)):
        with commands.on_terminal(*hosts_of(site, "gpu1")) as terminal:
            terminal.read_until(b"password:")
            assert not terminal.echoes()
            terminal.type(key)
            assert terminal.finish() == expected, terminal.shown
            assert terminal.echoes()
        assert b"Traceback" not in terminal.shown


# -- Kerberos ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kerberos_ticket_logs_in_and_selects_openssh(
    site: Site, commands: Commands, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ticket, GSSAPIAuthentication alone (Debian's default) changes nothing."""
    if why := kerberos.skip_reason():
        pytest.skip(why)
    ssh_network, host = site.ssh_network, site.ssh_network.hosts["gpu1"]
    ssh_network.write_config(GSSAPIAuthentication="yes")
    with kerberos.realm_in(tmp_path / "realm", hosts=(host.address,)) as realm:
        host.mounts = {"/etc/krb5.conf": realm.config}
        host.restart(
            GSSAPIAuthentication="yes",
            GSSAPIStrictAcceptorCheck="no",
            AuthenticationMethods="gssapi-with-mic",
        )
        try:
            monkeypatch.setenv("KRB5_CONFIG", str(realm.config))
            monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")
            options = ConnectOptions(10.0, ssh_config=ssh_network.config)
            target = ssh_config.resolve(Host("gpu1"), ssh_network.config)
            assert not connect.needs_openssh(target, options)
            with pytest.raises(HostError, match="gssapi-with-mic"):
                ask("gpu1", "auto", site)
            realm.log_in(tmp_path / "tickets")
            monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/tickets")
            ask("gpu1", "auto", site)
            assert "gssapi-with-mic" in (host.directory / "sshd.log").read_text()
            record = site.submit("print('hello')", hosts="gpu1")
            assert wait_for_verdict(record).state is JobState.SUCCEEDED
        finally:
            close_connections()
            plain(ssh_network, host)
