"""Examples train under clusterjob launch, under torchrun and as plain scripts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, Run, launch, run

DIGITS = ROOT / "examples" / "train_digits.py"
PLAIN = ROOT / "examples" / "plain_env.py"


def check_training(ran: Run, processes: int) -> None:
    assert ran.code == 0, ran.err
    [accuracy] = re.findall(r"held-out accuracy (\d\.\d+) on 359 digits", ran.out)
    assert float(accuracy) >= 0.95
    [speed] = re.findall(rf"(\d+) samples per second on {processes} x cpu", ran.out)
    assert int(speed) > 0
    assert len(re.findall(r"epoch \d+/10: loss", ran.out)) == 10  # only the main process prints
    assert "arning" not in ran.err


def test_digits_example_trains_as_plain_script(tmp_path: Path) -> None:
    check_training(run([sys.executable, DIGITS], tmp_path), 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_digits_example_trains_under_launcher(processes: int, tmp_path: Path) -> None:
    check_training(launch("fork", processes, [DIGITS], tmp_path), processes)


def test_digits_example_below_target_accuracy_fails_job(tmp_path: Path) -> None:
    ran = launch("fork", 1, [DIGITS, "--epochs", 1, "--target", 0.999], tmp_path)
    assert ran.code == 1
    assert re.search(
        r"FAILED: rank 0 .*: held-out accuracy 0\.\d+ is below the target of 0\.999", ran.err
    )


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_plain_torch_example_runs_under_each_launcher(launcher: str, tmp_path: Path) -> None:
    assert "clusterjob" not in PLAIN.read_text().replace("clusterjob launch", "")
    ran = launch(launcher, 2, [PLAIN], tmp_path)
    assert ran.code == 0, ran.err
    assert "all-reduce over 2 ranks: 3\n" in ran.out
    slope, intercept = re.search(r"fitted y = (\S+) x \+ (\S+),", ran.out).groups()
    assert float(slope) == pytest.approx(3.0, abs=0.02)
    assert float(intercept) == pytest.approx(-1.0, abs=0.02)
