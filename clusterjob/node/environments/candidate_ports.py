"""Compute a job's candidate rendezvous ports, for platforms that set none.

Every process computes the same ports. A shared file would be slow: NFS shows a new file seconds
late.
"""

from __future__ import annotations

COUNT = 16
# Below Linux's range of ephemeral ports (32768 and up), above the usual services.
_LOWEST, _HIGHEST = 20000, 32000


def candidates(job_id: str, attempt: int) -> list[int]:
    """Return a job's candidate ports in the order to try them.

    Args:
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0; each attempt has its own sequence.
    """
    import hashlib  # slow to load, and most environments set a port

    seed = hashlib.sha256(f"{job_id}\0{attempt}".encode(errors="surrogateescape")).digest()
    width = _HIGHEST - _LOWEST
    return [
        _LOWEST + int.from_bytes(seed[2 * index : 2 * index + 2], "big") % width
        for index in range(COUNT)
    ]
