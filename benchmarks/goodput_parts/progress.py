"""Watch a job's checkpoints: the steps that are saved, and a hash of the weights at each."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import torch

POLL_SECONDS = 0.1


class Progress:
    """The progress of one job, from the checkpoints that it writes.

    Args:
        path: the directory of `ctx.checkpoint`.

    Attributes:
        steps: the step of the latest checkpoint.
        seen: (seconds since the start, step) of each checkpoint that was seen.
        weights: a hash of the model's weights by step.
        moved_at: the monotonic time of the latest new checkpoint, or of the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = self.moved_at = time.monotonic()
        self.steps = 0
        self.seen: list[tuple[float, int]] = []
        self.weights: dict[int, str] = {}
        self._latest = ""

    def poll(self) -> None:
        """Read the latest checkpoint if it is new."""
        try:
            latest = max(self.path.glob("*.step*"), default=None)
            if latest is None or latest.name == self._latest:
                return
            state = torch.load(latest / "state.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError):
            return
        self._latest = latest.name
        step = int(latest.name.partition(".step")[2])
        if step > self.steps:
            self.steps, self.moved_at = step, time.monotonic()
            self.seen.append((self.moved_at - self.begin, step))
        data = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(state["model"].items()))
        self.weights[step] = hashlib.sha256(data).hexdigest()

    def expected(self, seconds: float) -> float:
        """Return the steps that this undisturbed run has, or would have, after some seconds.

        NaN if the run was too short for two checkpoints.
        """
        if len(self.seen) < 2:
            return float("nan")
        (first_at, first), (last_at, last) = self.seen[0], self.seen[-1]
        return last + (seconds - last_at) * (last - first) / (last_at - first_at)


def differing(one: Progress, other: Progress) -> tuple[int, list[int]]:
    """Return how many steps both have weights of, and the steps at which these differ."""
    common = sorted(set(one.weights) & set(other.weights))
    return len(common), [step for step in common if one.weights[step] != other.weights[step]]
