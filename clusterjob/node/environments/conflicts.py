"""Compare the families that apply: use the first family; ignore others or report conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from clusterjob.node.environments.reading import Finding, Ignored
from clusterjob.node.environments.topology import Topology, Worker

# Platforms start one command per node. A machine belongs to one platform, so the variables of two
# platforms must agree.
PLATFORMS = frozenset(
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
    """Return the winner; add the others' variables as ignored, or a conflict with them.

    Args:
        winner: the finding of the first family that applies.
        others: the findings of the later families that apply too.

    Returns:
        The winner; without a placement and with a conflict if another finding contradicts it.
    """
    used = {*winner.evidence.values(), *(item.variable for item in winner.ignored)}
    ignored: dict[str, Ignored] = {}
    conflicts: list[str] = []
    for other in others:
        why = (
            f"{winner.source} comes before {other.source}"
            if other.source != winner.source
            else f"another variable of {winner.source} has precedence"
        )
        ignored |= {
            name: Ignored(name, why)
            for name in other.evidence.values()
            if name not in used and name not in ignored
        }
        conflicts += [] if winner.conflicts else _contradictions(winner, other)
    placement = None if conflicts else winner.placement
    left_over = _incomplete_process(winner, others)
    return replace(
        winner,
        placement=placement,
        ignored=winner.ignored + tuple(ignored.values()),
        conflicts=left_over + winner.conflicts + tuple(conflicts[:1]),
    )


def _incomplete_process(winner: Finding, others: Sequence[Finding]) -> tuple[str, ...]:
    """Return a conflict if a process's variables are incomplete and a platform's are complete."""
    complete = next(
        (
            other
            for other in others
            if isinstance(other.placement, Topology) and other.source in PLATFORMS
        ),
        None,
    )
    names = sorted(set(winner.evidence.values()))
    if winner.source != "env" or not winner.conflicts or complete is None or not names:
        return ()
    text = ", ".join(names)
    verb = "describe" if len(names) > 1 else "describes"
    return (
        (
            f"{text} {verb} one process of a job, but the variables of {complete.source} describe "
            f"a node: unset {text}"
        ),
    )


def _contradictions(winner: Finding, other: Finding) -> Iterable[str]:
    first, second = winner.placement, other.placement
    if isinstance(first, Worker) and isinstance(second, Worker) and winner.source == "env":
        # A launcher inside a task starts more processes than there are tasks, so its ranks differ.
        # Without more processes, a different rank is a mistake: a batch script may have set RANK
        # for all tasks.
        if first.world_size <= second.world_size and (first.rank, first.world_size) != (
            second.rank,
            second.world_size,
        ):
            yield (
                f"{_name(winner, 'rank')}={first.rank} of {first.world_size} and "
                f"{_name(other, 'rank')}={second.rank} "
                f"of {second.world_size} disagree ({winner.source}, {other.source})"
            )
    elif (
        isinstance(first, Topology)
        and isinstance(second, Topology)
        and {winner.source, other.source} <= PLATFORMS
    ):
        counts = {
            second.nnodes,
            second.nnodes / (first.nproc_per_node or 1),
        }  # PyTorchJob v1 counts processes in WORLD_SIZE
        if first.nnodes not in counts or first.node_rank != second.node_rank:
            yield (
                f"{_name(winner, 'node_rank')}={first.node_rank} of {first.nnodes} and "
                f"{_name(other, 'node_rank')}={second.node_rank} "
                f"of {second.nnodes} disagree ({winner.source}, {other.source})"
            )


def _name(finding: Finding, field: str) -> str:
    return finding.evidence.get(field, field)
