"""The ssh configuration of a host: address, user and keys, as printed by `ssh -G`."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clusterjob.core.hosts import Host, parse_hosts
from clusterjob.errors import HostError, SpecError

_SSH_TIMEOUT = 20.0  # seconds for ssh -G: a `Match exec` in the configuration may run a command


@dataclass(frozen=True)
class Target:
    """A host with its ssh configuration.

    Attributes:
        label: the host as the user wrote it, for errors.
        hostname, port, user: address and login name.
        identities: private key files to try, in order; some may not exist.
        certificates: certificates of these keys.
        identities_only: whether only configured keys are tried (IdentitiesOnly).
        agent: path of the agent's socket; empty for none.
        known_hosts: the user's known_hosts files; new keys are written to the first one.
        system_known_hosts: the system's known_hosts files.
        revoked_keys: files of revoked host keys (RevokedHostKeys).
        key_alias: name to look up the host key by (HostKeyAlias); empty for the host's own name.
        strict: StrictHostKeyChecking: ``ask``, ``yes``, ``accept-new`` or ``no``.
        hash_names: whether names of recorded keys are hashed (HashKnownHosts).
        jumps: bastions, the nearest first (ProxyJump).
        proxy_command: command whose stdin and stdout are the connection (ProxyCommand); empty for
            none.
        connect_timeout: ConnectTimeout in seconds; None if it is not set.
        arguments: options and name with which `ssh` reaches the host.
        control_path: socket of a shared connection (ControlPath); empty for none.
        persists: whether ssh opens and keeps that connection (ControlMaster, ControlPersist).
        gssapi: whether GSSAPIAuthentication is on.
        other_needs: further options that only OpenSSH supports, such as PKCS11Provider.
    """

    label: str
    hostname: str
    port: int
    user: str
    identities: tuple[Path, ...] = ()
    certificates: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: str = ""
    known_hosts: tuple[Path, ...] = ()
    system_known_hosts: tuple[Path, ...] = ()
    revoked_keys: tuple[Path, ...] = ()
    key_alias: str = ""
    strict: str = "ask"
    hash_names: bool = False
    jumps: tuple[Host, ...] = ()
    proxy_command: str = ""
    connect_timeout: float | None = None
    arguments: tuple[str, ...] = ()
    control_path: str = ""
    persists: bool = False
    gssapi: bool = False
    other_needs: tuple[str, ...] = ()


def resolve(host: Host, config_file: Path | None = None) -> Target:
    """Return the ssh configuration of a host.

    Args:
        host: the host as the user wrote it.
        config_file: a configuration file that replaces the user's and the system's, as in `ssh -F`.

    Raises:
        HostError: ssh refuses the configuration.
    """
    options = (
        _ask_ssh(host, config_file) if shutil.which("ssh") else _ask_paramiko(host, config_file)
    )

    def one(key: str, default: str = "") -> str:
        value = options.get(key, [default])[0]
        return default if value.lower() == "none" else value

    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # like ssh, ignore $HOME
    user = host.user or one("user") or pwd.getpwuid(os.getuid()).pw_name
    hostname, port = one("hostname", host.name), int(one("port", "22"))
    # Source: ssh_config(5), TOKENS.
    tokens = {
        "%": "%",
        "d": str(home),
        "h": hostname,
        "n": host.name,
        "p": str(port),
        "r": user,
        "u": pwd.getpwuid(os.getuid()).pw_name,
        "i": str(os.getuid()),
        "k": one("hostkeyalias") or host.name,
        "l": os.uname().nodename,
        "L": os.uname().nodename.split(".")[0],
        "j": one("proxyjump"),
        "C": "",
    }

    def filled(text: str) -> str:
        text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), text)
        return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)

    def paths(key: str, *, split: bool) -> tuple[Path, ...]:
        words = [
            word
            for line in options.get(key, [])
            for word in (line.split() if split else [line])
            if word.lower() != "none"
        ]
        return tuple(
            Path(str(home) + word[1:]) if (word := filled(raw)).startswith("~/") else Path(word)
            for raw in words
        )

    timeout = one("connecttimeout")
    needs = {"pkcs11provider": "PKCS11Provider", "knownhostscommand": "KnownHostsCommand"}
    return Target(
        label=str(host),
        hostname=filled(hostname) if "%" in hostname else hostname,
        port=port,
        user=user,
        identities=paths("identityfile", split=False),
        certificates=paths("certificatefile", split=False),
        identities_only=one("identitiesonly") in ("yes", "true"),
        agent=_agent(options.get("identityagent", [""])[0], filled, home=home),
        known_hosts=paths("userknownhostsfile", split=True),
        system_known_hosts=paths("globalknownhostsfile", split=True),
        revoked_keys=paths("revokedhostkeys", split=False),
        key_alias=one("hostkeyalias"),
        strict={"true": "yes", "false": "no", "off": "no"}.get(one("stricthostkeychecking"), "")
        or one("stricthostkeychecking", "ask"),
        hash_names=one("hashknownhosts") in ("yes", "true"),
        jumps=_jumps(one("proxyjump"), host),
        proxy_command=filled(one("proxycommand")),
        connect_timeout=float(timeout) if timeout.isdigit() and int(timeout) else None,
        arguments=_arguments(host, config_file),
        control_path=one("controlpath"),
        persists=one("controlmaster") in ("auto", "yes", "true")
        and one("controlpersist", "no") not in ("no", "false"),
        gssapi=one("gssapiauthentication") in ("yes", "true"),
        other_needs=tuple(name for key, name in needs.items() if one(key)),
    )


def _arguments(host: Host, config_file: Path | None) -> tuple[str, ...]:
    return (
        *(("-F", str(config_file)) if config_file else ()),
        *(("-p", str(host.port)) if host.port else ()),
        *(("-l", host.user) if host.user else ()),
        "--",
        host.name,
    )


def _ask_ssh(host: Host, config_file: Path | None) -> dict[str, list[str]]:
    try:
        asked = subprocess.run(
            ["ssh", "-G", *_arguments(host, config_file)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_SSH_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(
            str(host),
            f"`ssh -G` took longer than {_SSH_TIMEOUT:g} s",
            hint="a `Match exec` of the ssh configuration hangs",
        ) from error
    if asked.returncode:
        errors = asked.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise HostError(
            str(host),
            f"ssh refuses its configuration: {errors[0]}",
            hint=f"`ssh -G {host.name}` prints all errors",
        )
    options: dict[str, list[str]] = {}
    for line in asked.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _ask_paramiko(host: Host, config_file: Path | None) -> dict[str, list[str]]:
    """Read the configuration with paramiko if there is no ssh command.

    Include is not supported, and Match only as far as paramiko supports it.
    """
    import paramiko

    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    path = config_file or home / ".ssh" / "config"
    known = {
        "userknownhostsfile": [f"{home}/.ssh/known_hosts {home}/.ssh/known_hosts2"],
        "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts"],
        "identityfile": [f"{home}/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")],
    }
    if path.is_file():
        try:
            found = paramiko.SSHConfig.from_path(str(path)).lookup(host.name)
        except paramiko.ConfigParseError as error:
            raise HostError(str(host), f"{path} cannot be read: {error}") from error
        for key, value in found.items():
            known[key] = list(value) if key in ("identityfile", "certificatefile") else [str(value)]
    if host.port:
        known["port"] = [str(host.port)]
    return known


def _agent(value: str, filled: Callable[[str], str], home: Path) -> str:
    if value.lower() == "none":
        return ""
    if value in ("", "SSH_AUTH_SOCK"):
        return os.environ.get("SSH_AUTH_SOCK", "")
    if value.startswith("$"):
        return os.environ.get(value.strip("${}"), "")
    path = filled(value)
    return str(home) + path[1:] if path.startswith("~/") else path


def _jumps(text: str, host: Host) -> tuple[Host, ...]:
    try:
        return parse_hosts(text) if text else ()
    except SpecError as error:
        raise HostError(str(host), f"ProxyJump {text} is not valid: {error.message}") from error
