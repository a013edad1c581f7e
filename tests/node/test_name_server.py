"""A name server that never answers: workers and agents report it within seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import HOST, finish, last_message, rank_variables, run, script, start
from namespaces import Machine, machines, skip_reason

from clusterjob.node.system import network

SILENT = "10.77.0.9"
NO_ANSWER = "no name server answered within 3 s"
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
    """Yield a machine whose only name server never answers."""
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with machines(1) as [made]:
        drop_packets = [
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
        subprocess.run(made.command(*drop_packets), check=True)
        yield made


def with_silent_server(machine: Machine, directory: Path, *argv: object) -> list[str]:
    """Return a command that runs ``argv`` with the silent name server and a long timeout."""
    resolver = directory / "resolv.conf"
    resolver.write_text(f"nameserver {SILENT}\noptions timeout:20 attempts:3\n")
    # In the mount namespace that `ip netns exec` creates.
    shell_script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    return machine.command("sh", "-c", shell_script, resolver, *argv)


RESOLVER = {"RES_OPTIONS": "timeout:20 attempts:3"}  # users set it like this


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_worker_reports_silent_name_server_within_seconds(
    machine: Machine, tmp_path: Path, rank: int
) -> None:
    environ = RESOLVER | rank_variables(rank, 2, 29500, 1) | {"MASTER_ADDR": "master.example"}
    ended = run(
        with_silent_server(machine, tmp_path, sys.executable, script(tmp_path, INIT)),
        tmp_path,
        environ,
        code=1,
    )
    assert float(ended.out) < 15.0, ended  # the resolver's own timeout is 60 s or more
    assert "master.example:29500: " + NO_ANSWER in last_message(ended.err)
    assert HOST in last_message(ended.err)
    assert not [line for line in ended.err.splitlines() if "c10d" in line]


@pytest.mark.parametrize("node_rank", [0, 1])
def test_agent_reports_silent_name_server_and_ends_within_seconds(
    machine: Machine, tmp_path: Path, node_rank: int
) -> None:
    environ = RESOLVER | {
        "CLUSTERJOB_NODE_RANK": str(node_rank), "CLUSTERJOB_NNODES": "2",
        "CLUSTERJOB_TOKEN": "s" * 16, "CLUSTERJOB_MASTER_ADDR": "master.example",
    }  # fmt: skip
    words = ("launch", "--nproc-per-node", "1", script(tmp_path, "print('it ran')\n"))
    argv = with_silent_server(machine, tmp_path, sys.executable, "-m", "clusterjob", *words)
    begin = time.monotonic()
    ended = finish(start(argv, tmp_path, environ))
    seconds = time.monotonic() - begin
    assert "it ran" not in ended.out
    assert ended.code == 1
    assert seconds < 30  # the resolver's own timeout is 60 s or more
    [line] = [line for line in ended.err.splitlines() if NO_ANSWER in line]
    assert (
        "node 0 cannot listen at master.example:"
        if node_rank == 0
        else "node 1 cannot reach node 0 at master.example: "
    ) in line
    assert "Traceback" not in ended.err


SLOW_SERVER = """
    import socket, time
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    print("bound", flush=True)
    while True:
        query, client = server.recvfrom(512)
        time.sleep(1.5)
        header = query[:2] + bytes.fromhex("8180 0001 0001 0000 0000")
        answer = bytes.fromhex("c00c 0001 0001 0000003c 0004 c0000207")  # A 192.0.2.7
        server.sendto(header + query[12:] + answer, client)
"""


def test_worker_waits_for_slow_name_server_as_plain_python_does(
    machine: Machine, tmp_path: Path
) -> None:
    text = "import socket\nprint(socket.gethostbyname('data.example'))\n"
    program, directory = script(tmp_path, text), tmp_path / "server"
    directory.mkdir()
    argv = ["-m", "clusterjob", "launch", "--start", "exec", "--nproc-per-node", "1", program]
    command = with_silent_server(machine, tmp_path, sys.executable, *argv)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions no-aaaa\n")
    server = subprocess.Popen(
        machine.command(sys.executable, script(directory, SLOW_SERVER)),
        stdout=subprocess.PIPE,
    )
    with server:
        try:
            server.stdout.readline()
            ended = run(command, tmp_path)
        finally:
            server.kill()
    assert ended.out == "[0] 192.0.2.7\n", ended


def test_ip_addresses_need_no_name_server(machine: Machine, tmp_path: Path) -> None:
    code = (
        "from clusterjob.node.system import network; "
        "print(network.addresses_of('192.0.2.1'), network.addresses_of('fd77::1'))"
    )
    ended = run(
        with_silent_server(machine, tmp_path, sys.executable, "-c", code),
        tmp_path,
        RESOLVER,
    )
    assert ended.out == "['192.0.2.1'] ['fd77::1']\n", ended


def test_localhost_resolves_to_loopback_addresses() -> None:
    assert set(network.addresses_of("localhost")) <= {"127.0.0.1", "::1"}
    assert network.addresses_of("localhost")
