"""Check the variables that users set for their workers."""

from __future__ import annotations

import re

from clusterjob.errors import SpecError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables that bash sets itself or makes read-only (bash(1), "Shell Variables"): exporting one
# fails, or the worker gets another value.
_BASH_VARIABLES = frozenset({
    "_", "BASH", "BASHOPTS", "BASHPID", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME",
    "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "IFS", "LINENO", "OLDPWD", "OPTIND",
    "PIPESTATUS", "POSIXLY_CORRECT", "PPID", "PWD", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL",
    "SRANDOM", "UID",
})  # fmt: skip


def check(name: str, value: str, flag: str = "--env") -> None:
    """Check a variable that a job sets for its workers.

    Args:
        name: its name.
        value: its value; empty if it is a secret.
        flag: the option that sets it.

    Raises:
        SpecError: the name or the value cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a valid variable name",
            f"use letters, digits and underscores, such as {flag} NCCL_DEBUG",
        )
    if "\0" in value:
        raise SpecError(f"the value of {name} holds a NUL byte, which no environment can carry")
    if name in _BASH_VARIABLES or name.startswith("BASH_"):
        raise SpecError(
            f"{name} is a variable of bash: the script on the node cannot set it",
            f"leave it out of {flag}",
        )
    from clusterjob.node.environments.worker_variables import LAUNCH_VARIABLES

    if name in LAUNCH_VARIABLES or name.startswith("CLUSTERJOB_"):
        raise SpecError(f"{name} is set by the launcher for each worker", f"leave it out of {flag}")
