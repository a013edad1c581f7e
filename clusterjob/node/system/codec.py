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
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, EnumMeta
from typing import Annotated, Any, TypeVar

_NAME = "type"  # the key of the message's name; no message may have a field of this name
_MAX_NUMBER = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_TEXT = 1 << 17  # characters; the longest environment variable that execve(2) takes
_MAX_ITEMS = 256
_PLAIN = (str, int, float, bool)
_SHOWN = 80  # characters of a wrong value in an error
_T = TypeVar("_T")
Reader = Callable[[Any], Any]


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
        cuts: whether a longer text loses its end, and a longer list its begin; else it is refused.
    """

    maximum: int
    minimum: int = 0
    cuts: bool = False


class Codec:
    """The messages that one process may send to another.

    Args:
        *kinds: the dataclasses of the messages. Accepted field types: bool, int, float, str, a
            tuple of one type or of a fixed number of types, dict[str, ...], another dataclass, and
            each of these types or None. A dataclass with `to_json` and `from_json` encodes itself.
    """

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._latest: Any = object()  # the latest message of `encode_json`
        self._latest_json = b""

    def encode(self, message: Any) -> dict[str, Any]:
        """Return a message as plain data.

        Raises:
            TypeError: the message does not belong to this codec.
        """
        name = type(message).__name__
        if self._kinds.get(name) is not type(message):
            raise TypeError(f"{name} is not a message of this codec")
        return {_NAME: name, **plain(message)}

    def encode_json(self, message: Any) -> bytes:
        """Return a message as JSON; a message that goes to many peers in turn is encoded once.

        Raises:
            TypeError: the message does not belong to this codec.
        """
        if message is not self._latest:
            self._latest_json = json.dumps(self.encode(message)).encode()
            self._latest = message
        return self._latest_json

    def decode(self, data: Any) -> Any:
        """Return the message that plain data describes.

        Raises:
            UnknownMessageError: the message is unknown.
            MalformedMessageError: a field is missing or has a wrong value.
        """
        name = data.get(_NAME) if isinstance(data, dict) else None
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise UnknownMessageError(name)
        return _apply(_reader(typing.cast("Any", kind), kind.__name__), data)


def read(kind: type[_T], data: Any) -> _T:
    """Return the object of a dataclass that `plain` returned as JSON.

    Raises:
        MalformedMessageError: the data is no object, or a field is missing or has a wrong value.
    """
    found: _T = _apply(_read_object(typing.cast("Any", kind), kind.__name__), data)
    return found


def _apply(reader: Reader, data: Any) -> Any:
    try:
        return reader(data)
    except RecursionError as error:  # json.loads allows a few levels more than the repr in an error
        raise MalformedMessageError("a value is nested too deeply") from error


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass's object as plain data, also if it has a `to_json`."""
    kind: Any = type(value)
    return {name: plain(getattr(value, name)) for name in _field_names(kind)}


def plain(value: Any) -> Any:
    """Return an object of a dataclass as plain data, with its fields in order."""
    if value is None or type(value) in _PLAIN:
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


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
    if origin is tuple and arguments[-1] is Ellipsis:
        return _read_list(arguments[0], where, limit or Limit(_MAX_ITEMS))
    if origin is tuple:
        return _read_items(arguments, where)
    if origin is dict:
        return _read_map(arguments[1], where)
    if hasattr(annotation, "from_json"):
        return _read_json(annotation.from_json, where)
    if isinstance(annotation, EnumMeta):
        return _read_json(annotation, where)
    if is_dataclass(annotation):
        return _read_object(typing.cast("Any", annotation), where)
    if annotation is int:
        low, high = (limit.minimum, limit.maximum) if limit else (0, _MAX_NUMBER)
        return _read_if(lambda value: type(value) is int and low <= value <= high, where)
    if annotation is str:
        return _read_text(limit or Limit(_MAX_TEXT), where)
    if annotation is float:
        return _read_if(_is_seconds, where)
    return _read_if(lambda value: annotation is bool and isinstance(value, bool), where)


def _wrong(value: Any, where: str) -> MalformedMessageError:
    return MalformedMessageError(f"{where}: {value!r:.{_SHOWN}}")


def _read_list(annotation: Any, where: str, limit: Limit) -> Reader:
    item = _reader(annotation, where)

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, where)
        if len(value) > limit.maximum and not limit.cuts:
            raise MalformedMessageError(f"{where}: {len(value)} items")
        return tuple([item(each) for each in value[-limit.maximum :]])

    return read


def _read_items(annotations: Sequence[Any], where: str) -> Reader:
    items = [_reader(each, where) for each in annotations]

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, where)
        if len(value) != len(items):
            raise MalformedMessageError(f"{where}: {len(value)} items")
        return tuple([item(each) for item, each in zip(items, value, strict=True)])

    return read


def _read_map(annotation: Any, where: str) -> Reader:
    if annotation is str:  # variables of a forked worker may be longer than `_MAX_TEXT`
        annotation = Annotated[str, Limit(_MAX_NUMBER)]
    item = _reader(annotation, where)

    def read(value: Any) -> Any:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _wrong(value, where)
        return {key: item(each) for key, each in value.items()}

    return read


def _read_json(from_json: Callable[[Any], Any], where: str) -> Reader:
    def read(value: Any) -> Any:
        try:
            return from_json(value)
        except ValueError as error:
            raise MalformedMessageError(f"{where}: {error}") from error

    return read


@functools.cache
def _read_object(kind: Any, where: str) -> Reader:
    annotations = typing.get_type_hints(kind, include_extras=True)
    readers = {
        field.name: _reader(annotations[field.name], f"{where}.{field.name}")
        for field in fields(kind)
    }
    required = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessageError(f"{where}: not an object")
        for name in required:
            if name not in value:
                raise MalformedMessageError(f"{where}: no {name}")
        return kind(**{name: read(value[name]) for name, read in readers.items() if name in value})

    return read


def _read_text(limit: Limit, where: str) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, str) and (limit.cuts or len(value) <= limit.maximum):
            return value[: limit.maximum]
        raise _wrong(value, where)

    return read


def _read_if(is_right: Callable[[Any], bool], where: str) -> Reader:
    def read(value: Any) -> Any:
        if is_right(value):
            return value
        raise _wrong(value, where)

    return read


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MAX_SECONDS  # neither inf nor nan
