"""Profiles that backends propose for this machine; `clusterjob init` asks and writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterjob.errors import ConfigError
from clusterjob.node.system.sanitize import sanitize


@dataclass(frozen=True)
class Question:
    """One question about a profile.

    Attributes:
        key: the setting that the answer becomes; ``set.NAME`` for an option of the backend.
        text: the question, without its default.
        default: the answer to an empty line; empty to leave the setting out.
        choices: the valid answers; empty for any text.
        required: whether an empty answer is refused.
    """

    key: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True)
class Proposal:
    """A profile for one way to run jobs from this machine.

    Attributes:
        name: name of the profile.
        backend: name of its backend.
        found: one line about what exists here; empty if nothing hints at such a cluster.
        ready: whether the profile works without an answer.
        here: whether its jobs use this machine's interpreters.
        values: settings by key, as for `Question.key`.
        comments: a comment by key, shown beside the setting.
        examples: settings that are written as comments: key, value, comment.
        questions: what to ask if the user chooses it.
    """

    name: str
    backend: str
    found: str = ""
    ready: bool = False
    here: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)
    examples: Sequence[tuple[str, Any, str]] = ()
    questions: tuple[Question, ...] = ()


def toml_value(value: Any) -> str:
    """Return a TOML value: a basic string, a number, a boolean, or an array of them.

    Source: TOML 1.0, "String": json escapes all that a basic string forbids, except U+007F.

    Raises:
        ConfigError: a text is not valid Unicode, so that no TOML file can contain it.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{value!r} is not valid Unicode: it cannot be written to TOML") from None
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def profile_lines(proposal: Proposal, *, active: bool) -> list[str]:
    """Return the lines of a profile; all of them as comments if it is not active."""
    lines = [f"# {_comment(proposal.found)}"] if proposal.found else []
    mark = "" if active else "# "
    lines += [
        f"{mark}[clusters.{proposal.name}]",
        f"{mark}backend = {toml_value(proposal.backend)}",
    ]
    settings = [
        (key, value, proposal.comments.get(key, ""), mark) for key, value in proposal.values.items()
    ]
    settings += [
        (key, value, comment, "# ")
        for key, value, comment in proposal.examples
        if key not in proposal.values
    ]
    for key, value, comment, before in settings:
        beside = f"  # {_comment(comment)}" if comment else ""
        lines.append(f"{before}{key} = {toml_value(value)}{beside}")
    return lines


def _comment(text: str) -> str:
    """Return text for a comment: a comment of TOML ends at a line break."""
    return sanitize(text.encode(errors="replace").decode())
