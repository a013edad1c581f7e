"""`clusterjob logs` shows logs of any size in little memory: complete, tail or raw."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import new_folder
from procs import TEST_TIMEOUT

from clusterjob.cli.output import LogPrinter
from clusterjob.core.records import Handle, Record, Records
from clusterjob.node.logs import log_files
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.verdict import JobState, Verdict

MIB = 1 << 20
LIMIT = 50 * MIB


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the log directory of an ended job with one worker and the id x-222222."""
    folder = new_folder(log_files.node_directory(tmp_path, 0))
    handle = Handle(
        "local", "x-222222", data={"agents": [], "boot_id": "b", "host": os.uname().nodename}
    )
    end, at = Verdict(JobState.SUCCEEDED, 0).to_json(), "2026-01-01T00:00:00.000Z"
    Records().save(
        Record(
            "x-222222",
            "x",
            cluster="local",
            backend="local",
            job_dir=tmp_path,
            nodes=1,
            submitted_at=at,
            spec={"nproc_per_node": 1},
            handle=handle,
            end=end,
        )
    )
    return folder


# The peak memory of a process includes that of its parent before exec, and pytest uses more than
# the command. So a small Python process starts the command and measures it.
MEASURE = """
import resource, subprocess, sys
with open(sys.argv[1], "wb") as out:
    code = subprocess.run(sys.argv[2:], stdout=out).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
sys.exit(code)
"""


def show(tmp_path: Path, *args: str) -> tuple[bytes, int]:
    """Run ``logs``; return its output and its peak memory in bytes.

    Long output is returned as a SHA-256 digest.
    """
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(out),
        sys.executable,
        "-m",
        "clusterjob",
        "logs",
        "x-222222",
        *args,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TEST_TIMEOUT * 3, check=True)
    data = out.read_bytes()
    return (data if len(data) < 4096 else hashlib.sha256(data).digest()), int(done.stdout)


def write(path: Path, piece: bytes, count: int) -> bytes:
    """Write a piece many times, and return the digest of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for _ in range(count):
            stream.write(piece)
            digest.update(piece)
    return digest.digest()


def note(folder: Path) -> None:
    log_files.Timeline(folder).note()


@pytest.mark.parametrize("size", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_tail_of_large_log_takes_little_memory(job: Path, tmp_path: Path, size: int) -> None:
    write(job / "rank0.out", b"x" * 99 + b"\n", size * MIB // 100)
    with (job / "rank0.out").open("ab") as stream:
        stream.write(b"one\ntwo\nthree")
    note(job)
    assert show(tmp_path, "--tail", "1")[0] == b"three\n"
    out, memory = show(tmp_path, "--tail", "2")
    assert out == b"two\nthree\n"
    assert memory < LIMIT


@pytest.mark.parametrize("size", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("option", [(), ("--raw",)])
def test_very_long_line_is_shown_in_little_memory(
    job: Path, tmp_path: Path, size: int, option: tuple[str, ...]
) -> None:
    piece = b"abcdefgh" * (MIB // 8)
    digest = write(job / "rank0.out", piece, size)
    with (job / "rank0.out").open("ab") as stream:
        stream.write(b"\n")
    note(job)
    expected = hashlib.sha256()
    for _ in range(size):
        expected.update(piece)
    assert expected.digest() == digest
    expected.update(b"\n")
    out, memory = show(tmp_path, *option)
    assert out == expected.digest()
    assert memory < LIMIT + 20 * MIB


def test_progress_bar_with_many_updates_takes_little_memory(job: Path, tmp_path: Path) -> None:
    write(job / "rank0.out", b"\r%s" % (b"#" * 98), 20 * MIB // 99)
    note(job)
    out, memory = show(tmp_path)
    assert out == b"#" * 98 + b"\n"
    assert memory < LIMIT


@pytest.mark.slow
def test_large_log_is_shown_completely_in_little_memory(job: Path, tmp_path: Path) -> None:
    digest = write(
        job / "rank0.out",
        b"".join(b"line %d of many that are alike\n" % number for number in range(1000)),
        2000,
    )
    note(job)
    out, memory = show(tmp_path)
    assert out == digest
    assert memory < LIMIT + 20 * MIB


@pytest.mark.parametrize("tail", range(6))
def test_tail_shows_last_lines_of_full_output(job: Path, tmp_path: Path, tail: int) -> None:
    for number in range(4):
        for rank in (0, 1):
            with (job / f"rank{rank}.out").open("ab") as stream:
                stream.write(b"%d of %d\n" % (number, rank))
            note(job)
    whole = show(tmp_path)[0].splitlines()
    assert show(tmp_path, "--tail", str(tail))[0].splitlines() == whole[len(whole) - tail :]


def test_raw_option_passes_bytes_unchanged(job: Path, tmp_path: Path) -> None:
    data = b"\x1b[31mred\x1b[0m\x1b]0;title\x07\r\n10%\r20%\r\n\xff\xfe\x00\n\xe2\x98\x83 no end"
    (job / "rank0.out").write_bytes(data)
    note(job)
    assert show(tmp_path, "--raw")[0] == data
    assert show(tmp_path, "--raw", "--tail", "1")[0] == b"\xe2\x98\x83 no end"


@pytest.mark.slow
@pytest.mark.parametrize("label", ["all", "{rank:3}"])
def test_merged_output_of_120000_lines_is_shown_within_seconds(tmp_path: Path, label: str) -> None:
    folder, count = log_files.node_directory(tmp_path, 0), 30_000
    folder.mkdir(parents=True)
    notes = []
    for rank in range(4):
        who = label.format(rank=rank)
        lines = [f"rank {who} step {step:8} lr 0.000300 tokens/s 12345\n" for step in range(count)]
        size = (folder / f"rank{rank}.out").write_text("".join(lines))
        notes += [(moment, f"rank{rank}.out", size * moment // 50) for moment in range(1, 51)]
    text = (f"{moment / 10:.3f} {name} {size}\n" for moment, name, size in sorted(notes))
    (folder / "timeline").write_text("".join(text))
    begin = time.process_time()
    with open(os.devnull, "w") as out, contextlib.redirect_stdout(out):
        LogPrinter(world_is_one=False).show_all(LogReader(tmp_path).batches(end=True))
    # Measured: 0.5 s. When it took three times as long, 100 MB took minutes.
    assert time.process_time() - begin < 5.0
