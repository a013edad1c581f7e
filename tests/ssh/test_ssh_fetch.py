"""`clusterjob fetch` and `clusterjob hosts` with real hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ssh_network import SshNetwork
from sshsite import Site, close_connections
from verdicts import wait_for_verdict

from clusterjob.core import jobs
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError
from clusterjob.node.verdict import JobState

WRITER = """
    import os, pathlib
    rank = os.environ["RANK"]
    runs = pathlib.Path("runs")
    runs.mkdir(exist_ok=True)
    (runs / f"rank{rank}.txt").write_text(rank)
    (runs / "large.bin").write_bytes(bytes(range(256)) * 40000)
    (runs / "link").symlink_to("large.bin")
    (runs / "outside").symlink_to("/etc/passwd")
"""


@pytest.fixture
def record(site: Site) -> Record:
    record = site.submit(WRITER)
    assert wait_for_verdict(record).state is JobState.SUCCEEDED
    return record


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "results"


def fetch(
    record: Record,
    target: Path,
    *paths: str,
    nodes: tuple[int, ...] | None = (0,),
    agree: bool = False,
) -> Any:
    return jobs.fetch(
        record, paths or ["runs"], target=target, nodes=nodes, may_replace=lambda _: agree
    )


def test_fetch_copies_results_of_rank_0_or_of_all_nodes_in_workdir(
    record: Record, target: Path
) -> None:
    (done,) = fetch(record, target)
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*")) == [
        "runs",
        "runs/large.bin",
        "runs/link",
        "runs/rank0.txt",
    ]
    assert (target / "runs" / "large.bin").read_bytes() == bytes(range(256)) * 40000
    assert sorted(done.written) == ["runs/large.bin", "runs/link", "runs/rank0.txt"]
    assert done.passed_over == ["runs/outside: a link to /etc/passwd, which is outside"]
    with_nodes = target.with_name("all")
    fetch(record, with_nodes, "runs/", nodes=None)
    assert (with_nodes / "node0" / "runs" / "rank0.txt").read_text() == "0"
    assert (with_nodes / "node1" / "runs" / "rank1.txt").read_text() == "1"
    for path in ("nothing", "../agents", "/etc/passwd", "runs/../../token"):
        with pytest.raises(ClusterJobError, match="gpu1: there is no "):
            fetch(record, target.with_name("refused"), path)
    assert not target.with_name("refused").exists()


def test_fetch_command_reports_written_and_kept_files(
    site: Site, record: Record, target: Path
) -> None:
    close_connections()
    for expected, text in ((0, "3 written, 0 unchanged"), (0, "0 written, 3 unchanged")):
        code, out, err = site.run("fetch", record.job_id, "runs/", "--to", str(target))
        assert (code, out) == (expected, "")
        assert text in err
    (target / "runs" / "rank0.txt").write_text("mine")
    _, _, err = site.run("fetch", record.job_id, "runs/", "--to", str(target), code=1)
    assert "runs/rank0.txt not replaced: it has changed here" in err
    for option, value in (("--max-files", "1"), ("--max-size", "1K")):
        _, _, err = site.run(
            "fetch", record.job_id, "--to", str(target.with_name("new")), option, value, code=1
        )
        assert option in err


def test_unchanged_code_is_not_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterjob.remote.session import Session

    asked: list[str] = []
    original = Session.ask

    def note(self: Session, call: str, **more: Any) -> Any:
        asked.append(call)
        return original(self, call, **more)

    monkeypatch.setattr(Session, "ask", note)
    for expected in (True, False):
        asked.clear()
        wait_for_verdict(site.submit("print(1)"))
        assert ("receive" in asked) is expected


# -- hosts ---------------------------------------------------------------------------------------


def trust(site: Site, host: str, *more: str) -> tuple[int, str, str]:
    option = ("--set", f"ssh_config={site.ssh_network.config}")
    return site.run(
        "hosts",
        "trust",
        host,
        *option,
        "--fingerprint",
        site.ssh_network.hosts[host].fingerprint,
        *more,
    )


def test_hosts_command_shows_hosts_with_their_errors(site: Site) -> None:
    option = ("--set", f"ssh_config={site.ssh_network.config}")
    code, out, err = site.run(
        "hosts", "--hosts", "gpu1,nowhere.invalid", *option, "--python", site.python, "--json"
    )
    assert code == 1, err
    first, second = json.loads(out)["hosts"]
    assert (first["host"], first["address"], first["name"]) == ("gpu1", "root@10.77.0.1:22", "gpu1")
    assert first["error"].startswith("no torch")
    assert first["free"] > 0
    assert "unknown host" in second["error"]
    code, out, _ = site.run("hosts", "--hosts", "gpu1", *option, "--python", site.python)
    assert code == 1
    assert "gpu1  root@10.77.0.1:22" in out
    code, _, err = site.run("hosts", *option)
    assert (code, "there are no hosts" in err) == (2, True)


def test_only_confirmed_host_key_is_recorded_and_replaced(site: Site) -> None:
    network: SshNetwork = site.ssh_network
    known, own = network.known_hosts, f"10.77.0.1 {network.hosts['gpu1'].public_key}\n"
    other = f"10.77.0.1 {network.hosts['gpu2'].public_key}\n"
    wrong = ("--fingerprint", network.hosts["gpu2"].fingerprint)
    for before, more, code, said, after in (
        ("# mine\n", wrong, 1, "this may be another machine; do not trust it", "# mine\n"),
        ("# mine\n", (), 0, network.hosts["gpu1"].fingerprint, f"# mine\n{own}"),
        (own, (), 0, "already recorded", own),
        (other, (), 1, "--replace", other),
        (other, ("--replace",), 0, "", own),
        (f"@revoked * {own[10:]}", (), 1, "is revoked", f"@revoked * {own[10:]}"),
        (f"@revoked * {own[10:]}", ("--replace",), 1, "is revoked", f"@revoked * {own[10:]}"),
    ):
        known.write_text(before)
        found, out, err = trust(site, "gpu1", *more)
        assert (found, out, said in err, known.read_text()) == (code, "", True, after), err


def test_host_behind_bastion_is_trusted_after_bastion(site: Site) -> None:
    ssh_network: SshNetwork = site.ssh_network
    ssh_network.known_hosts.write_text("")
    code, _, err = trust(site, "inner1")
    assert code == 1
    assert "bastion: its key is unknown" in err
    assert trust(site, "bastion")[0] == 0
    assert trust(site, "inner1")[0] == 0
    assert (
        f"10.78.0.1 {ssh_network.hosts['inner1'].public_key}" in ssh_network.known_hosts.read_text()
    )
