"""Unmodified training scripts cross three time limits of a real Slurm with --until-done."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import shutil
import struct
import sys
import textwrap

import pytest
from launching import ROOT
from procs import wait_until
from slurm_user import User

pytestmark = pytest.mark.slow

NANOGPT = ROOT / "tests" / "compat" / "scripts" / "nanogpt"  # karpathy/nanoGPT, unchanged
LIMITS = 3
# Slurm's shortest limits are minutes; it looks every 30 s. A requeued job waits 10 s and more.
TEST_TIMEOUT = LIMITS * 240.0 + 240.0
OPTIONS = ("--until-done", "--checkpoint-dir", "out", "--signal-before", "50s", "--time", "2m")

# nanoGPT on the CPU: without RANK it forms no process group, which would need GPUs.
TRAIN_SH = """
    options=(--dataset=tiny --device=cpu --compile=False --always_save_checkpoint=True
      --eval_interval=20 --eval_iters=2 --log_interval=10 --batch_size=2 --block_size=8
      --gradient_accumulation_steps=1 --n_layer=1 --n_head=1 --n_embd=8
      --max_iters="$(cat max_iters)")
    [ -e out/ckpt.pt ] && exec env -u RANK $PYTHON train.py "${options[@]}" --init_from=resume
    exec env -u RANK $PYTHON train.py "${options[@]}"
    """
MANY = str(10**9)


def steps_of(user: User, job: str, attempt: int, pattern: str) -> list[int]:
    """Return the steps in the output of an attempt's rank 0."""
    name = f"rank0.attempt{attempt}.out" if attempt else "rank0.out"
    path = user.directory_of(job) / "logs" / "node0" / name
    return list(map(int, re.findall(pattern, path.read_text()))) if path.exists() else []


def steps_across_limits(user: User, job: str, pattern: str) -> list[list[int]]:
    """Let a job cross the limits, then end; return the steps that each attempt has printed."""
    wait_until(
        lambda: len(steps_of(user, job, LIMITS, pattern)) > 0,
        TEST_TIMEOUT,
        f"training after {LIMITS} limits of {job}",
    )
    user.path("max_iters").write_text("1")
    user.slurm.run("scancel", "--batch", "--signal=USR1", user.slurm_id(job))
    user("wait", job, timeout=TEST_TIMEOUT)
    assert user.job(job)["state"] == "SUCCEEDED"
    assert user.slurm_job(job)["Restarts"] == str(LIMITS + 1)
    [listed] = user.jobs()
    assert listed["id"] == job
    return [steps_of(user, job, attempt, pattern) for attempt in range(LIMITS + 1)]


def test_unmodified_nanogpt_crosses_three_time_limits(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")
    monkeypatch.delenv("CLUSTERJOB_PYTHON")
    for file in ("train.py", "model.py", "configurator.py"):
        shutil.copy(NANOGPT / file, user.path(file))
    data = user.path("data") / "tiny"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(
            struct.pack("1000H", *random.Random(0).choices(range(64), k=1000))
        )
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))
    user.path("train.sh").write_text(textwrap.dedent(TRAIN_SH).replace("$PYTHON", sys.executable))
    user.path("max_iters").write_text(MANY)
    command = ("submit", "--cluster", "slurm", *OPTIONS, "--", "bash", "train.sh")
    job = user(*command).stdout.strip()
    found = steps_across_limits(user, job, r"step (\d+): train loss")
    assert found[0][0] == 0
    for before, after in itertools.pairwise(found):
        assert 0 < before[-2] <= after[0] <= before[-1] + 20
        assert after[-1] > after[0]
    assert "Resuming training from out" in user.output(job, "--attempt", "1")
