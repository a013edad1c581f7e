"""Detect a process of PaddlePaddle's launcher, or a node whose platform sets its variables.

PADDLE_TRAINER_ENDPOINTS has an entry for each process. If no variable gives the local rank, it is
counted in this list.
Source: https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/distributed/launch_en.html
and runs of PaddlePaddle 3.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master
from clusterjob.node.environments.reading import Finding, Reading


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from Paddle's variables; None if they are not set."""
    reading = Reading(environ, "paddle")
    if not reading.is_set("PADDLE_TRAINER_ID"):
        return None
    rank = reading.number("rank", "PADDLE_TRAINER_ID")
    world_size = reading.number("world_size", "PADDLE_TRAINERS_NUM")
    endpoints = [
        item.strip()
        for item in reading.value("PADDLE_TRAINER_ENDPOINTS").split(",")
        if item.strip()
    ]
    if endpoints and world_size is not None and len(endpoints) != world_size:
        reading.conflicts.append(
            f"PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)} processes, PADDLE_TRAINERS_NUM "
            f"is {world_size}"
        )
    hosts = [item.rpartition(":")[0] or item for item in endpoints]
    local = reading.first_set("PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK")
    local_rank = reading.number("local_rank", local, required=not hosts)
    local_world_size = reading.number("local_world_size", "PADDLE_LOCAL_SIZE", required=not hosts)
    nnodes = reading.number("nnodes", "PADDLE_NNODES", required=False)
    node_rank = None
    if hosts and rank is not None and rank < len(hosts):
        on_this = [index for index, host in enumerate(hosts) if host == hosts[rank]]
        _check_own(reading, endpoints[rank], rank=rank)
        if local_rank is None and local_world_size is None:
            local_rank, local_world_size = on_this.index(rank), len(on_this)
            reading.evidence |= dict.fromkeys(
                ("local_rank", "local_world_size"), "PADDLE_TRAINER_ENDPOINTS"
            )
            nodes = list(dict.fromkeys(hosts))
            node_rank, nnodes = nodes.index(hosts[rank]), len(nodes)
    ranks = placing.Ranks(
        rank, world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    master = _master(reading)
    return placing.worker(reading, ranks, master=master, node_rank=node_rank, nnodes=nnodes)


def _check_own(reading: Reading, listed: str, rank: int) -> None:
    own = reading.value("PADDLE_CURRENT_ENDPOINT")
    if own and own != listed:
        reading.conflicts.append(
            f"PADDLE_CURRENT_ENDPOINT={own[:80]!r} is not entry {rank} of "
            f"PADDLE_TRAINER_ENDPOINTS, {listed[:80]!r}"
        )


def _master(reading: Reading) -> Master:
    if reading.is_set("MASTER_ADDR", "MASTER_PORT"):
        return placing.process_master(reading, alone=False)
    if reading.is_set("PADDLE_MASTER"):
        found = placing.endpoint(reading, "PADDLE_MASTER")
    else:
        variable = "PADDLE_TRAINER_ENDPOINTS"
        if not reading.is_set(variable):
            reading.conflicts.append("PADDLE_MASTER is not set (master_addr)")
            return Master(None, None)
        found = placing.endpoint(reading, variable, reading.value(variable).split(",")[0].strip())
    if found.port is None and not reading.conflicts:
        reading.conflicts.append(
            f"{reading.evidence.get('master_addr')} names no port (master_port)"
        )
    return found
