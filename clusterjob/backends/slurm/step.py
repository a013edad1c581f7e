"""Run a program beside the workers of a Slurm job: an overlapping step on one node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterjob.backends import shared
from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.flags import survives
from clusterjob.backends.slurm.status import cluster_of
from clusterjob.backends.slurm.submit import NODE_NAME
from clusterjob.core import node_zip
from clusterjob.core.records import Record
from clusterjob.errors import InsideError, SubmitError
from clusterjob.node import inside
from clusterjob.node.environments.slurm_env import slurm_environment
from clusterjob.node.logs.events import read_job_events

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost

# The step's script: the interpreter of the job's agent runs the program, else any that is new
# enough. The agent's may be a container's, which does not exist here.
_SCRIPT = f"""
new_enough() {{
  "$1" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' < /dev/null 2> /dev/null
}}
start() {{ exec "$1" -I -S -c {shlex.quote(shared.START_INSIDE)} "$zip"; }}
zip=$1 job=$2
for file in $(grep -slzxF -e "CLUSTERJOB_JOB_ID=$job" /proc/[0-9]*/environ 2> /dev/null); do
  [ -O "$file" ] || continue # root can read it, but another user has chosen the program
  path=$(readlink -- "${{file%environ}}exe")
  case ${{path##*/}} in python*) new_enough "$path" && start "$path" ;; esac
done
for path in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
  new_enough "$path" && start "$path"
done
echo "no Python 3.10 or newer on $(uname -n), outside of the job's environment" >&2
exit 1
"""


def command(
    record: Record,
    node: int,
    request: Mapping[str, Any],
    client: Client,
    host: LoginHost | None,
    *,
    terminal: bool,
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a program in an overlapping step; see `backends.base.Executor`.

    Args:
        record: the job.
        node: the node's rank.
        request: what the program does.
        client: runs Slurm's commands.
        host: the login host that runs srun; None for this machine.
        terminal: whether the program gets a terminal.

    Raises:
        InsideError: Slurm does not show the job.
        HostError: the login host cannot be used.
    """
    place = f"--relative={node}"
    if survives(record.job) and (name := _node_name(record, node)):
        place = f"--nodelist={name}"  # Slurm numbers only the nodes that it has not lost
    argv = _srun(_job_number(record, client), cluster_of(record).cluster, place)
    argv.append("--pty" if terminal else "--quit-on-interrupt")
    zip_path = f"{_directory(record)}/{node_zip.NAME}"
    argv += ["bash", "-c", _SCRIPT, "clusterjob-inside", zip_path, record.job_id]
    environ = {inside.REQUEST: inside.encoded(request)}
    if client.conf:
        environ["SLURM_CONF"] = client.conf
    srun = {"run": argv, "env": environ}
    if host is None:
        return shared.beside(srun, slurm_environment(os.environ, argv[0]))
    return shared.beside(host.supervised(srun, terminal=terminal))


def _node_name(record: Record, node: int) -> str:
    """Return the name of a node by the job's events; empty if they have none."""
    names = [
        str(event.get("host"))
        for event in read_job_events(record.job_dir)
        if event.get("event") == "joined" and event.get("node_rank") == node
    ]
    return names[-1] if names and NODE_NAME.fullmatch(names[-1]) else ""


def _srun(job: str, cluster: str | None, place: str) -> list[str]:
    return [
        "srun",
        *([f"--clusters={cluster}"] if cluster else []),
        f"--jobid={job}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        place,
        "--mpi=none",
        "--cpu-bind=none",
        "--job-name=clusterjob-inside",
        "--chdir=/",
        "--export=ALL",
        "--quiet",
    ]


def _directory(record: Record) -> str:
    """Return the job's directory on the nodes; an array's elements share its node zip."""
    handle = record.handle
    if handle is not None and "directory" in handle.data:
        return str(handle.data["directory"])
    return str(record.whole_dir)


def _job_number(record: Record, client: Client) -> str:
    """Return Slurm's number of a job; an array element has one besides its ``12_3``.

    Raises:
        InsideError: Slurm does not show the element.
    """
    key = "" if record.handle is None else record.handle.id
    if "_" not in key:
        return key
    try:
        shown = client.run(["squeue", "--all", "--noheader", f"--jobs={key}", "--format=%A"])
    except SubmitError as error:
        raise InsideError(error.message, error.hint) from error
    number = shown.out.strip()
    if not number.isdecimal():
        raise InsideError(f"Slurm does not show job {key}: {shown.message}")
    return number
