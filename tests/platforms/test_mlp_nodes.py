"""Training on nodes that have only a platform's variables.

Each node is a network namespace of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import finish, rank_reports, script, start, with_paddle
from namespaces import Machine, machines, skip_reason

TRAIN = """
    import json
    import os
    import sys
    from pathlib import Path
    import torch
    from clusterjob import bootstrap

    with bootstrap.init(timeout=90) as ctx:
        torch.manual_seed(ctx.rank)
        inputs = torch.randn(64, 4)
        goal = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        model = ctx.wrap(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(30):
            loss = torch.nn.functional.mse_loss(model(inputs), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(ctx.reduce(loss.item()))
        Path(f"rank{ctx.rank}.json").write_text(json.dumps({
            "place": [ctx.local_rank, ctx.world_size, ctx.node_rank, ctx.nnodes],
            "source": ctx.source, "losses": [losses[0], losses[-1]],
            "weights": model.module.weight.tolist(),
            "interface": os.environ["GLOO_SOCKET_IFNAME"], "arguments": sys.argv[1:],
        }))
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    reason = skip_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def four(namespaces: None) -> Iterator[list[Machine]]:
    with machines(4) as nodes:
        yield nodes


def variables(nodes: list[Machine], index: int, gpus: int, *, ipv6: bool = False) -> dict[str, str]:
    """Return the variables that the platform sets on one node."""
    hosts = [machine.address6 if ipv6 else machine.address for machine in nodes]
    own = {
        "MLP_ROLE": "WORKER",
        "MLP_ROLE_INDEX": str(index),
        "MLP_WORKER_NUM": str(len(nodes)),
        "MLP_WORKER_GPU": str(gpus),
    }
    own |= {f"MLP_WORKER_{number}_HOST": f"'{host}'" for number, host in enumerate(hosts)}
    return own | {
        "MLP_WORKER_0_PORT": "2222",
        "MLP_WORKER_ALL_HOSTS": ",".join(hosts),
        "MLP_HOST": hosts[index],
    }


def launch(
    nodes: list[Machine], directory: Path, environs: list[dict[str, str]], *argv: object
) -> list[tuple[int, str]]:
    """Run the entry command on all nodes at once; return the exit codes and outputs."""
    folders = [directory / f"tmp{index}" for index in range(len(nodes))]
    for folder in folders:
        folder.mkdir()
    started = [
        start(machine.command(*argv), directory, environ | {"TMPDIR": str(folder)})
        for machine, environ, folder in zip(nodes, environs, folders, strict=True)
    ]
    ran = [finish(process) for process in started]
    return [(each.code, each.out + each.err) for each in ran]


ENTRY = (sys.executable, "-m", "clusterjob", "launch")


def test_agent_from_an_address_of_no_node_is_refused_and_the_job_runs(
    four: list[Machine], tmp_path: Path
) -> None:
    nodes, foreign = four[:2], four[2]
    environs = [variables(nodes, index, 0) for index in range(2)]
    program = script(tmp_path, "print('ran')")
    options = ("--join-timeout", "4")
    rejected = start(foreign.command(*ENTRY, *options, program), tmp_path, environs[1])
    node_0 = start(nodes[0].command(*ENTRY, program), tmp_path, environs[0])
    refused = finish(rejected)
    assert (refused.code, "ran" in refused.out) == (1, False)
    hosts = f"{nodes[0].address}, {nodes[1].address}"
    why = f"{foreign.address} is no address of this job's nodes: {hosts}; set CLUSTERJOB_TOKEN"
    assert why in refused.err
    assert finish(start(nodes[1].command(*ENTRY, program), tmp_path, environs[1])).code == 0
    ended = finish(node_0, code=0)
    notice = "no CLUSTERJOB_TOKEN: agents join from the nodes that mlp names; this prevents"
    assert ended.err.count(notice) == 1


@pytest.mark.slow
def test_nodes_with_ipv6_addresses_train(four: list[Machine], tmp_path: Path) -> None:
    nodes = four[:2]
    for machine in nodes:  # leave no IPv4 route
        subprocess.run(
            ["ip", "-n", machine.name, "address", "del", f"{machine.address}/24", "dev", "eth0"],
            check=True,
        )
    environs = [variables(nodes, index, 0, ipv6=True) for index in range(2)]
    for code, output in launch(nodes, tmp_path, environs, *ENTRY, script(tmp_path, TRAIN)):
        assert code == 0, output
    first, second = rank_reports(tmp_path, 2)
    assert first["weights"] == second["weights"]


def test_platform_interface_and_addresses_between_nodes_are_used(
    tmp_path: Path, namespaces: None
) -> None:
    with machines(2, "rdma0") as nodes:
        path = with_paddle(tmp_path)
        environs = [
            variables(nodes, index, 0) | {"MLP_IFNAME": name, "PYTHONPATH": path}
            for index, name in enumerate(["rdma0", "missing0"])
        ]
        text = """
            import json, os, pathlib
            rank, names = os.environ["RANK"], ("GLOO_SOCKET_IFNAME", "PADDLE_CURRENT_ENDPOINT")
            report = json.dumps([os.environ[name].partition(":")[0] for name in names])
            pathlib.Path(f"rank{rank}.json").write_text(report)
        """
        for code, output in launch(nodes, tmp_path, environs, *ENTRY, script(tmp_path, text)):
            assert code == 0, output
    assert rank_reports(tmp_path, 2) == [["rdma0", node.address] for node in nodes]
