"""Placement of a node from Volcengine's MLP_* variables.

The tests cover both kinds of hosts and of indices, roles, quoted values and MPI tasks.
"""

from __future__ import annotations

import pytest

from clusterjob.node.environments import this_node
from clusterjob.node.environments.this_node import detect, find_node, node_of
from clusterjob.node.environments.topology import Topology

# Variables of worker 2 of 3 with RDMA, as the platform documents them: hosts are RDMA addresses,
# primary hosts are addresses in the VPC.
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
    assert (finding.source, finding.placement, len(finding.conflicts)) == ("mlp", None, 1)
    return finding.conflicts[0]


def test_primary_host_and_index_by_rack_are_preferred() -> None:
    finding = detect(NODE)
    assert finding.placement == Topology(
        3, 1, nproc_per_node=8, master_addr="10.0.0.1", master_port=2222, source="mlp"
    )
    assert finding.evidence == {
        "nnodes": "MLP_WORKER_NUM",
        "node_rank": "MLP_WORKER_RACK_RANK_INDEX",
        "nproc_per_node": "MLP_WORKER_GPU",
        "master_addr": "MLP_WORKER_0_PRIMARY_HOST",
        "master_port": "MLP_WORKER_0_PORT",
    }
    assert "RDMA" in finding.ignored["MLP_WORKER_0_HOST"]
    assert "same index" in finding.ignored["MLP_ROLE_INDEX"]


def test_host_and_role_index_are_used_without_primary_host_and_rack() -> None:
    plain = without(
        "MLP_WORKER_RACK_RANK_INDEX", "MLP_WORKER_0_PRIMARY_HOST", "MLP_WORKER_ALL_PRIMARY_HOSTS"
    )
    finding = detect(plain)
    assert finding.placement == Topology(
        3, 2, nproc_per_node=8, master_addr="192.168.0.1", master_port=2222, source="mlp"
    )
    assert (finding.evidence["node_rank"], finding.evidence["master_addr"]) == (
        "MLP_ROLE_INDEX",
        "MLP_WORKER_0_HOST",
    )


@pytest.mark.parametrize("quote", ["'", '"'])
def test_quotes_around_values_are_removed(quote: str) -> None:
    assert (
        detect({name: f"{quote}{value}{quote}" for name, value in NODE.items()}).placement
        == detect(NODE).placement
    )
    assert "MLP_WORKER_NUM=" in conflict(NODE | {"MLP_WORKER_NUM": f"{quote}3"})


@pytest.mark.parametrize("host", ["[fd00::1]", "fd00::1", "'[fd00::1]'"])
def test_ipv6_address_is_accepted(host: str) -> None:
    found = detect(
        NODE
        | {
            "MLP_WORKER_0_PRIMARY_HOST": host,
            "MLP_WORKER_ALL_PRIMARY_HOSTS": "[fd00::1]:22,fd00::2,fd00::3",
        }
    ).placement
    assert isinstance(found, Topology)
    assert found.master_addr == "fd00::1"


def test_machine_without_gpus_sets_no_worker_count() -> None:
    finding = detect(NODE | {"MLP_WORKER_GPU": "0"})
    assert isinstance(finding.placement, Topology)
    assert finding.placement.nproc_per_node is None
    assert "nproc_per_node" not in finding.evidence


def test_role_selects_names_of_variables() -> None:
    chief = {
        name.replace("WORKER", "CHIEF"): value.replace("WORKER", "chief")
        for name, value in NODE.items()
    }
    assert detect(chief).placement == detect(NODE).placement
    assert "MLP_CHIEF_NUM" in detect(chief).evidence.values()
    assert detect(without("MLP_ROLE")).placement == detect(NODE).placement
    assert "MLP_ROLE='DRIVER' is none of WORKER, CHIEF, PS" in conflict(
        NODE | {"MLP_ROLE": "driver"}
    )


@pytest.mark.parametrize("role", ["PS", "SERVER", "SCHEDULER", "EVALUATOR"])
def test_role_beside_workers_is_refused(role: str) -> None:
    beside = NODE | {
        "MLP_ROLE": role,
        "MLP_ROLE_INDEX": "0",
        f"MLP_{role}_NUM": "1",
        f"MLP_{role}_0_HOST": "10.0.0.9",
    }
    assert f"MLP_ROLE={role}, but MLP_WORKER_NUM=3" in conflict(beside)
    assert not detect(NODE | {f"MLP_{role}_NUM": "1"}).conflicts  # a worker beside that role


@pytest.mark.parametrize(("own", "rack"), [("0", "1"), ("2", "0")])
def test_indices_that_disagree_about_node_0_are_refused(own: str, rack: str) -> None:
    message = conflict(NODE | {"MLP_ROLE_INDEX": own, "MLP_WORKER_RACK_RANK_INDEX": rack})
    assert (
        message
        == f"MLP_ROLE_INDEX={own} and MLP_WORKER_RACK_RANK_INDEX={rack} disagree about node 0"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MLP_WORKER_NUM": "three"}, "MLP_WORKER_NUM='three' is not a whole number"),
        ({"MLP_WORKER_RACK_RANK_INDEX": "3"}, "node_rank is 3, outside 0..2"),
        ({"MLP_WORKER_0_PORT": "99999"}, "master_port is 99999"),
        (
            {"MLP_WORKER_0_PRIMARY_HOST": "localhost"},
            (
                "a loopback address, but there are 3 nodes (master_addr): "
                "set node 0's address in the network"
            ),
        ),
        ({"MLP_WORKER_0_PRIMARY_HOST": "a; rm -rf /"}, "is not a host"),
        (
            {"MLP_MPI_HOSTS": "10.0.0.1,10.0.0.2,10.0.0.3"},
            "runs its entry command on worker 0 alone, but there are 3 hosts",
        ),
    ],
)
def test_invalid_variable_gives_one_conflict(change: dict[str, str], message: str) -> None:
    assert message in conflict(NODE | change)


def test_mpi_task_is_refused_with_options_of_mpirun() -> None:
    message = conflict(
        NODE | {"MLP_MPI_HOSTS": "a,b", "MLP_MPI_HOSTFILE": "/root/mpi_rack_hostfile"}
    )
    assert "--hostfile $MLP_MPI_HOSTFILE" in message
    assert "port 2200" in message
    assert not detect(NODE | {"MLP_MPI_HOSTS": "10.0.0.1"}).conflicts


def test_processes_of_mpirun_are_detected_as_openmpi() -> None:
    started = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222",
    }  # fmt: skip
    finding = detect(NODE | {"MLP_MPI_HOSTS": "a,b"} | started)
    assert (finding.source, finding.level, finding.conflicts) == ("openmpi", "worker", [])


def test_peers_are_all_hosts_of_the_role_or_none() -> None:
    def peers(environ: dict[str, str]) -> set[str]:
        return set(this_node.peers(node_of(find_node(environ)), environ))

    rdma, vpc = ({f"{net}.{node}" for node in (1, 2, 3)} for net in ("192.168.0", "10.0.0"))
    lists = ("MLP_WORKER_ALL_HOSTS", "MLP_WORKER_ALL_PRIMARY_HOSTS")
    assert peers(NODE) == rdma | vpc
    assert peers(without(*lists)) == rdma | {"10.0.0.1"}
    assert peers(without(*lists, "MLP_WORKER_2_HOST")) == set()
    assert peers({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}) == set()
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\nb"}
    assert peers(sky) == {"10.0.0.1", "b"}


@pytest.mark.parametrize(
    ("stale", "names"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, RANK, WORLD_SIZE"),
    ],
)
def test_stale_process_variables_beside_variables_of_node_are_named(
    stale: dict[str, str], names: str
) -> None:
    finding = detect(NODE | stale)
    assert (finding.source, finding.placement) == ("env", None)
    assert finding.conflicts[0] == (
        f"{names}: of one process of a job, "
        f"but the variables of mlp are those of a node: unset {names}"
    )
    assert detect(without("MLP_WORKER_NUM") | stale).conflicts[0] == (
        "MASTER_PORT is not set (master_port)" if "," in names else "RANK is not set (rank)"
    )
    worker = {
        "LOCAL_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert detect(NODE | worker).conflicts == []  # processes that a launcher starts on such a node
