"""Encode messages between processes as JSON objects, and check every message that arrives.

A message is a frozen dataclass. Its class name is the message's name on the wire, its fields are
the keys of the object, and its type annotations say what is accepted. An unknown field is ignored,
so a newer sender may add one; an unknown message is refused by name.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_NUMBER = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_TEXT = 1 << 17  # characters; the longest environment variable that execve(2) takes
_MAX_ITEMS = 256
_SHOWN = 80  # characters of a wrong value in an error


class MalformedMessageError(ValueError):
    """A message is unknown or has a wrong field; the text names the field."""


@dataclass(frozen=True)
class Limit:
    """The bounds of a field, as ``Annotated[int, Limit(4096, minimum=1)]``.

    Attributes:
        maximum: the largest number; the most characters of a text or items of a list.
        minimum: the smallest number.
    """

    maximum: int
    minimum: int = 0


class Codec:
    """The messages that one process may send to another.

    Args:
        *kinds: the dataclasses of the messages. Accepted field types: bool, int, float, str, a
            tuple of one type, dict[str, str], another dataclass, and each of them or None. A
            dataclass with `to_json` and `from_json` encodes itself.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Any) -> dict[str, Any]:
        """Return a message as plain data.

        Raises:
            TypeError: the message does not belong to this codec.
        """
        name = type(message).__name__
        if self._kinds.get(name) is not type(message):
            raise TypeError(f"{name} is not a message of this codec")
        return {_NAME: name, **_plain(message)}

    def decode(self, data: Any) -> Any:
        """Return the message that plain data describes.

        Raises:
            MalformedMessageError: the message is unknown, or a field is missing or has a wrong
                value.
        """
        name = data.get(_NAME) if isinstance(data, Mapping) else None
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise MalformedMessageError(f"unknown message {name!r:.{_SHOWN}}")
        return _read(data, kind, kind.__name__)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _read(data: Any, kind: type[Any], where: str) -> Any:
    if not isinstance(data, Mapping):
        raise MalformedMessageError(f"{where}: not an object")
    annotations = _annotations(kind)  # type: ignore[arg-type]  # a class is hashable
    values = {}
    for field in fields(kind):
        if field.name in data:
            name = f"{where}.{field.name}"
            values[field.name] = _value(data[field.name], annotations[field.name], name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise MalformedMessageError(f"{where}: no {field.name}")
    return kind(**values)


def _value(value: Any, annotation: Any, where: str) -> Any:
    limit: Limit | None = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        annotation = next(each for each in arguments if each is not type(None))
        return _value(value, annotation, where)
    if origin is tuple and isinstance(value, list):
        if len(value) > (limit.maximum if limit else _MAX_ITEMS):
            raise MalformedMessageError(f"{where}: {len(value)} items")
        return tuple(_value(item, arguments[0], where) for item in value)
    if origin is dict and _is_mapping_of_texts(value):
        return value
    if hasattr(annotation, "from_json"):
        try:
            return annotation.from_json(value)
        except ValueError as error:
            raise MalformedMessageError(f"{where}: {error}") from error
    if is_dataclass(annotation):
        return _read(value, typing.cast("type[Any]", annotation), where)
    if _is_right(value, annotation, limit):
        return value
    raise MalformedMessageError(f"{where}: {value!r:.{_SHOWN}}")


def _is_mapping_of_texts(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(text, str) for item in value.items() for text in item)


def _is_right(value: Any, annotation: Any, limit: Limit | None) -> bool:
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        bounds = limit or Limit(_MAX_NUMBER)
        return type(value) is int and bounds.minimum <= value <= bounds.maximum
    if annotation is float:
        number = type(value) in (int, float) and math.isfinite(value)
        return number and 0 <= value < _MAX_SECONDS
    maximum = limit.maximum if limit else _MAX_TEXT
    return annotation is str and isinstance(value, str) and len(value) <= maximum
