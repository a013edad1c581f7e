"""The forkserver imports once what the workers import, if they can be forked."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT, write_tree
from procs import WITH_TORCH, MakeJob

from clusterjob.node.contract import World
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.stacks import offer
from clusterjob.node.system import processes
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers import preload
from clusterjob.node.workers.forkserver import Forkserver

WORLD = World(
    0,
    "127.0.0.1",
    1234,
    agent_store=True,
    node_rank=0,
    nnodes=1,
    nproc=1,
    first_rank=0,
    world_size=1,
)
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


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_workers_that_train_share_one_import_of_the_compiler(make_job: MakeJob, start: str) -> None:
    job = make_job(1)
    job.run("--nproc-per-node", "2", "--start", start, job.script(STEP), python=WITH_TORCH)
    for rank in (0, 1):
        assert json.loads(job.log(0, f"rank{rank}.out")) == [start == "fork", start == "fork", True]


def test_cuda_that_a_fork_would_break_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert not preload._fork_breaks_cuda()
    for broken in (False, True):
        # A function of torch for CUDA.
        monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda broken=broken: broken, False)
        assert preload._fork_breaks_cuda() is broken


def test_driver_that_keeps_a_killed_process_does_not_keep_the_forkserver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    cuda = SimpleNamespace(is_available=lambda: time.sleep(1000))
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8"), _C=None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setattr(preload, "_GPU_TIMEOUT", 0.1)
        patch.setattr(os, "kill", lambda pid, _: kept.append(pid))
        missing = preload.missing_gpus(1, is_python=True)
    os.kill(kept[0], signal.SIGKILL)
    os.waitpid(kept[0], 0)
    assert missing.startswith("torch sees 0 of the 1 GPUs")
    assert "(torch has not answered in 0.1 s, driver" in missing


def test_forkserver_without_the_promised_gpus_keeps_no_socket_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = socket.socketpair()
    options = LaunchOptions(Program("script", "train.py"))
    server = Forkserver(far, options, tmp_path, "job", attempt=0, node_rank=0, stdin=None)
    server._no_gpus, server._table = "torch sees no GPU", offer.anonymous_file("table")
    listener = os.open(os.devnull, os.O_RDONLY)
    message = messages.StartRound(WORLD, {})
    socket.send_fds(near, [messages.FROM_AGENT.encode(message)], [listener])
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(processes, "fork", lambda _: 0)
        server._handle_message()
    assert len(os.listdir("/proc/self/fd")) == before
    assert b"torch sees no GPU" in near.recv(1 << 12)
    for each in (listener, server._table):
        os.close(each)
    near.close()
    far.close()


def test_worker_that_cannot_even_begin_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LaunchOptions(Program("script", "train.py"))
    near, far = socket.socketpair()
    server = Forkserver(far, options, tmp_path, "job", attempt=0, node_rank=0, stdin=None)
    server._reports, server._report_fd = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(server, "_begin_child", lambda _: os.close(1 << 20))
    with open(os.devnull, "wb", buffering=0) as out:
        become = {"variables": {"LOCAL_RANK": "3"}, "argv": ["train"], "streams": (out, out)}
        child = processes.fork(lambda: server._become_worker(0, **become, reads=True))
    assert os.waitpid(child, 0)[1] == 127 << 8
    [failing] = messages.read_reports(server._reports)
    assert (failing.local_rank, failing.kind) == (3, "launch")
    assert failing.message == "cannot start train: Bad file descriptor"
    for each in (near, far):
        each.close()
    for descriptor in (server._reports, server._report_fd):
        os.close(descriptor)


def test_worker_frees_objects_of_nanobind_at_its_end_as_plain_python_does(
    make_job: MakeJob,
) -> None:
    job = make_job(1)
    job.script(
        "import sys, types; sys.modules['triton'] = types.ModuleType('triton')\n",
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
    job.run("--start", "fork", script, python=WITH_TORCH, env=env)
    assert job.log(0, "rank0.out").split("\n") == ["frozen", "frozen 0"]


ENVIRON = "import os\nos.environ"
CHANGES = {
    "item": f'{ENVIRON}["PYTORCH_ALLOC_CONF"] = "a:1"\nimport torch',
    "keyword": f'{ENVIRON}.update(MKL_DYNAMIC="0")\nimport torch',
    "putenv": 'import os\nos.putenv("TORCH_CPP_LOG_LEVEL", "INFO")\nimport torch',
    "removed": 'import os\ndel os.environ["TORCH_LOGS"]\nimport torch',
    "in a function": 'import os\ndef f():\n  os.environ["OMP_NUM_THREADS"] = "1"',
    "dynamo": f'{ENVIRON}["TORCHDYNAMO_DISABLE"] = "1"\nimport torch.optim',
    "keyword on its own line": f"{ENVIRON}.update(  # few\n    OMP_NUM_THREADS='1')",
    "inductor": f'{ENVIRON}.setdefault("TORCHINDUCTOR_X", "1")',
}
CHANGES_NOT = {
    "read later": f'{ENVIRON}["TORCH_NCCL_BLOCKING_WAIT"] = "1"\nos.environ["TORCH_HOME"] = ""',
    "not of torch": f'{ENVIRON}["TOKENIZERS_PARALLELISM"] = "false"\nimport torch',
    "read by torch's elastic": 'import os\nprint(os.environ.get("TORCHELASTIC_RUN_ID"))',
    "in a text": f"{ENVIRON}['A'] = 'try PYTORCH_ALLOC_CONF=expandable_segments:True'",
    "no environment": 'config["TORCH_LOGS"] = ""',
}


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        pytest.param(text, changes, id=name)
        for changes, texts in ((True, CHANGES), (False, CHANGES_NOT))
        for name, text in texts.items()
    ],
)
def test_program_that_may_change_a_variable_of_torch_is_found(
    tmp_path: Path, text: str, changes: bool
) -> None:
    found = preload.changed_variable(text.encode(), tmp_path / "train.py")
    assert (found is not None) is changes


@pytest.mark.parametrize(
    "text",
    [
        "import os, settings",
        "import torch; import settings as own",
        "from pack import (  # both\n    other,\n    settings,\n)",
        "from pack import settings as own",
        "from . import settings",
        "def main():\n    from pack.settings import name",
    ],
)
def test_each_form_of_import_is_followed(tmp_path: Path, text: str) -> None:
    (tmp_path / "pack").mkdir()
    for folder in (tmp_path, tmp_path / "pack"):
        (folder / "settings.py").write_text(CHANGES["item"])
    assert preload.changed_variable(text.encode(), tmp_path / "train.py") is not None


def test_modules_beside_the_script_are_read_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    write_tree(
        tmp_path,
        **{
            "pack/__init__.py": "import settings\nraise SystemExit",
            "settings.py": "import pack\n" + CHANGES["item"],
        },
    )
    text = b"import json, math\nfrom pack import name\n"
    expected = "settings.py line 3 names PYTORCH_ALLOC_CONF, which torch reads while it is imported"
    assert preload.changed_variable(text, Path("train.py")) == expected
    assert preload.changed_variable(text, tmp_path / "elsewhere" / "train.py") == expected
    assert preload.changed_variable(b"from .settings import X", Path("train.py")) == expected


def test_script_that_changes_a_variable_of_torch_is_started_by_exec(make_job: MakeJob) -> None:
    job = make_job(1)
    script = job.script("import own_settings, torch; print(torch.get_num_threads())")
    settings = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n'
    (Path(script).parent / "own_settings.py").write_text(settings)
    agent = job.start(0, script, python=WITH_TORCH, env={"OMP_NUM_THREADS": "2"})
    assert job.wait() == [0], job.stderr(agent)
    assert job.log(0, "rank0.out") == "1\n"
    reason = "own_settings.py line 2 names OMP_NUM_THREADS, which torch reads while it is imported"
    assert f"starts its workers by exec: {reason}" in job.stderr(agent)
