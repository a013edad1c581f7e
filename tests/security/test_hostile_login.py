"""A hostile Slurm login host: a real sshd sends any answer for Slurm and job directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostile_host import hostile
from procs import TEST_TIMEOUT
from sshsite import Site

from clusterjob.backends import base
from clusterjob.backends.slurm.login_host import Login
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.config import Settings
from clusterjob.core.plans import new_id
from clusterjob.core.records import Handle, Record, Records, home
from clusterjob.errors import ClusterJobError
from clusterjob.node.logs import events
from clusterjob.node.program import Program

# The code of a hostile host defines `command(argv)`, which returns the output of a Slurm command,
# and `polled(request)`, which answers for the job directories.
_LOGIN = r"""
def command(argv):
    return ""
def polled(request):
    return {"jobs": [{"known": True, "files": [], "more": False} for _ in request["jobs"]]}, b""
def answer(request):
    if request["call"] == "poll":
        return polled(request)
    if request["call"] == "run_command":
        return ran(request["argv"])
    if request["call"] == "check":
        return checked(), b""
    return {"missing": []}, b""
def ran(argv):
    output = command(argv).encode()
    return {"code": 0, "out": len(output)}, output
def checked():
    return {
        "errors": [], "identity": "x", "addresses": ["10.0.0.1"], "host": "gpu1", "home": "/h",
        "time": time.time(), "python": "3.11.2", "torch": None, "free": 10**10, "gpus": [],
    }
# The line of squeue for one job, with the field separator that the command requests.
def queue(argv, **changes):
    separator = argv[-1].removeprefix("--format=%F").partition("%K")[0]
    fields = dict(base="7", task="N/A", own="7", state="PENDING", reason="Resources", start="N/A",
                  submitted="1", name="train", directory="/h/jobs/JOB", comment="clusterjob:JOB")
    return separator.join([*(fields | changes).values(), ""]) + "\n"
"""


@pytest.fixture
def connect_timeout() -> str:
    return "3"


@pytest.fixture
def record(site: Site, connect_timeout: str) -> Record:
    """Return a job of a Slurm cluster whose login host is gpu1."""
    set_ = {"ssh_config": str(site.ssh_network.config), "connect_timeout": connect_timeout}
    job_id = new_id("train")
    handle = Handle(
        "slurm",
        "7",
        data={
            "ids": ["7"],
            "cluster": None,
            "at": time.time() - 60,
            "login": Login.named("gpu1", set_, ()).to_json(),
        },
    )
    spec: dict[str, Any] = {
        "login": "gpu1",
        "launcher": "srun",
        "options": set_,
        "setup": [],
        "nproc_per_node": 1,
        "workdir": str(site.directory),
    }
    made = Record(
        job_id,
        "train",
        cluster="hpc",
        backend="slurm",
        job_dir=home() / "jobs" / job_id,
        nodes=1,
        submitted_at=events.now(),
        spec=spec,
        handle=handle,
    )
    made.job_dir.mkdir(parents=True)
    Records().save(made)
    return made


@pytest.fixture
def play(site: Site, record: Record) -> Iterator[Callable[[str], None]]:
    with hostile(site.ssh_network.hosts["gpu1"], _LOGIN) as change:

        def play(code: str) -> None:
            drop_connection()
            change((_LOGIN + code).replace("JOB", record.job_id))

        yield play
    drop_connection()


def drop_connection() -> None:
    """Drop the cached connection; the next command opens one, like a new process."""
    backend: Any = base._loaded.pop("slurm", None)
    if backend is not None:
        backend.close()


ESCAPES = "\\x1b]52;c;eA==\\x07\\x1b[2J\\u202e"
RAN = "def ran(argv): return {}, {}"
# Answers of a login host to any Slurm command.
COMMANDS = {
    "absent with escapes": RAN.format(f"{{'absent': '{ESCAPES}'}}", "b''"),
    "refused with escapes": RAN.format("{'code': 1, 'out': 0}", f"'{ESCAPES}'.encode() * 1000"),
    "refused at length": RAN.format("{'code': 1, 'out': 0}", "b'x' * (8 << 20)"),
    "binary output": RAN.format("{'code': 0, 'out': 4}", "b'\\xff\\x00\\xfe\\n'"),
    "escapes in the queue": (
        f"def command(argv): return queue(argv, reason='{ESCAPES}', name='{ESCAPES}', "
        f"start='{ESCAPES}')"
    ),
    "invalid numbers": """
def command(argv):
    return queue(argv, base="²", task="9" * 5000, own="²", start="9" * 11, submitted="9" * 11)
""",
    "false reports of srun": """
def polled(request):
    data = b"1\\nsrun: error: n1: tasks 5-3: Exited with exit code 999\\n"
    data += b"srun: error: n1: task " + b"9" * 6000 + b": Killed\\n"
    files = [{"path": "ends/srun.0", "stamp": "1", "size": 2}]
    files += [{"path": "logs/slurm.out", "offset": 0, "size": len(data) - 2}]
    if "logs/slurm.out" in request["jobs"][0]["sizes"]:
        files, data = files[:1], data[:2]
    return {"jobs": [{"known": True, "files": files, "more": False}]}, data
""",
    "many rows": (
        "def command(argv): "
        "return ''.join(queue(argv, base=str(n), own=str(n)) for n in range(10000))"
    ),
    "endless answer": """
def ran(argv):
    while True:
        say(b"x" * 65536)
""",
    "clock far in the future": """
def checked(honest=checked):
    return honest() | {"time": 1e299}
def command(argv):
    return "7\\n"
""",
}
ONE_BYTE_PER_SECOND = """
def ran(argv):
    for byte in b'{"size": 5, "code": 0, "out": 5}':
        say(bytes([byte]))
        time.sleep(1)
"""


def settings_of(site: Site, record: Record) -> Settings:
    options = [f"{key}={value}" for key, value in record.spec["options"].items()]
    flags = {"login": "gpu1", "set": options, "python": site.python}
    return job_settings.resolve(flags, None, directory=site.directory)


def submit(site: Site, record: Record) -> None:
    settings = settings_of(site, record)
    program = Program("script", site.script(""))
    spec = job_settings.make_spec(program, settings, directory=site.directory)
    jobs.submit(jobs.plan(spec, settings), "hpc", detach=True)


def test_invalid_slurm_answer_of_login_host_gives_bounded_status_or_error(
    site: Site, record: Record, play: Callable[[str], None]
) -> None:
    for code in COMMANDS.values():
        play(code)
        assert_commands_are_bounded(site, record)


@pytest.mark.parametrize("connect_timeout", ["1"])
@pytest.mark.slow
def test_login_host_that_answers_one_byte_per_second_is_given_up(
    site: Site, record: Record, play: Callable[[str], None]
) -> None:
    play(ONE_BYTE_PER_SECOND)
    assert_commands_are_bounded(site, record)


def assert_commands_are_bounded(site: Site, record: Record) -> None:
    """Run each command: it ends in time, with a short status or a short ClusterJobError."""
    calls: dict[str, Callable[[], Any]] = {
        "status": lambda: polling.status(Records().find(record.job_id)).reason,
        "cancel": lambda: jobs.cancel([Records().find(record.job_id)]),
        "logs": lambda: polling.collect(Records().find(record.job_id)),
        "doctor": lambda: [*jobs.doctor_checks(settings_of(site, record), site.directory)],
        "submit": lambda: submit(site, record),
    }
    for command_name, call in calls.items():
        begin = time.monotonic()
        try:
            message = str(call())
        except ClusterJobError as error:
            message = f"{error.message} {error.hint}"
        assert time.monotonic() - begin < TEST_TIMEOUT, command_name
        assert len(message) < 6000, command_name


def test_control_characters_from_login_host_are_escaped_in_output(
    site: Site, record: Record, play: Callable[[str], None]
) -> None:
    for name in ("escapes in the queue", "refused with escapes", "absent with escapes"):
        play(COMMANDS[name])
        for verb in ("status", "cancel"):
            _, out, err = site.run(verb, record.job_id)
            assert not {"\x1b", "\x07", "\u202e"} & set(out + err), (name, verb)
