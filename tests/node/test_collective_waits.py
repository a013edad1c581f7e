"""Workers measure how long they wait for others in DDP, with the real torch and gloo."""

from __future__ import annotations

import json

import pytest
from procs import WITH_TORCH, MakeJob

# Rank `slow` is late in each step by 40 ms. What would be sent to the agent is printed.
TRAIN = """
    import json, os, sys, time
    import torch, torch.distributed as dist
    from torch import nn

    slow = int(sys.argv[1])
    names = ("clusterjob.node.workers.torch_patches", "clusterjob_hook.torch_patches")
    measured = next(filter(None, map(sys.modules.get, names)))
    measured.INTERVAL = 0.5
    found = []
    dist.init_process_group("gloo")
    measured.send = lambda kind, **fields: found.append((fields["step"], fields["waited"]))
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        time.sleep(0.04 if dist.get_rank() == slow else 0.0)
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    print(json.dumps(found[-1]))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("slow", "start"), [(1, "fork"), pytest.param(0, "exec", marks=pytest.mark.slow)]
)
def test_wait_of_slow_rank_is_shorter_by_its_lateness(
    make_job: MakeJob, slow: int, start: str
) -> None:
    job = make_job()
    words = ("--start", start, "--nproc-per-node", "2", job.script(TRAIN), str(slow))
    job.run(*words, python=WITH_TORCH)
    step, waited = zip(*(json.loads(job.log(0, f"rank{rank}.out")) for rank in (0, 1)), strict=True)
    late = waited[1 - slow] - waited[slow]
    assert 0.03 < late <= max(step)


@pytest.mark.slow
def test_compiled_model_gets_no_warning_about_the_measurement(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = nn.parallel.DistributedDataParallel(layers)
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.Adam(model.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            compiled(torch.ones(4, 4)).sum().backward()
            step()
        dist.destroy_process_group()
    """)
    job.start(0, "--nproc-per-node", "2", script, python=WITH_TORCH)
    assert job.wait(150) == [0]
    assert "Dynamo does not know" not in job.log(0, "rank0.err")


def test_no_metrics_leaves_torch_as_it_is(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(hasattr(dist.Logger.set_runtime_stats_and_log, "__wrapped__"),
              hasattr(dist.Reducer.set_logger, "__wrapped__"))
        dist.destroy_process_group()
    """)
    job.run("--no-metrics", script, python=WITH_TORCH)
    assert job.log(0, "rank0.out") == "False False\n"
