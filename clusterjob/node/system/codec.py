"""Encode messages between processes as JSON objects, and check every message that arrives.

A message is a frozen dataclass. Its class name is the message's name on the wire, its fields are
the keys of the object, and its type annotations define the accepted values. An unknown field is
ignored, so a newer sender may add one; an unknown message is refused, with its name in the error.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_NUMBER = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_TEXT = 1 << 17  # characters; the longest environment variable that execve(2) takes
_MAX_ITEMS = 256
_SHOWN = 80  # characters of a wrong value in an error


class MalformedMessageError(ValueError):
    """A message is unknown or has a wrong field; the text names the field."""


class UnknownMessageError(MalformedMessageError):
    """No message of the codec has this name.

    Args:
        name: the name, as it arrived.
    """

    def __init__(self, name: Any) -> None:
        self.shown = f"{name!r:.{_SHOWN}}"
        super().__init__(f"unknown message {self.shown}")


@dataclass(frozen=True)
class Limit:
    """The bounds of a field, as ``Annotated[int, Limit(4096, minimum=1)]``.

    Attributes:
        maximum: the largest number, or the maximum characters of a text or items of a list.
        minimum: the smallest number.
    """

    maximum: int
    minimum: int = 0


class Codec:
    """The messages that one process may send to another.

    Args:
        *kinds: the dataclasses of the messages. Accepted field types: bool, int, float, str, a
            tuple of one type or of a fixed number of types, dict[str, ...], another dataclass, and
            each of these types or None. A dataclass with `to_json` and `from_json` encodes itself.
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
            UnknownMessageError: the message is unknown.
            MalformedMessageError: a field is missing or has a wrong value.
        """
        name = data.get(_NAME) if isinstance(data, Mapping) else None
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise UnknownMessageError(name)
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


@functools.cache
def _parts(annotation: Any) -> tuple[Any, Limit | None, Any, tuple[Any, ...]]:
    """Return an annotation's type, its limit, and the origin and arguments of the type."""
    limit: Limit | None = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    return annotation, limit, typing.get_origin(annotation), typing.get_args(annotation)


def _value(value: Any, annotation: Any, where: str) -> Any:
    annotation, limit, origin, arguments = _parts(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        annotation = next(each for each in arguments if each is not type(None))
        return _value(value, annotation, where)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            fits = len(value) <= (limit.maximum if limit else _MAX_ITEMS)
            arguments = arguments[:1] * len(value)
        else:
            fits = len(value) == len(arguments)
        if not fits:
            raise MalformedMessageError(f"{where}: {len(value)} items")
        return tuple(_value(*item, where) for item in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        kind = arguments[1]
        if kind is str:  # variables of a forked worker may be longer than `_MAX_TEXT`
            kind = Annotated[str, Limit(_MAX_NUMBER)]
        return {key: _value(item, kind, where) for key, item in value.items()}
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
