"""Define `Option`, one job option: its key, its flag, its reader, the part that it sets."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The headings of `--help`, in order.
GROUPS = ("job", "resources", "environment", "code", "cluster", "restart", "output")


class Target(enum.Enum):
    """The part of a job that an option sets."""

    SPEC = enum.auto()  # the field of `JobSpec` with the option's key
    RESOURCES = enum.auto()  # a field of `Resources`
    BACKEND = enum.auto()  # an entry of `JobSpec.options`, as if given with --set
    OTHER = enum.auto()  # `core.job_settings.make_spec` computes fields from it


@dataclass(frozen=True)
class Option:
    """One option of a job, declared once.

    The command line, configuration files, CLUSTERJOB_* variables, `make_spec`, the command line of
    the nodes and docs/reference.md derive from it.

    Attributes:
        key: the key in a file; the flag is ``--key`` with dashes, the variable CLUSTERJOB_KEY.
        read: converts the text of a flag or a variable, or a value of a TOML file.
        help: one line for `--help`; empty for an option without a flag.
        bare: the value of the flag alone; a value is then written as ``--key=VALUE``.
        metavar: the form of the value in `--help`; empty for a switch, ``--key/--no-key``.
        short: a short flag, such as ``-N``; empty for none.
        aliases: other long flags of the same option, as torchrun spells it.
        group: the heading of its flag in `--help`, one of `GROUPS`.
        excludes: the key of an option for the same thing: a flag for one overrides a profile's
            value for the other.
        merge: whether the option is repeatable: a table or a list adds to earlier values.
        target: the part of the job that it sets.
        node: the field of `LaunchOptions` that it sets on each node; empty if the nodes do not
            need it.
    """

    key: str
    read: Callable[[Any], Any]
    help: str = ""
    metavar: str = ""
    short: str = ""
    aliases: tuple[str, ...] = ()
    group: str = "job"
    excludes: str = ""
    merge: bool = False
    bare: str = ""
    target: Target = Target.SPEC
    node: str = ""

    @property
    def flag(self) -> str:
        """The long flag."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable; empty if a variable cannot set it."""
        return "" if self.merge else f"CLUSTERJOB_{self.key.upper()}"
