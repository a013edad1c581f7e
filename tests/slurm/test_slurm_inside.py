"""Commands, shells and port forwards inside a Slurm job, here and through a login host."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess

import pytest
from inside_job import CLUSTERJOB, Inside
from login_user import GUEST as MEETING
from login_user import Laptop
from procs import TEST_TIMEOUT, command_line, own_processes, wait_until
from slurm_user import GUEST, PROMPT, SLEEPER, User
from terminals import Terminal

SERVER = (
    "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
    "print(s.server_address[1], flush=True); s.serve_forever()"
)


def of_command(text: str) -> list[int]:
    return [pid for pid in own_processes() if text in command_line(pid) and pid != os.getpid()]


def started(user: User, *options: str, text: str = SLEEPER, ranks: int = 4) -> Inside:
    job_id = user.submit(text, "--nodes", "2", "--nproc-per-node", "2", *options)
    user.wait_for(*(f"up{rank}" for rank in range(ranks)))
    return Inside(job_id, user.directory)


def test_exec_runs_in_step_of_job_and_killed_client_leaves_nothing(user: User) -> None:
    job = started(user)
    out, err = job.exec(
        "--rank", "3", "--",
        "bash", "-c", "echo $RANK $SLURMD_NODENAME $SLURM_JOB_ID; pwd; echo wrong >&2; exit 7",
        code=7,
    )  # fmt: skip
    number = user.job(job.id)["backend_id"]
    assert out.decode().split() == ["3", "n2", number, str(user.directory)]
    assert err == b"wrong\n"
    data = os.urandom(3_000_000)
    assert job.exec("--node", "1", "cat", data=data)[0] == data
    text = "sleep 7777 & setsid sleep 7777 & echo up; wait"
    with job.popen("exec", "--node", "1", "--", "bash", "-c", text) as process:
        assert process.stdout.readline() == b"up\n"
        assert len(of_command("sleep 7777")) >= 2
        process.kill()
        process.stdout.close()
    wait_until(lambda: not of_command("sleep 7777"), PROMPT, "the end")
    assert user.job(job.id)["state"] == "RUNNING"
    user("cancel", job.id)


@pytest.mark.slow
def test_exec_on_all_nodes_and_20_megabytes(user: User) -> None:
    job = started(user)
    out, _ = job.exec("--all", "--", "bash", "-c", "echo $RANK $SLURMD_NODENAME")
    assert sorted(out.decode().splitlines()) == ["[node 0] 0 n1", "[node 1] 2 n2"]
    data = os.urandom(20_000_000)
    out, _ = job.exec("cat", data=data)
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
    user("cancel", job.id)


@pytest.mark.slow
def test_cancel_ends_command_with_255(user: User) -> None:
    job = started(user)
    with job.popen("exec", "--", "bash", "-c", "echo up; sleep 7777") as process:
        assert process.stdout.readline() == b"up\n"
        user("cancel", job.id)
        assert process.wait(TEST_TIMEOUT) == 255
    wait_until(lambda: not of_command("sleep 7777"), PROMPT, "the end")


@pytest.mark.slow
def test_shell_in_step_follows_size_and_keys(user: User) -> None:
    job = started(user)
    argv = [*CLUSTERJOB, "shell", "--rank", "2", job.id]
    with Terminal(argv, controlling=True, rows=33, columns=77, cwd=user.directory) as terminal:
        before = terminal.attributes
        terminal.read_until(f"({job.id} rank 2)".encode())
        terminal.type(b"stty size; echo $SLURMD_NODENAME\r")
        terminal.read_until(b"33 77\r\nn2\r\n")
        terminal.resize(50, 132)
        terminal.type(b"while [ \"$(stty size)\" != '50 132' ]; do sleep 0.05; done; echo 'ok'2\r")
        terminal.read_until(b"ok2\r\n")
        terminal.type(b"echo 'be'gun; sleep 7777\r")
        terminal.read_until(b"begun\r\n")
        wait_until(lambda: of_command("sleep 7777"), TEST_TIMEOUT)
        terminal.type(b"\x03")
        terminal.read_until(b"^C")
        terminal.type(b"exit 5\r")
        assert terminal.finish() == 5
        assert terminal.attributes == before
    user("cancel", job.id)


@pytest.mark.slow
def test_workers_of_srun_and_elements_of_arrays_are_found(user: User) -> None:
    job = started(user, "--launcher", "srun", text=SLEEPER.replace('"RANK"', '"SLURM_PROCID"').replace("'RANK'", "'SLURM_PROCID'"))  # fmt: skip  # noqa: E501
    assert job.shell("echo $RANK $SLURMD_NODENAME", "--rank", "3") == "3 n2\n"
    _, err = job.exec("--rank", "4", "true", code=2)
    assert b"has no rank 4" in err
    user("cancel", job.id)
    text = GUEST.replace(
        "f\"up{os.environ['RANK']}\"", "'at' + os.environ['CLUSTERJOB_ARRAY_INDEX']"
    )
    array = user.submit(text, "--array", "0-1")
    user.wait_for("at0", "at1")
    element = Inside(f"{array}_1", user.directory)
    assert element.shell("echo $CLUSTERJOB_ARRAY_INDEX $CLUSTERJOB_JOB_ID") == f"1 {array}_1\n"
    _, err = Inside(array, user.directory).exec("true", code=2)
    assert err.decode() == (
        f"clusterjob: error: job {array} is an array\n  hint: name one element, such as {array}_0\n"
    )
    user.path("leave").touch()
    user("wait", array)


@pytest.mark.slow
def test_pending_job_is_one_line(user: User) -> None:
    job_id = user.submit(SLEEPER, "--nodes", "4", "--set", "begin=now+1hour")
    _, err = Inside(job_id, user.directory).exec("true", code=255)
    assert err.decode().startswith(f"clusterjob: error: job {job_id} has not started")
    logs = user("logs", job_id)
    assert (logs.stdout, "has not started: BeginTime" in logs.stderr) == ("", True)
    user("cancel", job_id)


@pytest.mark.slow
def test_login_host_runs_command_shell_and_forward(laptop: Laptop) -> None:
    job_id = laptop.submit(MEETING, "--nodes", "2", "--nproc-per-node", "2")
    laptop.wait_for("up0", "up1", "up2", "up3")
    job = Inside(job_id, laptop.directory)
    out, err = job.exec(
        "--rank", "3", "--",
        "bash", "-c", "echo $RANK $SLURMD_NODENAME; pwd; echo wrong >&2; exit 7",
        code=7,
    )  # fmt: skip
    assert out.decode().split() == ["3", "n2", str(laptop.there(job_id) / "code")]
    assert err == b"wrong\n"
    data = os.urandom(5_000_000)
    assert job.exec("cat", data=data)[0] == data
    with Terminal(
        [*CLUSTERJOB, "shell", job_id], controlling=True, rows=33, columns=77
    ) as terminal:
        terminal.read_until(b" rank 0)")
        terminal.type(b"stty size; exit 5\r")
        terminal.read_until(b"33 77\r\n")
        assert terminal.finish() == 5
    with job.popen("exec", "--node", "1", "--", str(laptop.python), "-c", SERVER) as process:
        port = process.stdout.readline().decode().strip()
        with job.forwarded(f"0:{port}", "--node", "1") as (forward, [local]):
            with socket.create_connection(("127.0.0.1", local), TEST_TIMEOUT) as sock:
                sock.sendall(b"GET /script.py HTTP/1.0\r\n\r\n")
                with sock.makefile("rb") as stream:
                    assert b"200 OK" in stream.readline()
            forward.send_signal(signal.SIGINT)
            assert forward.wait(TEST_TIMEOUT) == 130
        process.kill()
        process.stdout.close()
    wait_until(lambda: not of_command("http.server"), PROMPT, "the end of the server")
    laptop.leave()
    laptop("wait", job_id)


@pytest.mark.slow
def test_command_enters_container_of_worker(user: User) -> None:
    """A fake apptainer runs the job in real namespaces, with its own file system at /mnt."""
    namespaces = "--mount --user --map-root-user" if user_namespaces_work() else "--mount"
    user.command_first_on_path(
        "apptainer",
        'while [ "$1" != bash ]; do shift; done\n'
        f"exec unshare {namespaces} sh -c 'mount -t tmpfs tmpfs /mnt && "
        'touch /mnt/image && exec "$@"\' sh "$@"\n',
    )
    user.path("image.sif").touch()
    job = started(user, "--container", "image.sif", "--python", str(user.python))
    assert job.shell("ls /mnt; pwd; echo $RANK", "--rank", "2") == f"image\n{user.directory}\n2\n"
    job.exec("/no/such/program", code=127)
    user("cancel", job.id)


def user_namespaces_work() -> bool:
    return subprocess.run(["unshare", "--user", "true"], check=False).returncode == 0
