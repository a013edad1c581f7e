"""Table of compatibility cases: scripts with common patterns and expected results.

expected.json contains the results of torchrun. ``python tests/compat/compat_record.py [ID...]``
records them.
"""

from __future__ import annotations

import signal
from pathlib import Path

from compat_runs import Case

# BOTH is for scripts that test process start and end, __main__, stdin or signals. For other
# scripts, a forked worker and one started by exec are equal.
EXEC, BOTH = ("exec",), ("fork", "exec")
OWN_STORE = (
    "torchrun makes each process a client of its own store, even if the script sets another one; "
    "clusterjob redirects only processes that use the job store"
)
CHILDREN_END = (
    "processes started by a rank end with the job; torchrun leaves them running "
    "(docs/troubleshooting.md)"
)
STORE_PER_RESTART = (
    "torchrun's store keeps the addresses of workers from before a restart; "
    "in clusterjob each restart has its own store"
)
STORE_PER_GROUP = (
    "torchrun's store keeps the addresses of the previous group, and the next group waits for "
    "them; in clusterjob each group has its own keys"
)
INNER_TORCHRUN = (
    "torchrun inside torchrun on two nodes waits for ever; "
    "in clusterjob the inner torchrun uses the job store"
)
WORLDS_OF_ONE = (
    "accelerate makes each CPU process a world of one unless ACCELERATE_USE_CPU is set; "
    "clusterjob sets it for workers without a GPU"
)


def _script(name: str, *arguments: str, **more: object) -> Case:
    """Return the case of a script that is started by its path."""
    case_id = str(more.pop("id", Path(name).stem))
    return Case(case_id, (name, *arguments), **more)  # type: ignore[arg-type]


CASES = [
    # -- end of the process group ------------------------------------------------------------------
    _script("ddp_in_function.py", quick=True, starts=BOTH),
    _script("ddp_in_function.py", id="ddp_in_function-2-nodes", nodes=2),
    _script("ddp_never_destroyed.py", starts=BOTH),
    _script(
        "groups_in_turn.py",
        differs=("code", "out"),
        why=STORE_PER_RESTART,
        out=("round 0: 1.0\nround 1: 3.0\nround 2: 5.0\n",) * 2,
    ),
    _script("two_backends.py"),
    # -- stores and addresses ----------------------------------------------------------------------
    _script(
        "tcp_url.py",
        "{port}",
        differs=("code", "files", "out"),
        why=OWN_STORE,
        out=("rank 0 of 2\n", "rank 1 of 2\n"),
        files=(),
    ),
    _script("removes_meeting_file.py"),
    _script(
        "trials_in_turn.py",
        nproc=1,
        differs=("code", "out"),
        why=STORE_PER_GROUP,
        out=(
            (
                "lr 0.1: 2 ranks, bias -0.8820\nchildren: [0]\n"
                "lr 0.2: 2 ranks, bias -1.1820\nchildren: [0]\n"
                "lr 0.3: 2 ranks, bias -1.4820\nchildren: [0]\n"
            ),
        ),
    ),
    _script(
        "trials_in_turn.py",
        "--context",
        "spawn",
        "--world-sizes",
        "2",
        "3",
        id="trials_in_turn-spawn",
        nproc=1,
        limit=180,
        differs=("code", "out"),
        why=STORE_PER_GROUP,
        out=(
            (
                "lr 0.1: 2 ranks, bias -0.8820\nchildren: [0]\n"
                "lr 0.2: 3 ranks, bias -1.1820\nchildren: [0, 0]\n"
            ),
        ),
    ),
    _script("own_store.py", "{port}"),
    _script("job_store_keys.py"),
    # -- init_distributed_mode and similar functions -----------------------------------------------
    _script("init_mode_mae.py", quick=True),
    _script("init_megatron.py", nproc=2, nodes=2),
    _script(
        "accelerate_default.py",
        differs=("out",),
        why=WORLDS_OF_ONE,
        out=("seen 16 on 2 processes\n", ""),
        needs=("accelerate",),
    ),
    _script(
        "hf_trainer.py",
        differs=("out",),
        why=WORLDS_OF_ONE,
        out=("steps 4, seen 32, world 2\n", ""),
        needs=("transformers",),
    ),
    _script("lightning_fit.py", needs=("lightning",)),
    _script("hydra_app.py", "optimizer.lr=0.5", needs=("hydra",)),
    _script(
        "hydra_error.py",
        "optimizer.lr=0.5",
        code=1,
        message=r"rank 1.*\n?.*ValueError: no dataset for lr 0\.5",
        needs=("hydra",),
    ),
    # -- errors, signals, ends ---------------------------------------------------------------------
    _script(
        "record_decorator.py",
        code=1,
        message="rank 1.*RuntimeError: loss is not finite",
        starts=BOTH,
    ),
    _script("interrupt_saves.py", send=signal.SIGINT, code=130, quick=True, starts=BOTH),
    _script("terminates_parent.py", code=143, message="SIGTERM on", starts=BOTH),
    _script("usr1_checkpoints.py", starts=BOTH),
    _script("child_left_behind.py", differs=("left",), why=CHILDREN_END, starts=BOTH),
    _script("service_left_behind.py", differs=("left",), why=CHILDREN_END, starts=BOTH),
    _script("service_with_atexit.py", starts=BOTH),
    _script("early_signal.py", code=137, message="rank 1.*SIGKILL", quick=True, starts=BOTH),
    _script(
        "early_before_init.py",
        code=1,
        message="rank 1.*FileNotFoundError: data/train.bin",
        starts=BOTH,
    ),
    _script(
        "zero_before_init.py",
        code=1,
        message=r"rank 1 .*ended with exit code 0 .*rank 0 was in",
        starts=BOTH,
    ),
    _script("early_in_init.py", code=1, message="rank 1", starts=BOTH),
    _script("zero_after_destroy.py", starts=BOTH),
    _script("mismatched_detail.py", code=1, message="rank"),
    _script("monitored_barrier.py", code=1, message="rank 0"),
    _script("caught_peer_loss.py"),
    _script(
        "exit_message.py",
        code=1,
        message=r"FAILED: rank 1[\s\S]*Unable to locate sufficient 2 gpus",
        starts=BOTH,
    ),
    _script(
        "missing_module.py",
        code=1,
        message="ModuleNotFoundError: No module named 'no_such_package_anywhere'",
        starts=BOTH,
    ),
    # -- input and output --------------------------------------------------------------------------
    _script("breakpoint_continue.py", nproc=1, stdin="p loss\nc\n", starts=BOTH),
    _script("input_prompt.py", nproc=1, stdin="y\n", starts=BOTH),
    _script("stdin_ends.py", stdin="", starts=BOTH),
    _script("logging_both.py", "--epochs", "3", quick=True),
    _script("warnings_and_colours.py"),
    _script("large_output.py"),
    # -- data --------------------------------------------------------------------------------------
    _script("loader.py", "--context", "fork", id="loader-fork"),
    _script(
        "loader.py",
        "--context",
        "spawn",
        "--workers",
        "1",
        "--epochs",
        "1",
        id="loader-spawn",
        starts=BOTH,
    ),
    _script(
        "loader.py",
        "--context",
        "forkserver",
        "--workers",
        "1",
        "--epochs",
        "1",
        id="loader-forkserver",
    ),
    _script("loader.py", "--context", "fork", "--persistent", id="loader-persistent", quick=True),
    _script(
        "loader_error.py",
        code=1,
        message="rank 1.*ValueError: "
        "(Caught ValueError in DataLoader worker process 0|image file is truncated)",
    ),
    # -- features of torch -------------------------------------------------------------------------
    _script("compiled.py", "aot_eager", id="compiled-aot_eager"),
    _script("compiled.py", "inductor", id="compiled-inductor", limit=300),
    _script("dcp_checkpoint.py"),
    _script("dcp_async.py"),
    _script("rpc_server.py"),
    _script(
        "snapshot_resume.py",
        restarts=1,
        quick=True,
        differs=("code", "out", "files"),
        why=STORE_PER_RESTART,
        out=("epoch 0 after 0 restarts\nepoch 1 after 0 restarts\nepoch 2 after 1 restarts\n",) * 2,
        files=("snapshot.pt",),
        starts=BOTH,
    ),
    _script("async_handles.py"),
    # -- ways to start a program -------------------------------------------------------------------
    _script("environment.py", nproc=2, nodes=2, quick=True, starts=BOTH),
    _script(
        "arguments.py", "--nodes", "3", "-x", "two words", "", "--", "-m", "ünïcode", starts=BOTH
    ),
    Case("module", ("-m", "project.train", "--lr", "1"), quick=True, starts=BOTH),
    Case("package", ("-m", "project"), starts=BOTH),
    Case("directory", ("app", "--lr", "1"), starts=EXEC),
    Case(
        "dev_stdin",
        ("/dev/stdin", "--lr", "1"),
        stdin="import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n",
        starts=EXEC,
    ),
    _script("objects_of_main.py", quick=True, starts=BOTH),
    _script("threads.py"),
    Case("shell_python", ("--", "bash", "shell_python.sh", "a", "b c"), starts=EXEC),
    Case("shell_torchrun", ("--", "bash", "shell_torchrun.sh", "x"), nproc=1, starts=EXEC),
    Case(
        "shell_torchrun-2-nodes",
        ("--", "bash", "shell_torchrun.sh", "x"),
        nproc=1,
        nodes=2,
        differs=("code", "files", "out"),
        why=INNER_TORCHRUN,
        out=("", ""),
        files=("rank0.txt", "rank1.txt", "rank2.txt", "rank3.txt"),
        starts=EXEC,
    ),
    Case(
        "shell_accelerate",
        ("--", "bash", "shell_accelerate.sh", "x"),
        nproc=1,
        needs=("accelerate",),
        starts=EXEC,
    ),
    Case(
        "shell_accelerate-2-nodes",
        ("--", "bash", "shell_accelerate.sh", "x"),
        nproc=1,
        nodes=2,
        code=1,
        message="rank 0.*ConnectionError: Tried to launch distributed communication",
        differs=("code",),
        why="accelerate refuses a port that is in use: clusterjob reports the port and ends, "
        "torchrun's second node waits for ever",
        needs=("accelerate",),
        starts=EXEC,
    ),
    _script("notebook_runs.py", needs=("nbclient", "ipykernel")),
]
