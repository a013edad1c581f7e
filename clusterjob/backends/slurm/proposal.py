"""The profile of a Slurm cluster, for `clusterjob init`: here, or behind a login host."""

from __future__ import annotations

import getpass
import re
import shutil
from collections.abc import Iterator

from clusterjob.backends.slurm.checks import Partition, partitions_of
from clusterjob.backends.slurm.client import Client, is_here
from clusterjob.core.proposals import Proposal, Question
from clusterjob.errors import SubmitError

_NAME = "slurm"
_TIMEOUT = 10.0  # seconds for each of Slurm's commands
_SHOWN = 12  # maximum number of partitions in a comment
_ACCOUNT = re.compile(r"[\w.@+-]{1,100}", re.ASCII)


def propose() -> Iterator[Proposal]:
    """Yield the profile of the cluster whose commands are here, else that of a login host."""
    if shutil.which("sbatch") is None or not is_here():
        yield Proposal(
            "hpc",
            _NAME,
            examples=(
                ("login", "user@login1", "jobs are submitted on this host over SSH"),
                ("partition", "gpu", "default: the cluster's"),
            ),
            questions=(
                Question("login", "Login host of the cluster, such as me@login1", required=True),
                Question("partition", "Partition (empty for the cluster's default)"),
                Question("account", "Account to charge (empty for your default account)"),
            ),
        )
        return
    partitions = _partitions()
    default = next((each.name for each in partitions if each.is_default), "")
    first = default or next((each.name for each in partitions), "")
    accounts = _accounts()
    gpus = max((each.gpus for each in partitions if each.name == first), default=0)
    questions = []
    if len(partitions) > 1:
        names = tuple(each.name for each in partitions)
        questions.append(Question("partition", "Partition", default=first, choices=names))
    if len(accounts) > 1:
        text = "Account to charge (empty for your default account)"
        questions.append(Question("account", text, choices=accounts))
    if any(each.gpus for each in partitions):
        questions.append(Question("gpus", "GPUs on each node of a job (empty for none)"))
    listed = ", ".join(
        f"{each.name}{' (default)' if each.is_default else ''}" for each in partitions[:_SHOWN]
    )
    limits = "; ".join(f"{each.name}: {each.describe_limit()}" for each in partitions[:_SHOWN])
    yield Proposal(
        "slurm",
        _NAME,
        found=f"Slurm on this machine: partitions {listed}"
        if partitions
        else "sbatch without partitions: `sinfo` shows why",
        ready=bool(partitions),
        here=True,
        values={"partition": first} if first else {},
        comments={"partition": limits, "account": f"your accounts: {', '.join(accounts)}"},
        examples=(
            ("gpus", gpus or 8, f"a node of {first} has {gpus or 'no GPUs'}"),
            ("time", "2h", "time limit of a job; -t overrides it"),
            ("account", accounts[0] if accounts else "team", "account to charge"),
        ),
        questions=tuple(questions),
    )


def _partitions() -> list[Partition]:
    """Return the partitions that accept jobs, the default first."""
    try:
        shown = Client().run(
            ["sinfo", "--noheader", "--format=%P|%a|%l|%D|%T|%G"], timeout=_TIMEOUT
        )
    except SubmitError:
        return []
    found = [each for each in partitions_of(shown.out).values() if each.availability == "up"]
    return sorted(found, key=lambda each: not each.is_default)


def _accounts() -> tuple[str, ...]:
    """Return the user's accounts; empty without accounting."""
    if shutil.which("sacctmgr") is None:
        return ()
    try:
        user = getpass.getuser()
        shown = Client().run(
            ["sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account"],
            timeout=_TIMEOUT,
        )
    except (SubmitError, KeyError, OSError):
        return ()
    lines = shown.out.splitlines() if shown.code == 0 else []
    return tuple(dict.fromkeys(line for line in lines if _ACCOUNT.fullmatch(line)))
