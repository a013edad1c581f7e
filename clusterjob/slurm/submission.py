"""Getting a job into Slurm: asked first whether it could run at all, never submitted twice, looked for when Slurm did not answer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from clusterjob.errors import SubmitError, SubmitInDoubtError
from clusterjob.slurm.client import Answer, Client, hint
from clusterjob.slurm.flags import clock
from clusterjob.slurm.queue import FIELDS, by_comment, snapshot_of

_LOOKS, _PAUSE = 3, 1.0  # for a job of which nobody knows whether Slurm took it; seconds between two
_CONFIG_PATIENCE = 5.0  # seconds: without an answer Slurm's default is as good a guess
# sbatch takes such a job, and it waits until the nodes are back.
_ONLY_NOT_NOW = re.compile(r"Required node not available|ReqNodeNotAvail|nodes required for job are DOWN", re.IGNORECASE)
_NO_SUCH_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
UNUSABLE = re.compile(r"down|drain|fail|maint|unknown|power_down|reboot|future|planned_down", re.IGNORECASE)  # states of nodes


def check_configuration(client: Client) -> None:
    """Refuse a configuration that is not there: Slurm's commands would wait a minute for it.

    Raises:
        SubmitError: SLURM_CONF names a file that does not exist.
    """
    conf = client.conf or os.environ.get("SLURM_CONF")
    if client.is_local and conf and not os.path.exists(conf):
        raise SubmitError(f"Slurm's configuration {conf} is not there", "SLURM_CONF names one")


def preflight(client: Client, argv: Sequence[str]) -> Answer:
    """Ask Slurm whether the job could run: partition, GPUs, node count and each option; nothing is queued.

    Returns:
        What Slurm says; a code other than 0 says that the job would have to wait for nodes that are down.

    Raises:
        SubmitError: it could not; the message is Slurm's own.
    """
    check_configuration(client)
    answer = client.run([argv[0], "--test-only", *argv[1:]])
    if answer.code == 0 or _ONLY_NOT_NOW.search(answer.err):
        return answer
    if _NO_SUCH_NODES.search(answer.err) and _may_be_away(client, argv):
        return answer  # sbatch itself takes it, unless there are no such nodes at all
    raise _refused(answer)


def _may_be_away(client: Client, argv: Sequence[str]) -> bool:
    """Return whether the nodes that --test-only does not find may be some that are down or drained (seen with 22.05)."""
    given = dict(word.partition("=")[::2] for word in argv if word.startswith(("--partition=", "--nodes=")))
    partition = [f"--partition={given['--partition']}"] if "--partition" in given else []
    shown = client.run(["sinfo", "--noheader", "--Node", "--format=%N %P %T", *partition], patience=_CONFIG_PATIENCE)
    rows = [row.split() for row in shown.out.splitlines()]
    states = {row[0]: row[2] for row in rows if len(row) == 3 and (partition or row[1].endswith("*"))}
    wanted = int(given.get("--nodes", "1").partition("-")[0])
    return wanted <= len(states) and any(UNUSABLE.search(state) for state in states.values())


def check_time(client: Client, partitions: str | None, seconds: int | None) -> None:
    """Refuse a time limit above that of each partition: many a Slurm takes such a job, which then waits for ever.

    Args:
        client: runs scontrol.
        partitions: those that the job may run in, with commas between; None for the default one.
        seconds: the job's limit; None for the partition's own.

    Raises:
        SubmitError: the job would never start.
    """
    if seconds is None:
        return
    shown = client.run(["scontrol", "--oneliner", "show", "partition"], patience=_CONFIG_PATIENCE)
    limits: dict[str, int] = {}
    for line in shown.out.splitlines():
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if (said.get("Default") == "YES") if partitions is None else (said.get("PartitionName") in partitions.split(",")):
            limits[said.get("PartitionName", "")] = _seconds(said.get("MaxTime", ""))
    most = max(limits.values(), default=None)
    if most is not None and -(-seconds // 60) * 60 > most:
        names = ", ".join(limits)
        raise SubmitError(
            f"the time limit of {clock(seconds)} is above that of the partition {names}: {clock(most)}",
            "`sinfo -o '%P %l'` shows the limit of each partition; a qos that may exceed it has to be named: --set qos=NAME",
        )


def _seconds(text: str) -> int:
    """Return a time of Slurm's, [D-]HH:MM:SS; what is none, such as UNLIMITED, is as good as for ever."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text, re.ASCII)
    days, hours, minutes, rest = (int(part or 0) for part in match.groups()) if match else (10**6, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def submit(client: Client, argv: Sequence[str], comment: str, known: Sequence[str]) -> tuple[str, str | None]:
    """Submit one script; returns the job's id and, in a federation, the cluster that took it.

    Args:
        client: runs sbatch.
        argv: sbatch's command line.
        comment: what the job can be found by.
        known: ids of other jobs with this comment.

    Raises:
        SubmitError: Slurm refused it.
        SubmitInDoubtError: Slurm did not answer, and the job is not to be seen yet.
    """
    answer = client.run(argv)
    if answer.code == 0:
        job_id, _, cluster = (answer.out.strip().splitlines() or [""])[-1].partition(";")
        if job_id.isascii() and job_id.isdigit():
            return job_id, cluster or None
        raise SubmitError(f"sbatch printed no job id: {answer.out.strip()[:80]!r}")
    if not answer.in_doubt:
        raise _refused(answer)
    # Another sbatch might make two of it (nextflow#970).
    for look in range(_LOOKS):
        time.sleep(_PAUSE if look else 0.0)
        found = [job_id for job_id in find(client, comment) if job_id not in known]
        if found:
            return found[0], client.cluster
    raise SubmitInDoubtError(f"nobody knows whether Slurm has taken the job: {answer.words}")


def find(client: Client, comment: str) -> list[str]:
    """Return the ids of the jobs that were submitted with a comment, as far as Slurm answers."""
    seen = client.run(["squeue", "--me", "--noheader", "--states=all", f"--format={FIELDS}"])
    return list(dict.fromkeys(row.base for row in by_comment(snapshot_of(seen.out), comment))) if seen.code == 0 else []


def _refused(answer: Answer) -> SubmitError:
    who = "Slurm does not answer" if answer.silent else "Slurm refuses the job"
    return SubmitError(f"{who}: {answer.words}", hint(answer.words))


def largest_array(client: Client) -> int | None:
    """Return MaxArraySize: each index of an array stays below it (submitit#1624); None where Slurm does not say."""
    try:
        answer = client.run(["scontrol", "show", "config"], patience=_CONFIG_PATIENCE)
    except SubmitError:
        return None
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.out, re.MULTILINE)
    return int(match[1]) if match else None
