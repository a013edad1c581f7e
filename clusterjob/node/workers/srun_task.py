"""Start one worker of ``--launcher srun`` with the submitted code and torch's variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from clusterjob.node import contract
from clusterjob.node.environments import slurm_task
from clusterjob.node.workers import hook_directory


def main(argv: Sequence[str]) -> NoReturn:
    """Exec the program; its Python processes import the submitted code.

    Args:
        argv: the program's command line.
    """
    if os.environ.get(contract.CODE_TREE):
        directory = hook_directory.write(Path(os.environ[contract.JOB_DIR]))
        os.environ.update(hook_directory.variables(os.environ, directory))
    slurm_task.main(argv)
