"""The machinery of `doctor`: which check needs which, how findings are judged, and how hosts of
which the same is said stand together.
"""

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
    CheckState,
    Finding,
    Look,
    examine,
    failed,
    of_hosts,
    ok,
    one_line,
    unknown,
    warning,
)
from clusterjob.errors import SubmitError


def test_what_needs_a_check_that_failed_is_not_looked_at() -> None:
    looked = []

    def find(name: str, finding: Finding) -> Look:
        def look() -> Iterator[Finding]:
            looked.append(name)
            yield finding

        return Look(name, look, needs={"b": ("a",), "c": ("b",), "e": ("d",)}.get(name, ()))

    looks = [
        find("a", failed("no", "do")),
        find("b", ok("b")),
        find("c", ok("c")),
        find("d", warning("hm", "do")),
        find("e", ok("e")),
    ]
    states = [(check.name, str(check.state)) for check in examine(looks)]
    assert states == [
        ("a", "failed"),
        ("b", "unknown"),
        ("c", "unknown"),
        ("d", "warning"),
        ("e", "ok"),
    ]
    assert looked == ["a", "d", "e"]


def test_errors_are_failures_in_their_own_words() -> None:
    def refuse() -> list[Finding]:
        raise SubmitError("2 of 3 hosts cannot be used:\n  a: x\n  b: y", "look there")

    def full() -> list[Finding]:
        raise OSError(28, "No space left on device", "/tmp/x")

    checks = list(
        examine(
            [
                Look("one", refuse),
                Look("two", full, hint="make room"),
                Look("three", lambda: [ok("yes")], needs=("two",)),
            ]
        )
    )
    assert checks[0] == Check(
        "one", CheckState.FAILED, words="2 of 3 hosts cannot be used: a: x; b: y", hint="look there"
    )
    assert checks[1] == Check(
        "two", CheckState.FAILED, words="No space left on device: /tmp/x", hint="make room"
    )
    assert checks[2].state is CheckState.UNKNOWN


def test_checks_appear_as_they_are_done() -> None:
    begun = []

    def second() -> list[Finding]:
        begun.append("second")
        return [ok("2")]

    checks = examine([Look("first", lambda: [ok("1")]), Look("second", second)])
    assert next(checks).words == "1"
    assert not begun


def test_hosts_of_which_the_same_is_said_stand_together() -> None:
    same = {name: ok("3.11") for name in "abc"}
    assert list(of_hosts(same)) == [ok("3.11, on all 3 hosts")]
    assert list(of_hosts({**same, "d": failed("old", "new")})) == [
        ok("a, b, c: 3.11"),
        failed("d: old", "new"),
    ]
    assert list(of_hosts(same, 5)) == [ok("a, b, c: 3.11")]
    assert list(of_hosts({"a": ok("x")})) == [ok("a: x")]
    assert list(of_hosts({f"h{n}": unknown("?") for n in range(9)})) == [
        unknown("h0, h1, h2, h3 and 5 more: ?")
    ]


@given(
    st.dictionaries(
        st.text("abcdef0123", min_size=1, max_size=4),
        st.sampled_from([ok("x"), ok("y"), failed("z", "h")]),
        max_size=4,
    )
)
def test_every_host_is_said_something_of(found: dict[str, Finding]) -> None:
    lines = list(of_hosts(found))
    assert {line.state for line in lines} == {finding.state for finding in found.values()}
    for name, finding in found.items():
        assert any(
            finding.words in line.words
            and (line.words.endswith(" hosts") or name in line.words.split(": ")[0].split(", "))
            for line in lines
        )


@given(st.text())
def test_one_line_is_one(text: str) -> None:
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
    ("installed", "seen", "wanted", "required", "state", "words"),
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
        ),  # AMD's, of which no NVIDIA driver knows
        (8, {"gpus": 0}, 0, False, "ok", "8 GPUs, hidden from the job"),
        (
            2,
            {"gpus": 2},
            8,
            False,
            "warning",
            "2 GPUs where 8 are asked for: the job would be a rehearsal on the CPU",
        ),
        (2, {"gpus": 2}, 8, True, "failed", "2 GPUs where 8 are asked for"),
        (
            8,
            {"gpus": 0, "cuda": ""},
            None,
            False,
            "warning",
            "8 GPUs, of which torch sees 0: it is built for the CPU alone",
        ),
        (
            8,
            {"gpus": 0, "cuda": ""},
            8,
            False,
            "failed",
            "8 GPUs, of which torch sees 0: it is built for the CPU alone",
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
            "8 GPUs, of which torch sees 7: it gives no reason",
        ),
    ],
)
def test_gpus_of_the_driver_and_of_torch(
    installed: int, seen: dict[str, Any], wanted: int | None, required: bool, state: str, words: str
) -> None:
    finding = fitness.gpus(installed, answer(**seen), wanted=wanted, required=required)
    assert (str(finding.state), finding.words) == (state, words)
    assert bool(finding.hint) == (state != "ok")


def test_an_import_of_torch_that_takes_long_and_a_torch_without_processes() -> None:
    slow = fitness.torch(answer(seconds=40.0))
    assert (slow.state, slow.words) == (
        CheckState.WARNING,
        "2.9.0+cu128 for CUDA 12.8, with gloo and nccl; its import takes 40 s",
    )
    assert fitness.torch(answer(backends=[])).state is CheckState.FAILED
    assert fitness.torch(answer()).state is CheckState.OK


def test_space() -> None:
    states = [fitness.space(free, "/x").state for free in (0, 49_000_000, 60_000_000, 1 << 30)]
    assert states == [CheckState.FAILED, CheckState.FAILED, CheckState.WARNING, CheckState.OK]


def test_a_directory_that_others_may_write_or_own(tmp_path: Path) -> None:
    place = tmp_path / "home"
    assert this_machine.directory(place) == ok(f"{place} will be made with the first job")
    assert not place.exists()
    place.mkdir()
    for mode, state in (
        (0o755, "ok"),
        (0o700, "ok"),
        (0o770, "warning"),
        (0o777, "failed"),
        (0o1777, "ok"),
    ):
        place.chmod(mode)
        found = this_machine.directory(place)
        assert str(found.state) == state, found
        assert state == "ok" or found.hint == f"chmod go-w {place}"
    assert not list(place.iterdir()), "the try leaves nothing"
