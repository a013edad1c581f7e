"""Volcengine's MLP_* variables: hosts of two kinds, an index of two kinds, roles, quotes, and tasks
of the MPI kind.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clusterjob.node.environments import detect
from clusterjob.node.environments.topology import Topology
from clusterjob.node.launch import find_node
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import parse
from clusterjob.node.rendezvous import protocol
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Gathering

# As the platform documents them, for worker 2 of 3 with RDMA: hosts are RDMA's addresses, primary
# hosts the VPC's.
NODE = {
    "MLP_ROLE": "WORKER", "MLP_ROLE_INDEX": "2", "MLP_WORKER_NUM": "3", "MLP_WORKER_GPU": "8",
    "MLP_WORKER_CPU": "112", "MLP_WORKER_ALL_HOSTS": "192.168.0.1,192.168.0.2,192.168.0.3",
    "MLP_WORKER_0_HOST": "192.168.0.1", "MLP_WORKER_0_PORT": "2222",
    "MLP_WORKER_1_HOST": "192.168.0.2", "MLP_WORKER_2_HOST": "192.168.0.3",
    "MLP_HOST": "192.168.0.3", "MLP_PRIMARY_HOST": "10.0.0.3",
    "MLP_WORKER_0_PRIMARY_HOST": "10.0.0.1",
    "MLP_WORKER_ALL_PRIMARY_HOSTS": "10.0.0.1,10.0.0.2,10.0.0.3", "MLP_WORKER_RACK_RANK_INDEX": "1",
    "MLP_SSH_PORT": "2200", "MLP_IFNAME": "eth0",
}  # fmt: skip


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in NODE.items() if name not in names}


def conflict(environ: dict[str, str]) -> str:
    finding = detect(environ)
    assert (finding.source, finding.place, len(finding.conflicts)) == ("mlp", None, 1)
    return finding.conflicts[0]


def test_the_primary_host_and_the_index_by_rack_come_first() -> None:
    finding = detect(NODE)
    assert finding.place == Topology(
        3, 1, nproc_per_node=8, master_addr="10.0.0.1", master_port=2222, source="mlp"
    )
    assert finding.evidence == {
        "nnodes": "MLP_WORKER_NUM", "node_rank": "MLP_WORKER_RACK_RANK_INDEX",
        "nproc_per_node": "MLP_WORKER_GPU", "master_addr": "MLP_WORKER_0_PRIMARY_HOST",
        "master_port": "MLP_WORKER_0_PORT",
    }  # fmt: skip
    ignored = {item.variable: item.why for item in finding.ignored}
    assert "RDMA" in ignored["MLP_WORKER_0_HOST"]
    assert "same index" in ignored["MLP_ROLE_INDEX"]


def test_without_them_the_documented_launch_line_s_variables_do() -> None:
    plain = without(
        "MLP_WORKER_RACK_RANK_INDEX", "MLP_WORKER_0_PRIMARY_HOST", "MLP_WORKER_ALL_PRIMARY_HOSTS"
    )
    finding = detect(plain)
    assert finding.place == Topology(
        3, 2, nproc_per_node=8, master_addr="192.168.0.1", master_port=2222, source="mlp"
    )
    assert (finding.evidence["node_rank"], finding.evidence["master_addr"]) == (
        "MLP_ROLE_INDEX",
        "MLP_WORKER_0_HOST",
    )


@pytest.mark.parametrize("quote", ["'", '"'])
def test_values_may_carry_quotes(quote: str) -> None:
    assert (
        detect({name: f"{quote}{value}{quote}" for name, value in NODE.items()}).place
        == detect(NODE).place
    )
    assert "MLP_WORKER_NUM=" in conflict(NODE | {"MLP_WORKER_NUM": f"{quote}3"})


@pytest.mark.parametrize("host", ["[fd00::1]", "fd00::1", "'[fd00::1]'"])
def test_addresses_may_be_of_ipv6(host: str) -> None:
    found = detect(
        NODE
        | {
            "MLP_WORKER_0_PRIMARY_HOST": host,
            "MLP_WORKER_ALL_PRIMARY_HOSTS": "[fd00::1]:22,fd00::2,fd00::3",
        }
    ).place
    assert isinstance(found, Topology)
    assert found.master_addr == "fd00::1"


def test_a_machine_without_gpus_leaves_the_number_of_workers_open() -> None:
    finding = detect(NODE | {"MLP_WORKER_GPU": "0"})
    assert isinstance(finding.place, Topology)
    assert finding.place.nproc_per_node is None
    assert "nproc_per_node" not in finding.evidence


def test_the_role_names_the_variables() -> None:
    chief = {
        name.replace("WORKER", "CHIEF"): value.replace("WORKER", "chief")
        for name, value in NODE.items()
    }
    assert detect(chief).place == detect(NODE).place
    assert "MLP_CHIEF_NUM" in detect(chief).evidence.values()
    assert detect(without("MLP_ROLE")).place == detect(NODE).place
    assert "MLP_ROLE='DRIVER' is none of WORKER, CHIEF, PS" in conflict(
        NODE | {"MLP_ROLE": "driver"}
    )


@pytest.mark.parametrize("role", ["PS", "SERVER", "SCHEDULER", "EVALUATOR"])
def test_whoever_stands_beside_the_workers_does_not_train_alone(role: str) -> None:
    beside = NODE | {
        "MLP_ROLE": role,
        "MLP_ROLE_INDEX": "0",
        f"MLP_{role}_NUM": "1",
        f"MLP_{role}_0_HOST": "10.0.0.9",
    }
    assert f"MLP_ROLE={role}, beside MLP_WORKER_NUM=3" in conflict(beside)
    assert detect(NODE | {f"MLP_{role}_NUM": "1"}).sound  # the workers themselves


@pytest.mark.parametrize(("own", "rack"), [("0", "1"), ("2", "0")])
def test_both_indices_agree_about_node_0(own: str, rack: str) -> None:
    words = conflict(NODE | {"MLP_ROLE_INDEX": own, "MLP_WORKER_RACK_RANK_INDEX": rack})
    assert (
        words
        == f"MLP_ROLE_INDEX={own} and MLP_WORKER_RACK_RANK_INDEX={rack} disagree about who is node 0"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MLP_WORKER_NUM": "three"}, "MLP_WORKER_NUM='three' is not a whole number"),
        ({"MLP_WORKER_RACK_RANK_INDEX": "3"}, "node_rank is 3, outside 0..2"),
        ({"MLP_WORKER_0_PORT": "99999"}, "master_port is 99999"),
        (
            {"MLP_WORKER_0_PRIMARY_HOST": "localhost"},
            "which each of the 3 nodes is itself (master_addr); node 0's own address in the network works",
        ),
        ({"MLP_WORKER_0_PRIMARY_HOST": "a; rm -rf /"}, "is no host"),
        ({"MLP_WORKER_ALL_PRIMARY_HOSTS": "10.0.0.1"}, "lists 1 hosts, MLP_WORKER_NUM is 3"),
        (
            {"MLP_MPI_HOSTS": "10.0.0.1,10.0.0.2,10.0.0.3"},
            "runs its entry command on worker 0 alone, and there are 3 hosts",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_line(change: dict[str, str], words: str) -> None:
    assert words in conflict(NODE | change)


def test_a_task_of_the_mpi_kind_is_told_how_to_fan_out() -> None:
    words = conflict(NODE | {"MLP_MPI_HOSTS": "a,b", "MLP_MPI_HOSTFILE": "/root/mpi_rack_hostfile"})
    assert "--hostfile $MLP_MPI_HOSTFILE" in words
    assert "port 2200" in words
    assert detect(NODE | {"MLP_MPI_HOSTS": "10.0.0.1"}).sound


def test_processes_that_mpirun_starts_there_are_mpirun_s() -> None:
    started = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222",
    }  # fmt: skip
    finding = detect(NODE | {"MLP_MPI_HOSTS": "a,b"} | started)
    assert (finding.source, finding.level, finding.conflicts) == ("openmpi", "worker", ())


def test_nodes_that_use_different_indices_are_refused_when_they_meet(tmp_path: Path) -> None:
    """One node's launch script may have been given the index by rack, another's not: ranks would
    come twice, or trade places.
    """

    def agent(environ: dict[str, str], node_rank: int) -> dict[str, object]:
        counted_by = find_node(environ).evidence["node_rank"]
        return {
            "job": "j", "attempt": 0, "node_rank": node_rank, "nnodes": 3, "nproc": 1,
            "host": f"h{node_rank}", "pid": 7, "counted_by": counted_by,
        }  # fmt: skip

    by_rack, by_role = NODE, without("MLP_WORKER_RACK_RANK_INDEX")

    async def meet() -> str:
        job = JobIdentity(
            "j",
            0,
            token=b"secret",
            ports=[0],
            has_torch=False,
            counted_by="MLP_WORKER_RACK_RANK_INDEX",
        )
        gathering = Gathering(
            3, parse(["x.py"]), job=job, events=EventLog(tmp_path / "events.jsonl")
        )
        gathering.join(agent(by_rack, 0), lambda _message: None)
        gathering.join(agent(by_rack, 1), lambda _message: None)
        with pytest.raises(protocol.Refused) as caught:
            gathering.join(agent(by_role, 2), lambda _message: None)
        return str(caught.value)

    assert asyncio.run(meet()) == (
        "node 2 on h2 (pid 7) is counted by MLP_ROLE_INDEX, node 0 by MLP_WORKER_RACK_RANK_INDEX: all nodes have to use the same index"
    )


@pytest.mark.parametrize(
    ("stale", "names"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, RANK, WORLD_SIZE"),
    ],
)
def test_stale_variables_of_a_process_beside_a_complete_set_are_named(
    stale: dict[str, str], names: str
) -> None:
    finding = detect(NODE | stale)
    assert (finding.source, finding.place) == ("env", None)
    verb = "say" if "," in names else "says"
    assert (
        finding.conflicts[0]
        == f"{names} {verb} that this is a process of a job, and the variables of mlp give a node's place: unset {names}"
    )
    assert detect(without("MLP_WORKER_NUM") | stale).conflicts[0] == (
        "RANK" if "," not in names else "MASTER_ADDR"
    ) + " is not set" + (" (rank)" if "," not in names else " (master_addr)")
    worker = {
        "LOCAL_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert detect(NODE | worker).conflicts == ()  # a launcher's own processes on such a node
