"""Compute the `World` of each node for one round of workers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import accumulate

from clusterjob.node.contract import World
from clusterjob.node.environments import candidate_ports, worker_endpoints
from clusterjob.node.environments.topology import Topology
from clusterjob.node.rendezvous import ports
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Peer


def plan_round(
    peers: Sequence[Peer], restart: int, topology: Topology, job: JobIdentity, *, serve_store: bool
) -> tuple[list[World], socket.socket | None]:
    """Bind the store's port; return every node's world, by node_rank, and the store's socket.

    Node 0's agent serves that socket as torch's store. It is None if rank 0, or torchrun's own
    agent, binds the port.

    Args:
        peers: the agents, by node_rank.
        restart: the number of the round, from 0.
        topology: node 0's rank assignment.
        job: the job's identity.
        serve_store: whether node 0's agent serves torch's store.

    Raises:
        RendezvousError: no port for the store is free.
    """
    candidates = [0]
    if not serve_store:  # a worker binds the port later; the kernel assigns none of these meanwhile
        candidates = candidate_ports.candidates(f"{job.job_id}\0{restart}", job.attempt)
    store = ports.listen(topology.master_addr, candidates, alone=topology.nnodes == 1)
    port = int(store.getsockname()[1])
    if not serve_store:
        store.close()
    *first_ranks, world_size = [0, *accumulate(peer.nproc for peer in peers)]
    # One endpoint per worker. Node 0's last one is extra: rank 0 binds it for its framework.
    held = all(len(peer.endpoints) >= peer.nproc + (peer.node_rank == 0) for peer in peers)
    endpoints = ""
    if held and any(peer.wants_endpoints for peer in peers):  # a long list: make it only if needed
        of_all = [each for peer in peers for each in peer.endpoints[: peer.nproc]]
        endpoints = worker_endpoints.listed(of_all)
    worlds = [
        World(
            restart,
            topology.master_addr,
            master_port=port,
            agent_store=serve_store,
            node_rank=peer.node_rank,
            nnodes=len(peers),
            nproc=peer.nproc,
            first_rank=first_rank,
            world_size=world_size,
            endpoints_master=peers[0].endpoints[-1] if held else "",
            endpoints=endpoints if peer.wants_endpoints else "",
            own_endpoints=",".join(peer.endpoints[: peer.nproc]),
        )
        for peer, first_rank in zip(peers, first_ranks, strict=True)
    ]
    return worlds, store if serve_store else None
