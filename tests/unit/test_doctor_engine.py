"""The check engine of `doctor`: dependencies, findings, and grouping of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.doctor import fitness, this_machine
from clusterjob.doctor.engine import (
    Check,
    CheckFinding,
    CheckState,
    CheckStep,
    failed,
    of_hosts,
    ok,
    one_line,
    run_checks,
    unknown,
    warning,
)
from clusterjob.errors import RecordError, SubmitError


def test_check_after_failed_dependency_is_unknown_and_not_run() -> None:
    executed = []

    def step(name: str, finding: CheckFinding, *needs: str) -> CheckStep:
        def check_function() -> Iterator[CheckFinding]:
            executed.append(name)
            yield finding

        return CheckStep(name, check_function, needs=needs)

    steps = [
        step("a", failed("no", "do")),
        step("b", ok("b"), "a"),
        step("c", ok("c"), "b"),
        step("d", warning("hm", "do")),
        step("e", ok("e"), "d"),
    ]
    states = [str(check.state) for check in run_checks(steps)]
    assert states == ["failed", "unknown", "unknown", "warning", "ok"]
    assert executed == ["a", "d", "e"]


def test_exception_in_check_is_failure_with_its_message() -> None:
    def raise_submit_error() -> list[CheckFinding]:
        raise SubmitError("2 of 3 hosts cannot be used:\n  a: x\n  b: y", "look there")

    def raise_os_error() -> list[CheckFinding]:
        raise OSError(28, "No space left on device", "/tmp/x")

    checks = list(
        run_checks(
            [
                CheckStep("one", raise_submit_error),
                CheckStep("two", raise_os_error, hint="make room"),
                CheckStep("three", lambda: [ok("yes")], needs=("two",)),
            ]
        )
    )
    assert checks[0] == Check(
        "one",
        CheckState.FAILED,
        message="2 of 3 hosts cannot be used: a: x; b: y",
        hint="look there",
    )
    assert checks[1] == Check(
        "two", CheckState.FAILED, message="No space left on device: /tmp/x", hint="make room"
    )
    assert checks[2].state is CheckState.UNKNOWN


def test_check_result_is_yielded_before_next_check_runs() -> None:
    checks = run_checks(
        [CheckStep("first", lambda: [ok("1")]), CheckStep("second", lambda: pytest.fail("it ran"))]
    )
    assert next(checks).message == "1"


EQUAL = {name: ok("3.11") for name in "abc"}


@pytest.mark.parametrize(
    ("found", "hosts", "lines"),
    [
        (EQUAL, None, [ok("3.11, on all 3 hosts")]),
        (
            {**EQUAL, "d": failed("old", "new")},
            None,
            [ok("a, b, c: 3.11"), failed("d: old", "new")],
        ),
        (EQUAL, 5, [ok("a, b, c: 3.11")]),
        ({"a": ok("x")}, None, [ok("a: x")]),
        (
            {f"h{number}": unknown("?") for number in range(9)},
            None,
            [unknown("h0, h1, h2, h3 and 5 more: ?")],
        ),
    ],
    ids=["all", "one differs", "not all hosts", "one host", "many hosts"],
)
def test_hosts_with_equal_findings_are_grouped(
    found: dict[str, CheckFinding], hosts: int | None, lines: list[CheckFinding]
) -> None:
    assert list(of_hosts(found, hosts)) == lines


@given(st.text())
def test_one_line_has_no_line_break(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1


def answer(**facts: Any) -> dict[str, Any]:
    common = {
        "torch": "2.9.0+cu128",
        "cuda": "12.8",
        "gpus": 8,
        "driver_error": "",
        "backends": ["gloo", "nccl"],
        "fork": "",
        "broken": "",
        "seconds": 1.0,
    }
    return {
        "executable": "/usr/bin/python3",
        "version": [3, 11, 7],
        "unfit": "",
        "setup": False,
        "died": "",
        "facts": common | facts,
    }


@pytest.mark.parametrize(
    ("installed", "seen", "wanted", "required", "state", "message"),
    [
        (8, {"gpus": 8}, 8, False, "ok", "8 GPUs, and torch sees all of them"),
        (1, {"gpus": 1}, None, False, "ok", "1 GPU, and torch sees it"),
        (0, {"gpus": 0}, None, False, "ok", "none"),
        (
            0,
            {"gpus": 4},
            4,
            False,
            "ok",
            "4 GPUs, and torch sees all of them",
        ),  # AMD GPUs: the NVIDIA driver does not count them
        (8, {"gpus": 0}, 0, False, "ok", "8 GPUs, hidden from the job"),
        (
            2,
            {"gpus": 2},
            8,
            False,
            "warning",
            "2 GPUs, but the job needs 8: the job would be a rehearsal on the CPU",
        ),
        (2, {"gpus": 2}, 8, True, "failed", "2 GPUs, but the job needs 8"),
        (
            8,
            {"gpus": 0, "cuda": ""},
            None,
            False,
            "warning",
            "8 GPUs, of which torch sees 0: torch is built for the CPU only",
        ),
        (
            8,
            {"gpus": 0, "cuda": ""},
            8,
            False,
            "failed",
            "8 GPUs, of which torch sees 0: torch is built for the CPU only",
        ),
        (
            8,
            {"gpus": 0, "driver_error": "driver too old"},
            1,
            False,
            "failed",
            "8 GPUs, of which torch sees 0: driver too old",
        ),
        (
            8,
            {"gpus": 7},
            None,
            False,
            "warning",
            "8 GPUs, of which torch sees 7: torch gives no reason",
        ),
    ],
)
def test_gpu_check_compares_driver_torch_and_job(
    installed: int,
    seen: dict[str, Any],
    wanted: int | None,
    required: bool,
    state: str,
    message: str,
) -> None:
    finding = fitness.gpus(installed, answer(**seen), wanted=wanted, required=required)
    assert (str(finding.state), finding.message) == (state, message)
    assert bool(finding.hint) == (state != "ok")


def test_torch_check_reports_slow_import_and_missing_backends() -> None:
    slow = fitness.torch(answer(seconds=40.0))
    assert (slow.state, slow.message) == (
        CheckState.WARNING,
        "2.9.0+cu128 for CUDA 12.8, with gloo and nccl; its import takes 40 s",
    )
    assert fitness.torch(answer(backends=[])).state is CheckState.FAILED
    assert fitness.torch(answer()).state is CheckState.OK


def test_disk_space_check_warns_and_fails_below_limits() -> None:
    states = [fitness.space(free, "/x").state for free in (0, 49_000_000, 60_000_000, 1 << 30)]
    assert states == [CheckState.FAILED, CheckState.FAILED, CheckState.WARNING, CheckState.OK]


def test_directory_check_refuses_what_jobs_refuse_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("CLUSTERJOB_HOME", str(home))
    assert this_machine.directory() == ok(f"{home} will be created with the first job")
    home.mkdir(mode=0o755)
    assert this_machine.directory() == ok(f"{home} is writable")
    home.chmod(0o777)
    with pytest.raises(RecordError, match=r"everyone can write to it \(mode 0777\)"):
        this_machine.directory()
    assert not list(home.iterdir()), "the check must leave no file"
