"""Variables that a script sets before it imports torch.

They apply in forked workers too; if that is impossible, the workers start by exec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from procs import WITH_TORCH, Job

from clusterjob.node.program import Program
from clusterjob.node.workers import early_variables

MakeJob = Callable[..., Job]
ENVIRONMENT = {"TORCH_LOGS": "graph", "OMP_NUM_THREADS": "2"}


def set_in(program: Program, environ: dict[str, str]) -> str | None:
    return early_variables.set_in(program.source(), program.file.name, environ)


SETS = {
    "item": 'import os\nos.environ["PYTORCH_ALLOC_CONF"] = "a:1"\nimport torch',
    "environ": 'from os import environ\nenviron["PYTORCH_ALLOC_CONF"] = str(1)\nimport torch',
    "setdefault": 'import os\nos.environ.setdefault("OPENBLAS_NUM_THREADS", "1")\nimport torch',
    "update": 'import os\nos.environ.update({"MKL_DYNAMIC": "0"})\nimport torch',
    "keywords": 'import os\nos.environ.update(MKL_DYNAMIC="0")\nimport torch',
    "putenv": 'import os\nos.putenv("TORCH_CPP_LOG_LEVEL", "INFO")\nimport torch',
    "removed": 'import os\ndel os.environ["TORCH_LOGS"]\nimport torch',
    "popped": 'import os\nos.environ.pop("TORCH_LOGS", None)\nimport torch',
    "another value": 'import os\nos.environ["TORCH_LOGS"] = "recompiles"\nimport torch',
    "in a block": 'import os\nif True:\n  os.environ["TORCH_LOGS"] = ""\n  import torch',
    "in except": (
        "import os\ntry:\n  import apex\nexcept ImportError:\n"
        '  os.environ["TORCH_LOGS"] = ""\nimport torch.nn'
    ),
    "never imports": 'import os\nos.environ["TORCH_LOGS"] = ""\nimport lightning',
}
SETS_NOT = {
    "after": 'import os\nimport torch\nos.environ["TORCH_LOGS"] = ""',
    "after an inner import": (
        "import os\ntry:\n  from torch import nn\nexcept ImportError:\n  pass\n"
        'os.environ["TORCH_LOGS"] = ""'
    ),
    "in a function": 'import os\ndef main():\n  os.environ["TORCH_LOGS"] = ""\nimport torch',
    "the same value": 'import os\nos.environ["TORCH_LOGS"] = "graph"\nimport torch',
    "has a value": 'import os\nos.environ.setdefault("TORCH_LOGS", "")\nimport torch',
    "read later": (
        'import os\nos.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"\n'
        'os.environ["CUDA_VISIBLE_DEVICES"] = ""\nimport torch'
    ),
    "read again": (
        'import os\nos.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"\n'
        'os.environ["OMP_NUM_THREADS"] = "1"\nimport torch'
    ),
    "not of torch": 'import os\nos.environ["TOKENIZERS_PARALLELISM"] = "false"\nimport torch',
    "another mapping": (
        'import os\nconfig = {}\nconfig["TORCH_LOGS"] = os.environ.get("TORCH_LOGS")\nimport torch'
    ),
    "not Python": "os.environ[",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in SETS.items()])
def test_variable_set_before_import_of_torch_is_found_in_script(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    reason = set_in(Program("script", str(script)), ENVIRONMENT)
    assert reason is not None
    assert "which torch reads while it is imported" in reason


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in SETS_NOT.items()])
def test_variable_without_effect_on_import_of_torch_is_ignored(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert set_in(Program("script", str(script)), ENVIRONMENT) is None


def test_module_is_searched_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    for name in ("__main__.py", "train.py"):
        (package / name).write_text(SETS["item"])
    for module, file in (("project", "__main__.py"), ("project.train", "train.py")):
        reason = set_in(Program("module", module), {})
        assert (
            reason
            == f"{file} line 2 sets PYTORCH_ALLOC_CONF, which torch reads while it is imported"
        )
    assert set_in(Program("module", "elsewhere.train"), {}) is None


SCRIPT = """
    import importlib.util, json, os, sys
    assert "torch" not in sys.modules
    assert importlib.util.find_spec("torch").origin.endswith("__init__.py")
    import own_settings
    from torch import nn
    import torch
    import torch.distributed as dist
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"  # too late, as in every process
    import torch.nn.functional
    assert sys.modules["torch"] is torch and torch.nn is nn
    assert torch.__spec__.loader is torch.__loader__
    print(json.dumps([dist.get_debug_level().name, torch.get_num_threads()]), flush=True)
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_variables_set_before_import_of_torch_apply_in_worker(
    make_job: MakeJob, start: str
) -> None:
    job = make_job(1)
    script = job.script(SCRIPT)
    settings = (
        'import os\nos.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL", OMP_NUM_THREADS="1", '
        'TORCH_SHOW_CPP_STACKTRACES="1")'
    )
    (Path(script).parent / "own_settings.py").write_text(settings)
    agent = job.start(0, "--start", start, script, python=WITH_TORCH, env={"OMP_NUM_THREADS": "2"})
    assert job.wait() == [0], job.stderr(agent)
    log = job.dir / "logs" / "node0"
    assert json.loads((log / "rank0.out").read_text()) == ["DETAIL", 1]
    # A variable that a forked worker cannot apply is reported.
    assert (
        "torch was imported before this script set TORCH_SHOW_CPP_STACKTRACES"
        in (log / "rank0.err").read_text()
    ) is (start == "fork")


def test_script_with_other_torch_variables_is_started_by_exec(make_job: MakeJob) -> None:
    job = make_job(1)
    script = job.script("""
        import os
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
        import torch
    """)
    agent = job.start(0, script, python=WITH_TORCH)
    assert job.wait() == [0]
    reason = (
        "script.py line 3 sets TORCH_SHOW_CPP_STACKTRACES, which torch reads while it is imported"
    )
    assert f"starts its workers by exec: {reason}" in job.stderr(agent)
