"""`list`, `logs`, `cancel`, `open` and `clean` on recorded jobs: filters, terminals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERJOB
from launching import new_folder
from procs import TEST_TIMEOUT
from terminals import Terminal, show

from clusterjob.backends.base import Status
from clusterjob.backends.local.backend import LocalBackend
from clusterjob.cli import main
from clusterjob.cli.line_search import LineSearch
from clusterjob.cli.tables import cut, width_of
from clusterjob.core.records import Handle, ProcessIdentity, Record, Records, home
from clusterjob.core.spec import JobSpec
from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node.logs.log_files import LogLine, Timeline
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict

WIDE = "训练"  # two letters of two columns each
Run = Callable[..., tuple[int, str, str]]
Save = Callable[..., Record]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in this process without a terminal."""
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    monkeypatch.setattr(sys.stderr, "reconfigure", lambda **_: None, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(words)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that records an ended job, by default submitted `minutes` ago."""
    spec = JobSpec(program=Program("command", "true"), workdir=tmp_path, nproc_per_node=2)

    def save(job_id: str, minutes: int = 1, **fields: Any) -> Record:
        at = datetime.now(timezone.utc) - timedelta(minutes=minutes, seconds=5)
        end = Verdict(
            fields.pop("state", JobState.SUCCEEDED),
            fields.pop("code", 0),
            reason=fields.pop("reason", ""),
            started_at="2026-01-01T00:00:00Z",
            ended_at="2026-01-01T00:03:20Z",
        )
        record = Record(
            job_id,
            fields.pop("name", job_id.partition("-")[0]),
            cluster="local",
            backend="local",
            job_dir=home() / "jobs" / job_id,
            nodes=2,
            submitted_at=at.isoformat().replace("+00:00", "Z"),
            spec=spec.to_json(),
            handle=Handle("local", job_id, data={"agents": [], "boot_id": "b", "host": "h"}),
            **{"end": end.to_json(), **fields},
        )
        (record.job_dir / "logs").mkdir(parents=True)
        Records().save(record)
        return record

    return save


def ids(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines()[1:]]


# -- list ------------------------------------------------------------------------------------------


def test_list_shows_20_newest_jobs_and_counts_the_others(run: Run, save: Save) -> None:
    for number in range(25):
        save(f"job-{number:02}", minutes=number)
    code, out, err = run("list")
    assert (code, ids(out)) == (0, [f"job-{number:02}" for number in range(20)])
    assert err == "clusterjob: and 5 more: --all\n"
    assert ids(run("list", "--all")[1])[-1] == "job-24"
    for limit in (("-n", "3"), ("--since", "3m")):
        assert ids(run("list", *limit)[1]) == ["job-00", "job-01", "job-02"]
    assert len(json.loads(run("list", "--json")[1])["jobs"]) == 25
    [job] = json.loads(run("list", "--json", "-n", "1", "--name", "job")[1])["jobs"]
    assert (job["id"], job["seconds"]) == ("job-00", 200.0)


def test_list_filters_and_columns(run: Run, save: Save) -> None:
    save("train-a", 1)
    save("train-b", 2, state=JobState.FAILED, code=3, reason="boom")
    save("eval-c", 3, state=JobState.FAILED, code=3)
    assert ids(run("list", "--state", "f", "--name", "tr*")[1]) == ["train-b"]
    assert ids(run("list", "--cluster", "gone")[1]) == []
    table = run("list", "--columns", "State,name,duration,code", "-n", "2")[1].splitlines()
    assert [line.split() for line in table] == [
        ["STATE", "NAME", "DURATION", "CODE"],
        ["SUCCEEDED", "train", "3m", "20s", "0"],
        ["FAILED", "train", "3m", "20s", "3"],
    ]


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("list --state done", "is not a state"),
        ("list --since soon", "is not a time"),
        ("list --columns id,nmae", "no column 'nmae'"),
        ("list --all -n 3", "are both given"),
        ("list --json --watch", "are both given"),
        ("list -n 0", "0"),
        ("logs log-a --rank 4", "has no rank 4"),
        ("logs log-a --rank a", "--rank a"),
        ("logs log-a --node 2", "has no node 2"),
        ("logs log-a --attempt 2", "no output of attempt 2"),
        ("logs log-a --grep (", "is not a regular expression"),
        ("logs log-a --since later", "is not a time"),
        ("cancel", "give job ids, or one of"),
        ("cancel log-a --all", "are both given"),
        ("clean --yes", "give job ids, or one of"),
        ("clean log-a --all --yes", "are both given"),
        ("clean --older-than 30 --yes", "is not an age"),
        ("clean --larger-than big --yes", "is not a size"),
        ("clean --state running --yes", "only ended jobs are removed"),
        ("status --watch --json", "--json and --watch"),
    ],
)
def test_wrong_options_are_refused_with_one_line(run: Run, line: str, part: str) -> None:
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert part in err
    assert 1 <= len(err.splitlines()) <= 2
    assert len(Records().all()) == 1


def test_list_shows_local_time_without_a_terminal(
    run: Run, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC-5")
    time.tzset()
    record = save("job-a")
    Records().save(Record(**{**vars(record), "submitted_at": "2026-01-01T20:00:00.5Z"}))
    try:
        assert "2026-01-02 01:00:00" in run("list")[1]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


@pytest.mark.parametrize("command", ["wait", "report", "stacks"])
def test_command_on_one_job_takes_the_latest(
    run: Run, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save("old-a", 60)
    save("new-b")
    assert run(command)[2].startswith("clusterjob: job new-b\n")


@pytest.mark.parametrize("columns", [40, 200])
def test_list_on_terminal_fits_its_width(save: Save, columns: int) -> None:
    save("train-a", 3, state=JobState.FAILED, code=1, reason="\x1b[31mred\x1b[0m \x07" + "x" * 300)
    save(f"{WIDE * 8}-b", 5, state=JobState.FAILED, code=1, reason=WIDE * 100)
    code, out = show([*CLUSTERJOB, "list"], columns=columns)
    assert code == 0
    lines = out.splitlines()
    assert [width_of(line) <= columns for line in lines] == [True] * 3
    assert all(line.endswith("…") for line in lines[1:])
    assert not {"\x1b", "\x07"} & {*out}
    for part in ("train-a ", *(("3 min ago", "3m 20s", "red \\x07xxx") if columns == 200 else ())):
        assert part in lines[1]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [(WIDE, 4, WIDE), (WIDE + "x", 4, "训…"), ("e\u0301", 1, "e\u0301"), ("abc", 2, "a…")],
)
def test_cut_counts_wide_and_combining_letters(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_redraws_in_place_and_restores_the_terminal(
    save: Save, number: signal.Signals, code: int
) -> None:
    save("one-a")
    with Terminal([*CLUSTERJOB, "list", "--watch"], columns=60, rows=10) as terminal:
        terminal.read_until(b"one-a")
        assert terminal.shown.startswith(b"\x1b[?1049h\x1b[?25l")
        save("two-b")
        terminal.read_until(b"two-b")
        terminal.resize(40, 30)
        widths = [31]
        while max(widths) > 30:  # a frame of the old width may be on its way
            terminal.shown = b""
            terminal.read_until(b"\x1b[J")
            frame = re.sub(r"\x1b\[\??\w+|\r", "", terminal.shown.decode())
            widths = [width_of(line) for line in frame.split("\n")]
        terminal.process.send_signal(number)
        assert terminal.finish() == code
    assert terminal.shown.endswith(b"\x1b[?25h\x1b[?1049l")


def test_watch_survives_many_changes_of_the_size() -> None:
    """A signal handler must not wait for a lock that the main thread holds: the program ends."""
    program = """
import os, signal, sys, time
from clusterjob.cli import redraw, tables
tables.terminal_size = lambda: os.terminal_size((80, 24))
end, pid = time.monotonic() + 1, os.getpid()
if os.fork() == 0:
    while time.monotonic() < end:
        os.kill(pid, signal.SIGWINCH)
        sum(range(1000))
    os._exit(0)
redraw.show(lambda size: ["line"], lambda: time.monotonic() > end, interval=0.001)
os.wait()
"""
    argv = [sys.executable, "-c", program]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True, timeout=TEST_TIMEOUT)


def test_watch_without_terminal_prints_changes_only(
    run: Run, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("one-a")
    rounds = 0

    def sleep(_seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            save("two-b", 0)
        if rounds == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("clusterjob.cli.redraw.time.sleep", sleep)
    code, out, _ = run("list", "--watch")
    tables = [[row.split()[0] for row in table.splitlines()] for table in out.split("\n\n")]
    assert (code, tables) == (0, [["ID", "one-a"], ["ID", "two-b", "one-a"]])
    assert "DURATION" not in out


# -- logs ------------------------------------------------------------------------------------------


@pytest.fixture
def logged(save: Save, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Return a job with output of two nodes, which wrote at 1000, 1060 and 1120 s."""
    record = save("log-a")
    for node, ranks in ((0, (0, 1)), (1, (2, 3))):
        folder = new_folder(record.job_dir / "logs" / f"node{node}")
        timeline = Timeline(folder)
        for step, now in enumerate((1000.0, 1060.0, 1120.0)):
            monkeypatch.setattr(time, "time", lambda now=now, node=node: now + 5000 * node)
            for rank in ranks:
                name = f"rank{rank}.attempt1" if step == 2 else f"rank{rank}"
                for stream, text in (("out", "step"), ("err", "\x1b[31mwarning\x1b[0m")):
                    with (folder / f"{name}.{stream}").open("a") as file:
                        file.write(f"{text} {step} of {rank}\n")
            timeline.follow(folder.iterdir())
            timeline.note()
    monkeypatch.undo()
    return record


def lines(run: Run, *words: str) -> list[str]:
    code, out, err = run("logs", *words)
    assert code == 0, err
    shown = [*out.splitlines(), *err.splitlines()]
    return [re.sub(r"\x1b\[\d*m", "", line) for line in shown if not line.startswith("clusterjob")]


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rank", "0,2-3"], {0: 6, 2: 6, 3: 6}),
        (["--rank", "0", "--rank", "3"], {0: 6, 3: 6}),
        (["--node", "1"], {2: 6, 3: 6}),
        (["--node", "0-1", "--rank", "1"], {1: 6}),
        (["--stderr", "--rank", "1"], {1: 3}),
        (["--attempt", "1"], {0: 2, 1: 2, 2: 2, 3: 2}),
        (["--since", "70s", "--rank", "0"], {0: 4}),
        (["--since", "70s", "--rank", "3"], {3: 4}),
        (["--since", "1970-01-01T01:00:00Z"], {2: 6, 3: 6}),
        (["--grep", r"step [01]"], {0: 2, 1: 2, 2: 2, 3: 2}),
        (["--grep", r"^warning 2", "--rank", "2"], {2: 1}),
        (["-n", "1", "--grep", "step 0 of 3"], {3: 1}),
        (["--stderr", "--since", "1s", "--grep", "of [13]", "-n", "2"], {1: 1, 3: 1}),
        (["--grep", "nothing"], {}),
    ],
)
def test_logs_filters_combine(run: Run, words: list[str], expected: dict[int, int]) -> None:
    found: dict[int, int] = {}
    for line in lines(run, "log-a", *words):
        rank = int(line.rpartition(" ")[2])
        found[rank] = found.get(rank, 0) + 1
    assert found == expected


@pytest.mark.usefixtures("logged")
def test_logs_follow_applies_filters_and_exits_with_code_of_job(run: Run) -> None:
    code, out, _ = run("logs", "-f", "--rank", "1", "--grep", "step [12]")
    assert (code, out) == (0, "[1] step 1 of 1\n[1] step 2 of 1\n")


def test_logs_without_id_shows_the_latest_job_and_names_it(
    run: Run, save: Save, logged: Record
) -> None:
    code, out, err = run("logs")
    assert code == 0
    assert "step 0 of 0" in out
    assert f"clusterjob: job {logged.job_id}\n" in err
    save("new-b", minutes=0)
    assert run("logs") == (0, "", "clusterjob: job new-b\n")
    assert "step 0 of 0" in run("logs", "@2")[1]


def test_logs_of_a_job_that_has_not_started_say_why(run: Run, save: Save) -> None:
    this = ProcessIdentity.of_this_process()
    Records().save(replace(save("new-a"), handle=None, end=None, submitter=this))
    said = "clusterjob: job new-a has not started: it is being submitted\n"
    assert run("logs", "new-a") == run("logs", "new-a", "-n", "5") == (0, "", said)


def test_hostile_expression_ends_with_an_error() -> None:
    with pytest.raises(UsageError, match="takes more than"):
        LineSearch("(a+)+$").matching([LogLine(0, 0, stream="out", text="a" * 60 + "!")])
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_cancel_of_a_beginning_of_several_ids_names_them_newest_first(
    run: Run, save: Save, cancelled: list[str]
) -> None:
    save("train-a", 5)
    save("trial-b", 1, name="run", end=None)
    code, _, err = run("cancel", "tr")
    assert (code, cancelled) == (2, [])
    assert "trial-b (RUNNING), train-a (SUCCEEDED)" in err


# -- cancel ----------------------------------------------------------------------------------------


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let jobs without an end be PENDING or RUNNING by name; return the ids of cancelled jobs."""
    done: list[str] = []

    def status(_self: Any, records: list[Record]) -> dict[str, Status]:
        states = {"wait": JobState.PENDING, "run": JobState.RUNNING}
        return {record.job_id: Status(states[record.name]) for record in records}

    def cancel(_self: Any, records: list[Record]) -> None:
        if any(record.job_id == "run-stuck" for record in records):
            raise ClusterJobError("its host does not answer")
        done.extend(record.job_id for record in records)

    monkeypatch.setattr(LocalBackend, "status", status)
    monkeypatch.setattr(LocalBackend, "cancel", cancel)
    return done


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--all"], {"run-a", "run-b", "wait-c"}),
        (["--state", "pend"], {"wait-c"}),
        (["--state", "running,pending", "--name", "r*"], {"run-a", "run-b"}),
        (["--name", "ended"], set()),
        (["@", "run-a"], {"run-b", "run-a"}),
    ],
)
def test_cancel_selects_jobs_that_have_not_ended(
    run: Run, save: Save, cancelled: list[str], words: list[str], expected: set[str]
) -> None:
    save("run-a", 5, end=None)
    save("run-b", 1, end=None)
    save("wait-c", 3, end=None)
    save("ended-d", 9)
    code, _, err = run("cancel", *words, "--yes")
    assert (code, set(cancelled)) == (0, expected)
    assert err.count("is cancelled") == len(expected)


def test_cancel_of_several_selected_jobs_asks_first(
    run: Run, save: Save, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("run-a", end=None)
    save("run-b", end=None)
    code, _, err = run("cancel", "--all")
    assert (code, cancelled) == (2, []), "without a terminal, --yes is needed"
    assert "run-a" in err
    assert "--yes" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert (run("cancel", "--all")[0], cancelled) == (1, [])
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert (run("cancel", "--all")[0], sorted(cancelled)) == (0, ["run-a", "run-b"])


def test_job_that_cannot_be_cancelled_does_not_keep_others_running(
    run: Run, save: Save, cancelled: list[str]
) -> None:
    save("run-a", 1, end=None)
    save("run-stuck", 2, end=None)
    save("run-z", 3, end=None)
    code, _, err = run("cancel", "--all", "--yes")
    assert (code, sorted(cancelled)) == (1, ["run-a", "run-z"])
    assert "job run-stuck is not cancelled: its host does not answer" in err
    assert "job run-stuck is cancelled" not in err


# -- open, wait, clean -----------------------------------------------------------------------------


def test_open_prints_directory_of_job(run: Run, save: Save) -> None:
    record = save("job-a")
    for words in ([], ["job"]):
        assert run("open", *words) == (0, f"{record.job_dir}\n", "")
    record.job_dir.rename(record.job_dir.with_name("gone"))
    code, out, err = run("open")
    assert (code, out, "does not exist" in err) == (1, "", True)


@pytest.mark.parametrize(
    "verb",
    [
        *("logs", "open", "wait", "status", "cancel", "clean", "rerun", "report", "stacks"),
        *("metrics", "fetch"),
    ],
)
def test_wrong_id_is_one_line_and_a_hint(run: Run, save: Save, verb: str) -> None:
    save("train-a")
    code, out, err = run(verb, "trian-a")
    assert (code, out) == (2, "")
    assert err == ("clusterjob: error: there is no job 'trian-a'\n  hint: did you mean train-a?\n")


def test_clean_shows_asks_and_removes(run: Run, save: Save) -> None:
    for number in range(3):
        save(f"job-{number}")
    code, out, err = run("clean", "--all", "--dry-run")
    assert (code, ids(out)) == (0, ["job-2", "job-1", "job-0"])
    assert re.fullmatch(r"clusterjob: would remove 3 jobs, [\d.]+ KB\n", err)
    data = json.loads(run("clean", "--all", "--dry-run", "--json")[1])
    assert data["would_free"] == sum(job["bytes"] for job in data["jobs"]) > 0
    code, _, err = run("clean", "--all")
    assert (code, "--yes" in err, len(Records().all())) == (2, True, 3)
    code, _, err = run("clean", "job-1", "--yes")
    assert (code, sorted(Records().names())) == (0, ["job-0", "job-2"])
    assert re.search(r"removed 1 job, freed [\d.]+ KB", err)
    assert run("clean", "--all", "--yes", "--json")[0] == 0
    assert run("clean", "--all", "--yes")[2] == "clusterjob: no ended job matches\n"
