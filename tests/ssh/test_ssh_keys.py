"""Lookup in known_hosts files, compared with the results of OpenSSH's ssh-keygen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from procs import checked_output
from ssh_network import require_ssh_network

from clusterjob.remote import known_hosts
from clusterjob.remote.known_hosts import HostKeyStatus, KnownHosts


@pytest.fixture(autouse=True)
def _ssh() -> None:
    require_ssh_network()


class Key:
    def __init__(self, directory: Path, name: str, kind: str = "ed25519") -> None:
        self.path = directory / name
        checked_output("ssh-keygen", "-q", "-t", kind, "-N", "", "-f", self.path)
        self.kind, self.text = Path(f"{self.path}.pub").read_text().split()[:2]
        import base64

        self.blob = base64.b64decode(self.text)
        self.fingerprint = checked_output("ssh-keygen", "-lf", self.path).split()[1]

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return Key(tmp_path, "key")


@pytest.fixture
def other(tmp_path: Path) -> Key:
    return Key(tmp_path, "other")


def known(directory: Path, *lines: str) -> KnownHosts:
    (directory / "known_hosts").write_text("".join(f"{line}\n" for line in lines))
    return KnownHosts([directory / "known_hosts", directory / "absent"])


def test_fingerprint_equals_output_of_ssh_keygen(key: Key) -> None:
    assert known_hosts.fingerprint(key.blob) == key.fingerprint


def test_known_changed_unknown_and_revoked_keys_have_their_status(
    tmp_path: Path, key: Key, other: Key
) -> None:
    files = known(
        tmp_path,
        "# comment",
        "",
        f"gpu1,10.0.0.1 {key}",
        f"[gpu2]:2222 {key} a comment",
        f"@revoked * {other}",
        "gpu3 nonsense",
    )
    assert files.status(["gpu1"], key.blob) == (HostKeyStatus.KNOWN, f"{tmp_path}/known_hosts:3")
    assert files.status(["10.0.0.1"], key.blob)[0] is HostKeyStatus.KNOWN
    assert files.status(["[gpu2]:2222", "gpu2"], key.blob)[0] is HostKeyStatus.KNOWN
    assert files.status(["gpu3"], key.blob)[0] is HostKeyStatus.UNKNOWN
    assert files.status(["gpu1"], other.blob)[0] is HostKeyStatus.REVOKED, (
        "revoked comes before all"
    )
    third = Key(tmp_path, "third", "ecdsa")
    assert files.status(["gpu1"], third.blob) == (
        HostKeyStatus.CHANGED,
        f"{tmp_path}/known_hosts:3",
    )


def test_key_recorded_without_port_is_known_on_other_port(
    tmp_path: Path, key: Key, other: Key
) -> None:
    files = known(tmp_path, f"gpu1 {key}")
    names = known_hosts.lookup_names("GPU1", 2222, alias="")
    assert names == ["[gpu1]:2222", "gpu1"]
    assert files.status(names, key.blob)[0] is HostKeyStatus.KNOWN
    assert files.status(names, other.blob)[0] is HostKeyStatus.UNKNOWN, (
        "another server on that machine may have another key"
    )


@pytest.mark.parametrize(
    ("patterns", "host", "found"),
    [
        ("*.lab", "gpu1.lab", True),
        ("*.lab,!gpu1.lab", "gpu1.lab", False),
        ("gpu?", "gpu1", True),
        ("gpu?", "gpu12", False),
        ("[gpu1]:22", "[gpu1]:22", True),
        ("[gpu1]:22", "g:22", False),
        ("GPU1", "gpu1", True),
        ("!gpu1", "gpu2", False),
    ],
)
def test_host_patterns_match_like_openssh(
    tmp_path: Path, key: Key, patterns: str, host: str, found: bool
) -> None:
    assert bool(known(tmp_path, f"{patterns} {key}").kinds([host])) is found


def test_recorded_keys_are_found_by_ssh_keygen_and_clusterjob(
    tmp_path: Path, key: Key, other: Key
) -> None:
    path = tmp_path / "ssh" / "known_hosts"
    known_hosts.record(path, "gpu1", kind=key.kind, blob=key.blob, hashed=False)
    with path.open("a") as stream:
        stream.write(f"gpu0 {other}")  # a last line without a newline
    known_hosts.record(path, "[gpu2]:2222", kind=other.kind, blob=other.blob, hashed=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for name, wanted in (("gpu1", key), ("gpu0", other), ("[gpu2]:2222", other)):
        assert wanted.text in checked_output("ssh-keygen", "-F", name, "-f", path)
        assert KnownHosts([path]).status([name], wanted.blob)[0] is HostKeyStatus.KNOWN
    assert "gpu2" not in path.read_text()


def test_host_name_hashed_by_openssh_is_found(tmp_path: Path, key: Key) -> None:
    known(tmp_path, f"gpu1 {key}")
    checked_output("ssh-keygen", "-H", "-f", tmp_path / "known_hosts")
    files = KnownHosts([tmp_path / "known_hosts"])
    assert "gpu1" not in (tmp_path / "known_hosts").read_text()
    assert files.status(["gpu1"], key.blob)[0] is HostKeyStatus.KNOWN
    assert files.status(["gpu2"], key.blob)[0] is HostKeyStatus.UNKNOWN


def test_key_recorded_in_dev_null_is_not_stored(key: Key) -> None:
    known_hosts.record(Path("/dev/null"), "gpu1", kind=key.kind, blob=key.blob, hashed=False)
    assert not KnownHosts([Path("/dev/null")]).kinds(["gpu1"])


def test_forget_removes_only_plain_lines_of_host(tmp_path: Path, key: Key, other: Key) -> None:
    files = known(
        tmp_path,
        "# mine",
        f"gpu1,gpu2 {key}",
        f"gpu3 {key}",
        f"@revoked gpu1 {other}",
        "gpu1 broken line",
    )
    assert files.kinds(["gpu1"])
    path = tmp_path / "known_hosts"
    path.chmod(0o644)
    known_hosts.forget(path, ["gpu1"])
    assert (
        path.read_text()
        == f"# mine\ngpu2 {key}\ngpu3 {key}\n@revoked gpu1 {other}\ngpu1 broken line\n"
    )
    assert path.stat().st_mode & 0o777 == 0o644
    assert subprocess.run(
        ["ssh-keygen", "-F", "gpu1", "-f", path], capture_output=True, check=False
    ).returncode in (0, 1)
