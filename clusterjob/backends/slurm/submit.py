"""Submit a job to Slurm: check the job, submit it once, find it if Slurm did not answer."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterjob.backends.shared import switch, warn
from clusterjob.backends.slurm.client import Client, SlurmOutput, hint
from clusterjob.backends.slurm.flags import clock, least_nodes
from clusterjob.backends.slurm.squeue import ask, is_number, rows_of
from clusterjob.core import python_env
from clusterjob.core.plans import Plan
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost

# Maximum number of searches for a job that Slurm may have accepted; seconds between two searches.
_SEARCHES, _PAUSE = 3, 1.0
_CONFIG_TIMEOUT = 5.0  # seconds; without an answer the default values of Slurm are used
# The output of --test-only for a job that could run.
_WOULD_START = re.compile(r"Job \d+ to start at .* in partition (?P<partition>\S+)")
# sbatch also accepts a job with one of the errors in this pattern: the job waits for its nodes.
_ACCEPTED = re.compile(
    rf"{_WOULD_START.pattern}|(?i:Required node not available|ReqNodeNotAvail|"
    "nodes required for job are DOWN)"
)
_PRINTED_ID = re.compile(
    r"^(?:Submitted batch job )?(\d{1,10})(?:;([\w.-]+))?(?: on cluster [\w.-]+)?\s*$",
    re.ASCII | re.MULTILINE,
)
# A script with this line fails without torch; an indented import may be optional.
_IMPORTS_TORCH = re.compile(rb"^(import|from) torch\b", re.MULTILINE)
_NO_TORCH = 93  # an exit code that Python itself does not use
_FINDS_TORCH = (
    f"import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else {_NO_TORCH})"
)
NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_NO_SUCH_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
# States of nodes that start no job now.
UNUSABLE = re.compile(
    r"down|drain|fail|maint|unknown|power_down|reboot|future|planned_down", re.IGNORECASE
)


def check_configuration(client: Client) -> None:
    """Refuse a missing configuration file, for which Slurm's commands would wait a minute.

    Raises:
        SubmitError: SLURM_CONF names a file that does not exist.
    """
    conf = client.conf or os.environ.get("SLURM_CONF")
    if client.host is None and conf and not os.path.exists(conf):
        raise SubmitError(
            f"Slurm's configuration {conf} is not there", "set SLURM_CONF to the path of slurm.conf"
        )


def parse_config(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`."""
    return {
        key: value.strip() for key, value in re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE)
    }


def preflight(client: Client, spec: JobSpec, argv: Sequence[str]) -> SlurmOutput:
    """Check with sbatch --test-only whether the job could run; queue nothing.

    Slurm checks the partition, the GPUs, the node count and each option. The time limit is checked
    here, because Slurm may accept a limit that no partition allows.

    Returns:
        The answer of sbatch; a code other than 0 means that the job would wait for nodes that are
        down.

    Raises:
        SubmitError: the job could not run; the message is Slurm's own.
    """
    check_configuration(client)
    answer = client.run([argv[0], "--test-only", *argv[1:]])
    # A wrapper of sbatch may return another code than 0 for a job that would start.
    # sbatch accepts a job whose nodes are down, but not a job for which no such nodes exist.
    if (
        answer.code != 0
        and not _ACCEPTED.search(answer.err)
        and not (_NO_SUCH_NODES.search(answer.err) and _may_be_down(client, spec))
    ):
        raise _refused(answer)
    _check_time(client, spec, preflight=answer)
    return answer


def check_pyxis(client: Client, plan: Plan) -> None:
    """Refuse a job whose srun needs Pyxis, if this Slurm has none: it would fail after its wait.

    Raises:
        SubmitError: srun has no --container-image.
    """
    if not any(b"--container-image=" in file.data for file in plan.files):
        return
    known = client.run(["srun", "--help"], timeout=_CONFIG_TIMEOUT)
    if known.code == 0 and "--container-image" not in known.out + known.err:
        raise SubmitError(
            f"--container {plan.spec.container}: srun has no --container-image (no Pyxis)",
            "use --container apptainer:IMAGE, or ask the site's administrators for Pyxis",
        )


def check_torch(spec: JobSpec) -> None:
    """Refuse a script that imports torch if its Python has none: it would fail after its wait.

    Only a Python that this machine has too is asked. Setup lines and containers may change it.

    Raises:
        SubmitError: the interpreter does not find torch.
    """
    unknown = spec.setup or spec.container or python_env.travels(spec)
    needed = switch(spec.options, "need_torch", default=True)
    if unknown or not needed or not os.path.isabs(spec.python):
        return
    if not spec.program.is_python or not _IMPORTS_TORCH.search(spec.program.source()):
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        code = subprocess.run(
            [spec.python, "-c", _FINDS_TORCH],
            check=False,
            cwd=spec.workdir,
            env=os.environ | dict(spec.env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CONFIG_TIMEOUT,
        ).returncode
        if code == _NO_TORCH:
            raise SubmitError(
                f"no torch: {spec.python} does not find it",
                "--python PATH chooses another; if the nodes have it, --set need_torch=false",
            )


def without_bad_nodes(client: Client, plan: Plan) -> Plan:
    """Return the plan with --exclude for the nodes to avoid, if Slurm has enough others."""
    names = [name for name in plan.avoid if NODE_NAME.fullmatch(name)]
    if not names:
        return plan
    commands = tuple(
        replace(command, argv=_excluding(command.argv, names)) for command in plan.commands
    )
    argv = commands[0].argv
    if not _WOULD_START.search(client.run([argv[0], "--test-only", *argv[1:]]).err):
        return plan
    shown = ", ".join(plan.avoid[name] for name in names[-5:])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    warn(f"avoids {shown}{more} (`clusterjob hosts bad --clear` forgets them)")
    return replace(plan, commands=commands)


def _excluding(argv: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return sbatch's command line with these nodes in --exclude, which keeps the user's own."""
    flag = "--exclude="
    own = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
    others = [word for word in argv[1:] if not word.startswith(flag)]
    return (argv[0], flag + ",".join([*own, *names]), *others)


def _may_be_down(client: Client, spec: JobSpec) -> bool:
    """Return whether the nodes that --test-only does not find may only be down (Slurm 22.05)."""
    # If no partition is named, SBATCH_PARTITION, the script or a plug-in may set another partition
    # than the default.
    named = spec.options.get("partition")
    shown = client.run(
        ["sinfo", "--all", "--noheader", "--Node", "--format=%N %T"]
        + ([f"--partition={named}"] if named else []),
        timeout=_CONFIG_TIMEOUT,
    )
    states = dict(row.split() for row in shown.out.splitlines() if len(row.split()) == 2)
    return least_nodes(spec) <= len(states) and any(map(UNUSABLE.search, states.values()))


def _check_time(client: Client, spec: JobSpec, preflight: SlurmOutput) -> None:
    """Refuse a time limit above the limits of all partitions of the job.

    Without EnforcePartLimits, Slurm accepts such a job, and the job waits forever. Nothing is
    refused if the limit is unknown: SBATCH_PARTITION, a template or a plug-in may set another
    partition than the default, and a quality of service may allow more time.

    Args:
        client: runs scontrol.
        spec: the job.
        preflight: the answer of --test-only.

    Raises:
        SubmitError: the job would never start.
    """
    seconds, named = spec.resources.time_limit, spec.options.get("partition")
    would_start = _WOULD_START.search(preflight.err)
    by_others = bool(spec.template or spec.login or os.environ.get("SBATCH_PARTITION"))
    has_qos = "qos" in spec.options or bool(os.environ.get("SBATCH_QOS"))
    if seconds is None or would_start is None or has_qos or (by_others and named is None):
        return
    shown = client.run(
        ["scontrol", "--all", "--oneliner", "show", "partition"], timeout=_CONFIG_TIMEOUT
    )
    limits: dict[str, int] = {}
    default = ""
    for line in shown.out.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        limits[fields.get("PartitionName", "")] = _seconds(fields.get("MaxTime", ""))
        if fields.get("Default") == "YES":
            default = fields.get("PartitionName", "")
    wanted = named.split(",") if named is not None else [default]
    if would_start["partition"] not in wanted or not limits.keys() >= set(wanted):
        return
    most = max(limits[name] for name in wanted)
    if -(-seconds // 60) * 60 > most and not _has_other_rules(client):
        raise SubmitError(
            f"the time limit of {clock(seconds)} is above that of the partition"
            f" {', '.join(wanted)}: {clock(most)}",
            "`sinfo -o '%P %l'` shows the limit of each partition;"
            " name a qos that may exceed it with --qos NAME",
        )


def _has_other_rules(client: Client) -> bool:
    """Return whether a plug-in or the user's default quality of service may allow more time."""
    config = parse_config(client.run(["scontrol", "show", "config"], timeout=_CONFIG_TIMEOUT).out)
    return config.get("JobSubmitPlugins") != "(null)" or "qos" in config.get(
        "AccountingStorageEnforce", ""
    ).split(",")


def _seconds(text: str) -> int:
    """Return the seconds of Slurm's [D-]HH:MM:SS; 10**6 days for other text such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d?):(\d\d?)", text, re.ASCII)
    days, hours, minutes, rest = (
        (int(part or 0) for part in match.groups()) if match else (10**6, 0, 0, 0)
    )
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def submit_pieces(
    client: Client, plan: Plan, host: LoginHost | None = None
) -> tuple[list[str], str | None]:
    """Submit each piece of a job; return Slurm's ids, and the cluster that accepted them.

    The cluster is None outside of a federation.

    Args:
        client: runs sbatch.
        plan: the job.
        host: the login host that runs sbatch; None for this machine.

    Raises:
        SubmitError: Slurm refuses a piece; the pieces submitted before are cancelled.
    """
    ids: list[str] = []
    cluster: str | None = None
    for command in plan.commands:
        try:
            job, cluster = _submit_once(client, command.argv, job=plan.job_id, known=ids)
        except SubmitError:
            if ids:
                Client(cluster=cluster, host=host).run(["scancel", *ids])
            raise
        except KeyboardInterrupt:  # sbatch also gets the SIGINT, but may have submitted the job
            ends.cancel(plan.job_dir)  # the script exits if it finds this request
            if host is not None:
                host.request_cancel([plan.job_id])
            if taken := sorted({*ids, *(_find(client, plan.job_id) or ())}):
                Client(cluster=cluster, host=host).run(["scancel", *taken])
            raise
        ids.append(job)
    return ids, cluster


def _submit_once(
    client: Client, argv: Sequence[str], job: str, known: Sequence[str]
) -> tuple[str, str | None]:
    """Submit one script; return the job's id and, in a federation, the cluster that accepted it.

    A site may replace sbatch by a wrapper. The wrapper may print more than the id, or may fail
    after Slurm has accepted the job.

    Args:
        client: runs sbatch.
        argv: sbatch's command line.
        job: clusterjob's own job id, for the search in Slurm's queue.
        known: Slurm's ids of other pieces of the same job.

    Raises:
        SubmitError: Slurm refused it.
        SubmitInDoubtError: it is unknown whether Slurm accepted it, and squeue does not show it.
    """
    answer = client.run(argv)
    printed = _PRINTED_ID.findall(answer.out)
    if answer.code == 0 and len(printed) == 1:
        return printed[0][0], printed[0][1] or None
    if answer.silent and not answer.in_doubt:
        raise _refused(answer)  # Slurm was not reached
    # A second sbatch might submit the job twice (nextflow#970).
    in_doubt = answer.in_doubt or answer.code == 0 or bool(printed)
    for search in range(_SEARCHES):
        time.sleep(_PAUSE if search else 0.0)
        found = _find(client, job)
        if mine := [job_id for job_id in found or () if job_id not in known]:
            return mine[0], client.cluster
        if found is not None and not in_doubt:
            raise _refused(answer)
    why = (
        answer.message if answer.code else f"sbatch printed no job id: {answer.out.strip()[:80]!r}"
    )
    raise SubmitInDoubtError(f"it is unknown whether Slurm accepted the job: {why}")


def _find(client: Client, job: str) -> list[str] | None:
    """Return Slurm's ids of a job by clusterjob's own id; None if Slurm does not answer."""
    if (snapshot := ask(client)) is None:
        return None
    return list(dict.fromkeys(row.base for row in rows_of(snapshot, job)))


def _refused(answer: SlurmOutput) -> SubmitError:
    who = "Slurm does not answer" if answer.silent else "Slurm refuses the job"
    return SubmitError(f"{who}: {answer.message}", hint(answer.message))


def largest_array(client: Client) -> int | None:
    """Return MaxArraySize, or None if Slurm does not answer.

    Each index of an array must be below MaxArraySize (submitit#1624).
    """
    try:
        answer = client.run(["scontrol", "show", "config"], timeout=_CONFIG_TIMEOUT)
    except SubmitError:
        return None
    size = parse_config(answer.out).get("MaxArraySize", "")
    return int(size) if is_number(size) else None
