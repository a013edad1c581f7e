"""Control characters in texts of hosts, jobs and files never control the terminal.

The tests show the texts on a real terminal.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_host import exchange
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from terminals import Terminal, show

from clusterjob.cli.output import escape_json
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import HostError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict
from clusterjob.remote import openssh_transport, paramiko_transport
from clusterjob.remote.ssh_config import Target
from clusterjob.remote.transport import ConnectOptions

HOSTILE = (
    "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.exe\r\n"
    "clusterjob: job x SUCCEEDED[/x][bold]"
)
# Terminal control, except the colours (SGR) and line ends that clusterjob itself prints.
OBEYED = re.compile(
    r"\x1b(?!\[[0-9;]*m)|"
    r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]"
)
CLUSTERJOB = (sys.executable, "-m", "clusterjob")


def assert_harmless(text: str) -> None:
    found = OBEYED.search(text)
    assert found is None, f"a terminal obeys {found[0]!r} in {text!r}"
    assert not re.search(r"^clusterjob: job x SUCCEEDED", text, re.MULTILINE), text


# -- sanitize() ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "shown"),
    [
        ("a\x1b]0;t\x07b", {}, r"a\x1b]0;t\x07b"),
        ("a\r\nb\u202ec\ud800", {}, r"a\r\nb\u202ec\ud800"),
        ("Zürich \u2603 \u05d0\tx", {}, "Zürich \u2603 \u05d0\tx"),
        ("a\nb\x1b[2J\n", {"lines": True}, "a\nb\\x1b[2J\n"),
        ("\x1b[1;31mred\x1b[0m", {}, "red"),
        ("\x1b[1;31mred", {"colours": True}, "\x1b[1;31mred\x1b[0m"),
        ("\x1b[1;31mred\x1b[0m!", {"colours": True}, "\x1b[1;31mred\x1b[0m!"),
        (
            "\x1b[2Ka\x1b[1A\x1b]8;;http://x\x07b",
            {"colours": True},
            r"a\x1b]8;;http://x\x07b",
        ),
    ],
)
def test_control_characters_are_escaped_and_colours_removed_or_reset(
    text: str, options: dict[str, bool], shown: str
) -> None:
    assert sanitize(text, **options) == shown


@given(
    st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\x1b[]0;m\x07\x9b\r\n\u202e"))),
    st.booleans(),
)
def test_sanitized_text_contains_no_terminal_control(text: str, colours: bool) -> None:
    shown = sanitize(text, colours=colours)
    assert OBEYED.search(shown) is None
    assert "\n" not in shown
    assert ("\x1b" in shown) <= colours
    value = {"text": text}
    safe = escape_json(json.dumps(value, ensure_ascii=False))
    assert OBEYED.search(safe) is None
    assert json.loads(safe) == value


# -- commands ------------------------------------------------------------------------------------


@pytest.fixture
def hostile_job(tmp_path: Path) -> str:
    """Return the id of an ended job whose texts are all hostile."""
    job_dir = tmp_path / "job"
    (job_dir / "logs" / "node0").mkdir(parents=True)
    failure = Failure(
        0,
        0,
        node_rank=0,
        host=f"host{HOSTILE}",
        exit_code=3,
        signal=None,
        message=f"ValueError: {HOSTILE}",
        last_lines=(f"Traceback {HOSTILE}", HOSTILE),
    )
    verdict = Verdict(JobState.FAILED, 3, reason=f"rank 0 {HOSTILE}", failure=failure)
    (job_dir / "result.json").write_text(json.dumps(verdict.to_json()))
    (job_dir / "logs" / "node0" / "rank0.out").write_bytes(
        b"\x1b[31mred\x1b[0m " + HOSTILE.encode() + b"\n"
    )
    handle = Handle(
        "local", "x-222222", data={"agents": [], "boot_id": "b", "host": f"host{HOSTILE}"}
    )
    cluster, at = f"cluster{HOSTILE}", "2026-01-01T00:00:00.000Z"
    Records().save(
        Record(
            "x-222222",
            f"name{HOSTILE}",
            cluster=cluster,
            backend="local",
            job_dir=job_dir,
            nodes=1,
            submitted_at=at,
            spec={"nproc_per_node": 2},
            handle=handle,
        )
    )
    return "x-222222"


@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["list", "--json"],
        ["status", "x-2"],
        ["status", "--json", "x-2"],
        ["wait", "x-2"],
        ["logs", "x-2"],
        ["logs", "-f", "x-2"],
        ["status", HOSTILE],
        ["fetch", "x-2", HOSTILE],
    ],
    ids=lambda args: " ".join(args)[:16],
)
def test_commands_show_hostile_texts_without_terminal_control(
    hostile_job: str, args: list[str]
) -> None:
    code, shown = show([*CLUSTERJOB, *args])
    assert code in (0, 1, 2, 3)
    assert_harmless(shown)
    assert "Traceback (most recent" not in shown
    assert "gnp.exe" in shown or args[0] == "fetch"
    if args[0] == "logs":
        assert shown.startswith("[0] \x1b[31mred\x1b[0m "), "it keeps colours"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_live_line_escapes_reasons_and_details(term: str) -> None:
    program = f"""
from clusterjob.backends.base import JobPhase, JobProgress, Status
from clusterjob.cli.live_progress import LiveProgress
from clusterjob.core.live import live
from clusterjob.node.verdict import JobState
progress = LiveProgress(prints_phases=True)
text = {HOSTILE!r}
progress.update(Status(JobState.PENDING, text), has_open_lines=False)
stop = JobProgress(JobPhase.STOP, detail=text)
progress.update(Status(JobState.RUNNING, text, progress=stop), has_open_lines=False)
live.clear()
"""
    with Terminal(
        [sys.executable, "-c", program],
        columns=400,
        env={"TERM": term, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    ) as terminal:
        assert terminal.finish() == 0, terminal.shown
    assert terminal.shown.count(b"[/x][bold]") >= 2
    assert b"\x07" not in terminal.shown
    assert b"\x1b[2J" not in terminal.shown


def test_tables_of_hosts_and_checks_escape_control_characters() -> None:
    program = f"""
from types import SimpleNamespace
from clusterjob.cli import output
from clusterjob.doctor.engine import Check, CheckState
text = {HOSTILE!r}
report = SimpleNamespace(
    host="a" + text, address=text, python=text, torch=True, free=1, gpus=(), error=text, hint=text
)
output.print_hosts([report])
output.print_check(Check("torch", CheckState.FAILED, text, text))
output.print_message(text)
"""
    code, shown = show([sys.executable, "-c", program])
    assert code == 0, shown
    assert_harmless(shown)


@pytest.mark.parametrize("verb", [["run"], pytest.param(["launch"], marks=pytest.mark.slow)])
def test_hostile_job_output_is_shown_without_terminal_control(
    tmp_path: Path, verb: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nprint({HOSTILE!r})\nsys.stderr.write({HOSTILE!r})\n"
        f"raise ValueError({HOSTILE!r})\n"
    )
    code, shown = show([*CLUSTERJOB, *verb, "--nproc-per-node", "2", "train.py"], cwd=tmp_path)
    assert code == 1
    assert_harmless(
        re.sub(r"\x1b\[(\d*[AJK]|\?25[hl])|\r", "", shown)
    )  # except our own cursor movements
    assert "gnp.exe" in shown


def test_dry_run_escapes_control_characters_of_setup_commands(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "clusterjob.toml").write_text(
        '[clusters.here]\nbackend = "local"\nsetup = ["echo \\u001b]0;title\\u0007"]\n'
    )
    _, shown = show(
        [*CLUSTERJOB, "submit", "--cluster", "here", "--dry-run", "train.py"], cwd=tmp_path
    )
    assert_harmless(shown)


def test_env_command_escapes_control_characters_of_variables(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLUSTERJOB, "env"],
        env={"PATH": "/usr/bin:/bin", "RANK": f"0{HOSTILE}", "WORLD_SIZE": "2"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert_harmless(done.stdout + done.stderr)


# -- errors of hosts -----------------------------------------------------------------------------

ONE_LINE = HOSTILE.replace("\r\n", " ")


def host_answers_error() -> None:
    exchange(lambda _: ({"error": HOSTILE}, b"")).ask("up", job="job", node=0)


def host_sends_no_ssh_banner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target("gpu1", "127.0.0.1", port=listener.getsockname()[1], user="me")
        thread = threading.Thread(target=send_banners, args=(listener,))
        thread.start()
        try:
            paramiko_transport.connect(target, ConnectOptions(20.0))
        finally:
            thread.join()


def send_banners(listener: socket.socket) -> None:
    with listener.accept()[0] as connection:
        connection.sendall(f"{ONE_LINE}\n".encode() * 200)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass


def ssh_writes_error() -> None:
    raise openssh_transport._failure(Target("gpu1", "gpu1", port=22, user="me"), ONE_LINE)


@pytest.mark.parametrize(
    "work",
    [host_answers_error, host_sends_no_ssh_banner, ssh_writes_error],
)
def test_traceback_of_host_error_contains_no_terminal_control(work: Callable[[], None]) -> None:
    """A user's script may not catch the error, and Python prints it with its causes."""
    with pytest.raises(HostError) as caught:
        work()
    text = "".join(traceback.format_exception(caught.value))
    assert_harmless(text)
    assert "gpu1: " in text
