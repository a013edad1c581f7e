"""Compatibility scripts on Slurm, with each of the three launchers, and on SSH hosts."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from compat_cases import CASES
from compat_runs import Case, Outcome, expected, skip_without, under_clusterjob
from slurm_cluster import SlurmCluster
from ssh_network import SshNetwork

pytestmark = pytest.mark.slow
BY_ID = {case.id: case for case in CASES}
# One case of each kind: DDP, own init function, module, DataLoader processes, killed rank.
ON_SLURM = [
    "ddp_in_function-2-nodes",
    "init_mode_mae",
    "module",
    "loader-persistent",
    "early_signal",
]
RUNS_ON_SLURM = [
    *((name, "agent") for name in ON_SLURM),
    *((name, "torchrun") for name in ("ddp_in_function-2-nodes", "early_signal")),
    *((name, "srun") for name in ("ddp_in_function-2-nodes", "init_mode_mae")),
]
ON_HOSTS = [
    "ddp_in_function-2-nodes",
    "environment",
    "train_siblings",
    "loader-spawn",
    "early_signal",
]
_LABEL = re.compile(r"^\[[^\]]*\] ", re.MULTILINE)


def shown(outcome: Outcome) -> set[str]:
    """Return the set of output lines without rank labels; equal lines may be folded."""
    return set(_LABEL.sub("", outcome.shown).splitlines())


def recorded(case: Case) -> set[str]:
    """Return the output lines of the ranks under torchrun."""
    return {line for text in expected()[case.id]["out"] for line in text.splitlines()}


def characters(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


@pytest.mark.parametrize(("name", "launcher"), RUNS_ON_SLURM)
def test_script_on_slurm_has_same_outcome_as_under_torchrun(
    slurm: SlurmCluster, tmp_path: Path, name: str, launcher: str
) -> None:
    case = BY_ID[name]
    skip_without(case)
    options = ("--cluster", "slurm", "--launcher", launcher)
    start = "fork" if launcher == "agent" else None
    ours = under_clusterjob(case, tmp_path, start, options, Path(os.environ["CLUSTERJOB_HOME"]))
    assert (ours.code == 0) == (case.code == 0), ours.err
    assert sorted(ours.files) == sorted(expected()[name]["files"])
    assert ours.left == []
    if case.code == 0 and launcher == "torchrun":
        # The ranks share a stream, and Python writes a line and its newline separately: lines can
        # be mixed, but no character is lost.
        assert characters(_LABEL.sub("", ours.shown)) == characters(
            "".join(expected()[name]["out"])
        )
    elif case.code == 0:
        assert shown(ours) == recorded(case)
    elif launcher != "srun":
        assert re.search(case.message, ours.err), ours.err


@pytest.mark.parametrize("name", ON_HOSTS)
def test_script_on_ssh_hosts_has_same_outcome_as_under_torchrun(
    ssh_network: SshNetwork, tmp_path: Path, name: str
) -> None:
    case = BY_ID[name]
    skip_without(case)
    hosts = "gpu1" if case.nodes == 1 else "gpu[1-2]"
    options = (
        "--hosts",
        hosts,
        "--set",
        f"ssh_config={ssh_network.config}",
        "--set",
        "connect_timeout=20",
    )
    ours = under_clusterjob(case, tmp_path, "fork", options, Path(os.environ["CLUSTERJOB_HOME"]))
    assert ours.code == case.code, ours.err
    assert ours.left == []
    if case.code == 0:
        assert shown(ours) == recorded(case), ours.err
    else:
        assert re.search(case.message, ours.err), ours.err
