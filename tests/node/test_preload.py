"""The forkserver imports once what the workers of a training script would import themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT
from procs import WITH_TORCH, Job

from clusterjob.node.program import Program
from clusterjob.node.workers import preload

MakeJob = Callable[..., Job]
TRAINS = {
    "optimizer": "import torch.optim as optim\n",
    "method": "loss.backward()\n",
    "transformers": "from transformers import Trainer\n",
    "lightning": "import lightning as L\n",
    "accelerate": "accelerator = Accelerator()\n",
    "compile": "model = torch.compile(model)\n",
}
TRAINS_NOT = {
    "empty": "",
    "collective": "dist.all_reduce(tensor)\n",
    "other word": "options = optimistic()\n",
    "variable of dynamo": (
        "import os, torch\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\nimport torch.optim\n"
    ),
    "variable of inductor": "os.environ.setdefault('TORCHINDUCTOR_X', '1')\nloss.backward()\n",
}
# Prints whether the compiler is loaded as soon as torch is, and trains one step.
STEP = """
    import json, os, sys
    before = "torch" in sys.modules
    import torch
    loaded = "torch._dynamo" in sys.modules
    layer = torch.nn.Linear(2, 1)
    step = torch.optim.Adam(layer.parameters()).step
    layer(torch.ones(1, 2)).sum().backward()
    step()
    print(json.dumps([before, loaded, "torch._dynamo" in sys.modules]))
"""


def program(directory: Path, text: str) -> Program:
    script = directory / "train.py"
    script.write_text(text)
    return Program("script", str(script))


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in TRAINS.items()])
def test_script_that_trains_is_recognised(tmp_path: Path, text: str) -> None:
    assert preload.trains(program(tmp_path, text).source())


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in TRAINS_NOT.items()])
def test_compiler_is_not_preloaded_for_other_scripts(tmp_path: Path, text: str) -> None:
    assert not preload.trains(program(tmp_path, text).source())


def test_missing_file_and_module_of_an_installation_do_not_train(tmp_path: Path) -> None:
    assert not preload.trains(Program("script", str(tmp_path / "missing.py")).source())
    assert not preload.trains(Program("module", "elsewhere.train").source())


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_workers_that_train_share_one_import_of_the_compiler(make_job: MakeJob, start: str) -> None:
    job = make_job(1)
    job.start_all("--nproc-per-node", "2", "--start", start, job.script(STEP), python=WITH_TORCH)
    assert job.wait() == [0]
    for rank in (0, 1):
        assert json.loads(job.log(0, f"rank{rank}.out")) == [False, start == "fork", True]


def test_cuda_that_a_fork_would_break_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert not preload._fork_breaks_cuda(torch)
    for broken in (False, True):
        # A function of torch for CUDA.
        monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda broken=broken: broken, False)
        assert preload._fork_breaks_cuda(torch) is broken


def test_worker_frees_objects_of_nanobind_at_its_end_as_plain_python_does(
    make_job: MakeJob,
) -> None:
    job = make_job(1)
    job.script(
        """
        import sys, types
        binding = sys.modules["binding"] = types.ModuleType("binding")
        binding.function = type("nb_func", (), {"__module__": "nanobind"})()
        """,
        "sitecustomize.py",
    )
    script = job.script("""
        import gc, os
        class Last:
            def __del__(self, write=os.write, count=gc.get_freeze_count):
                write(1, b"frozen %d" % count())
        print("frozen" if gc.get_freeze_count() else "not frozen", flush=True)
        last = Last()
    """)
    env = {"PYTHONPATH": f"{job.dir.parent}{os.pathsep}{ROOT}"}
    job.start(0, "--start", "fork", script, python=WITH_TORCH, env=env)
    assert job.wait() == [0]
    assert job.log(0, "rank0.out").split("\n") == ["frozen", "frozen 0"]
