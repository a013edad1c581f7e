"""When several families apply: the first one's word holds, the others are told apart as agreeing,
ignored, or in conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from clusterjob.node.environments.reading import Finding, Ignored
from clusterjob.node.environments.topology import Topology, Worker

# Platforms start one command a node. One machine is on one of them, so two have to say the same.
_PLATFORMS = frozenset(
    (
        "mlp",
        "kubeflow",
        "modelarts",
        "nodes",
        "pai",
        "aihc",
        "volcano",
        "pytorchjob",
        "skypilot",
        "sagemaker",
    )
)


def compare(winner: Finding, others: Sequence[Finding]) -> Finding:
    """Return the winner with what became of the others: ignored variables, and a conflict where
    they contradict it.

    Args:
        winner: the first family that applies.
        others: the families after it that apply too.
    """
    used = {*winner.evidence.values(), *(item.variable for item in winner.ignored)}
    ignored: dict[str, Ignored] = {}
    conflicts: list[str] = []
    for other in others:
        why = (
            f"{winner.source} comes before {other.source}"
            if other.source != winner.source
            else "another variable of its kind says more"
        )
        ignored |= {
            name: Ignored(name, why)
            for name in other.evidence.values()
            if name not in used and name not in ignored
        }
        conflicts += [] if winner.conflicts else _contradictions(winner, other)
    place = None if conflicts else winner.place
    left_over = _left_over(winner, others)
    return replace(
        winner,
        place=place,
        ignored=winner.ignored + tuple(ignored.values()),
        conflicts=left_over + winner.conflicts + tuple(conflicts[:1]),
    )


def _left_over(winner: Finding, others: Sequence[Finding]) -> tuple[str, ...]:
    """Return what makes this one process of a job, where that place is incomplete and a platform's
    variables give a node's in full.
    """
    complete = next(
        (
            other
            for other in others
            if isinstance(other.place, Topology) and other.source in _PLATFORMS
        ),
        None,
    )
    names = sorted(set(winner.evidence.values()))
    if winner.source != "env" or not winner.conflicts or complete is None or not names:
        return ()
    text = ", ".join(names)
    verb = "say" if len(names) > 1 else "says"
    return (
        f"{text} {verb} that this is a process of a job, and the variables of {complete.source} give a node's place: unset {text}",
    )


def _contradictions(winner: Finding, other: Finding) -> Iterable[str]:
    first, second = winner.place, other.place
    if isinstance(first, Worker) and isinstance(second, Worker) and winner.source == "env":
        # Nobody knows who set RANK: perhaps a batch script, once for all of srun's tasks. A real
        # launcher inside a task has more processes than there are tasks; the same number, or fewer,
        # in another order is a mistake.
        if first.world_size <= second.world_size and (first.rank, first.world_size) != (
            second.rank,
            second.world_size,
        ):
            yield (
                f"{_name(winner, 'rank')}={first.rank} of {first.world_size} and {_name(other, 'rank')}={second.rank} "
                f"of {second.world_size} disagree ({winner.source}, {other.source})"
            )
    elif (
        isinstance(first, Topology)
        and isinstance(second, Topology)
        and {winner.source, other.source} <= _PLATFORMS
    ):
        counts = {
            second.nnodes,
            second.nnodes / (first.nproc_per_node or 1),
        }  # PyTorchJob v1 counts processes in WORLD_SIZE
        if first.nnodes not in counts or first.node_rank != second.node_rank:
            yield (
                f"{_name(winner, 'node_rank')}={first.node_rank} of {first.nnodes} and {_name(other, 'node_rank')}={second.node_rank} "
                f"of {second.nnodes} disagree ({winner.source}, {other.source})"
            )


def _name(finding: Finding, field: str) -> str:
    return finding.evidence.get(field, field)
