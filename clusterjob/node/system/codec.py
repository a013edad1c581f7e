"""Encode messages between processes as JSON objects, and check every message that arrives.

A message is a frozen dataclass. Its class name is the message's name on the wire, its fields are
the keys of the object, and its type annotations define the accepted values. An unknown field is
ignored, so a newer sender may add one; an unknown message is refused, with its name in the error.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Sized
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_SECONDS = 1e11  # also for times since the epoch
_SHOWN = 80  # characters of a wrong value in an error
_T = TypeVar("_T")


class MalformedMessageError(ValueError):
    """A message is unknown or has a wrong field; the text names the field."""


@dataclass(frozen=True)
class Limit:
    """The bounds of a field, as ``Annotated[int, Limit(4096, minimum=1)]``.

    Attributes:
        maximum: the largest number, or the maximum characters of a text or items of a list.
        minimum: the smallest number.
        cuts: whether a longer text loses its end, and a longer list its begin; else it is refused.
    """

    maximum: int
    minimum: int = 0
    cuts: bool = False


_MANY = Limit(2**31 - 1)
# The limits of fields without their own; execve(2) takes no longer environment variable.
_LIMITS: dict[Any, Limit] = {str: Limit(1 << 17), tuple: Limit(256)}
# Whether a value is of a type, and within a limit.
_CHECKS: dict[Any, Callable[[Any, Limit], bool]] = {
    int: lambda value, limit: type(value) is int and limit.minimum <= value <= limit.maximum,
    float: lambda value, _: type(value) in (int, float) and 0 <= value < _MAX_SECONDS,
    bool: lambda value, _: isinstance(value, bool),
    str: lambda value, limit: isinstance(value, str) and _fits(value, limit),
    tuple: lambda value, limit: isinstance(value, list) and _fits(value, limit),
    dict: lambda value, _: (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ),
}


def _fits(value: Sized, limit: Limit) -> bool:
    return limit.cuts or len(value) <= limit.maximum


class Codec:
    """The messages that one process may send to another.

    Args:
        *kinds: the dataclasses of the messages. Accepted field types: bool, int, float, str, a
            tuple of one type, dict[str, str], an enumeration, another dataclass, and each of these
            types or None. The `from_json` of a dataclass checks its data.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._latest: Any = object()  # the latest message of `encode`
        self._latest_json = b""

    def encode(self, message: Any) -> bytes:
        """Return a message as JSON; a message that goes to many peers in turn is encoded once."""
        if message is not self._latest:
            fields_ = {_NAME: type(message).__name__, **vars(message)}
            self._latest_json = json.dumps(fields_, default=vars).encode()
            self._latest = message
        return self._latest_json

    def decode(self, data: Any) -> Any:
        """Return the message that plain data describes.

        Raises:
            MalformedMessageError: the message is unknown, or a field is missing or has a wrong
                value.
        """
        name = data.get(_NAME) if isinstance(data, dict) else None
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise MalformedMessageError(f"unknown message {name!r:.{_SHOWN}}")
        return read(kind, data)


def read(kind: type[_T], data: Any) -> _T:
    """Return the object of a dataclass that `plain` returned as JSON.

    Raises:
        MalformedMessageError: the data is no object, or a field is missing or has a wrong value.
    """
    readers, required = _fields(typing.cast("Any", kind))
    if not isinstance(data, dict):
        raise MalformedMessageError(f"{kind.__name__}: not an object")
    found = {}
    for name, reader in readers.items():
        if name in data:
            try:
                found[name] = reader(data[name])
            except (ValueError, RecursionError) as error:
                raise MalformedMessageError(f"{kind.__name__}.{name}: {error}") from error
        elif name in required:
            raise MalformedMessageError(f"{kind.__name__}: no {name}")
    return kind(**found)


def plain(value: Any) -> Any:
    """Return an object of a dataclass as plain data, with its fields in order."""
    return json.loads(json.dumps(value, default=vars))


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Callable[[Any], Any]], list[str]]:
    """Return the reader of each field of a dataclass, and the names of those without a default.

    A large job decodes thousands of messages at once; so each class is examined only once.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    required = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    return readers, required


def _reader(annotation: Any) -> Callable[[Any], Any]:
    """Return a function that checks a value and returns it; a wrong value is a ValueError."""
    limit: Limit | None = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    inner = [_reader(each) for each in arguments if each not in (type(None), ...)]
    if kind in (typing.Union, types.UnionType):
        return lambda value: None if value is None else inner[0](value)
    if hasattr(kind, "from_json"):
        return kind.from_json  # type: ignore[no-any-return]
    if is_dataclass(kind):
        return functools.partial(read, typing.cast("Any", kind))
    if kind not in _CHECKS:
        return typing.cast("Callable[[Any], Any]", kind)  # an enumeration
    bounds = limit or _LIMITS.get(kind, _MANY)

    def checked(value: Any) -> Any:
        if not _CHECKS[kind](value, bounds):
            raise MalformedMessageError(f"{value!r:.{_SHOWN}}")
        if ... in arguments:
            return tuple([inner[0](item) for item in value[-bounds.maximum :]])
        if kind is tuple:
            return tuple([of_item(item) for of_item, item in zip(inner, value, strict=True)])
        return value[: bounds.maximum] if kind is str else value

    return checked
