"""What a detector sees and says: a mapping read with a memory of which variable gave which field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterjob.errors import PlaceError
from clusterjob.node.environments.topology import Topology, Worker

NOWHERE = "none"  # the source of a finding without a family
_LONGEST_NAME = 255  # characters
_MOST_DIGITS = 19  # more is no count of anything here


@dataclass(frozen=True)
class Ignored:
    """A variable that was seen and not used, and why."""

    variable: str
    why: str


@dataclass(frozen=True)
class Finding:
    """What one family of variables says of this process's place.

    Attributes:
        source: the family, such as ``torchrun``; ``none`` when no family applies.
        place: a `Worker`, a `Topology`, or None when nothing was found or the conflicts forbid an
            answer.
        evidence: which variable gave which field.
        ignored: variables that were seen and not used.
        conflicts: one line for each reason why there is no place; empty when the finding is sound.
    """

    source: str
    place: Topology | Worker | None
    evidence: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """``worker`` for one process's place, ``node`` for one node's, ``none`` for neither."""
        if isinstance(self.place, Worker):
            return "worker"
        return "node" if isinstance(self.place, Topology) else "none"

    @property
    def sound(self) -> bool:
        """Whether the variables agree with each other; an environment with none of them is sound."""
        return not self.conflicts

    def check(self) -> Finding:
        """Return the finding itself.

        Raises:
            PlaceError: the variables are half-set or contradict each other; the message names them.
        """
        if self.conflicts:
            raise PlaceError(
                f"the environment ({self.source}) gives no place in a job: {'; '.join(self.conflicts)}",
                PlaceError.general_hint,
            )
        return self


class Reading:
    """A mapping of variables, read for one family; notes what each field came from and what was
    wrong.
    """

    def __init__(self, environ: Mapping[str, str], source: str, *, quoted: bool = False) -> None:
        """Begin to read.

        Args:
            environ: the mapping.
            source: the family.
            quoted: whether values may come with the quotes of a shell or a YAML file around them.
        """
        self.environ = environ
        self.source = source
        self._quoted = quoted
        self.evidence: dict[str, str] = {}
        self.conflicts: list[str] = []
        self.ignored: list[Ignored] = []

    def is_set(self, *variables: str) -> bool:
        """Return whether any of these variables has a value."""
        return any(self.value(variable) for variable in variables)

    def first_set(self, *variables: str) -> str:
        """Return the first of these variables that has a value; where none has, the first, which is
        the one to name.
        """
        return next((variable for variable in variables if self.value(variable)), variables[0])

    def value(self, variable: str) -> str:
        """Return the variable's value without white space, and quotes, around it; empty if it is
        unset. Leaves no evidence.
        """
        value = self.environ.get(variable, "").strip()
        if self._quoted and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].strip()
        return value

    def text(self, field_name: str, variable: str, *, required: bool = True) -> str | None:
        """Return the variable's value, or None when it is unset or empty (a conflict when it is
        required).
        """
        value = self.value(variable)
        if not value:
            if required:
                self.conflicts.append(f"{variable} is not set ({field_name})")
            return None
        self.evidence[field_name] = variable
        return value

    def number(self, field_name: str, variable: str, *, required: bool = True) -> int | None:
        """Return the variable as a whole number, or None; a value that is no number is a conflict."""
        value = self.text(field_name, variable, required=required)
        if value is None:
            return None
        found = whole_number(value)
        if found is None:
            self.conflicts.append(f"{variable}={value[:80]!r} is not a whole number ({field_name})")
        return found

    def host(self, field_name: str, variable: str, *, required: bool = True) -> str | None:
        """Return the variable as a host's name or address, an IPv6 address without brackets; what
        cannot be one is a conflict.
        """
        value = self.text(field_name, variable, required=required)
        return None if value is None else self.as_host(field_name, variable, text=value)

    def as_host(self, field_name: str, variable: str, text: str) -> str | None:
        """Return a part of a variable's value as a host's name or address; what cannot be one is a
        conflict.
        """
        name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if (
            not name
            or len(name) > _LONGEST_NAME
            or not all(letter.isalnum() or letter in "._-:%" for letter in name)
        ):
            self.conflicts.append(f"{variable}={text[:80]!r} is no host ({field_name})")
            return None
        self.evidence[field_name] = variable
        return name

    def finding(self, place: Topology | Worker | None) -> Finding:
        """Close the reading with a place, which the conflicts overrule."""
        return Finding(
            source=self.source,
            place=None if self.conflicts else place,
            evidence=dict(self.evidence),
            ignored=tuple(self.ignored),
            conflicts=tuple(self.conflicts),
        )

    def refuse(self, error: PlaceError) -> Finding:
        """Close the reading with one more conflict: the numbers are readable and impossible
        together.
        """
        variable = self.evidence.get(
            error.message.partition(" ")[0]
        )  # the message begins with the field
        self.conflicts.append(f"{variable}: {error.message}" if variable else error.message)
        return self.finding(None)


def whole_number(text: str) -> int | None:
    """Return what ASCII digits say; None for anything else, which int() would partly take."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
