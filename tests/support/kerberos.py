"""A real Kerberos realm for tests: MIT's KDC on a loopback address of the client's network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from procs import PATH, checked_output, missing_programs, wait_until

REALM = "CLUSTER.TEST"
_PORT = 8888
_PASSWORD = "realm"
_CONFIG = """[libdefaults]
default_realm = {realm}
dns_canonicalize_hostname = false
dns_lookup_kdc = false
rdns = false
default_keytab_name = FILE:{directory}/keytab
[realms]
{realm} = {{
  kdc = 127.0.0.1:{port}
}}
"""
_KDC_CONFIG = """[kdcdefaults]
kdc_listen = 127.0.0.1:{port}
kdc_tcp_listen = 127.0.0.1:{port}
[realms]
{realm} = {{
  database_name = {directory}/principal
  key_stash_file = {directory}/stash
  acl_file = {directory}/acl
}}
[logging]
kdc = FILE:{directory}/kdc.log
"""


def skip_reason() -> str:
    """Return why no KDC can run on this machine; empty if one can."""
    return missing_programs("krb5kdc", "kdb5_util", "kadmin.local", "kinit", "klist")


@dataclass
class Realm:
    """A running realm; `config` is its krb5.conf, and `keytab` has the keys of its hosts."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "krb5.conf"

    def run(self, *argv: object, given: str = "") -> str:
        """Run a command of Kerberos; fail the test if it fails."""
        return checked_output(*argv, input=given, env=os.environ | self.variables())

    def variables(self) -> dict[str, str]:
        return {
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(self.directory / "kdc.conf"),
        }

    def log_in(self, cache: Path) -> None:
        """Get a ticket of root into a cache."""
        self.run("kinit", "-c", f"FILE:{cache}", f"root@{REALM}", given=f"{_PASSWORD}\n")


@contextlib.contextmanager
def realm_in(directory: Path, hosts: tuple[str, ...]) -> Iterator[Realm]:
    """Run a KDC with the principals of root and of these hosts."""
    directory.mkdir()
    realm = Realm(directory)
    values = {"realm": REALM, "directory": directory, "port": _PORT}
    realm.config.write_text(_CONFIG.format(**values))
    (directory / "kdc.conf").write_text(_KDC_CONFIG.format(**values))
    (directory / "acl").touch()
    realm.run("kdb5_util", "create", "-s", "-r", REALM, "-P", _PASSWORD)
    queries = [f"addprinc -pw {_PASSWORD} root"]
    for host in hosts:
        queries += [f"addprinc -randkey host/{host}", f"ktadd -k {directory}/keytab host/{host}"]
    realm.run("kadmin.local", "-r", REALM, given="\n".join(queries) + "\n")
    kdc = subprocess.Popen(
        [shutil.which("krb5kdc", path=PATH) or "krb5kdc", "-n", "-r", REALM],
        env=os.environ | realm.variables(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(_answers, 20, "the KDC")
        yield realm
    finally:
        kdc.terminate()
        kdc.wait()


def _answers() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", _PORT)) == 0
