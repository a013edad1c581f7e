"""Start one worker of ``--launcher srun`` with the submitted code and torch's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from clusterjob.node import contract
from clusterjob.node.environments import scheduler, slurm_task
from clusterjob.node.workers import preload, worker_process


def main(argv: Sequence[str], gpus: int = 0) -> NoReturn:
    """Exec the program; its Python processes import the submitted code.

    Args:
        argv: the program's command line.
        gpus: number of GPUs that the task must see; with fewer, it ends before the program starts.
    """
    is_python = os.path.basename(argv[0]).startswith("python")
    if error := preload.missing_gpus(gpus, is_python=is_python):
        sys.exit(f"clusterjob: {scheduler.node_name()}: {error}")
    if os.environ.get(contract.CODE_TREE):
        directory = worker_process.write_hook(Path(os.environ[contract.JOB_DIR]))
        os.environ.update(worker_process.hook_variables(os.environ, directory))
    slurm_task.main(argv)
