"""Which job, which start of it, and how its agents know each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobIdentity:
    """What makes an agent one of this job's.

    Attributes:
        job_id: the job's id.
        attempt: which start of the whole job this is, from 0; an agent of another attempt is
            refused.
        token: the job's secret; never in argv, logs or records.
        ports: where node 0 may listen, in order.
        has_torch: whether this node's interpreter finds torch, so that its store can be served.
        counted_by: the platform's variable that gave this node's index; empty where it was given by
            hand. Where a platform has several indices, all nodes have to use the same.
    """

    job_id: str
    attempt: int
    token: bytes
    ports: list[int]
    has_torch: bool
    counted_by: str = ""

    def __repr__(self) -> str:
        return f"JobIdentity({self.job_id!r}, attempt={self.attempt})"
