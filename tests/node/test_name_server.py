"""A name server that never answers: the master's name, the address of the server, and what is made
of it, within seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import HOST, Run, finish, last_message, rank_variables, run, script, start
from namespaces import Machine, machines, why_not

from clusterjob.node.system import network

SILENT = "10.77.0.9"
SAID = "no name server answered within 3 s"
INIT = """
    import sys, time
    import torch.distributed
    begin = time.monotonic()
    try:
        from clusterjob import bootstrap
        bootstrap.init(timeout=600)
    finally:
        print(time.monotonic() - begin)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Give a machine whose only name server swallows all that it is sent."""
    why = why_not()
    if why:
        pytest.skip(why)
    with machines(1) as [made]:
        swallow = [
            "ip",
            "neigh",
            "add",
            SILENT,
            "lladdr",
            "02:00:00:00:00:09",
            "dev",
            "eth0",
            "nud",
            "permanent",
        ]
        subprocess.run(made.command(*swallow), check=True)
        yield made


def there(machine: Machine, directory: Path, *argv: object) -> list[str]:
    """Return the command that runs another one where that name server is asked, many times longer
    than anybody likes to wait.
    """
    resolver = directory / "resolv.conf"
    resolver.write_text(f"nameserver {SILENT}\noptions timeout:20 attempts:3\n")
    # In the mount namespace that `ip netns exec` makes.
    entering = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    return machine.command("sh", "-c", entering, resolver, *argv)


def without_options(directory: Path, extra: dict[str, str]) -> dict[str, str]:
    return extra | {"RES_OPTIONS": "timeout:20 attempts:3"}  # as a user may have set it


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_says_so_within_seconds(machine: Machine, tmp_path: Path, rank: int) -> None:
    environ = without_options(
        tmp_path, rank_variables(rank, 2, 29500, 1) | {"MASTER_ADDR": "master.example"}
    )
    ended = run(there(machine, tmp_path, sys.executable, script(tmp_path, INIT)), tmp_path, environ)
    assert ended.code == 1
    assert float(ended.out) < 15.0, ended  # 60 and more by the resolver's own patience
    assert "master.example:29500: " + SAID in last_message(ended.err)
    assert HOST in last_message(ended.err)
    assert not [line for line in ended.err.splitlines() if "c10d" in line]


@pytest.mark.parametrize("node_rank", [0, 1])
def test_an_agent_ends_within_seconds(machine: Machine, tmp_path: Path, node_rank: int) -> None:
    ended, seconds = launched(
        machine,
        tmp_path,
        {"CLUSTERJOB_NODE_RANK": str(node_rank), "CLUSTERJOB_NNODES": "2", "CLUSTERJOB_TOKEN": "s"},
    )
    assert ended.code == 1
    assert seconds < 30  # 60 and more by the resolver's own patience
    [line] = [line for line in ended.err.splitlines() if SAID in line]
    assert (
        "node 0 cannot listen at master.example:"
        if node_rank == 0
        else "node 1 cannot find node 0 at master.example: "
    ) in line
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_an_agent_whose_platform_makes_names_as_it_goes_says_so_and_waits(
    machine: Machine, tmp_path: Path
) -> None:
    places = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "23456", "CLUSTERJOB_TOKEN": "s"}
    ended, _ = launched(machine, tmp_path, places, "--join-timeout", "7")
    assert ended.code == 1
    lines = [
        line
        for line in ended.err.splitlines()
        if f"node 1 cannot find node 0 at master.example: {SAID}" in line
    ]
    assert " s so far" in lines[0]
    assert "gave up after" in lines[-1]


def launched(
    machine: Machine, directory: Path, environ: dict[str, str], *options: str
) -> tuple[Run, float]:
    places = (
        {"CLUSTERJOB_MASTER_ADDR": "master.example"}
        if "RANK" not in environ
        else {"MASTER_ADDR": "master.example"}
    )
    argv = there(
        machine,
        directory,
        sys.executable,
        "-m",
        "clusterjob",
        "launch",
        *options,
        "--nproc-per-node",
        "1",
        "train.py",
    )
    script(directory, "print('it ran')\n")
    begin = time.monotonic()
    ended = finish(start(argv, directory, without_options(directory, environ | places)))
    assert "it ran" not in ended.out
    return ended, time.monotonic() - begin


def test_addresses_need_no_name_server(machine: Machine, tmp_path: Path) -> None:
    code = "from clusterjob.node.system import network; print(network.addresses_of('192.0.2.1'), network.addresses_of('fd77::1'))"
    ended = run(
        there(machine, tmp_path, sys.executable, "-c", code),
        tmp_path,
        without_options(tmp_path, {}),
    )
    assert ended.out == "['192.0.2.1'] ['fd77::1']\n", ended


def test_a_name_has_its_addresses() -> None:
    assert set(network.addresses_of("localhost")) <= {"127.0.0.1", "::1"}
    assert network.addresses_of("localhost")
