"""Check received data against a schema: types, ranges and sizes.

The error names the first value that does not match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class SchemaError(ValueError):
    """The data does not match the schema; the message has the location and the value."""


class Schema(Protocol):
    """A condition on a value."""

    def check(self, value: Any, where: str) -> None:
        """Check a value.

        Raises:
            SchemaError: it does not match.
        """
        ...


def _refuse(value: Any, where: str, wanted: str) -> SchemaError:
    shown = (
        ascii(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    )
    return SchemaError(f"{where} is {shown[:60]}, not {wanted}")


@dataclass(frozen=True)
class Text:
    """A text with a maximum length and an optional regular expression."""

    most: int = 4096
    form: str = ""

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, str):
            raise _refuse(value, where, wanted="a text")
        if len(value) > self.most:
            raise SchemaError(
                f"{where} is a text of {len(value)} characters, more than {self.most}"
            )
        if self.form and not re.fullmatch(self.form, value, re.ASCII):
            raise _refuse(value, where, wanted=f"of the form {self.form}")


@dataclass(frozen=True)
class Integer:
    """An integer in a range; True and False are not integers."""

    least: int = 0
    most: int = 2**63 - 1

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse(value, where, wanted="an integer")
        if not self.least <= value <= self.most:
            raise SchemaError(
                f"{where} is {_short(value)}, not {_short(self.least)} to {_short(self.most)}"
            )


@dataclass(frozen=True)
class Number:
    """A finite number with a maximum absolute value."""

    most: float = 1e300

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not abs(value) < self.most
        ):
            raise _refuse(
                value,
                where,
                wanted="a finite number" if self.most >= 1e300 else f"a number below {self.most:g}",
            )


@dataclass(frozen=True)
class Flag:
    """True or False."""

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, bool):
            raise _refuse(value, where, wanted="true or false")


@dataclass(frozen=True)
class Nullable:
    """A value, or null."""

    of: Schema

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if value is not None:
            self.of.check(value, where)


@dataclass(frozen=True)
class ListOf:
    """A list of values of one schema, with a maximum length."""

    of: Schema
    most: int = 10_000

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, list):
            raise _refuse(value, where, wanted="a list")
        if len(value) > self.most:
            raise SchemaError(f"{where} is a list of {len(value)}, more than {self.most}")
        for index, item in enumerate(value):
            self.of.check(item, f"{where}[{index}]")


@dataclass(frozen=True)
class Row:
    """A list with one value for each schema, in their order."""

    of: tuple[Schema, ...]

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, list) or len(value) != len(self.of):
            raise _refuse(value, where, wanted=f"a list of {len(self.of)}")
        for index, (schema, item) in enumerate(zip(self.of, value, strict=True)):
            schema.check(item, f"{where}[{index}]")


@dataclass(frozen=True)
class MapOf:
    """An object with any keys, values of one schema and a maximum number of keys."""

    of: Schema
    most: int = 10_000

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, dict):
            raise _refuse(value, where, wanted="an object")
        if len(value) > self.most:
            raise SchemaError(f"{where} is an object of {len(value)} keys, more than {self.most}")
        for key, item in value.items():
            self.of.check(item, f"{where}.{ascii(key)[1:60]}")


@dataclass(frozen=True)
class Object:
    """An object with required and optional keys; other keys are ignored."""

    required: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)

    def check(self, value: Any, where: str) -> None:
        """Check a value; see `Schema`."""
        if not isinstance(value, dict):
            raise _refuse(value, where, wanted="an object")
        for key, schema in self.required.items():
            if key not in value:
                raise SchemaError(f"{where} has no {key!r}")
            schema.check(value[key], f"{where}.{key}")
        for key, schema in self.optional.items():
            if key in value:
                schema.check(value[key], f"{where}.{key}")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**12 else f"about 2^{number.bit_length()}"
