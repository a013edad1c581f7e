"""Mark the tests of this folder, and skip them where no GPU is."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_jobs import usable_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _needs_gpus(request: pytest.FixtureRequest) -> None:
    """Skip a test if it needs more GPUs than there are."""
    needed = 2 if "two_gpus" in request.fixturenames else 1
    count, why = usable_gpus()
    if count < needed:
        pytest.skip(why or f"the test needs {needed} GPUs, and torch sees {count}")


@pytest.fixture
def two_gpus() -> None:
    """Mark a test that needs two GPUs."""
