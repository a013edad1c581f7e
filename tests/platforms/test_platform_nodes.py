"""Jobs on nodes that share no files with the submitter; only the nodes' output comes back.

Each node is a network namespace of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import environment
from namespaces import Machine, machines, skip_reason
from procs import TEST_TIMEOUT

from clusterjob.backends import job_progress, shared
from clusterjob.backends.batch_command import upload
from clusterjob.backends.batch_command.log_stream import LogStream
from clusterjob.core import node_zip
from clusterjob.core.plans import PlannedFile
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState

TRAIN = """
import os, sys, torch, torch.distributed as dist
from clusterjob import bootstrap
with bootstrap.init(timeout=90) as ctx:
    value = torch.ones(1) * (ctx.rank + 1)
    dist.all_reduce(value)
    print(f"sum {value.item():.0f} of {ctx.world_size} in {os.path.basename(os.getcwd())}")
    print(f"rank {ctx.rank} é \\u2603 [0] like ours", file=sys.stderr)
    print("x" * 20_000)
    sys.stdout.write("no end of line")
"""


@pytest.fixture
def two_machines() -> Iterator[list[Machine]]:
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with machines(2) as made:
        yield made


@dataclass
class Task:
    """A platform task: the process and the log of each node."""

    job_dir: Path
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def lines(self, node: int, count: int = 10_000) -> list[str]:
        """Return the last complete lines of a node's log, as a platform shows them."""
        return self.logs[node].read_bytes().decode(errors="replace").split("\n")[:-1][-count:]

    def collect(self) -> None:
        for node in range(len(self.logs)):
            LogStream(self.job_dir, node).take(self.lines(node))

    def wait(self) -> list[int]:
        return [process.wait(TEST_TIMEOUT) for process in self.processes]


@pytest.fixture
def submit(two_machines: list[Machine], tmp_path: Path) -> Iterator[Callable[..., Task]]:
    tasks: list[Task] = []

    def submit_one(text: str, task_id: str = "t-1", attempt: int = 0, **fields: object) -> Task:
        work, job_dir, node_root = tmp_path / "work", tmp_path / "job", tmp_path / f"there{attempt}"
        for folder in (work, job_dir, node_root):
            folder.mkdir(exist_ok=True)
        (work / "train.py").write_text(text)
        spec = JobSpec(
            Program("script", "train.py"),
            work,
            python=sys.executable,
            nproc_per_node=2,
            require_gpus=False,
            **fields,
        )  # type: ignore[arg-type]
        values = shared.common_values(spec, "job-abc", job_dir=job_dir) | {
            "uploaded": True, "workdir": "", "node_zip": "",
            "launch_arguments": spec.launch_options().arguments(),
        }  # fmt: skip
        files = [
            shared.script_file(job_dir / upload.ENTRY, render("mlp.sh.j2", values)),
            PlannedFile(job_dir / node_zip.NAME, node_zip.node_zip(tmp_path)),
        ]
        staged = upload.stage(spec, job_dir, files=files)
        hosts = {
            f"MLP_WORKER_{number}_HOST": machine.address
            for number, machine in enumerate(two_machines)
        }
        task = Task(job_dir, [], [])
        tasks.append(task)
        for index, machine in enumerate(two_machines):
            code = node_root / f"node{index}" / "code"
            code.parent.mkdir(parents=True)
            subprocess.run(["cp", "-rT", staged.root, code], check=True)
            platform = hosts | {
                "MLP_ROLE": "WORKER", "MLP_ROLE_INDEX": str(index), "MLP_WORKER_NUM": "2",
                "MLP_WORKER_GPU": "2", "MLP_WORKER_0_PORT": "2222", "MLP_TASK_ID": task_id,
                "CLUSTERJOB_TOKEN": "secret-of-the-job", "PYTHONPATH": "", "HOME": str(node_root),
            }  # fmt: skip
            log = node_root / f"worker_{index}.log"
            argv = machine.command("bash", code / "clusterjob-entry" / "entry.sh")
            with log.open("wb") as output:
                process = subprocess.Popen(
                    argv,
                    cwd=node_root,
                    env=environment(node_root, platform),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            task.processes.append(process)
            task.logs.append(log)
        staged.remove()
        return task

    yield submit_one
    for task in tasks:
        for process in task.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_uploaded_code_trains_and_output_comes_back_through_log(
    submit: Callable[..., Task],
) -> None:
    task = submit(TRAIN, setup=("echo setting up on $MLP_ROLE_INDEX",))
    reader, seen = LogReader(task.job_dir), []
    while any(process.poll() is None for process in task.processes):
        task.collect()
        seen += reader.read()
        time.sleep(0.2)  # the interval between two polls
    assert task.wait() == [0, 0], [path.read_text() for path in task.logs]
    for count in (5, 10_000, 1, 10_000):  # some lines arrive twice, whole or in part
        for node in range(2):
            LogStream(task.job_dir, node).take(task.lines(node, count))
    seen += reader.finish()
    for rank in range(4):
        own = [line for line in seen if line.rank == rank]
        assert {line.node_rank for line in own} == {rank // 2}
        assert [line.text for line in own if line.stream == "out"] == [
            "sum 10 of 4 in code",
            "x" * 20_000,
            "no end of line",
        ]
        assert f"rank {rank} é \u2603 [0] like ours" in [
            line.text for line in own if line.stream == "err"
        ]
    assert [(line.rank, line.text) for line in LogReader(task.job_dir, rank=3).finish()][-1] == (
        3,
        "no end of line",
    )
    verdict = LogStream(task.job_dir, 0).verdict
    assert verdict is not None
    assert (verdict.state, verdict.exit_code) == (JobState.SUCCEEDED, 0)
    assert LogStream(task.job_dir, 1).verdict is None
    assert [LogStream(task.job_dir, node).gaps for node in range(2)] == [[], []]
    assert "setting up on 1\n" in (task.job_dir / "logs" / "node1" / "agent.log").read_text()
    logs = [path.read_text() for path in task.logs]
    assert logs
    assert [text for text in logs if "secret" in text] == []


def test_failed_rank_is_named_with_its_last_lines(submit: Callable[..., Task]) -> None:
    task = submit(TRAIN + "    if ctx.rank == 3: raise ValueError('boom é')\n    dist.barrier()\n")
    assert task.wait() == [1, 1], [path.read_text() for path in task.logs]
    task.collect()
    task.collect()
    verdict = LogStream(task.job_dir, 0, attempt=0).verdict
    assert verdict is not None
    assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 1)
    assert verdict.failure is not None
    assert (verdict.failure.rank, verdict.failure.node_rank, verdict.failure.message) == (
        3,
        1,
        "ValueError: boom é",
    )
    assert verdict.failure.last_lines[-1].endswith("ValueError: boom é")
    assert [
        line.text
        for line in LogReader(task.job_dir, rank=3).finish()
        if line.text.endswith("ValueError: boom é")
    ]


def test_task_ended_by_platform_is_cancelled(submit: Callable[..., Task]) -> None:
    task = submit("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    _wait_for(lambda: all(any("up" in line for line in task.lines(node)) for node in range(2)))
    for process in task.processes:
        process.send_signal(signal.SIGTERM)
    assert task.wait() == [143, 143]
    task.collect()
    verdict = LogStream(task.job_dir, 0).verdict
    assert verdict is not None
    assert (verdict.state, verdict.exit_code) == (JobState.CANCELLED, 143)


def test_sigterm_after_another_node_ended_keeps_verdict(
    submit: Callable[..., Task],
) -> None:
    """Node 1 receives the verdict before node 0 has printed it."""
    task = submit(
        "import os, time\nif os.environ['RANK'] == '3': raise ValueError('boom')\ntime.sleep(600)\n"
    )
    task.processes[1].wait(TEST_TIMEOUT)
    while task.processes[0].poll() is None:
        task.processes[0].send_signal(signal.SIGTERM)
        time.sleep(0.001)
    task.collect()
    verdict = LogStream(task.job_dir, 0).verdict
    assert verdict is not None
    assert (verdict.state, verdict.failure is not None and verdict.failure.message) == (
        JobState.FAILED,
        "ValueError: boom",
    )


def test_node_with_failed_setup_line_is_named_in_verdict(
    submit: Callable[..., Task],
) -> None:
    task = submit(TRAIN, setup=("echo trying", '[ "$MLP_ROLE_INDEX" = 0 ]'))
    assert task.processes[1].wait(TEST_TIMEOUT) == 1
    # The platform does so when a worker fails.
    task.processes[0].send_signal(signal.SIGTERM)
    task.wait()
    task.collect()
    verdict = shared.verdict_without_coordinator(
        task.job_dir, job_progress.Progress(), otherwise="nobody knows"
    )
    assert (verdict.state, verdict.failure is not None and verdict.failure.node_rank) == (
        JobState.FAILED,
        1,
    )
    assert 'a setup line failed: [ "$MLP_ROLE_INDEX" = 0 ]' in verdict.reason


@pytest.mark.slow
def test_agent_of_older_attempt_cannot_join_newer_attempt(
    submit: Callable[..., Task], tmp_path: Path
) -> None:
    """A platform retry is a new task with a new token; agents of the old task cannot join it."""
    # Node 0 of the old task never leaves its setup line.
    old = submit(TRAIN, "t-old", setup=('until [ "$MLP_ROLE_INDEX" = 1 ]; do sleep 0.05; done',))
    old.processes[0].kill()  # node 1 of the old task keeps connecting to node 0's address
    old.processes[0].wait()
    go = tmp_path / "there1" / "go"
    later = '[ "$MLP_ROLE_INDEX" = 0 ] || until [ -e "$HOME/go" ]; do sleep 0.05; done'
    new = submit(TRAIN, "t-new", attempt=1, setup=(later,))
    _wait_for(
        lambda: any(
            '"unauthenticated"' in path.read_text()
            for path in go.parent.glob("clusterjob-*/events.jsonl")
        )
    )
    go.touch()
    assert new.wait() == [0, 0], [path.read_text() for path in (*new.logs, *old.logs)]
    assert old.processes[1].poll() != 0, "it was no part of the new one"


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TEST_TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
