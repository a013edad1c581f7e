"""--secret: the value reaches every worker, and is in no argument, file but its own, record, plan,
log, or environment of Slurm's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
from procs import PATIENCE
from slurm_user import User
from sshsite import Site, end_of, lines_of
from volc_platform import Platform

from clusterjob.core import jobs
from clusterjob.core.job_secrets import Secret, packed
from clusterjob.errors import SpecError
from clusterjob.node import contract

VALUE = "s3cr=t 'of' $mine\nin two lines"
FROM_FILE = "t0ken-of-a-file"
DIGESTS = [hashlib.sha256(value.encode()).hexdigest() for value in (VALUE, FROM_FILE)]
# Tells what it was given by digests, and which processes show a value: in their arguments, or,
# above this one, in the environment that they were started with.
TELL = """
    import hashlib, os, pathlib
    values = [os.environ["MY_KEY"], os.environ["MY_TOKEN"]]
    def shows(path):
        try:
            return any(value.encode() in path.read_bytes() for value in values)
        except OSError:
            return False
    def words(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""
    seen = [words(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if shows(path)]
    pid = os.getppid()
    while pid > 1 and b"clusterjob\\0submit" not in words(pid):
        if shows(pathlib.Path(f"/proc/{pid}/environ")):
            seen.append(words(pid))
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    print(*(hashlib.sha256(value.encode()).hexdigest() for value in values), seen, os.environ.get("CLUSTERJOB_SECRETS_FILE"))
"""
TOLD = f"{' '.join(DIGESTS)} [] None"


def showing(places: Iterable[Path]) -> list[str]:
    """Return the files that hold a value, but for those that carry the secrets, which have to be
    their owner's alone.
    """
    found = []
    for place in places:
        for path in place.rglob("*"):
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
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "tell.py").write_text(textwrap.dedent(TELL))
    return directory


def clusterjob(work: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "clusterjob", *words]
    done = subprocess.run(
        argv,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    assert not any(value in done.stdout + done.stderr for value in (VALUE, FROM_FILE))
    return done


def home() -> Path:
    return Path(os.environ["CLUSTERJOB_HOME"])


@pytest.mark.parametrize(
    "options", [("--start", "fork"), ("--start", "exec"), ("--setup", "set -x")], ids=str
)
def test_secret_on_this_machine_reaches_the_workers_alone(
    work: Path, flags: list[str], options: tuple[str, ...]
) -> None:
    job_id = clusterjob(
        work, "submit", "--cluster", "local", "--nproc-per-node", "2", *options, *flags, "tell.py"
    ).stdout.strip()
    clusterjob(work, "wait", job_id)
    assert clusterjob(work, "logs", job_id).stdout == f"[0-1] {TOLD}\n"
    assert showing([home(), work]) == []
    assert json.loads((home() / "jobs" / job_id / "spec.json").read_text())["secret"] == [
        "MY_KEY",
        "MY_TOKEN",
    ]


@pytest.mark.parametrize("launcher", ["agent", "srun"])
def test_secret_under_slurm_is_in_no_environment_of_slurm_s(
    user: User, flags: list[str], launcher: str
) -> None:
    user.path("tell.py").write_text(textwrap.dedent(TELL))
    notes = user.command_first_on_path("sbatch", 'env >> "$NOTES"; exec "$REAL" "$@"')
    options = ("--cluster", "slurm", "--nodes", "2", "--launcher", launcher, "--setup", "set -x")
    job_id = user("submit", *options, *flags, "tell.py").stdout.strip()
    user("wait", job_id)
    assert user.output(job_id) == f"[0-1] {TOLD}\n"
    assert "PATH=" in notes.read_text(), "what sbatch was started with"
    assert VALUE.partition("\n")[0] not in notes.read_text()
    assert showing([user.home, user.directory]) == []


def test_secret_on_hosts_is_in_one_file_on_each_and_in_none_here(
    site: Site, flags: list[str]
) -> None:
    record = site.submit(TELL, secret=flags[1::2])
    lines = lines_of(record)
    assert sorted(lines) == [f"{rank} out {TOLD}" for rank in range(2)]
    assert end_of(record).exit_code == 0
    assert showing([home(), site.directory]) == []
    assert not (record.job_dir / "secrets").exists()
    for host in ("gpu1", "gpu2"):
        assert showing([site.world.hosts[host].home]) == []
        assert (site.remote_dir(record, host) / "secrets").stat().st_mode & 0o777 == 0o600


def test_secret_on_a_platform_is_a_private_variable(
    volc: Platform, work: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in volc.variables.items():
        monkeypatch.setenv(name, value)
    sets = {
        "image": "cr.example.com/train:1",
        "queue": "train",
        "flavor": "ml.pni3ln.8xlarge",
        "poll": "0.2",
    }
    options = [
        "--cluster",
        "mlp",
        *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")),
    ]
    dry = json.loads(clusterjob(work, "render", "--json", *options, *flags, "tell.py").stdout)
    assert dry["secrets"] == ["MY_KEY", "MY_TOKEN"]
    job_id = clusterjob(work, "submit", *options, *flags, "tell.py").stdout.strip()
    clusterjob(work, "wait", job_id)
    told = clusterjob(work, "logs", job_id).stdout
    assert " ".join(DIGESTS) in told
    assert VALUE not in json.dumps(volc.calls())
    assert showing([home(), work]) == []


def test_plan_names_secrets_and_shows_no_value(work: Path, flags: list[str]) -> None:
    for command in (("submit", "--dry-run"), ("render",), ("render", "--json")):
        shown = clusterjob(work, *command, "--cluster", "local", *flags, "tell.py").stdout
        assert "MY_KEY" in shown
        assert "MY_TOKEN" in shown
    assert not home().exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--secret", "NOWHERE"], "--secret NOWHERE: it is not set here"),
        (
            ["--secret", f"MY_TOKEN={FROM_FILE}"],
            "--secret MY_TOKEN: its file cannot be read: No such file or directory",
        ),
        (["--secret", "MY_TOKEN="], "--secret MY_TOKEN= names no file"),
        (["--secret", "RANK"], "RANK is set by the launcher"),
        (["--secret", "A-B"], "'A-B' cannot be a variable's name"),
        (["--secret", "MY_KEY", "--env", "MY_KEY=public"], "MY_KEY has two values"),
        (["--env", "NOWHERE"], "--env NOWHERE: it is not set here"),
    ],
)
def test_secret_without_a_value_is_refused_before_anything_starts(
    work: Path, flags: list[str], words: list[str], says: str
) -> None:
    """What was written after the name is not repeated: it may be the secret itself, by mistake."""
    done = clusterjob(work, "submit", "--cluster", "local", *words, "tell.py", code=2)
    assert says in done.stderr.splitlines()[0]
    assert "  hint: " in done.stderr
    assert not home().exists()


def test_env_with_a_name_alone_copies_the_caller_s_value(
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


def test_secrets_of_a_profile_are_relative_to_its_file(work: Path) -> None:
    (work / "clusterjob.toml").write_text('[defaults]\nsecret = ["HF_TOKEN=../token-of-mine"]\n')
    (work / "below").mkdir()
    settings = jobs.settle({}, "local", directory=work / "below")
    assert settings.values["secret"] == (Secret("HF_TOKEN", work / "../token-of-mine"),)


def test_secrets_file_gives_back_what_was_packed(tmp_path: Path) -> None:
    value = "a\udcffb=c\n"
    (tmp_path / "file").write_bytes(packed([Secret("A"), Secret("B")], {"A": value, "B": ""}))
    assert contract.read_secrets({"CLUSTERJOB_SECRETS_FILE": str(tmp_path / "file")}) == {
        "A": value,
        "B": "",
    }
    with pytest.raises(SpecError, match="a variable cannot carry the value"):
        packed([Secret("A")], {"A": "x" * 200_000})
