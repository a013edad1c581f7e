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
from clusterjob.node.rendezvous.messages import CoordinatorState, Members
from clusterjob.node.system import processes


def state(seconds_left: float | None = None) -> CoordinatorState:
    return CoordinatorState(
        2,
        3,
        started_at="2026-11-25T12:00:00.000Z",
        seconds_left=seconds_left,
        limit_runs=True,
        node=1,
        host="gpu1",
        moves=1,
        process="boot pid:[1] 2 3",
        groups=(Members((0, 1, 2, 3), 0), Members((1, 2, 3), 1)),
        nodes=(1, 2, 3),
        avoided=(0,),
        addresses=("10.0.0.2", "10.0.0.3"),
        clock=1234.5,
        made_at=time.monotonic(),
        boot_id=processes.boot_id(),
    )


@pytest.mark.parametrize("seconds_left", [None, 1e6])
def test_state_that_was_written_is_read(tmp_path: Path, seconds_left: float | None) -> None:
    written = state(seconds_left)
    succession.write_state(tmp_path, written)
    assert succession.read_state(tmp_path, 2) == written
    assert (tmp_path / COORDINATOR).stat().st_mode & 0o777 == 0o600


def test_state_of_another_attempt_is_ignored(tmp_path: Path) -> None:
    assert succession.read_state(tmp_path, 2) is None
    succession.write_state(tmp_path, state())
    assert succession.read_state(tmp_path, 3) is None


def test_deadline_stays_on_this_machine_and_is_moved_on_another() -> None:
    limit = time.monotonic() + 100
    of_limit = replace(state(160.0), made_at=limit - 160)
    assert of_limit.deadline == limit
    moved = replace(of_limit, boot_id="another").deadline - time.monotonic()
    assert 150 < moved <= 160
    assert state().deadline == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"restarts": -1},
        {"restarts": "3"},
        {"restarts": True},
        {"restarts": 2**31},
        {"attempt": None},
        {"started_at": 5},
        {"started_at": "x" * 301},
        {"nodes": "1"},
        {"groups": [{"nodes": [1], "coordinator": 1}] * 3},
        {"groups": [{"nodes": [-1], "coordinator": 1}]},
        {"nodes": [1, -2]},
        {"avoided": [0] * 20_000},
        {"addresses": ["10.0.0.2"] * 9},
        {"addresses": [5]},
        {"moves": 1.5},
        {"seconds_left": "1"},
        {"seconds_left": -1.0},
        {"seconds_left": math.nan},
        {"made_at": 1e12},
        {"boot_id": None},
    ],
)
def test_damaged_state_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    succession.write_state(tmp_path, state(1e6))
    data = json.loads((tmp_path / COORDINATOR).read_text())
    (tmp_path / COORDINATOR).write_text(json.dumps(data | change))
    assert succession.read_state(tmp_path, 2) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null"])
def test_file_that_is_no_state_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / COORDINATOR).write_text(text)
    assert succession.read_state(tmp_path, 2) is None
