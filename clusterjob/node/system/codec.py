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
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_SECONDS = 1e9
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


@dataclass(frozen=True)
class _Form:
    """What a type annotation accepts.

    Attributes:
        kind: a key of `_CHECKS`, or a function that reads a value or raises ValueError.
        limit: the bounds of a value.
        items: the forms of the items of a tuple; of a list, the form of all.
        is_list: whether there may be any number of items.
        optional: whether null is accepted.
    """

    kind: Any
    limit: Limit
    items: tuple[_Form, ...] = ()
    is_list: bool = False
    optional: bool = False


class Codec:
    """The messages that one process may send to another.

    Args:
        *kinds: the dataclasses of the messages. Accepted field types: bool, int, float, str, a
            tuple of one type, dict[str, str], an enumeration, another dataclass, and each of these
            types or None. The `from_json` of a dataclass checks its data.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._latest: Any = object()  # the latest message of `encode_json`
        self._latest_json = b""

    def encode(self, message: Any) -> dict[str, Any]:
        """Return a message as plain data."""
        return {_NAME: type(message).__name__, **plain(message)}

    def encode_json(self, message: Any) -> bytes:
        """Return a message as JSON; a message that goes to many peers in turn is encoded once."""
        if message is not self._latest:
            self._latest_json = json.dumps(self.encode(message)).encode()
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
    forms, required = _fields(typing.cast("Any", kind))
    if not isinstance(data, dict):
        raise MalformedMessageError(f"{kind.__name__}: not an object")
    for name in required:
        if name not in data:
            raise MalformedMessageError(f"{kind.__name__}: no {name}")
    found = {}
    for name, form in forms.items():
        if name in data:
            try:
                found[name] = _value(form, data[name])
            except (ValueError, RecursionError) as error:
                raise MalformedMessageError(f"{kind.__name__}.{name}: {error}") from error
    return kind(**found)


def plain(value: Any) -> Any:
    """Return an object of a dataclass as plain data, with its fields in order."""
    if is_dataclass(value):
        forms, _ = _fields(typing.cast("Any", type(value)))
        return {name: plain(getattr(value, name)) for name in forms}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, _Form], list[str]]:
    """Return the forms of a dataclass's fields, and the names of those without a default.

    A large job decodes thousands of messages at once; so each class is examined only once.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    forms = {field.name: _form(hints[field.name]) for field in fields(kind)}
    required = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    return forms, required


def _form(annotation: Any) -> _Form:
    limit: Limit | None = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    kind = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    inner = [each for each in arguments if each not in (type(None), ...)]
    if kind in (typing.Union, types.UnionType):
        return replace(_form(inner[0]), optional=True)
    items = tuple(map(_form, inner)) if kind is tuple else ()
    if hasattr(kind, "from_json"):
        kind = kind.from_json
    elif is_dataclass(kind):
        kind = functools.partial(read, typing.cast("Any", kind))
    return _Form(kind, limit or _LIMITS.get(kind, _MANY), items, is_list=... in arguments)


def _value(form: _Form, value: Any) -> Any:
    """Check a value and return it.

    Raises:
        ValueError: the value is wrong.
    """
    kind, limit = form.kind, form.limit
    if value is None and form.optional:
        return None
    check = _CHECKS.get(kind)
    if check is None:
        return kind(value)
    if not check(value, limit):
        raise MalformedMessageError(f"{value!r:.{_SHOWN}}")
    if form.is_list:
        return tuple([_value(form.items[0], item) for item in value[-limit.maximum :]])
    if form.items:
        return tuple([_value(*each) for each in zip(form.items, value, strict=True)])
    return value[: limit.maximum] if kind is str else value
