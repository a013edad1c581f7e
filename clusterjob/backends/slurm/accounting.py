"""Ask Slurm how a job ended: scontrol for one job, sacct for jobs that squeue lacks."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from clusterjob.backends.slurm.client import UNREACHED, Client, SlurmOutput
from clusterjob.backends.slurm.queue import INTERVAL
from clusterjob.backends.slurm.squeue import JobRow, is_number
from clusterjob.errors import ClusterJobError

_FIELDS = "JobID,State,Submit,ExitCode,NodeList,WorkDir"  # WorkDir last: only it may contain '|'
_TIMEOUT = 20.0  # seconds for one sacct
_MAX_NODES = 1000  # maximum characters of a list of nodes in a reason


def explained(client: Client, row: JobRow) -> JobRow:
    """Add the failed node and the script's signal to the row of an ended job.

    squeue does not show them.
    """
    if row.state not in ("NODE_FAIL", "FAILED"):
        return row
    shown = _shown(client, "scontrol", "--all", "--oneliner", "show", "job", row.key)
    values: dict[str, str] = {
        key: value[:_MAX_NODES]
        for key, value in re.findall(r"(?:^| )(FailedNode|NodeList|ExitCode)=(\S+)", shown)
        if value != "(null)"
    }
    if row.state == "FAILED":
        return replace(row, signal=_signal(values.get("ExitCode", "")))
    names, nodes = values.get("FailedNode", ""), values.get("NodeList", "")
    if nodes and not names:  # Slurm 22.05 has no FailedNode for a job that ended by NODE_FAIL
        options = ("--all", "--noheader", "--Node", "--states=down,fail", "--format=%N")
        down = _shown(client, "sinfo", *options, f"--nodes={nodes}")
        names = ",".join(dict.fromkeys(down[:_MAX_NODES].split()))
    return replace(
        row, failed_node=f"node {names}" if names else f"one of {nodes}" if nodes else ""
    )


def _signal(exit_code: str) -> int:
    """Return the signal in Slurm's ``code:signal``; 0 if there is none."""
    number = exit_code.partition(":")[2]
    return int(number) if is_number(number) else 0


def _shown(client: Client, *argv: str) -> str:
    try:
        return client.run(argv, timeout=INTERVAL).out
    except ClusterJobError:
        return ""


class Accounting:
    """Slurm's accounting, for jobs that squeue no longer shows; many sites do not have it.

    Args:
        client: runs sacct.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._absent = False
        self._next = 0.0  # earliest time of the next sacct, in monotonic seconds

    def ended(self, wanted: Mapping[str, tuple[float, str]]) -> dict[str, JobRow] | None:
        """Return the jobs that accounting shows, by key, with one sacct for all jobs.

        It runs sacct at most once in 5 s. It returns None if the last call is too recent or the
        login host is not reachable.

        Args:
            wanted: for each key, the submit time in seconds since the epoch, and the end of the
                path of the job's directory. No other job has the same end of the path, but Slurm
                may give the same id to another job.
        """
        if self._absent or not wanted:
            return {}
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + INTERVAL
        since = time.strftime(
            "%Y-%m-%dT%H:%M:%S", time.gmtime(min(at for at, _ in wanted.values()) - 60)
        )
        argv = [
            "sacct",
            "--allocations",
            "--noheader",
            "--parsable2",
            "--duplicates",
            f"--format={_FIELDS}",
            f"--starttime={since}",
            f"--jobs={','.join(sorted({key.partition('_')[0] for key in wanted}))}",
        ]
        try:
            answer = self._client.run(argv, {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC0"}, _TIMEOUT)
        except ClusterJobError:
            answer = SlurmOutput(127, "", err="")
        if answer.code == UNREACHED:
            return None
        if answer.code != 0:
            self._absent = True
            return {}
        found: dict[str, JobRow] = {}
        for line in answer.out.split("\n"):
            fields = line.split("|", 5)
            if len(fields) < 6 or fields[0] not in wanted:
                continue
            key, state, submitted, exit_code, nodes, directory = fields
            at = float(submitted) if is_number(submitted) else 0.0
            if directory.endswith(wanted[key][1]) and (
                key not in found or at >= found[key].submitted  # a requeued job has several rows
            ):
                state = state.partition(" ")[0].rstrip("+")
                failed = state == "NODE_FAIL" and nodes not in ("", "None assigned")
                found[key] = JobRow(
                    key,
                    state,
                    submitted=at,
                    failed_node=f"one of {nodes}" if failed else "",
                    signal=_signal(exit_code),
                )
        return found
