"""`clusterjob doctor` with real hosts and sshd servers: usable hosts and each problem."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doctoring import Diagnosis, doctor, light_torch
from launching import executable
from ssh_network import SshHost
from sshsite import Site


class HostDoctor:
    """Run doctor for hosts whose interpreter finds a fake torch, which imports fast."""

    def __init__(self, site: Site) -> None:
        self.site = site
        for name in ("gpu1", "gpu2", "gpu3"):
            self.torch(name, "2.9.0")

    def torch(self, host: str, version: str) -> Path:
        library = self.site.ssh_network.hosts[host].home / "lib"
        subprocess.run(["rm", "-rf", library], check=True)
        return light_torch(library, version)

    def __call__(self, *arguments: str, **flags: Any) -> Diagnosis:
        flags = {
            "setup": ['export PYTHONPATH="$HOME/lib"'],
            **flags,
            "set": {"need_torch": "true", **flags.get("set", {})},
        }
        return doctor(*self.site.options(**flags), *arguments, cwd=self.site.directory)


@pytest.fixture
def diagnose(site: Site) -> Iterator[HostDoctor]:
    made = HostDoctor(site)
    yield made
    for name in ("gpu1", "gpu2", "gpu3"):
        subprocess.run(["rm", "-rf", site.ssh_network.hosts[name].home / "lib"], check=True)


def test_usable_hosts_pass_all_checks(diagnose: HostDoctor) -> None:
    found = diagnose(hosts="gpu[1-3]", nproc_per_node=2)
    assert found.fit
    assert [check["state"] for check in found.checks] == ["ok"] * len(found.checks), found
    assert found.message("job") == "3 nodes with 2 workers each"
    assert (
        found.message("reached")
        == "gpu1 (root@10.77.0.1:22), gpu2 (root@10.77.0.2:22), gpu3 (root@10.77.0.3:22)"
    )
    assert found.message("machines") == "gpu1 is gpu1, gpu2 is gpu2, gpu3 is gpu3"
    assert found.message("torch") == "2.9.0 for the CPU only, with gloo, on all 3 hosts"
    assert found.message("versions") == "the same on all hosts"
    for host in diagnose.site.ssh_network.hosts.values():
        kept = host.home / ".clusterjob" / "jobs"
        assert not kept.is_dir() or not list(kept.iterdir()), "no job was begun"


def test_unreachable_hosts_fail_check_reached_and_others_are_checked(diagnose: HostDoctor) -> None:
    network = diagnose.site.ssh_network
    network.write_config("Host closed\n  HostName 10.77.0.1\n  Port 9\n")
    network.known_hosts.write_text(
        network.known_hosts.read_text().replace("10.77.0.2 ", "10.9.9.9 ")
    )
    found = diagnose(hosts="gpu1,closed,gpu2,gpu3")
    assert found.failed == ["reached"]
    closed, unknown, fit = found.message("reached").splitlines()
    assert closed.startswith("closed: connection refused")
    assert unknown.startswith("gpu2: its key is unknown")
    assert fit == "gpu1 (root@10.77.0.1:22), gpu3 (root@10.77.0.3:22)"
    assert "hosts trust" in found.hints("reached")
    away = "closed, gpu2: not checked: it needs 'reached'"
    assert [found.message(name).splitlines()[-1] for name in ("disks", "clock")] == [away] * 2
    assert "gpu1, gpu3: 2.9.0" in found.message("torch")


# -- checks on a host ----------------------------------------------------------------------------


def test_problems_of_hosts_fail_their_checks(diagnose: HostDoctor, full_disk: SshHost) -> None:
    """One machine twice, a full disk, and an interpreter that is nowhere."""
    diagnose.site.ssh_network.write_config(
        "Host other\n  HostName 10.77.0.1\n  HostKeyAlias 10.77.0.1\n"
    )
    found = diagnose(hosts="gpu1,gpu2,other", python="/nowhere/python")
    assert set(found.failed) == {"machines", "disks", "interpreter"}
    assert found.message("machines").splitlines()[0] == "other: it is the same machine as gpu1"
    assert "gpu2: disk full: " in found.message("disks")
    assert "there is no interpreter /nowhere/python" in found.message("interpreter")
    assert found.state("torch") == "unknown"


def test_failed_setup_line_is_error_only_without_sync(diagnose: HostDoctor) -> None:
    """A setup line may need the code, which doctor does not send; with --no-sync, hosts have it."""
    found = diagnose(setup=["source code/env.sh"])
    assert found.state("interpreter") == "unknown"
    assert "a setup line failed: source code/env.sh" in found.message("interpreter")
    assert "code, which is not sent yet" in found.message("interpreter")
    assert diagnose("--no-sync", setup=["source code/env.sh"]).failed == ["interpreter"]


def test_different_torch_versions_fail_and_builds_warn(diagnose: HostDoctor) -> None:
    diagnose.torch("gpu2", "2.8.1")
    found = diagnose(hosts="gpu[1-3]")
    assert found.failed == ["versions"]
    assert found.message("versions") == "torch differs: 2.9.0 on gpu1, gpu3; 2.8.1 on gpu2"
    diagnose.torch("gpu2", "2.9.0+cpu")
    builds = diagnose(hosts="gpu[1-3]")
    assert builds.fit
    assert builds.state("versions") == "warning"


def test_wrong_clock_is_warning(diagnose: HostDoctor, tmp_path: Path) -> None:
    """Namespaces share the kernel's clock, so the interpreter subtracts an hour."""
    late = tmp_path / "late-python"
    shift = (
        "import sys, time; real = time.time; time.time = lambda: real() - 3600; exec(sys.argv[1])"
    )
    executable(
        late,
        f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} -S "$@"\n'
        f'shift; exec {sys.executable} -S -c {shlex.quote(shift)} "$@"\n',
    )
    found = diagnose(python=str(late))
    assert found.fit
    assert found.state("clock") == "warning"
    assert found.message("clock") == "gpu1, gpu2: about 60 min behind this machine's"
