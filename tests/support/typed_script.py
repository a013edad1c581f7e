"""A user's script that type checkers accept; each line marked `# error` has a type error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import clusterjob
from clusterjob import Executor, Job, JobGroup


def train(lr: float, epochs: int = 10) -> float:
    return lr * epochs


def pair(name: str, size: int) -> tuple[str, int]:
    return name, size


job = clusterjob.submit(train, 0.1, cluster="slurm", nodes=2, time="2h", trust_results=True)
loss: float = job.result(timeout=60.0)
losses: list[float] = job.results()
error: BaseException | None = job.exception()
state: clusterjob.JobState = job.state
verdict: clusterjob.Verdict = job.wait(5)
text: str = job.logs(rank=0, tail=10)

everything = clusterjob.submit(
    train,
    0.1,
    gpus="device=0,1",
    gpus_per_node=8,
    uv=True,
    env_archive=Path("env.tar.gz"),
    env_cache="/tmp/envs",
    notify=["mailto://user:password@example.org"],
    notify_cmd="logger",
    notify_on="end,failure",
    snapshot=False,
    transport="openssh",
    after=["afterok:train-1", "afterany:train-2"],
    nproc_per_node="auto",
    launcher="ray",
)
total: float = everything.result()

group = clusterjob.map(pair, ["a", "b"], [1, 2], partition="gpu", array="%2")
pairs: list[tuple[str, int]] = group.results()
first: Job[tuple[str, int]] = group[0]
some: JobGroup[tuple[str, int]] = group[:1]
for done in clusterjob.as_completed(group, timeout=10):
    name, size = done.result()

with Executor(nodes=2, gpus_per_node=8) as executor:
    other: Job[float] = executor.submit(train, 0.1, epochs=3)


async def main() -> float:
    both = await asyncio.gather(job, other)
    return both[0] + await job


again = Job.get("@", trust_results=True)
asyncio.run(main())

clusterjob.submit(train, "0.1")  # error
clusterjob.submit(train, 0.1, 3, 4)  # error
clusterjob.submit(train, 0.1, node=2)  # error
clusterjob.submit(train, 0.1, max_restarts="2")  # error
clusterjob.submit(train, 0.1, uv="yes")  # error
clusterjob.submit(train, 0.1, snapshot=1)  # error
clusterjob.submit(train, 0.1, transport=1)  # error
clusterjob.submit(train, 0.1, notify=8)  # error
clusterjob.map(pair, [1, 2], [1, 2])  # error
executor.submit(train, 0.1, epoch=3)  # error
executor.submit(train, 0.1, epochs="3")  # error
wrong: str = job.result()  # error
