"""GPUs of a local job, and their division between nodes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia import installed_gpus

from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core.gpus import listed_gpus, shares, visible_gpus
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.program import Program

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"


@pytest.mark.parametrize(
    ("listed", "installed", "found"),
    [
        ("", 8, []),
        ("0", 8, ["0"]),
        ("0,1", 8, ["0", "1"]),
        ("3,1", 8, ["3", "1"]),
        (" 0 , 1 ", 8, ["0", "1"]),
        (f"{UUID},{MIG}", 8, [UUID, MIG]),
        ("-1", 8, []),
        ("0,-1,1", 8, ["0"]),
        ("NoDevFiles", 8, []),
        ("0,,1", 8, ["0"]),
        ("none", 8, []),
        ("0,1,0", 8, ["0", "1"]),
        ("0,1,2", 2, ["0", "1"]),
        ("7,0", 2, []),
        ("0,1", 0, []),
        (UUID, 0, []),
        ("²", 8, []),
        (None, 2, ["0", "1"]),
        (None, 0, []),
        ("9" * 5000, 8, []),
    ],
)
def test_gpu_list_ends_at_first_invalid_or_missing_gpu(
    listed: str | None, installed: int, found: list[str]
) -> None:
    assert listed_gpus(listed, installed) == found


@given(st.text(), st.integers(0, 8))
def test_any_text_gives_a_gpu_list(listed: str, installed: int) -> None:
    assert len(listed_gpus(listed, installed)) <= len(listed)


def test_unset_variable_makes_all_installed_gpus_visible() -> None:
    assert visible_gpus({}) == [str(index) for index in range(installed_gpus())]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 8))
def test_shares_are_disjoint_and_in_order(installed: int, nodes: int, per_node: int) -> None:
    available = [str(index) for index in range(installed)]
    found = shares(available, nodes, per_node=per_node)
    if installed < nodes * per_node:
        assert found is None
    else:
        assert [len(share) for share in found] == [per_node] * nodes
        assert [gpu for share in found for gpu in share] == available[: nodes * per_node]


def devices(tmp_path: Path, **fields: object) -> tuple[list[str | None], tuple[str, ...]]:
    """Return CUDA_VISIBLE_DEVICES of each node in a plan, and the notes of the plan."""
    resources = {key: fields.pop(key) for key in ("nodes", "gpus_per_node", "mem") if key in fields}
    spec = JobSpec(
        Program("command", "true"),
        tmp_path,
        resources=Resources(**resources),  # type: ignore[arg-type]
        **{"require_gpus": False, **fields},  # type: ignore[arg-type]
    )
    plan = LocalBackend().plan(spec)
    return [command.env.get("CUDA_VISIBLE_DEVICES") for command in plan.commands], plan.notes


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that 8 GPUs are installed."""
    monkeypatch.setattr("clusterjob.core.gpus._installed", lambda: 8)


@pytest.mark.usefixtures("eight_gpus")
def test_each_node_gets_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(tmp_path, nodes=2, gpus_per_node=4) == (["0,1,2,3", "4,5,6,7"], ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,1,{UUID},0,7")
    assert devices(tmp_path, nodes=2, gpus_per_node=2) == (["3,1", f"{UUID},0"], ())
    assert devices(tmp_path, nodes=1, gpus_per_node=5) == ([f"3,1,{UUID},0,7"], ())


def test_variable_is_unchanged_without_gpu_option_and_empty_for_zero_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices(tmp_path, nodes=2) == ([None, None], ())
    assert devices(tmp_path, nodes=2, gpus_per_node=0) == (["", ""], ())
    assert devices(tmp_path, nodes=2, gpus_per_node=0, require_gpus=True) == (["", ""], ())


@pytest.mark.usefixtures("eight_gpus")
def test_too_few_gpus_give_cpu_rehearsal_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    found, notes = devices(tmp_path, nodes=2, gpus_per_node=2)
    assert found == ["", ""]
    assert len(notes) == 1
    assert "3 of the 4 GPUs" in notes[0]
    assert "\n" not in notes[0]
    with pytest.raises(SpecError, match="3 of the 4 GPUs"):
        devices(tmp_path, nodes=2, gpus_per_node=2, require_gpus=True)


def test_memory_limit_of_local_job_gives_note(tmp_path: Path) -> None:
    _, notes = devices(tmp_path, mem=1 << 30)
    assert len(notes) == 1
    assert "--mem" in notes[0]
