"""What another user writes to torch's store is checked, cut and shown escaped."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from launching import TEST_TIMEOUT
from procs import WITH_TORCH, MakeJob, wait_until

from clusterjob.errors import RendezvousError
from clusterjob.node.system import network
from clusterjob.worker.rendezvous import Facts, GroupStore, join, print_notice

WORKER: Any = SimpleNamespace(rank=0, world_size=2)
ANSWER = json.dumps(["\x1b]0;x\x07send money to mallory", "or else"])

# Rank 1 joins after the other user has written the forged answer.
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
    """Write an answer of rank 0 into a job's store, as any client of the port can."""
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    rendezvous_store = dist.PrefixStore("rendezvous", dist.PrefixStore("clusterjob/0", store))
    rendezvous_store.compare_set("go", "", ANSWER)


def test_forged_answer_in_store_fails_the_job_and_is_shown_escaped(make_job: MakeJob) -> None:
    job = make_job()
    job.start(0, "--nproc-per-node", "2", job.script(INIT), python=WITH_TORCH)
    wait_until(job.path("port").exists, TEST_TIMEOUT)
    forge(int(job.path("port").read_text()))
    job.path("forged").touch()
    assert job.wait() == [1]
    assert "\x1b" not in job.log(0, "rank0.err") + job.log(0, "rank1.err") + job.result["reason"]
    assert r"\x1b]0;x\x07send money to mallory" in job.result["reason"]


def test_foreign_text_in_a_list_of_ranks_is_ignored() -> None:
    import torch.distributed as dist

    worker: Any = SimpleNamespace(rank=1, world_size=3)
    memory = dist.HashStore()
    store = GroupStore(memory, worker, served=False, number=0)
    assert store.without("joined") == [0, 1, 2]
    store.note("joined")
    memory.append("clusterjob/0/rendezvous/joined", "x \u00b2 -2 7 ")
    assert store.without("joined") == [0, 2]


@pytest.mark.parametrize("data", ["x", "[]", "{}", '{"rank": "x"}', "9" * 5000])
@pytest.mark.parametrize("name", ["first", "go"])
def test_invalid_value_of_another_program_is_refused(name: str, data: str) -> None:
    import torch.distributed as dist

    store = GroupStore(dist.HashStore(), WORKER, served=False, number=0)
    store.offer(name, data)
    own = Facts(0, "h", 1, world_size=2, job="j", versions="v", gpu="")
    with pytest.raises(RendezvousError, match="holds a value that no process of a job writes"):
        join(store, own, timeout=1)


def test_host_name_of_another_process_is_cut_and_shown_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = Facts(0, "h\x1b[2J\n" + "x" * 1000, 1, world_size=1, job="j", versions="v", gpu="")
    host = Facts.of(facts.data()).host
    assert len(host) == 300
    print_notice(host)
    assert capsys.readouterr().err.startswith("clusterjob: h\\x1b[2J\\n")


def test_store_of_one_node_listens_on_that_machine_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian resolves the host's own name to 127.0.1.1; one node needs no other address."""
    monkeypatch.setattr(
        network, "addresses_of", lambda host: ["127.0.1.1"] if host == "myself" else [host]
    )
    with network.listen_at("myself", 0, backlog=1, alone=True) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"
    with network.listen_at("myself", 0, backlog=1) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
