"""Detect a process of IBM's jsrun under LSF.

LSB_DJOB_RANKFILE names a file with one host per line. The first host is the launch node, which is
not a node of the job. LSB_MCPU_HOSTS contains the same list: ``launch 1 host1 42 host2 42``.
Source: IBM's documentation of LSF, "Environment variables set for job execution", and Lightning's
LSF environment, lightning/fabric/plugins/environments/lsf.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading

# Keys under which `lookups.look_up` stores the content of LSB_DJOB_RANKFILE and this host's name.
RANKFILE = "LSB_DJOB_RANKFILE lines"
OWN_NAME = "this host"


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from jsrun's variables; None if they are not set."""
    reading = Reading(environ, "lsf")
    if not reading.is_set("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"):
        return None
    rank = reading.number("rank", "JSM_NAMESPACE_RANK")
    world_size = reading.number("world_size", "JSM_NAMESPACE_SIZE")
    local_rank = reading.number("local_rank", "JSM_NAMESPACE_LOCAL_RANK")
    nodes, variable = _nodes(reading)
    local_world_size = reading.number(
        "local_world_size", "JSM_NAMESPACE_LOCAL_SIZE", required=False
    )
    if local_world_size is None and not reading.is_set("JSM_NAMESPACE_LOCAL_SIZE"):
        if world_size is not None and nodes and world_size % len(nodes) == 0:
            local_world_size = world_size // len(nodes)  # jsrun fills resource sets evenly
        else:
            reading.conflicts.append("JSM_NAMESPACE_LOCAL_SIZE is not set (local_world_size)")
    ranks = placing.Ranks(
        rank, world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    own = reading.value(OWN_NAME)
    if nodes:
        reading.evidence["nnodes"] = variable
    fallback = None
    if nodes and not ranks.alone and not reading.is_set("MASTER_ADDR"):
        fallback = reading.as_host("master_addr", variable, nodes[0])
    job = (
        reading.number("master_port", "LSB_JOBID", required=False)
        if not reading.is_set("MASTER_PORT")
        else None
    )
    return placing.worker(
        reading,
        ranks,
        node_rank=nodes.index(own) if own in nodes else None,
        nnodes=len(nodes) or None,
        master=placing.process_master(
            reading,
            alone=ranks.alone,
            fallback=fallback,
            fallback_port=None if job is None else job % 1000 + 10000,
        ),
    )


def _nodes(reading: Reading) -> tuple[list[str], str]:
    """Return the job's nodes in order, without the launch node, and their variable."""
    if reading.is_set(RANKFILE):
        hosts, variable = reading.value(RANKFILE).split()[1:], "LSB_DJOB_RANKFILE"
    else:
        hosts, variable = reading.value("LSB_MCPU_HOSTS").split()[2::2], "LSB_MCPU_HOSTS"
    return list(dict.fromkeys(hosts)), variable
