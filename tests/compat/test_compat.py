"""Scripts as people write them, each unmodified: what works under torchrun works here with the same result."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from compat_cases import CASES
from compat_runs import HUNG, Case, differences, expected, skip_without, under_clusterjob, under_torchrun


def _marks(case: Case, start: str) -> list[pytest.MarkDecorator]:
    return [] if start in case.quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("case", "start"),
    [pytest.param(case, start, id=f"{case.id}-{start}", marks=_marks(case, start)) for case in CASES for start in case.starts],
)
def test_a_script_runs_under_clusterjob_as_under_torchrun(tmp_path: Path, case: Case, start: str) -> None:
    skip_without(case)
    ours = under_clusterjob(case, tmp_path, start)
    found = differences(case, expected()[case.id], ours)
    assert not found, "\n".join([*found, ours.err, *ours.ranks_err])


# Where torchrun waits for ever there is nothing to check but that it still does: two of these are enough. Where it does the same as
# clusterjob, the test above has compared the two already: a few are enough to see that the record is torchrun's.
HANGS = ("spawn_own_port", "tcp_url")
RECORDED = [case for case in CASES if case.id in HANGS or ("code" not in case.differs and (case.differs or case.code or case.quick))]


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in RECORDED])
def test_torchrun_does_what_is_recorded_of_it(tmp_path: Path, case: Case) -> None:
    skip_without(case)
    recorded = expected()[case.id]
    if case.id in HANGS:
        assert under_torchrun(case, tmp_path, HUNG).code is None
        return
    # torch 2.13 aborts or deadlocks now and then where a gloo group is freed at the end of a process.
    for attempt in range(3):
        place = tmp_path / f"attempt{attempt}"
        place.mkdir()
        seen = under_torchrun(case, place)
        if seen.code == recorded["code"]:
            break
    if seen.code is None:
        pytest.skip("torchrun hung three times: torch's own deadlock, which says nothing of the record")
    assert seen.code == recorded["code"], seen.err
    if seen.code == 0:
        assert seen.recorded() == recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_never_destroyed", "module"])
def test_clusterjob_takes_no_longer_than_torchrun(tmp_path: Path, name: str) -> None:
    [case] = [case for case in CASES if case.id == name]
    taken: dict[str, list[float]] = {"torchrun": [], "fork": []}
    for turn in range(3):
        for launcher, seconds in taken.items():
            place = tmp_path / f"{launcher}{turn}"
            place.mkdir()
            seen = under_torchrun(case, place) if launcher == "torchrun" else under_clusterjob(case, place, launcher)
            seconds.append(seen.seconds)
    # Half of torchrun's time on a machine that is idle; the bound is what a busy one needs.
    assert median(taken["fork"]) < median(taken["torchrun"]) * 1.5 + 1, taken
