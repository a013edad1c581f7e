"""What known_hosts files say: compared with what OpenSSH's own ssh-keygen finds in the same files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sshworld import require, sh

from clusterjob.remote import known_hosts
from clusterjob.remote.known_hosts import KnownHosts, Standing


@pytest.fixture(autouse=True)
def _ssh() -> None:
    require()


class Key:
    def __init__(self, directory: Path, name: str, kind: str = "ed25519") -> None:
        self.path = directory / name
        sh("ssh-keygen", "-q", "-t", kind, "-N", "", "-f", self.path)
        self.kind, self.text = Path(f"{self.path}.pub").read_text().split()[:2]
        import base64

        self.blob = base64.b64decode(self.text)
        self.fingerprint = sh("ssh-keygen", "-lf", self.path).split()[1]

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


def test_fingerprints_are_ssh_keygens(key: Key) -> None:
    assert known_hosts.fingerprint(key.blob) == key.fingerprint


def test_the_standing_of_a_key(tmp_path: Path, key: Key, other: Key) -> None:
    files = known(
        tmp_path,
        "# comment",
        "",
        f"gpu1,10.0.0.1 {key}",
        f"[gpu2]:2222 {key} a comment",
        f"@revoked * {other}",
        "gpu3 nonsense",
    )
    assert files.standing(["gpu1"], key.blob) == (Standing.KNOWN, f"{tmp_path}/known_hosts:3")
    assert files.standing(["10.0.0.1"], key.blob)[0] is Standing.KNOWN
    assert files.standing(["[gpu2]:2222", "gpu2"], key.blob)[0] is Standing.KNOWN
    assert files.standing(["gpu3"], key.blob)[0] is Standing.UNKNOWN
    assert files.standing(["gpu1"], other.blob)[0] is Standing.REVOKED, "revoked comes before all"
    third = Key(tmp_path, "third", "ecdsa")
    assert files.standing(["gpu1"], third.blob) == (Standing.CHANGED, f"{tmp_path}/known_hosts:3")


def test_a_key_that_is_revoked_is_so_although_it_is_known(tmp_path: Path, key: Key) -> None:
    files = known(tmp_path, f"gpu1 {key}", f"@revoked gpu1 {key}")
    assert files.standing(["gpu1"], key.blob)[0] is Standing.REVOKED


def test_a_host_that_is_known_without_its_port(tmp_path: Path, key: Key, other: Key) -> None:
    files = known(tmp_path, f"gpu1 {key}")
    names = known_hosts.lookup_names("GPU1", 2222, alias="")
    assert names == ["[gpu1]:2222", "gpu1"]
    assert files.standing(names, key.blob)[0] is Standing.KNOWN
    assert files.standing(names, other.blob)[0] is Standing.UNKNOWN, (
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
def test_patterns(tmp_path: Path, key: Key, patterns: str, host: str, found: bool) -> None:
    assert bool(known(tmp_path, f"{patterns} {key}").kinds([host])) is found


def test_recorded_keys_are_found_by_ssh_keygen_and_by_us(
    tmp_path: Path, key: Key, other: Key
) -> None:
    path = tmp_path / "ssh" / "known_hosts"
    known_hosts.record(path, "gpu1", kind=key.kind, blob=key.blob, hashed=False)
    with path.open("a") as stream:
        stream.write(f"gpu0 {other}")  # a last line without an end
    known_hosts.record(path, "[gpu2]:2222", kind=other.kind, blob=other.blob, hashed=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for name, wanted in (("gpu1", key), ("gpu0", other), ("[gpu2]:2222", other)):
        assert wanted.text in sh("ssh-keygen", "-F", name, "-f", path)
        assert KnownHosts([path]).standing([name], wanted.blob)[0] is Standing.KNOWN
    assert "gpu2" not in path.read_text()


def test_what_openssh_has_hashed_is_found(tmp_path: Path, key: Key) -> None:
    known(tmp_path, f"gpu1 {key}")
    sh("ssh-keygen", "-H", "-f", tmp_path / "known_hosts")
    files = KnownHosts([tmp_path / "known_hosts"])
    assert "gpu1" not in (tmp_path / "known_hosts").read_text()
    assert files.standing(["gpu1"], key.blob)[0] is Standing.KNOWN
    assert files.standing(["gpu2"], key.blob)[0] is Standing.UNKNOWN


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, key: Key, other: Key) -> None:
    assert known(tmp_path, f"gpu1 {key}").standing(["gpu1"], key.blob)[0] is Standing.KNOWN
    assert known(tmp_path, f"gpu1 {other}").standing(["gpu1"], key.blob)[0] is Standing.CHANGED
    (tmp_path / "known_hosts").unlink()
    assert (
        KnownHosts([tmp_path / "known_hosts"]).standing(["gpu1"], key.blob)[0] is Standing.UNKNOWN
    )


def test_nothing_is_remembered_in_dev_null(key: Key) -> None:
    known_hosts.record(Path("/dev/null"), "gpu1", kind=key.kind, blob=key.blob, hashed=False)
    assert not KnownHosts([Path("/dev/null")]).kinds(["gpu1"])


def test_a_host_is_forgotten_and_nothing_else(tmp_path: Path, key: Key, other: Key) -> None:
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
