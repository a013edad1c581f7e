"""Another user of the machine who finds torch's store: he does not choose what a rank says."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from launching import PATIENCE, by_hand, finish, script
from procs import WITH_TORCH, Job, wait_until

from clusterjob.errors import GangError
from clusterjob.node import contract
from clusterjob.node.system import network
from clusterjob.worker.rendezvous import Facts
from clusterjob.worker.signed_values import SignedStore

NewJob = Callable[..., Job]
ANSWER = json.dumps(
    {"refused": "\x1b]0;x\x07send money to mallory", "hint": "or else", "time": 0.0, "nodes": []}
)

# Rank 1 comes once the stranger has been there.
INIT = """
    import os, pathlib, time
    from clusterjob import bootstrap
    if os.environ["RANK"] == "0":
        pathlib.Path("port.new").write_text(os.environ["MASTER_PORT"])
        pathlib.Path("port.new").rename("port")
    while os.environ["RANK"] == "1" and not pathlib.Path("forged").exists():
        time.sleep(0.02)
    bootstrap.init(backend="gloo", timeout=60)
    print("formed")
"""


def forge(port: int) -> None:
    """Write into a job's store what its rank 0 would, as anybody may who reaches the port."""
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    corner = dist.PrefixStore("roll", dist.PrefixStore("clusterjob/0", store))
    corner.compare_set("go", "", ANSWER)


def test_the_answer_of_a_stranger_is_not_rank_0_s(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--nproc-per-node", "2", job.script(INIT), python=WITH_TORCH)
    wait_until(job.path("port").exists, PATIENCE)
    forge(int(job.path("port").read_text()))
    job.path("forged").touch()
    assert job.wait() == [1]
    said = job.log(0, "rank0.err") + job.log(0, "rank1.err") + json.dumps(job.result)
    assert "mallory" not in said
    assert "'go' in torch's store was written by no process of this job" in job.result["reason"]


def test_without_a_key_a_stranger_s_text_moves_no_cursor(tmp_path: Path) -> None:
    """Under other launchers nobody has a key: what comes is shown as text."""
    started = by_hand(2, [script(tmp_path, INIT)], tmp_path)
    wait_until((tmp_path / "port").exists, PATIENCE)
    port = int((tmp_path / "port").read_text())
    wait_until(lambda: is_there(port), PATIENCE)
    forge(port)
    (tmp_path / "forged").touch()
    said = [finish(process) for process in started]
    assert all(each.code == 1 for each in said)
    assert any("send money" in each.err for each in said)
    assert "\x1b" not in "".join(each.err for each in said)


def is_there(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Memory:
    """A store of this process's own; torch's is in the tests above."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()

    def get(self, name: str) -> bytes:
        return self.values[name]


def test_a_value_cannot_be_moved_to_another_key_or_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        contract.STORE_KEY, contract.store_key(b"secret", "job", attempt=0, restart=0)
    )
    memory = Memory()
    store = SignedStore(memory, 0)
    store.set("rank0", "hello")
    assert store.get("rank0") == b"hello"
    memory.values["rank1"] = memory.values["rank0"]
    with pytest.raises(GangError, match="'rank1' in torch's store was written by no process"):
        store.get("rank1")
    with pytest.raises(GangError):
        SignedStore(memory, 1).get("rank0")
    monkeypatch.setenv(
        contract.STORE_KEY, contract.store_key(b"secret", "job", attempt=0, restart=1)
    )
    with pytest.raises(GangError):
        SignedStore(memory, 0).get("rank0")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"rank": "x"}', b"\xff", b"9" * 5000])
def test_facts_that_no_process_leaves_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(GangError, match="holds what no process of a job leaves there"):
        Facts.of(data)


def test_a_host_s_name_is_shown_without_what_moves_the_cursor() -> None:
    facts = Facts(
        0,
        "h\x1b[2J\n" + "x" * 1000,
        pid=1,
        boot="b",
        world_size=1,
        job="j",
        versions="v",
        gpu="",
        time=time.time(),
    )
    assert Facts.of(facts.data().encode()).host.startswith("h\\x1b[2J\\n")
    assert len(Facts.of(facts.data().encode()).host) == 300


def test_the_store_of_one_node_is_reached_from_that_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's own name means 127.0.1.1: there is no need to listen on all addresses for it."""
    monkeypatch.setattr(
        network, "addresses_of", lambda host: ["127.0.1.1"] if host == "myself" else [host]
    )
    with network.listen_at("myself", 0, backlog=1, alone=True) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"
    with network.listen_at("myself", 0, backlog=1) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
