"""The state of a coordinator, as another process reads it from the job's directory."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterjob.node.logs.job_dir import COORDINATOR
from clusterjob.node.rendezvous import succession
from clusterjob.node.rendezvous.messages import CoordinatorState, Lasting, Members
from clusterjob.node.system import files, processes
from clusterjob.node.system.codec import plain
from clusterjob.node.verdict import RoundEnd


def state(seconds_left: float = 1e6) -> CoordinatorState:
    lasting = Lasting(
        3,
        nodes=(1, 2, 3),
        groups=(Members((0, 1, 2, 3), 0), Members((1, 2, 3), 1)),
        avoided=(0,),
        rounds=(RoundEnd(2, 1, "signal"),),
        first_started="2026-11-25T12:00:00.000Z",
        deadline=seconds_left,
    )
    return CoordinatorState(
        2,
        lasting,
        node=1,
        host="gpu1",
        moves=1,
        addresses=("10.0.0.1", "10.0.0.2"),
        boot=processes.boot_id(),
        clock=1234.5,
        made_at=time.monotonic(),
    )


def write(job_dir: Path, written: CoordinatorState) -> None:
    files.write_json(job_dir / COORDINATOR, plain(written))


def read(job_dir: Path, attempt: int = 2) -> CoordinatorState | None:
    found = succession.from_disk(job_dir, attempt, "it was killed")
    return found.state if found is not None else None


def test_state_that_was_written_is_read_in_the_same_attempt(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    written = state()
    write(tmp_path, written)
    # The rounds that have ended are those of the events.
    assert read(tmp_path) == replace(written, lasting=replace(written.lasting, rounds=()))
    assert read(tmp_path, 3) is None
    assert (tmp_path / COORDINATOR).stat().st_mode & 0o777 == 0o600


def test_time_limit_goes_on_on_this_machine_and_stands_still_until_another_reads_it(
    tmp_path: Path,
) -> None:
    made = replace(state(160.0), made_at=time.monotonic() - 60)
    for boot, left in ((made.boot, 100), ("another", 160)):
        write(tmp_path, replace(made, boot=boot))
        found = succession.from_disk(tmp_path, 2, "it was killed")
        limit = found.received_at + found.state.lasting.deadline
        assert left - 10 < limit - time.monotonic() <= left


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": None},
        {"moves": 1.5},
        {"made_at": 1e12},
        {"boot": None},
        {"lasting": {"round": -2}},
        {"lasting": {"round": "3"}},
        {"lasting": {"round": True}},
        {"lasting": {"round": 2**31}},
        {"lasting": {"first_started": "x" * 301}},
        {"lasting": {"nodes": "1"}},
        {"lasting": {"nodes": [1, -2]}},
        {"lasting": {"groups": [{"nodes": [1], "coordinator": 1}] * 3}},
        {"lasting": {"groups": [{"nodes": [-1], "coordinator": 1}]}},
        {"lasting": {"avoided": [0] * 20_000}},
        {"lasting": {"deadline": -1.0}},
        {"lasting": {"deadline": math.nan}},
    ],
)
def test_damaged_state_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, state())
    data = json.loads((tmp_path / COORDINATOR).read_text())
    (tmp_path / COORDINATOR).write_text(json.dumps(data | change))
    assert read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null"])
def test_file_that_is_no_state_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / COORDINATOR).write_text(text)
    assert read(tmp_path) is None
