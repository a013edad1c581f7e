"""Read environment variables for a detector and record which variable gave which field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterjob.errors import PlacementError
from clusterjob.node.environments.topology import Topology, Worker

NOWHERE = "none"  # the source of a finding without a family
_MAX_NAME = 255  # characters of a host name
_MAX_DIGITS = 19  # a text with this many digits or more is not a valid number


@dataclass(frozen=True)
class Ignored:
    """A variable that is set but was not used, and the reason."""

    variable: str
    why: str


@dataclass(frozen=True)
class Finding:
    """The rank assignment that one family of variables gives this process or node.

    Attributes:
        source: the family, such as ``torchrun``; ``none`` if no family applies.
        placement: a `Worker` or a `Topology`; None if nothing was found or there are conflicts.
        evidence: the variable that gave each field.
        ignored: variables that are set but were not used.
        conflicts: one line for each reason why the variables give no rank assignment; empty
            without such reasons.
    """

    source: str
    placement: Topology | Worker | None
    evidence: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """The level: ``worker`` for a process, ``node`` for a node, ``none`` for neither."""
        if isinstance(self.placement, Worker):
            return "worker"
        return "node" if isinstance(self.placement, Topology) else "none"

    def check(self) -> Finding:
        """Return the finding itself.

        Raises:
            PlacementError: the variables are incomplete or contradict each other; the message names
                them.
        """
        if self.conflicts:
            raise PlacementError(
                f"the environment ({self.source}) gives no rank assignment: "
                f"{'; '.join(self.conflicts)}",
                PlacementError.general_hint,
            )
        return self


class Reading:
    """A mapping of variables, read for one family.

    Attributes:
        environ: the mapping.
        source: the family.
        evidence: the variable that gave each field.
        conflicts: the errors so far.
        ignored: variables that are set but are not used.
    """

    def __init__(self, environ: Mapping[str, str], source: str, *, quoted: bool = False) -> None:
        """Prepare to read the mapping.

        Args:
            environ: the mapping.
            source: the family.
            quoted: whether to remove quotes around values, left by a shell or a YAML file.
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
        """Return the first of these variables that has a value.

        If no variable has a value, return the first variable, which an error message then names.
        """
        return next((variable for variable in variables if self.value(variable)), variables[0])

    def value(self, variable: str) -> str:
        """Return the variable's value without surrounding white space; empty if it is unset.

        With ``quoted``, surrounding quotes are removed too. No evidence is recorded.
        """
        value = self.environ.get(variable, "").strip()
        if self._quoted and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].strip()
        return value

    def text(self, field_name: str, variable: str, *, required: bool = True) -> str | None:
        """Return the variable's value, or None if it is unset or empty.

        If the variable is required, an unset or empty value is a conflict.
        """
        value = self.value(variable)
        if not value:
            if required:
                self.conflicts.append(f"{variable} is not set ({field_name})")
            return None
        self.evidence[field_name] = variable
        return value

    def number(self, field_name: str, variable: str, *, required: bool = True) -> int | None:
        """Return the variable as a whole number, or None; any other value is a conflict."""
        value = self.text(field_name, variable, required=required)
        return None if value is None else self.as_number(field_name, variable, text=value)

    def as_number(self, field_name: str, variable: str, text: str) -> int | None:
        """Return a part of a variable's value as a whole number; any other text is a conflict."""
        found = whole_number(text)
        if found is None:
            self.conflicts.append(f"{variable}={text[:80]!r} is not a whole number ({field_name})")
        self.evidence[field_name] = variable
        return found

    def host(self, field_name: str, variable: str, *, required: bool = True) -> str | None:
        """Return the variable as a host name or address; an invalid one is a conflict.

        Brackets around an IPv6 address are removed.
        """
        value = self.text(field_name, variable, required=required)
        return None if value is None else self.as_host(field_name, variable, text=value)

    def as_host(self, field_name: str, variable: str, text: str) -> str | None:
        """Return a part of a variable's value as a host; an invalid one is a conflict.

        Several addresses of the host have commas between them.
        """
        name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if (
            not name
            or len(name) > _MAX_NAME
            or not all(letter.isalnum() or letter in "._-:%," for letter in name)
        ):
            self.conflicts.append(f"{variable}={text[:80]!r} is not a host ({field_name})")
            return None
        self.evidence[field_name] = variable
        return name

    def finding(self, placement: Topology | Worker | None) -> Finding:
        """Return the finding; it has this placement unless there are conflicts."""
        return Finding(
            source=self.source,
            placement=None if self.conflicts else placement,
            evidence=dict(self.evidence),
            ignored=tuple(self.ignored),
            conflicts=tuple(self.conflicts),
        )

    def refuse(self, error: PlacementError) -> Finding:
        """Return the finding with one more conflict: the numbers do not fit together."""
        variable = self.evidence.get(
            error.message.partition(" ")[0]
        )  # the message begins with the field's name
        self.conflicts.append(f"{variable}: {error.message}" if variable else error.message)
        return self.finding(None)


def whole_number(text: str) -> int | None:
    """Return a text of ASCII digits as a number; None for any other text.

    int() would also accept signs, spaces, underscores and digits of other scripts.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS else None
