"""Detect a node of Volcano, whose svc and env plugins list the hosts of each task.

The variables are VC_<TASK>_HOSTS, VC_<TASK>_NUM and VC_TASK_INDEX.

Source: https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md
and how_to_use_env_plugin.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading

_HOSTS = re.compile(r"VC_(\w+)_HOSTS\Z")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from its index and its task's hosts; None without an index."""
    reading = Reading(environ, "volcano", quoted=True)
    index = reading.first_set("VC_TASK_INDEX", "VK_TASK_INDEX")
    if not reading.is_set(index):
        return None
    node_rank = reading.number("node_rank", index)
    lists = {
        name: hosts
        for name in sorted(environ)
        if _HOSTS.match(name) and (hosts := placing.hosts(reading, name))
    }
    chosen = _own_list(reading, lists)
    if chosen is None:
        return reading.finding(None)
    hosts = lists[chosen]
    count = chosen.removesuffix("_HOSTS") + "_NUM"
    nnodes = reading.number("nnodes", count, required=False)
    if nnodes is None and not reading.is_set(count):
        nnodes = len(hosts)
        reading.evidence["nnodes"] = chosen
    elif nnodes is not None and nnodes != len(hosts):
        reading.conflicts.append(f"{count}={nnodes}, but {chosen} lists {len(hosts)}")
    master = placing.master_or_first(reading, chosen, hosts)
    nproc_per_node = reading.number("nproc_per_node", "NPROC_PER_NODE", required=False)
    return placing.node(
        reading,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=nproc_per_node,
        master=master,
    )


def _own_list(reading: Reading, lists: dict[str, list[str]]) -> str | None:
    """Return the variable that lists the hosts of this pod's own task."""
    if len(lists) == 1:
        return next(iter(lists))
    if not lists:
        reading.conflicts.append("VC_WORKER_HOSTS is not set (nnodes)")
        return None
    # An index counts the pods of one task. Only the host name shows the task of this pod.
    own = reading.value("HOSTNAME")
    mine = [
        name
        for name, hosts in lists.items()
        if own and any(host.partition(".")[0] == own.partition(".")[0] for host in hosts)
    ]
    others = [name for name in lists if name not in mine]
    reading.conflicts.append(
        f"{' and '.join(lists)} list several tasks"
        + (f"; this host is in {mine[0]}" if mine else "")
        + "; no variable counts the nodes across "
        f"{'them' if not mine else 'it and ' + ' and '.join(others)}: Volcano's pytorch plugin "
        "sets RANK and WORLD_SIZE"
    )
    return None
