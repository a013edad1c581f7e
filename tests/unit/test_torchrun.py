"""torchrun as launcher: its command line, and the root cause from its stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterjob.node.contract import World
from clusterjob.node.program import Program
from clusterjob.node.verdict import Failure
from clusterjob.node.workers.forkserver import torchrun_command
from clusterjob.node.workers.worker_failures import Failures

WORLD = World(
    0,
    "10.0.0.1",
    master_port=1234,
    agent_store=False,
    node_rank=1,
    nnodes=2,
    nproc=4,
    first_rank=4,
    world_size=8,
)

# Output of torch 2.13 with shortened times and paths.
CLOSING = """\
W1120 06:25:42 4711 torch/distributed/elastic/multiprocessing/api.py:1049] Sending process 11458 \
closing signal SIGTERM
E1120 06:25:43 4711 torch/distributed/elastic/multiprocessing/api.py:1023] failed \
(exitcode: {code}) local_rank: 1 (pid: 11460) of binary
============================================================
die.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 11458)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_06:25:42
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 11460)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("program", "end"),
    [
        (Program("script", "train.py", args=("--lr", "1")), ["train.py", "--lr", "1"]),
        (Program("module", "pkg.train", args=("x",)), ["-m", "pkg.train", "x"]),
        (Program("command", "bash", args=("a.sh",)), ["--no-python", "bash", "a.sh"]),
    ],
)
def test_command_line_of_torchrun_has_placement_and_program(
    program: Program, end: list[str]
) -> None:
    argv = torchrun_command(program, WORLD, job_id="train-abc")
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    options = dict(zip(argv[3 : -len(end) : 2], argv[4 : -len(end) : 2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "4",
        "--master-addr": "10.0.0.1",
        "--master-port": "1234",
        "--rdzv-id": "train-abc",
        "--max-restarts": "0",
    }
    assert argv[-len(end) :] == end


def failure_of(directory: Path, stderr: str | None) -> Failure:
    """Return the failure of a node whose torchrun has written this text."""
    if stderr is not None:
        (directory / "torchrun.err").write_text(stderr)
    failures = Failures(1, "gpu1", directory=directory, attempt=0, under_torchrun=True)
    return failures.of_worker(WORLD, 0, code=1, signal_name=None, message="exited with code 1")


@pytest.mark.parametrize(
    ("written", "code", "signal"), [(3, 3, None), (-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV")]
)
def test_stderr_of_torchrun_gives_rank_and_exit_of_root_cause(
    tmp_path: Path, written: int, code: int, signal: str | None
) -> None:
    text = "[rank2]: peer is gone\n[rank3]: ValueError: boom\n" + CLOSING.format(code=written)
    failure = failure_of(tmp_path, text)
    found = (failure.rank, failure.local_rank, failure.exit_code, failure.signal)
    assert found == (3, 1, code, signal)
    # Another rank's lines are not this one's.
    assert failure.last_lines == ("[rank3]: ValueError: boom",)


def test_root_cause_without_output_has_no_lines_of_other_ranks(tmp_path: Path) -> None:
    text = "[rank2]: Connection closed by peer\nterminate called\n" + CLOSING.format(code=-6)
    assert failure_of(tmp_path, text).last_lines == ("terminate called",)


def test_forged_exit_code_of_any_length_ends_no_agent(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, CLOSING.format(code="9" * 40))
    assert (failure.rank, failure.exit_code) == (3, 999 & 0xFF)


@pytest.mark.parametrize(
    "text",
    [None, "", "torchrun: error\n", "Root Cause (first observed failure):\n[0]:\n  rank"],
)
def test_stderr_of_torchrun_without_root_cause_is_the_failure_of_torchrun(
    tmp_path: Path, text: str | None
) -> None:
    failure = failure_of(tmp_path, text)
    assert (failure.rank, failure.message) == (None, "torchrun exited with code 1")
