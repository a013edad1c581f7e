"""Address of node 0 when its name does not resolve: from Slurm, or an error in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import executable

from clusterjob.errors import PlacementError
from clusterjob.node.environments import slurm_env, this_node
from clusterjob.node.environments.topology import Topology

NOWHERE = "no-such-node.invalid"
NODE = Topology(2, 1, nproc_per_node=None, master_addr=NOWHERE, master_port=None, source="slurm")


@pytest.fixture
def no_scontrol(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path)}


@pytest.fixture
def scontrol(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an scontrol that writes its arguments into the file `asked`."""
    executable(
        tmp_path / "scontrol",
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
        "echo 'NodeName=x Arch=x86_64 NodeAddr=192.0.2.9 NodeHostName=y'\n"
        "case $4 in *[*) echo 'NodeName=y NodeAddr=192.0.2.10';; esac\n",
    )
    return {"PATH": f"{tmp_path}:/bin:/usr/bin"}


@pytest.mark.parametrize(
    "change",
    [
        {"master_addr": "127.0.0.1"},
        {"master_addr": "192.0.2.1"},
        {"master_addr": "localhost"},
        {"master_addr": "::1"},
        {"source": "mlp"},
    ],
    ids=str,
)
def test_address_that_resolves_or_is_of_another_platform_is_kept(
    change: dict[str, Any], no_scontrol: dict[str, str]
) -> None:
    node = replace(NODE, **change)
    assert slurm_env.resolve_master_address(node, no_scontrol) is node


def test_address_of_single_node_is_loopback(no_scontrol: dict[str, str]) -> None:
    node = replace(NODE, nnodes=1, node_rank=0)
    assert slurm_env.resolve_master_address(node, no_scontrol).master_addr == "127.0.0.1"


def test_unresolvable_name_is_refused_without_scontrol(no_scontrol: dict[str, str]) -> None:
    with pytest.raises(
        PlacementError, match=f"node 0 is {NOWHERE}, which does not resolve here"
    ) as caught:
        slurm_env.resolve_master_address(NODE, no_scontrol)
    assert "\n" not in caught.value.message


def test_scontrol_gives_address_and_never_gets_name_that_is_option(
    tmp_path: Path, scontrol: dict[str, str]
) -> None:
    assert slurm_env.resolve_master_address(NODE, scontrol).master_addr == "192.0.2.9"
    with pytest.raises(PlacementError):
        slurm_env.resolve_master_address(replace(NODE, master_addr="-M.invalid"), scontrol)
    assert (tmp_path / "asked").read_text() == f"--oneliner show node {NOWHERE}\n"


@pytest.mark.parametrize(
    ("nodes", "peers"),
    [
        ("localhost,other", ["localhost", "other"]),
        ("n[0-1].invalid", ["192.0.2.9", "192.0.2.10"]),
    ],
)
def test_peers_of_a_step_are_its_nodes_or_their_addresses_in_slurm(
    scontrol: dict[str, str], nodes: str, peers: list[str]
) -> None:
    assert this_node.peers(NODE, scontrol | {"SLURM_STEP_NODELIST": nodes}) == peers
