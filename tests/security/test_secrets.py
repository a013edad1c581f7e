"""The value of --secret reaches every worker and is written only to its secrets file.

No argument, record, plan, log or environment of Slurm contains it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
from commands import command
from launching import new_folder
from procs import wait_until
from servers import webhook
from slurm_user import User
from sshsite import Site, output_lines
from verdicts import wait_for_verdict

from clusterjob.core import job_settings, records
from clusterjob.core.job_secrets import Secret, packed
from clusterjob.errors import SpecError
from clusterjob.node import contract

# A script looks for them in all processes of the machine; tests beside this one have other values.
VALUE = f"s3cr=t 'of' $mine\nin two lines {os.getpid()}"
FROM_FILE = f"t0ken-of-a-file-{os.getpid()}"
DIGESTS = [hashlib.sha256(value.encode()).hexdigest() for value in (VALUE, FROM_FILE)]
# Prints the digests of its values, and each process that exposes a value: in its arguments or,
# if it is a parent process, in its initial environment.
REPORT_SCRIPT = """
    import hashlib, os, pathlib
    values = [os.environ["MY_KEY"], os.environ["MY_TOKEN"]]
    def exposes(path):
        try:
            return any(value.encode() in path.read_bytes() for value in values)
        except OSError:
            return False
    def command_line(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""
    seen = [
        command_line(path.parent.name)
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if exposes(path)
    ]
    pid = os.getppid()
    while pid > 1 and b"clusterjob\\0submit" not in command_line(pid):
        if exposes(pathlib.Path(f"/proc/{pid}/environ")):
            seen.append(command_line(pid))
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    digests = [hashlib.sha256(value.encode()).hexdigest() for value in values]
    print(*digests, seen, os.environ.get("CLUSTERJOB_SECRETS_FILE"))
"""
EXPECTED_REPORT = f"{' '.join(DIGESTS)} [] None"


def exposed_files(directories: Iterable[Path]) -> list[str]:
    """Return the files that contain a value, except secrets files with mode 0600."""
    found = []
    for folder in directories:
        for path in folder.rglob("*"):
            if not path.is_file() or not any(
                value in path.read_bytes() for value in (VALUE.encode(), FROM_FILE.encode())
            ):
                continue
            if path.name != "secrets" or path.stat().st_mode & 0o777 != 0o600:
                found.append(str(path))
    return found


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("MY_KEY", VALUE)
    (tmp_path / "token-of-mine").write_text(f"{FROM_FILE}\n")
    return ["--secret", "MY_KEY", "--secret", f"MY_TOKEN={tmp_path / 'token-of-mine'}"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = new_folder(tmp_path / "work")
    (directory / "tell.py").write_text(textwrap.dedent(REPORT_SCRIPT))
    return directory


def clusterjob(work: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = command(work, *args, code=code)
    assert not any(value in done.stdout + done.stderr for value in (VALUE, FROM_FILE))
    return done


@pytest.mark.parametrize(
    "options", [("--start", "fork"), ("--start", "exec"), ("--setup", "set -x")], ids=str
)
@pytest.mark.usefixtures("plain_python")
def test_secret_of_local_job_reaches_workers_only(
    work: Path, flags: list[str], options: tuple[str, ...]
) -> None:
    job_id = clusterjob(
        work, "submit", "--cluster", "local", "--nproc-per-node", "2", *options, *flags, "tell.py"
    ).stdout.strip()
    clusterjob(work, "wait", job_id)
    assert clusterjob(work, "logs", job_id).stdout == f"[0-1] {EXPECTED_REPORT}\n"
    assert exposed_files([records.unchecked_home(), work]) == []
    assert json.loads((records.unchecked_home() / "jobs" / job_id / "spec.json").read_text())[
        "secret"
    ] == [
        "MY_KEY",
        "MY_TOKEN",
    ]


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_secret_of_slurm_job_is_absent_from_slurm_environment(
    user: User, flags: list[str], launcher: str
) -> None:
    user.path("tell.py").write_text(textwrap.dedent(REPORT_SCRIPT))
    notes = user.command_first_on_path("sbatch", 'env >> "$NOTES"; exec "$REAL" "$@"')
    options = ("--cluster", "slurm", "--nodes", "2", "--launcher", launcher, "--setup", "set -x")
    job_id = user("submit", *options, *flags, "tell.py").stdout.strip()
    user("wait", job_id)
    assert user.output(job_id) == f"[0-1] {EXPECTED_REPORT}\n"
    assert "PATH=" in notes.read_text(), "the environment of sbatch is recorded"
    assert VALUE.partition("\n")[0] not in notes.read_text()
    assert exposed_files([user.home, user.directory]) == []


def test_secret_of_ssh_job_is_in_one_file_per_host_and_none_here(
    site: Site, flags: list[str]
) -> None:
    record = site.submit(REPORT_SCRIPT, secret=flags[1::2])
    lines = output_lines(record)
    assert sorted(lines) == [f"{rank} out {EXPECTED_REPORT}" for rank in range(2)]
    assert wait_for_verdict(record).exit_code == 0
    assert exposed_files([records.unchecked_home(), site.directory]) == []
    assert not (record.job_dir / "secrets").exists()
    for host in ("gpu1", "gpu2"):
        assert exposed_files([site.ssh_network.hosts[host].home]) == []
        assert (site.remote_dir(record, host) / "secrets").stat().st_mode & 0o777 == 0o600


def test_plan_names_secrets_and_shows_no_value(work: Path, flags: list[str]) -> None:
    for words in (("submit", "--dry-run"), ("render",), ("render", "--json")):
        shown = clusterjob(work, *words, "--cluster", "local", *flags, "tell.py").stdout
        assert "MY_KEY" in shown
        assert "MY_TOKEN" in shown
    assert not records.unchecked_home().exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--secret", "NOWHERE"], "--secret NOWHERE: it is not set here"),
        (
            ["--secret", f"MY_TOKEN={FROM_FILE}"],
            "--secret MY_TOKEN: its file cannot be read: No such file or directory",
        ),
        (["--secret", "MY_TOKEN="], "--secret MY_TOKEN= names no file"),
        (["--secret", "RANK"], "RANK is set by the launcher"),
        (["--secret", "A-B"], "'A-B' is not a valid variable name"),
        (["--secret", "MY_KEY", "--env", "MY_KEY=public"], "MY_KEY has two values"),
        (["--env", "NOWHERE"], "--env NOWHERE: it is not set here"),
    ],
)
def test_invalid_secret_or_env_option_is_refused_before_submission(
    work: Path, flags: list[str], args: list[str], message: str
) -> None:
    """The error does not repeat the text after the name: it may be the secret itself."""
    done = clusterjob(work, "submit", "--cluster", "local", *args, "tell.py", code=2)
    assert message in done.stderr.splitlines()[0]
    assert "  hint: " in done.stderr
    assert not records.unchecked_home().exists()


def test_env_option_with_name_only_copies_value_of_caller(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORD", "of = mine")
    plan = json.loads(
        clusterjob(
            work,
            "render",
            "--json",
            "--cluster",
            "local",
            "--env",
            "WORD",
            "--env",
            "B=2",
            "tell.py",
        ).stdout
    )
    [script] = [file["text"] for file in plan["files"] if file["path"].endswith("node.sh")]
    assert "export WORD='of = mine'\n" in script
    assert "export B=2\n" in script


def test_secret_path_in_config_file_is_relative_to_that_file(work: Path) -> None:
    (work / "clusterjob.toml").write_text('[defaults]\nsecret = ["HF_TOKEN=../token-of-mine"]\n')
    (work / "below").mkdir()
    settings = job_settings.resolve({}, "local", directory=work / "below")
    assert settings.values["secret"] == (Secret("HF_TOKEN", work / "../token-of-mine"),)


def test_secrets_file_restores_packed_values(tmp_path: Path) -> None:
    value = "a\udcffb=c\n"
    values = {name: Secret(name).value({"A": value, "B": ""}) for name in ("A", "B")}
    (tmp_path / "file").write_bytes(packed(values))
    assert contract.read_secrets({"CLUSTERJOB_SECRETS_FILE": str(tmp_path / "file")}) == {
        "A": value,
        "B": "",
    }
    with pytest.raises(SpecError, match="the value does not fit into a variable"):
        Secret("A").value({"A": "x" * 200_000})


@pytest.mark.usefixtures("plain_python")
def test_notify_url_is_only_in_secrets_file(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither given as a variable nor as a URL; a failed submission does not show it either."""
    with webhook() as hook:
        url = f"json://127.0.0.1:{hook.server_port}/{FROM_FILE}"
        check_url(url, work, monkeypatch)
        # The verdict may be there before the processes that notify have started.
        wait_until(lambda: hook.states == ["RUNNING"] * 2, 30.0, "both messages")


def check_url(url: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", url)
    given = ("--cluster", "local", "--notify", "MY_HOOK", "--notify", url, "--notify-on", "start")
    (work / "tell.py").write_text("import os; print(sorted(os.environ.items()))")
    for words in (("submit", "--dry-run"), ("render", "--json")):
        assert "json://***" in clusterjob(work, *words, *given, "tell.py").stdout
    job_id = clusterjob(work, "submit", *given, "tell.py").stdout.strip()
    clusterjob(work, "wait", job_id)
    assert "MY_HOOK" not in clusterjob(work, "logs", job_id).stdout
    clusterjob(work, "--verbose", "status", "--json", job_id)
    assert exposed_files([records.unchecked_home(), work]) == []
    recorded = json.loads((records.unchecked_home() / "jobs" / job_id / "spec.json").read_text())
    assert recorded["notify"] == ["MY_HOOK", "json://***"]


def test_notify_url_in_file_of_project_is_not_shown_for_trust(work: Path) -> None:
    (work / "clusterjob.toml").write_text(f'[defaults]\nnotify = "json://h/{FROM_FILE}"\n')
    other = work.parent / "other.py"
    other.write_text("")
    done = clusterjob(work, "submit", "--cluster", "local", str(other), code=2)
    assert "[defaults] notify = ..." in done.stderr
