"""Convert samples and the facts of a node to lines of JSON.

The facts are an object. A sample is an array in the order of the fields of `Sample`, with an array
for each worker, which begins with its rank, and for each GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from clusterjob.node.metrics.samples import NodeFacts, Sample


def facts_line(facts: NodeFacts) -> bytes:
    """Return the facts of a node as a line."""
    return _json({**vars(facts), "gpus": [list(vars(gpu).values()) for gpu in facts.gpus]})


def sample_line(sample: Sample) -> bytes:
    """Return a sample as a line."""
    *numbers, _, _ = vars(sample).values()
    workers = [[rank, *_short(vars(worker).values())] for rank, worker in sample.workers.items()]
    gpus = [_short(vars(gpu).values()) for gpu in sample.gpus]
    return _json([round(numbers[0], 2), round(numbers[1], 2), *_short(numbers[2:]), workers, gpus])


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Round numbers for a file: one decimal below 1000, else none."""
    return [
        value if value is None or isinstance(value, int)
        else round(value, 1) if abs(value) < 1000 else round(value)
        for value in values
    ]  # fmt: skip


def _json(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()
