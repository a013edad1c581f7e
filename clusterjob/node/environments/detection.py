"""Detect the rank assignment of this process or node, and show it (``clusterjob env``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterjob.node.environments import families
from clusterjob.node.environments.families import FAMILIES, Family
from clusterjob.node.environments.topology import (
    NOWHERE,
    Finding,
    Topology,
    Worker,
    whole_number,
)
from clusterjob.node.system import files, network, processes
from clusterjob.node.system.sanitize import sanitize

SCHEMA = 1
_MAX_TEXT = 1 << 20  # characters of a host file
_TIMEOUT = 4.0  # seconds for `flux hostlist local`
# (family, count, index): the launcher sets both. A batch script may export a count for its steps.
# In a step a family applies, and then the count is not read. No family reads PADDLE_TRAINER_ID.
_COUNTS = (
    ("env", "WORLD_SIZE", "RANK"),
    ("openmpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mvapich2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("hydra", "PMI_SIZE", "PMI_RANK"),
    ("paddle", "PADDLE_TRAINERS_NUM", "RANK"),
    ("sagemaker", "SM_HOST_COUNT", "SM_CURRENT_HOST"),
)
_FIELDS = (
    "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "rank", "local_rank",
    "world_size", "local_world_size",
)  # fmt: skip


def detect(environ: Mapping[str, str]) -> Finding:
    """Return the detected rank assignment with its evidence.

    The first family that applies gives it. The variables of later families are ignored, or are a
    conflict. The function reads only the mapping: no file, no socket, no clock. `look_up` adds the
    contents of files, sockets and commands that variables point at.
    """
    findings = [(family, family.detect(environ)) for family in FAMILIES]
    applied = [each for each in findings if each[1].source != NOWHERE]
    found = _compare(applied) if applied else _without_family(environ)
    for _, other in findings:
        if other.source == NOWHERE:
            found.ignored |= other.ignored
    _ignore_master(found)
    return found


def _compare(applied: Sequence[tuple[Family, Finding]]) -> Finding:
    """Return the first finding; add the others' variables as ignored, or a conflict with them."""
    (family, winner), *others = applied
    used = {*winner.evidence.values(), *winner.ignored}
    nodes, conflicts = [], []
    for other_family, other in others:
        why = (
            f"{winner.source} comes before {other.source}"
            if other.source != winner.source
            else f"another variable of {winner.source} has precedence"
        )
        for name in other.evidence.values():
            if name not in used:
                winner.ignored.setdefault(name, why)
        are_platforms = family.is_platform and other_family.is_platform
        conflicts.append(_disagreement(winner, other, are_platforms=are_platforms))
        if other_family.is_platform and other.placement is not None:
            nodes.append(other.source)
    names = sorted(set(winner.evidence.values()))
    if winner.source == "env" and winner.conflicts and nodes and names:
        text, verb = ", ".join(names), "describe" if len(names) > 1 else "describes"
        conflicts.append(
            f"{text} {verb} one process of a job, but the variables of {nodes[0]} describe "
            f"a node: unset {text}"
        )
    first = next(filter(None, conflicts), "")
    if first:
        winner.placement = None
        winner.conflicts.insert(0, first)
    return winner


def _disagreement(winner: Finding, other: Finding, *, are_platforms: bool) -> str:
    """Return the conflict between two findings; empty if they agree or need not agree."""
    first, second = winner.placement, other.placement
    if isinstance(first, Worker) and isinstance(second, Worker) and winner.source == "env":
        # A launcher inside a task starts more processes than there are tasks, so its ranks differ.
        # Without more processes, a different rank is a mistake: a batch script may have set RANK
        # for all tasks.
        name = "rank"
        own, theirs = (first.rank, first.world_size), (second.rank, second.world_size)
        agree = own == theirs or first.world_size > second.world_size
    elif isinstance(first, Topology) and isinstance(second, Topology) and are_platforms:
        name = "node_rank"
        own, theirs = (first.node_rank, first.nnodes), (second.node_rank, second.nnodes)
        # PyTorchJob v1 counts processes in WORLD_SIZE.
        counts = (first.nnodes, first.nnodes * (first.nproc_per_node or 1))
        agree = first.node_rank == second.node_rank and second.nnodes in counts
    else:
        return ""
    if agree:
        return ""
    return (
        f"{winner.evidence.get(name, name)}={own[0]} of {own[1]} and "
        f"{other.evidence.get(name, name)}={theirs[0]} of {theirs[1]} disagree "
        f"({winner.source}, {other.source})"
    )


def _without_family(environ: Mapping[str, str]) -> Finding:
    """Return an empty finding, or a conflict if variables give a count above 1 and no index.

    Without this check each process would train its own copy of the model alone.
    """
    found = Finding(NOWHERE, environ)
    for source, count, index in _COUNTS:
        value = found.value(count)
        if (whole_number(value) or 0) > 1 and not found.is_set(index):
            why = f"{index} is not set, but {count}={value}: the launcher sets both"
            return Finding(source, environ, conflicts=[why])
    for name in sorted(filter(families.VOLCANO_HOSTS.match, environ)):
        hosts = found.hosts(name)
        if len(hosts) > 1:
            why = (
                f"VC_TASK_INDEX is not set, but {name} lists {len(hosts)} hosts: "
                "Volcano's env plugin sets it"
            )
            return Finding("volcano", environ, conflicts=[why])
    return found


def _ignore_master(found: Finding) -> None:
    """Record MASTER_ADDR and MASTER_PORT as ignored if they are not used: many scripts set them."""
    why = (
        "no other variable gives a rank"
        if found.source == NOWHERE
        else f"{found.source} has its own variables for it"
    )
    if not found.conflicts:  # these variables may be the reason for a conflict
        unused = {"MASTER_ADDR", "MASTER_PORT"} - {*found.evidence.values(), *found.ignored}
        found.ignore(why, *sorted(unused))


# -- values that variables point at ----------------------------------------------------------------


def look_up(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the mapping and the values that a family needs to look up.

    These are the contents of host files, descriptors and commands that some variables name. Each
    is added under a key that is no variable's name, so that `detect` stays a pure function.

    Returns:
        A new mapping; the same mapping if no value is needed.
    """
    found: dict[str, str] = {}
    if environ.get("PALS_RANKID") and environ.get("PBS_NODEFILE"):
        text = files.read_text(environ["PBS_NODEFILE"], _MAX_TEXT)
        found[families.PALS_FIRST_NODE] = text.partition("\n")[0].strip()
    several = environ.get("FLUX_TASK_RANK") and environ.get("FLUX_JOB_NNODES") != "1"
    if several and not environ.get("MASTER_ADDR"):
        command = families.FLUX_HOSTS.split()
        found[families.FLUX_HOSTS] = processes.output_of(command, environ, timeout=_TIMEOUT)
    if environ.get("MPI_LOCALRANKID") and environ.get("PMI_FD") and not environ.get("MASTER_PORT"):
        found[families.HYDRA_PROXY] = _peer(environ["PMI_FD"])
    return {**environ, **found} if found else environ


def _peer(descriptor: str) -> str:
    """Return the pid of the peer of a local socket; empty if it is not a socket.

    The peer of PMI_FD is the proxy that started this node's processes.
    """
    import socket

    refused = contextlib.suppress(OSError, ValueError, OverflowError)
    with refused, socket.socket(fileno=os.dup(int(descriptor))) as link:
        pid = network.peer_of(link)[0]
        return str(pid) if pid > 0 else ""
    return ""


# -- clusterjob env --------------------------------------------------------------------------------


def describe(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data; a field that its level does not have is None."""
    place = finding.placement
    fields = vars(place) if place is not None else {}
    if isinstance(place, Worker):
        fields = vars(place.topology) | fields
    return {
        "source": finding.source,
        "level": finding.level,
        **{name: fields.get(name) for name in _FIELDS},
        "evidence": finding.evidence,
        "ignored": [{"variable": name, "why": why} for name, why in finding.ignored.items()],
        "conflicts": finding.conflicts,
    }


def text_of(found: Mapping[str, Any]) -> str:
    """Return the data of `describe` as text: each field with its value and its variable."""
    rows = [
        (name, str(found[name]), found["evidence"].get(name, ""))
        for name in _FIELDS
        if found[name] is not None
    ]
    lines = [f"source: {found['source']}   level: {found['level']}"]
    if rows:
        rows.insert(0, ("FIELD", "VALUE", "FROM"))
        names, values, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines += [f"{a:{names}}  {b:{values}}  {c}".rstrip() for a, b, c in rows]
    lines += [f"ignored: {item['variable']} ({item['why']})" for item in found["ignored"]]
    lines += [f"conflict: {conflict}" for conflict in found["conflicts"]]
    return "\n".join(sanitize(line) for line in lines)


def show(*, as_json: bool) -> int:
    """Print the detected environment; return the exit code: 1 if there is a conflict, else 0."""
    found = describe(detect(look_up(os.environ)))
    if as_json:
        import json

        # ASCII only, so that any encoding of stdout can represent it.
        print(json.dumps({"schema": SCHEMA, **found}, indent=1))
    else:
        print(text_of(found))
    return 1 if found["conflicts"] else 0


def main(argv: Sequence[str]) -> int:
    """Run ``clusterjob env``, also on a node that has only the node zip.

    Args:
        argv: the arguments after ``env`` on the command line.

    Returns:
        The exit code, as for `show`.
    """
    import argparse

    parser = argparse.ArgumentParser(
        prog="clusterjob env",
        description="Show the detected environment: the variable that gave each field, ignored "
        "variables and conflicts.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return show(as_json=parser.parse_args(argv).as_json)
