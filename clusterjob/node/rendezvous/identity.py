"""The identity of a job: its id, its attempt, and the secret that its agents share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobIdentity:
    """The data that an agent needs to join a job.

    Attributes:
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0; agents of other attempts are refused.
        token: the job's secret; never in argv, logs or records.
        ports: the ports at which node 0 may listen, in order.
        has_torch: whether this node's interpreter finds torch and can serve its store.
        counted_by: the platform's variable from which node_rank was read; empty if the user set it.
            A platform may have several such variables; all nodes must use the same one.
    """

    job_id: str
    attempt: int
    token: bytes
    ports: list[int]
    has_torch: bool
    counted_by: str = ""

    def __repr__(self) -> str:
        return f"JobIdentity({self.job_id!r}, attempt={self.attempt})"
