"""How many examples a fuzz test takes: some in the normal run, 10,000 in the slow one."""

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

QUICK, THOROUGH = 100, 10_000

# Any JSON, with the numbers, names and depths that careless readers trip over.
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
    """Make two tests of a function: of `QUICK` examples, and a slow one of `THOROUGH`.

    Args:
        strategies: the function's arguments that hypothesis makes; all others are fixtures, the
            same ones for each example.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(check, eval_str=True)
        fixtures = [
            parameter for name, parameter in own.parameters.items() if name not in strategies
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
        del test.__wrapped__  # pytest would take the signature from there
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([*fixtures, examples])  # type: ignore[attr-defined]
        return pytest.mark.parametrize(
            "examples", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)]
        )(test)

    return decorate


def emptied(directory: Path) -> Path:
    """Return a directory for one example, with nothing in it: a numbered one for each of thousands
    takes minutes to make and to remove.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Return a JSON value of which up to three inner values are taken away, or are any JSON."""
    result = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        inside = result
        while isinstance(inside, (dict, list)) and inside:
            key = draw(
                st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside)))
            )
            if not isinstance(inside[key], (dict, list)) or draw(st.booleans()):
                if draw(st.booleans()):
                    inside[key] = draw(JSON)
                else:
                    del inside[key]
                break
            inside = inside[key]
    return result
