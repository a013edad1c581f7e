"""Training on real GPUs: NCCL, fork and exec, mixed precision, SyncBatchNorm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_jobs import SCRIPTS, clusterjob, run_script


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_one_gpu_is_a_world_of_one_with_nccl(start: str, tmp_path: Path) -> None:
    output = run_script("all_reduce.py", tmp_path, 1, "--start", start)
    assert f"rank 0 of 1: nccl on cuda:0, current 0, {start}" in output


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_plain_script_trains_on_one_gpu(start: str, tmp_path: Path) -> None:
    assert "rank 0 of 1: nccl on cuda:0" in run_script("plain.py", tmp_path, 1, "--start", start)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_two_ranks_on_one_gpu_are_refused(start: str, tmp_path: Path) -> None:
    done = clusterjob(
        *("launch", "--nproc-per-node", "2", "--start", start, str(SCRIPTS / "all_reduce.py")),
        cwd=tmp_path,
        code=1,
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )
    text = done.stdout + done.stderr
    assert re.search(r"rank [01] .* and rank [01] .* have the same GPU, \S+", text), text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_two_gpus_sum_through_nccl(start: str, tmp_path: Path) -> None:
    output = run_script("all_reduce.py", tmp_path, 2, "--start", start)
    assert f"rank 0 of 2: nccl on cuda:0, current 0, {start}" in output
    assert f"rank 1 of 2: nccl on cuda:1, current 1, {start}" in output


@pytest.mark.usefixtures("two_gpus")
def test_plain_script_trains_on_two_gpus(tmp_path: Path) -> None:
    output = run_script("plain.py", tmp_path, 2)
    assert "rank 0 of 2: nccl on cuda:0" in output
    assert "rank 1 of 2: nccl on cuda:1" in output


def test_grad_scaler_trains_and_skips_an_infinite_gradient(tmp_path: Path) -> None:
    assert "rank 0 of 1: loss" in run_script("mixed_precision.py", tmp_path, 1)


@pytest.mark.usefixtures("two_gpus")
def test_grad_scaler_of_two_ranks_skips_the_same_step(tmp_path: Path) -> None:
    output = run_script("mixed_precision.py", tmp_path, 2)
    assert "rank 1 of 2: loss" in output


def test_sync_batch_norm_of_one_rank_is_batch_norm(tmp_path: Path) -> None:
    assert "SyncBatchNorm agrees" in run_script("sync_batch_norm.py", tmp_path, 1)


@pytest.mark.usefixtures("two_gpus")
def test_sync_batch_norm_uses_the_samples_of_both_ranks(tmp_path: Path) -> None:
    output = run_script("sync_batch_norm.py", tmp_path, 2)
    assert "[0-1] " in output or output.count("SyncBatchNorm agrees") == 2
