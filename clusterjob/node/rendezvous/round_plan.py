"""Plan a round: bind the store's port, give every node its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from clusterjob.node.contract import World
from clusterjob.node.environments import slurm_env, worker_variables
from clusterjob.node.environments.topology import Topology, candidate_ports
from clusterjob.node.rendezvous import ports
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Peer


def store_address(topology: Topology, peers: Iterable[Peer]) -> str:
    """Return the coordinator's address for torch's store.

    Of several addresses, it is the last one at which an agent has reached the coordinator: agents
    try them in order, so this agent cannot reach an earlier one.
    """
    addresses = topology.master_addr.split(",")
    reached = {peer.reached_at for peer in peers}
    return next((each for each in reversed(addresses) if each in reached), addresses[0])


def plan_round(
    nodes: Sequence[int],
    peers: Mapping[int, Peer],
    restart: int,
    topology: Topology,
    job: JobIdentity,
    *,
    serve_store: bool,
) -> tuple[dict[int, World], socket.socket | None]:
    """Bind the store's port; return every node's world, by its number, and the store's socket.

    The coordinator's agent serves that socket as torch's store; if its node runs no workers, its
    world has none. The socket is None if rank 0, or torchrun's own agent, binds the port.

    Args:
        nodes: the nodes that run workers, in the order of their ranks.
        peers: the agents, by the number of their node.
        restart: the number of the round, from 0.
        topology: the coordinator's node.
        job: the job's identity.
        serve_store: whether the coordinator's agent serves torch's store.

    Raises:
        RendezvousError: no port for the store is free.
    """
    own, first = topology.node_rank, nodes[0]
    store: socket.socket | None = None
    if serve_store or first == own:
        candidates = [0]
        if not serve_store:  # a worker binds the port later, so it must not be ephemeral
            candidates = candidate_ports(f"{job.job_id}\0{restart}", job.attempt)
        address = store_address(topology, peers.values())
        store = ports.listen(address, candidates, alone=topology.nnodes == 1)
        port = int(store.getsockname()[1])
        if not serve_store:
            store.close()
    else:
        address = peers[first].address
        port = candidate_ports(f"{job.job_id}\0{restart}", job.attempt)[0]
    working = [peers[node] for node in nodes]
    *first_ranks, world_size = [0, *accumulate(peer.nproc for peer in working)]
    # One endpoint per worker. A node holds one more, which rank 0 binds for its framework.
    held = all(len(peer.endpoints) > peer.nproc for peer in working)
    endpoints = ""
    if held and any(peer.wants_endpoints for peer in working):  # long: make it only if needed
        of_all = [each for peer in working for each in peer.endpoints[: peer.nproc]]
        endpoints = worker_variables.endpoint_list(of_all)

    tasks = slurm_env.tasks_per_node([peer.nproc for peer in working])
    step_nodes = slurm_env.nodes_of_round([peer.host for peer in working], os.environ)

    def world(peer: Peer, node_rank: int, first_rank: int, nproc: int) -> World:
        return World(
            restart,
            address,
            master_port=port,
            agent_store=serve_store,
            node_rank=node_rank,
            nnodes=len(nodes),
            nproc=nproc,
            first_rank=first_rank,
            world_size=world_size,
            endpoints_master=working[0].endpoints[-1] if held else "",
            endpoints=endpoints if peer.wants_endpoints else "",
            own_endpoints=",".join(peer.endpoints[:nproc]),
            tasks_per_node=tasks,
            step_nodes=step_nodes,
        )

    worlds = {
        peer.node_rank: world(peer, node_rank, first_rank=rank, nproc=peer.nproc)
        for node_rank, (peer, rank) in enumerate(zip(working, first_ranks, strict=True))
    }
    if serve_store and own not in worlds:
        worlds[own] = world(peers[own], len(nodes), first_rank=world_size, nproc=0)
    return worlds, store if serve_store else None
