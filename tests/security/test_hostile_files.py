"""Files of any content in a job directory end no command and hide no other job.

The files are records, verdicts, events, timelines and platform logs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import command
from fuzzing import JSON, changed, emptied, fuzz
from hypothesis import strategies as st
from launching import new_folder, write_tree
from procs import TEST_TIMEOUT
from written_job import lines_of

from clusterjob.backends import job_progress
from clusterjob.backends.batch_command.log_stream import LogStream
from clusterjob.cli.phase_text import phase_text
from clusterjob.core import job_settings, polling
from clusterjob.core.listing import Listing
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.selection import Selection
from clusterjob.errors import SpecError
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import Phase, read_events, read_phases
from clusterjob.node.logs.job_dir import PHASES
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.program import Program
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

VERDICT = Verdict(
    JobState.FAILED,
    3,
    reason="rank 1: boom",
    failure=Failure(
        1, 1, node_rank=0, host="h", exit_code=3, signal=None, message="boom", last_lines=("a", "b")
    ),
    consequences=(Failure(0, 0, node_rank=0, host="h", exit_code=1, signal=None, message="x"),),
)
HANDLE = Handle(
    "local",
    "good-222222",
    data={
        "agents": [{"node_rank": 0, "pid": 1, "ticks": 2}],
        "boot_id": "b",
        "host": "h",
        "job_dir": "/x",
    },
)
RECORD = Record(
    "x-222222",
    "x",
    cluster="local",
    backend="local",
    job_dir=Path("/nowhere/x-222222"),
    nodes=2,
    submitted_at="2026-01-01T00:00:00.000Z",
    spec={"nproc_per_node": 2, "env": {"A": "b"}},
    handle=HANDLE,
    end=VERDICT.to_json(),
    array={"indices": [0, 1], "pieces": [0]},
    index=3,
)


def listed_job_ids() -> list[str]:
    jobs, _ = Listing(Records()).select(Selection(), None, ask=polling.statuses)
    return [row.job_id for job in reversed(jobs) for row in job.rows]


# -- any content ---------------------------------------------------------------------------------


@fuzz(data=changed(VERDICT.to_json()) | JSON)
def test_verdict_of_any_content_is_valid_or_a_value_error(data: object) -> None:
    try:
        verdict = Verdict.from_json(data)
    except ValueError:
        return
    assert verdict.text()
    assert (verdict.exit_code == 0) == (verdict.state is JobState.SUCCEEDED)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


@fuzz(data=changed(json.loads(json.dumps(RECORD.to_json()))) | JSON)
def test_record_of_any_content_hides_no_other_job(tmp_path: Path, data: object) -> None:
    records = Records()
    if not records.entries():
        records.save(
            Record(
                "good-222222",
                "x",
                cluster="local",
                backend="local",
                job_dir=tmp_path,
                nodes=1,
                submitted_at="2026-01-01T00:00:00.000Z",
                spec={},
                handle=HANDLE,
            )
        )
    (records.directory / "x-222222.json").write_text(json.dumps(data))
    for name in ("x-222222_0", "x-222222_1"):
        (records.directory / f"{name}.json").unlink(missing_ok=True)
    assert "good-222222" in listed_job_ids()
    assert "good-222222" in [record.job_id for record, _ in polling.statuses(records.all())]


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 10**18},
        {"array": {"indices": list(range(300_000)), "pieces": [0]}},
        {"array": {"indices": [0], "pieces": [0] * 300_000}},
    ],
)
def test_record_with_huge_numbers_is_damaged(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="invalid value"):
        Record.from_json(RECORD.to_json() | changes)


@pytest.mark.parametrize("key", ["nodes", "nproc_per_node", "gpus_per_node", "spares"])
def test_huge_number_of_untrusted_file_is_refused_at_once(tmp_path: Path, key: str) -> None:
    """Such a number needs no trust."""
    (tmp_path / "clusterjob.toml").write_text(f"[defaults]\n{key} = 100000000\n")
    settings = job_settings.resolve({}, "local", directory=tmp_path)
    with pytest.raises(SpecError, match="100000000: the greatest value is"):
        job_settings.make_spec(Program("command", "true"), settings, directory=tmp_path)


@fuzz(
    data=changed(VERDICT.to_json() | {"node_rank": 0, "host": "h"}) | JSON,
    refusal=st.binary(max_size=40),
)
def test_job_directory_of_any_content_has_a_status(
    tmp_path: Path, data: object, refusal: bytes
) -> None:
    (tmp_path / "ends").mkdir(exist_ok=True)
    for path in (tmp_path / "result.json", tmp_path / "ends" / "node0.json"):
        path.write_text(json.dumps(data))
    (tmp_path / "ends" / "node1.refused").write_bytes(refusal)
    (tmp_path / "ends" / "node².refused").write_bytes(refusal)
    record = Record(
        "x-222222",
        "x",
        cluster="local",
        backend="local",
        job_dir=tmp_path,
        nodes=2,
        submitted_at="2026-01-01T00:00:00.000Z",
        spec={},
        handle=HANDLE,
    )
    ((_, status),) = polling.statuses([record])
    assert status.state.final or status.state in (JobState.PREEMPTED, JobState.UNKNOWN)
    ends.has_result(tmp_path, 0)


EVENTS = st.sampled_from([
    "started", "waiting", "exec", "warned", "ended", "listening", "joined", "running", "ranks",
    "stop", 1, None,
])  # fmt: skip
FIELDS = (
    "time", "restart", "missing", "why", "monotonic", "nnodes", "node_rank", "world_size",
    "preload", "joined", "formed",
)  # fmt: skip
EVENT = st.fixed_dictionaries(
    {"event": EVENTS},
    optional=dict.fromkeys(FIELDS, JSON | st.booleans() | st.integers(-1, 9) | st.floats()),
)


@fuzz(events=st.lists(EVENT | JSON, max_size=6), garbage=st.binary(max_size=20))
def test_events_of_any_content_give_valid_progress(
    tmp_path: Path, events: list[object], garbage: bytes
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events) + garbage)
    progress = job_progress.progress(tmp_path)
    started_at, restarts, waiting, started, *_ = progress
    status = progress.status(JobState.RUNNING, clock=1.0)
    assert "\n" not in sanitize(phase_text(status))
    shown = status.progress
    assert shown is None or (shown.done >= 0 and shown.total >= 0)
    assert shown is None or shown.seconds is None or shown.seconds >= 0
    assert started is None or started >= 0
    assert (started_at is None or isinstance(started_at, str), type(restarts), type(waiting)) == (
        True,
        int,
        str,
    )


PHASE = st.fixed_dictionaries(
    {"phase": st.sampled_from([*Phase, "x", None]), "restart": JSON, "attempt": JSON},
    optional=dict.fromkeys(("time", "monotonic", "rank", "detail"), JSON | st.integers(0, 9)),
)


@fuzz(lines=st.lists(PHASE | JSON, max_size=6), garbage=st.binary(max_size=20))
def test_phases_of_any_content_are_skipped_or_valid(
    tmp_path: Path, lines: list[object], garbage: bytes
) -> None:
    path = tmp_path / "logs" / "node0" / PHASES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + garbage)
    for begin in read_phases(tmp_path, 0):
        assert isinstance(begin.phase, Phase)
        assert isinstance(begin.detail, str)


NAMES = st.sampled_from(
    [
        "rank0.out",
        "rank1.err",
        "rank" + "9" * 400 + ".out",
        "../../x",
        "rank0.attempt1.restart2.out",
        "timeline",
    ]
)
NOTE = st.builds(
    "{}.{:03} {} {}".format,
    st.integers(0, 10**40),
    st.integers(0, 999),
    NAMES,
    st.integers(0, 10**18 - 1),
).map(str.encode)


@fuzz(notes=st.lists(NOTE | st.binary(max_size=30), max_size=8), data=st.binary(max_size=60))
def test_timeline_of_any_content_loses_no_log_line(
    tmp_path: Path, notes: list[bytes], data: bytes
) -> None:
    folder = new_folder(log_files.node_directory(tmp_path, 0))
    (folder / "timeline").write_bytes(b"\n".join(notes))
    (folder / "rank0.out").write_bytes(data)
    reader = LogReader(tmp_path)
    lines = lines_of(reader) + lines_of(reader, end=True)
    assert len(lines) == data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))


# A label of many ranks creates many files, which has a test of its own below.
LABEL = st.sampled_from(["0", "0-3", "0-99", "node0", "0-24,0-24,5-9", "3,1", ""])
LINE = st.one_of(
    st.builds(
        "{}@{}.0 [{}]{}{} {}".format,
        st.integers(0, 10**12),
        st.integers(0, 10**12),
        LABEL,
        st.sampled_from(["", "!"]),
        st.sampled_from(["", "+"]),
        st.text(max_size=10),
    ),
    st.builds(
        "{} clusterjob-verdict {}".format,
        st.integers(1, 99),
        (changed(VERDICT.to_json()) | JSON).map(json.dumps),
    ),
    st.builds("clusterjob-refused {} {}".format, st.integers(0, 999), st.text(max_size=10)),
    st.text(max_size=30),
)


@fuzz(lines=st.lists(LINE, max_size=5))
def test_platform_logs_of_any_content_are_accepted(tmp_path: Path, lines: list[str]) -> None:
    job_dir = emptied(tmp_path / "job")
    stream = LogStream(job_dir, 0)
    stream.take([line.replace("\n", " ") for line in lines])
    assert stream.next_number >= 1
    assert stream.verdict is None or stream.verdict.text()
    ends.refusals(job_dir)
    lines_of(LogReader(job_dir))


def test_platform_logs_that_name_a_billion_ranks_create_few_files(tmp_path: Path) -> None:
    LogStream(tmp_path, 0).take(
        [
            f"{number}@1.0 [{label}] x"
            for number, label in enumerate(("0-1024,0-1024,5-9", "0-999999999"), 1)
        ]
    )
    assert len(os.listdir(tmp_path / "logs" / "node0")) <= 1030


@fuzz(
    state=changed(
        {
            "sizes": {"rank0.out": 3},
            "attempts": {"0": {"next": 3, "known": ["a"], "missing": [[1, 2]]}},
        }
    )
    | JSON
)
def test_log_stream_accepts_saved_state_of_any_content(tmp_path: Path, state: object) -> None:
    job_dir = emptied(tmp_path / "job")
    write_tree(job_dir, **{"logs/node0/stream.json": json.dumps(state)})
    stream = LogStream(job_dir, 0)
    stream.take(["1@1.0 [0] hello", "2 [0] you"])
    assert stream.next_number >= 3


# -- any size, any kind --------------------------------------------------------------------------


def test_result_file_that_is_a_pipe_or_too_large_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.json")
    assert ends.read_result(tmp_path) is None
    (tmp_path / "result.json").unlink()
    with (tmp_path / "result.json").open("wb") as stream:
        stream.truncate(1 << 40)  # a sparse file
    assert ends.read_result(tmp_path) is None


def test_event_line_of_32_mb_is_skipped_in_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("wb") as stream:
        stream.write(
            b'{"event": "started", "time": "t"}\n'
            + b"x" * (32 << 20)
            + b'\n{"event": "exec", "why": "w"}\n'
        )
    program = f"""
import resource, sys
from pathlib import Path
from clusterjob.backends.job_progress import progress
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(tuple(progress(Path({str(tmp_path)!r})))[:4])
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10, "KiB"
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("('t', 0, 'w', None)\n", 0), done.stderr
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == [
        "started",
        "exec",
    ]


def test_broken_record_is_named_and_other_records_are_listed(tmp_path: Path) -> None:
    records = Records()
    good = replace(RECORD, job_id="good-222222", end=None, array=None, index=None)
    records.save(good)
    records.save(replace(good, job_id="gone-222222", backend="of-another-package"))
    bare = Handle("local", "bare-222222", data={})
    records.save(replace(good, job_id="bare-222222", handle=bare))
    (records.directory / "bad-222222.json").write_text('{"schema": 1, "nodes": "many"}')
    (records.directory / "dir-222222.json").mkdir()
    for words in (["list", "--json"], ["status", "--json"], ["list"]):
        done = command(tmp_path, *words)
    assert "bad-222222.json" in done.stderr
    assert "dir-222222.json" in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["good-222222", "UNKNOWN"],
        ["gone-222222", "UNKNOWN"],
        ["bare-222222", "UNKNOWN"],
    ]
