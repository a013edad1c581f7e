"""Fuzz tests: `QUICK` examples in the normal run, `THOROUGH` in the slow run."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QUICK, THOROUGH = 100, 2_000

# Any JSON value, with numbers, names and depths that often cause errors in parsers.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "²", "-1", "1e999", "\x1b[2J", 10**30]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def fuzz(
    **strategies: st.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make two tests of a function: one with `QUICK` examples, a slow one with `THOROUGH`.

    Args:
        strategies: the function's arguments that hypothesis creates. All others are fixtures, which
            are the same for all examples.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check, eval_str=True)
        fixtures = [
            parameter for name, parameter in signature.parameters.items() if name not in strategies
        ]

        def test(**given_by_pytest: Any) -> None:
            examples = given_by_pytest.pop("examples")

            @settings(
                max_examples=examples,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(**strategies)
            def run(**values: Any) -> None:
                check(**given_by_pytest, **values)

            run()

        functools.update_wrapper(test, check)
        del test.__wrapped__  # otherwise pytest uses its signature
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([*fixtures, examples])  # type: ignore[attr-defined]
        return pytest.mark.parametrize(
            "examples", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)]
        )(test)

    return decorate


def emptied(directory: Path) -> Path:
    """Empty a directory for the next example and return it.

    Thousands of numbered directories, one per example, take minutes to create and to remove.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


@st.composite
def changed(draw: st.DrawFn, value: Any, by: st.SearchStrategy[Any] = JSON) -> Any:
    """Return a JSON value in which one to three inner values are removed or replaced."""
    result = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        container = result
        while isinstance(container, (dict, list)) and container:
            key = draw(
                st.sampled_from(
                    sorted(container) if isinstance(container, dict) else range(len(container))
                )
            )
            if not isinstance(container[key], (dict, list)) or draw(st.booleans()):
                if draw(st.booleans()):
                    container[key] = draw(by)
                else:
                    del container[key]
                break
            container = container[key]
    return result
