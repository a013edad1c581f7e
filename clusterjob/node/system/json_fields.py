"""Read checked fields of JSON that other processes and hosts write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_MAX_NUMBER = 2**31 - 1
_MAX_TEXT = 16_384  # characters; a longer text is cut


def mapping(data: Any) -> Mapping[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: the data is something else, as for the other functions of this module.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{type(data).__name__} instead of an object")  # noqa: TRY004 - one exception type
    return data


def number(fields: Mapping[str, Any], name: str) -> int:
    """Return a whole number."""
    value = fields.get(name)
    if type(value) is not int or abs(value) > _MAX_NUMBER:
        raise ValueError(f"{name} is not a number")
    return value


def text(fields: Mapping[str, Any], name: str) -> str:
    """Return a text of at most 16,384 characters."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")  # noqa: TRY004
    return value[:_MAX_TEXT]


def optional(
    read: Callable[[Mapping[str, Any], str], _T], fields: Mapping[str, Any], name: str
) -> _T | None:
    """Return a field; None if it is missing or null."""
    return None if fields.get(name) is None else read(fields, name)


def items(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list; an empty one if it is missing or null."""
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004
    return list(value)
