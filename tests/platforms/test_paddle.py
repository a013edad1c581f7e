"""PaddlePaddle scripts under clusterjob's agents: variables, held ports and real training."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, rank_reports, run, script, with_paddle
from namespaces import machines, skip_reason
from procs import Job

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import worker_variables
from clusterjob.node.environments.this_node import detect

VENV = ROOT / ".venv-paddle"
LOCAL = [sys.executable, "-m", "clusterjob", "run", "--cluster", "local"]


def test_held_port_can_only_be_bound_with_so_reuseaddr() -> None:
    held = worker_variables.hold_ports(3)
    ports = [holder.getsockname()[1] for holder in held]
    try:
        assert len(set(ports)) == 3
        with socket.socket() as server, socket.socket() as client, socket.socket() as without_reuse:
            with pytest.raises(ConnectionRefusedError):
                client.connect(("127.0.0.1", ports[0]))
            with pytest.raises(OSError, match="in use"):
                without_reuse.bind(("127.0.0.1", ports[0]))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", ports[0]))
            server.listen()
    finally:
        for holder in held:
            holder.close()


def test_held_ports_are_not_given_out_for_port_0(tmp_path: Path) -> None:
    """Test in a network namespace with six ephemeral ports, four of them held."""
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    text = """
        import socket
        from pathlib import Path
        from clusterjob.node.environments.worker_variables import hold_ports
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40005")
        holders, others = hold_ports(4), []
        try:
            while True:
                other = socket.socket()
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                other.listen()
                others.append(other)
        except OSError:
            pass
        held, ports = ([each.getsockname()[1] for each in them] for them in (holders, others))
        assert len(set(ports) | set(held)) == 6, (ports, held)
        assert not set(ports) & set(held), (ports, held)
        assert hold_ports(1) == []  # no port is left
    """
    with machines(1) as [machine]:
        ran = run(machine.command(sys.executable, script(tmp_path, text)), tmp_path)
    assert ran.code == 0, ran.err


def node_world(node_rank: int, sizes: list[int], gpus: int = 0) -> World:
    endpoints = [
        [f"10.0.0.{node}:{4000 + local}" for local in range(size)]
        for node, size in enumerate(sizes)
    ]
    return World(
        0,
        "10.0.0.0",
        master_port=29500,
        agent_store=True,
        node_rank=node_rank,
        nnodes=len(sizes),
        nproc=sizes[node_rank],
        first_rank=sum(sizes[:node_rank]),
        world_size=sum(sizes),
        gpus=gpus,
        endpoints_master="10.0.0.0:5000",
        endpoints=worker_variables.endpoint_list([item for node in endpoints for item in node]),
        own_endpoints=",".join(endpoints[node_rank]),
    )


def variables_of(of: World, local_rank: int) -> dict[str, str]:
    common = contract.worker_variables(of, local_rank, job_id="job", max_restarts=0)
    return common | worker_variables.paddle_variables(of, local_rank)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rank_assignment_is_the_same_for_torch_and_paddle(sizes: list[int]) -> None:
    for node_rank, size in enumerate(sizes):
        for local_rank in range(size):
            variables = variables_of(node_world(node_rank, sizes), local_rank)
            assert variables.keys() <= set(worker_variables.LAUNCH_VARIABLES)
            found = detect(variables)
            assert (found.source, found.conflicts) == ("torchrun", [])
            for torch, paddle in (
                ("RANK", "TRAINER_ID"), ("WORLD_SIZE", "TRAINERS_NUM"),
                ("LOCAL_RANK", "RANK_IN_NODE"), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
            ):  # fmt: skip
                assert variables[torch] == variables[f"PADDLE_{paddle}"]


def test_worker_gets_one_gpu_of_a_node_with_gpus() -> None:
    chosen = [
        variables_of(node_world(0, [4], gpus=2), local)["FLAGS_selected_gpus"] for local in range(4)
    ]
    assert chosen == ["0", "1", "0", "1"]
    assert "FLAGS_selected_gpus" not in variables_of(node_world(0, [4]), 0)


def test_endpoint_list_too_long_for_environment_is_left_out() -> None:
    assert worker_variables.endpoint_list(["a:1", "b:2"]) == "a:1,b:2"
    assert len(worker_variables.endpoint_list(["10.200.200.200:50000"] * 4500)) > 90_000
    assert worker_variables.endpoint_list(["10.200.200.200:50000"] * 6500) == ""
    variables = variables_of(node_world(0, [9000]), 3)
    assert "PADDLE_TRAINER_ENDPOINTS" not in variables
    assert (variables["PADDLE_MASTER"], variables["PADDLE_CURRENT_ENDPOINT"]) == (
        "10.0.0.0:5000",
        "10.0.0.0:4003",
    )


SHOW = """
    import json, os, pathlib
    from clusterjob.node.environments.this_node import detect, look_up
    found = detect(look_up(os.environ))
    own = {name: value for name, value in os.environ.items() if name.startswith("PADDLE_")}
    report = json.dumps([own, found.source, list(found.conflicts)])
    pathlib.Path(f"rank{os.environ['RANK']}.json").write_text(report)
"""


def test_endpoint_list_is_sent_only_to_nodes_with_paddle(
    make_job: Callable[..., Job],
) -> None:
    """The list grows with the job, and each node would receive it."""
    job = make_job(2)
    script = job.script(
        "import os; print('PADDLE_MASTER' in os.environ, 'PADDLE_TRAINER_ENDPOINTS' in os.environ)"
    )
    job.start(0, script)
    job.start(1, "--", sys.executable, "-S", script)
    assert job.wait() == [0, 0]
    assert [job.log(node, f"rank{node}.out") for node in (0, 1)] == ["True False\n", "True True\n"]


def test_workers_of_two_nodes_get_endpoints_without_conflict(tmp_path: Path) -> None:
    script(tmp_path, SHOW)
    inherited = {
        "PADDLE_MASTER": "elsewhere:1",
        "PADDLE_TRAINER_ID": "7",
        "CLUSTERJOB_HOME": str(tmp_path / "home"),
        "PYTHONPATH": with_paddle(tmp_path),
    }
    run([*LOCAL, "--nodes", "2", "--nproc-per-node", "2", "train.py"], tmp_path, inherited, code=0)
    ranks = rank_reports(tmp_path, 4)
    endpoints = ranks[0][0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len({*endpoints, ranks[0][0]["PADDLE_MASTER"]}) == 5
    assert all(item.startswith("127.0.0.1:") for item in endpoints)
    for number, (own, source, conflicts) in enumerate(ranks):
        assert (source, conflicts) == ("clusterjob", [])
        assert own["PADDLE_CURRENT_ENDPOINT"] == endpoints[number]
        assert [
            own[f"PADDLE_{name}"]
            for name in ("TRAINER_ID", "TRAINERS_NUM", "RANK_IN_NODE", "LOCAL_SIZE", "NNODES")
        ] == [str(number), "4", str(number % 2), "2", "2"]
        for name in ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"):
            assert own[name] == ranks[0][0][name]


# -- training with PaddlePaddle --------------------------------------------------------------------

TRAIN = """
    import json
    import os
    from pathlib import Path
    import paddle
    import paddle.distributed as dist
    from clusterjob.node.environments.this_node import detect, look_up

    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(1)
    model = paddle.DataParallel(paddle.nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    paddle.seed(100 + rank)
    inputs = paddle.randn([64, 4])
    goal = paddle.matmul(inputs, paddle.to_tensor([[1.0], [-2.0], [3.0], [0.5]]))
    own, losses = [], []
    for _ in range(20):
        loss = paddle.nn.functional.mse_loss(model(inputs), goal)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        own.append(float(loss))
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    found = detect(look_up(os.environ))
    place = found.check().placement
    Path(f"rank{rank}.json").write_text(json.dumps({
        "losses": losses, "own": own, "world": dist.get_world_size(),
        "weights": model.state_dict()["weight"].numpy().tolist(), "source": found.source,
        "place": [place.rank, place.local_rank, place.world_size, place.local_world_size],
        "master": f"{place.topology.master_addr}:{place.topology.master_port}",
        "endpoints_master": os.environ["PADDLE_MASTER"],
    }))
"""


@pytest.fixture
def python() -> str:
    """Return the interpreter of the virtual environment that has PaddlePaddle."""
    if (VENV / "why-not").exists():
        pytest.skip((VENV / "why-not").read_text().strip())
    if not (VENV / "ready").exists():
        pytest.skip("PaddlePaddle is not installed: tools/paddle.sh does that")
    return str(VENV / "bin" / "python")


def check_training(directory: Path, per_node: int) -> None:
    ranks = rank_reports(directory, 2)
    for number, rank in enumerate(ranks):
        assert (rank["world"], rank["source"]) == (2, "clusterjob")
        assert rank["place"] == [number, number % per_node, 2, per_node]
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["losses"][-1] < 0.1 * rank["losses"][0]
    assert ranks[0]["own"] != ranks[1]["own"]  # each rank trains on its own data


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "nproc", "restarts"), [(1, 2, 1), (2, 1, 0)])
def test_paddle_script_trains_on_two_ranks_and_after_a_restart(
    tmp_path: Path, python: str, nodes: int, nproc: int, restarts: int
) -> None:
    again = f"""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < "{restarts}":
        dist.barrier()
        raise SystemExit(3)
"""
    script(tmp_path, TRAIN + again)
    shape = ["--nodes", nodes, "--nproc-per-node", nproc, "--max-restarts", restarts]
    environ = {"CLUSTERJOB_HOME": str(tmp_path / "home")}
    ran = run([*LOCAL, *shape, "--python", python, "train.py"], tmp_path, environ, code=0)
    assert ("SUCCEEDED after 1 restart" in ran.out + ran.err) == bool(restarts)
    check_training(tmp_path, nproc)
    assert all(rank["master"] != rank["endpoints_master"] for rank in rank_reports(tmp_path, 2))
