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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, EnumMeta
from typing import Annotated, Any, TypeVar

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_NUMBER = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_TEXT = 1 << 17  # characters; the longest environment variable that execve(2) takes
_MAX_ITEMS = 256
_SHOWN = 80  # characters of a wrong value in an error
_T = TypeVar("_T")
Reader = Callable[[Any], Any]


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
    try:
        found: _T = _object_reader(typing.cast("Any", kind), kind.__name__)(data)
    except RecursionError as error:  # json.loads allows a few levels more than the repr in an error
        raise MalformedMessageError("a value is nested too deeply") from error
    return found


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def plain(value: Any) -> Any:
    """Return an object of a dataclass as plain data, with its fields in order."""
    if is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


@functools.cache
def _reader(annotation: Any, where: str) -> Reader:
    """Return the function that checks a value of this type and returns it.

    A large job decodes thousands of messages at once; so each annotation is examined only once.

    Args:
        annotation: the type.
        where: the name of the value for errors, such as ``Hello.host``.
    """
    limit: Limit | None = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, limit = typing.get_args(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(each for each in arguments if each is not type(None)), where)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return functools.partial(
            _read_list, _reader(arguments[0], where), limit or Limit(_MAX_ITEMS), where
        )
    if origin is dict:  # variables of a forked worker may be longer than `_MAX_TEXT`
        text = _reader(Annotated[str, Limit(_MAX_NUMBER)], where)
        return functools.partial(_read_map, text, where)
    if hasattr(annotation, "from_json") or isinstance(annotation, EnumMeta):
        from_json = getattr(annotation, "from_json", annotation)
        return functools.partial(_read_json, from_json, where)
    if is_dataclass(annotation):
        return _object_reader(typing.cast("Any", annotation), where)
    if annotation is str:
        return functools.partial(_read_text, limit or Limit(_MAX_TEXT), where)
    limit = limit or Limit(_MAX_NUMBER)
    checks: dict[Any, Callable[[Any], bool]] = {
        int: lambda value: type(value) is int and limit.minimum <= value <= limit.maximum,
        # neither inf nor nan
        float: lambda value: type(value) in (int, float) and 0 <= value < _MAX_SECONDS,
        bool: lambda value: isinstance(value, bool),
    }
    return functools.partial(_read_if, checks[annotation], where)


def _wrong(value: Any, where: str) -> MalformedMessageError:
    return MalformedMessageError(f"{where}: {value!r:.{_SHOWN}}")


def _read_list(item: Reader, limit: Limit, where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(value, where)
    if len(value) > limit.maximum and not limit.cuts:
        raise MalformedMessageError(f"{where}: {len(value)} items")
    return tuple([item(each) for each in value[-limit.maximum :]])


def _read_map(text: Reader, where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(value, where)
    return {text(key): text(each) for key, each in value.items()}


def _read_json(from_json: Reader, where: str, value: Any) -> Any:
    try:
        return from_json(value)
    except ValueError as error:
        raise MalformedMessageError(f"{where}: {error}") from error


def _read_text(limit: Limit, where: str, value: Any) -> str:
    if isinstance(value, str) and (limit.cuts or len(value) <= limit.maximum):
        return value[: limit.maximum]
    raise _wrong(value, where)


def _read_if(is_right: Callable[[Any], bool], where: str, value: Any) -> Any:
    if is_right(value):
        return value
    raise _wrong(value, where)


@functools.cache
def _object_reader(kind: Any, where: str) -> Reader:
    annotations = typing.get_type_hints(kind, include_extras=True)
    readers = {name: _reader(annotations[name], f"{where}.{name}") for name in _field_names(kind)}
    required = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    return functools.partial(_read_object, kind, readers, required, where)


def _read_object(
    kind: Any, readers: Mapping[str, Reader], required: Sequence[str], where: str, value: Any
) -> Any:
    if not isinstance(value, dict):
        raise MalformedMessageError(f"{where}: not an object")
    for name in required:
        if name not in value:
            raise MalformedMessageError(f"{where}: no {name}")
    return kind(**{name: read(value[name]) for name, read in readers.items() if name in value})
