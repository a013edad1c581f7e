"""Commands, shells and port forwards inside a job on hosts that are reached over SSH."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from pathlib import Path

import pytest
from inside_job import CLUSTERJOB, Inside
from procs import TEST_TIMEOUT, command_line, wait_until
from sshsite import SLEEPER, Site, wait_for_lines
from terminals import Terminal

from clusterjob.core.records import Records

LEFT = 20.0  # seconds until no process is left on a host; it takes less than 3 s


def started(site: Site) -> Inside:
    record = site.submit(SLEEPER, nproc_per_node=2)
    wait_for_lines(record, *(f"up {rank}" for rank in range(4)))
    return Inside(record.job_id, site.directory)


def on_host(site: Site, host: str, text: str) -> list[int]:
    return [pid for pid in site.ssh_network.hosts[host].pids() if text in command_line(pid)]


def cancel(site: Site, job: Inside) -> None:
    with site.command("cancel", job.id) as process:
        _, err = process.communicate(timeout=TEST_TIMEOUT)
    assert process.returncode == 0, err


def test_exec_runs_on_host_of_rank_and_killed_client_leaves_nothing(site: Site) -> None:
    job = started(site)
    out, err = job.exec(
        "--rank", "3", "--", "bash", "-c", "echo $RANK; uname -n; pwd; echo wrong >&2; exit 7",
        code=7,
    )  # fmt: skip
    rank, host, directory = out.decode().split()
    assert (rank, host, err) == ("3", "gpu2", b"wrong\n")
    assert Path(directory) == site.remote_dir(Records().find(job.id), "gpu2") / "code"
    data = os.urandom(3_000_000)
    assert job.exec("--node", "1", "cat", data=data)[0] == data
    text = "sleep 7777 & setsid sleep 7777 & echo up; wait"
    with job.popen("exec", "--node", "1", "--", "bash", "-c", text) as process:
        assert process.stdout.readline() == b"up\n"
        assert len(on_host(site, "gpu2", "sleep 7777")) >= 2
        process.kill()
        process.stdout.close()
    wait_until(lambda: not on_host(site, "gpu2", "sleep 7777"), LEFT, "the end")
    cancel(site, job)


@pytest.mark.slow
def test_shell_over_ssh_follows_size_and_keys(site: Site) -> None:
    job = started(site)
    argv = [*CLUSTERJOB, "shell", "--rank", "2", job.id]
    with Terminal(argv, controlling=True, rows=33, columns=77, cwd=site.directory) as terminal:
        before = terminal.attributes
        terminal.read_until(f"({job.id} rank 2)".encode())
        terminal.type(b"stty size; uname -n\r")
        terminal.read_until(b"33 77\r\ngpu2\r\n")
        terminal.resize(50, 132)
        terminal.type(b"while [ \"$(stty size)\" != '50 132' ]; do sleep 0.05; done; echo 'ok'2\r")
        terminal.read_until(b"ok2\r\n")
        terminal.type(b"exit 5\r")
        assert terminal.finish() == 5
        assert terminal.attributes == before
    cancel(site, job)


@pytest.mark.slow
def test_exec_on_all_hosts_and_50_megabytes(site: Site) -> None:
    job = started(site)
    out, _ = job.exec("--all", "--", "bash", "-c", "echo $RANK $(uname -n)")
    assert sorted(out.decode().splitlines()) == ["[node 0] 0 gpu1", "[node 1] 2 gpu2"]
    data = os.urandom(50_000_000)
    out, _ = job.exec("cat", data=data)
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
    cancel(site, job)


@pytest.mark.slow
def test_unreachable_host_is_one_line_and_other_node_still_answers(site: Site) -> None:
    job = started(site)
    site.ssh_network.hosts["gpu2"].stop()
    try:
        _, err = job.exec("--node", "1", "true", code=255)
        assert err.decode().startswith("clusterjob: error: gpu2: ")
        assert len(err.decode().splitlines()) <= 2
        assert job.exec("--node", "0", "uname", "-n")[0] == b"gpu1\n"
        out, err = job.exec("--all", "uname", "-n", code=255)
        assert out == b"[node 0] gpu1\n"
        assert err.decode().startswith("clusterjob: gpu2: ")
    finally:
        site.ssh_network.hosts["gpu2"].start()
    cancel(site, job)


@pytest.mark.slow
def test_forward_reaches_loopback_of_host_and_ends_with_job(site: Site) -> None:
    job = started(site)
    server = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
        "print(s.server_address[1], flush=True); s.serve_forever()"
    )
    with job.popen("exec", "--node", "1", "--", site.python, "-c", server) as process:
        port = process.stdout.readline().decode().strip()
        with job.forwarded(f"0:{port}", "--node", "1") as (forward, [local]):
            with socket.create_connection(("127.0.0.1", local), TEST_TIMEOUT) as sock:
                sock.sendall(b"GET /script.py HTTP/1.0\r\n\r\n")
                with sock.makefile("rb") as stream:
                    assert b"time.sleep(1000)" in stream.read()
            cancel(site, job)
            assert forward.wait(TEST_TIMEOUT) == 255
            assert f"job {job.id} has ended" in forward.stderr.read()
        assert process.wait(TEST_TIMEOUT) == 255


@pytest.mark.slow
def test_interrupt_of_client_reaches_command_on_host(site: Site) -> None:
    job = started(site)
    text = "trap 'echo caught; exit 3' INT; echo up; while :; do sleep 0.05; done"
    with job.popen("exec", "--", "bash", "-c", text) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(TEST_TIMEOUT) == 3
    cancel(site, job)


@pytest.mark.slow
def test_cut_network_ends_client_and_later_the_command(site: Site) -> None:
    record = site.submit(SLEEPER, hosts="gpu2")
    wait_for_lines(record, "up 0")
    job = Inside(record.job_id, site.directory)
    with job.popen("exec", "--", "bash", "-c", "echo up; sleep 7777", stderr=-1) as process:
        assert process.stdout.readline() == b"up\n"
        site.ssh_network.hosts["gpu2"].link("down")
        try:
            assert process.wait(TEST_TIMEOUT) == 255
            assert process.stderr.read().startswith(b"clusterjob: error: node 0: ")
        finally:
            site.ssh_network.hosts["gpu2"].link("up")
    # The program's next sign of life shows the host that the connection is gone.
    wait_until(lambda: not on_host(site, "gpu2", "sleep 7777"), TEST_TIMEOUT, "the end")
    cancel(site, job)
