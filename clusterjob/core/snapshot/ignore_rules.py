"""Match paths against .gitignore patterns, as git does, without exponential run time.

Each pattern becomes one regular expression over bytes. The text after a ``*`` is matched at its
first occurrence, and no other occurrence is tried. Backtracking would give the same result, but
with a pattern such as ``*a*a*a*a`` it would try every way to split a name, which can take hours.
Source: gitignore(5), git's wildmatch.c.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

_CLASSES = {
    name: set(b"".join(re.findall(kind, bytes(range(128)), re.DOTALL)))
    for name, kind in {
        b"alnum": rb"[0-9A-Za-z]",
        b"alpha": rb"[A-Za-z]",
        b"blank": rb"[ \t]",
        b"cntrl": rb"[\x00-\x1f\x7f]",
        b"digit": rb"[0-9]",
        b"graph": rb"[!-~]",
        b"lower": rb"[a-z]",
        b"print": rb"[ -~]",
        b"punct": rb"[!-/:-@\[-`{-~]",
        b"space": rb"[ \t\n\r\f\v]",
        b"upper": rb"[A-Z]",
        b"xdigit": rb"[0-9A-Fa-f]",
    }.items()
}
_MAX_BYTES = 4096  # maximum bytes of one line; no path on Linux is longer
_numbers = itertools.count()


@dataclass(frozen=True)
class Pattern:
    """One line of a pattern file.

    Attributes:
        regex: matches a path relative to the file's directory, or a name.
        includes: whether it includes again the paths that an earlier line excluded (``!``).
        directories: whether it matches only directories.
        names: whether it is matched against the last part of a path, at any depth.
    """

    regex: re.Pattern[bytes]
    includes: bool
    directories: bool
    names: bool


class Patterns:
    """The patterns of one file.

    Args:
        lines: lines of the file.
        simple: whether all lines are simple, as in clusterjob's own list. One combined expression
            then rejects most paths, which is several times as fast. With hostile lines, it would
            be slower.
    """

    def __init__(self, lines: Iterable[bytes], *, simple: bool = False) -> None:
        self._patterns = [pattern for line in lines if (pattern := _pattern(line)) is not None][
            ::-1
        ]
        self._any = None
        if simple:
            names, paths = (
                [one.regex.pattern for one in self._patterns if one.names is names]
                for names in (True, False)
            )
            self._any = (
                re.compile(b"|".join(names), re.DOTALL),
                re.compile(b"|".join(paths) or b"(?!)", re.DOTALL),
            )

    def verdict(self, path: str, *, is_directory: bool) -> bool | None:
        """Return whether the last line that matches a path excludes it; None if no line does.

        A line that matches only a parent directory does not count.

        Args:
            path: path relative to the directory of the file, with slashes.
            is_directory: whether the path is a directory.
        """
        whole = os.fsencode(path)
        name = whole.rpartition(b"/")[2]
        if self._any is not None and not (
            self._any[0].fullmatch(name) or self._any[1].fullmatch(whole)
        ):
            return None
        for pattern in self._patterns:
            if (is_directory or not pattern.directories) and pattern.regex.fullmatch(
                name if pattern.names else whole
            ):
                return not pattern.includes
        return None


def _pattern(line: bytes) -> Pattern | None:
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    while line.endswith(b" ") and not _is_escaped(line, len(line) - 1):
        line = line[:-1]
    includes = line.startswith(b"!")
    line = line[includes:]
    directories = line.endswith(b"/")
    line = line.removesuffix(b"/")
    if not line or (line.startswith(b"#") and not includes) or len(line) > _MAX_BYTES:
        return None
    names = b"/" not in line
    expression = _segment(line) if names else _path(line.removeprefix(b"/"))
    # In git, a line with an open bracket or a backslash at the end matches nothing.
    if expression is None:
        return None
    return Pattern(
        re.compile(expression, re.DOTALL), includes, directories=directories, names=names
    )


def _is_escaped(line: bytes, at: int) -> bool:
    before = line[:at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _path(line: bytes) -> bytes | None:
    """Return the regular expression of a pattern with slashes; None if it is invalid.

    Each run of segments between ``**`` is matched at its first occurrence.
    """
    segments = _split(line)
    runs: list[list[bytes]] = [[]]
    for index, segment in enumerate(segments):
        is_any_depth = len(segment) > 1 and not segment.strip(b"*")
        # At the end, ``**`` matches everything below the directory, but not the directory itself.
        read = b".+" if is_any_depth else _segment(segment)
        if is_any_depth and index < len(segments) - 1:
            runs.append([])
        elif read is None:
            return None
        else:
            runs[-1].append(read)
    first, *others = [b"/".join(run) for run in runs]
    whole = first + b"/" if first and others else first
    for index, run in enumerate(others, 1):
        if index == len(others):
            whole += b"(?:[^/]+/)*?" + run
        elif run:
            whole += _found_first(b"(?:[^/]+/)*?" + run + b"/")
    return whole


def _split(line: bytes) -> list[bytes]:
    """Return the parts of a pattern between its slashes; a slash in brackets does not count."""
    parts, begin, at = [], 0, 0
    while at < len(line):
        character, end = line[at : at + 1], at + 1
        if character == b"[" and (found := _bracket(line, at)) is not None:
            end = found[1]
        elif character == b"\\":
            end = at + 2
        elif character == b"/":
            parts.append(line[begin:at])
            begin = end
        at = end
    return [*parts, line[begin:]]


def _segment(text: bytes) -> bytes | None:
    """Return the regular expression of a pattern without slashes; None if it is invalid."""
    runs: list[bytes] = [b""]
    at = 0
    while at < len(text):
        character, end = text[at : at + 1], at + 1
        if character == b"*":
            if runs[-1] or len(runs) == 1:
                runs.append(b"")
        elif character == b"[":
            found = _bracket(text, at)
            if found is None:
                return None
            runs[-1] += found[0]
            end = found[1]
        elif character == b"\\":
            end = at + 2
            if end > len(text):
                return None
            runs[-1] += re.escape(text[at + 1 : end])
        else:
            runs[-1] += b"[^/]" if character == b"?" else re.escape(character)
        at = end
    first, *others = runs
    for run in others[:-1]:
        first += _found_first(b"[^/]*?" + run)
    # The last run has a fixed length, so it can match only at the end of the name.
    return first + b"[^/]*" + others[-1] if others else first


def _found_first(expression: bytes) -> bytes:
    """Return an expression that tries only the first match of the given expression.

    It does the same as an atomic group, which Python 3.10 does not have.
    """
    name = b"g%d" % next(_numbers)
    return b"(?=(?P<" + name + b">" + expression + b"))(?P=" + name + b")"


def _bracket(text: bytes, begin: int) -> tuple[bytes, int] | None:
    """Return the regular expression of a set such as ``[!a-z]`` and the offset after it.

    Return None if the set is not closed or contains an unknown class.
    """
    at = begin + 1
    negated = text[at : at + 1] in (b"!", b"^")
    at += negated
    chosen: set[int] = set()
    before, is_first = b"", True
    while (character := text[at : at + 1]) != b"]" or is_first:
        is_first, at = False, at + 1
        named = re.match(rb"\[:(\w*):\]", text[at - 1 :])
        if named:
            if named[1] not in _CLASSES:
                return None
            chosen |= _CLASSES[named[1]]
            before, at = b"", at - 1 + named.end()
            continue
        if character == b"-" and before and text[at : at + 1] not in (b"]", b""):
            at += text[at : at + 1] == b"\\"
            if text[at : at + 1]:
                chosen |= set(range(before[0], text[at] + 1))
            before, at = b"", at + 1
            continue
        if character == b"\\":
            character, at = text[at : at + 1], at + 1
        if not character:
            return None
        chosen.add(character[0])
        before = character
    if negated:
        chosen = set(range(256)) - chosen
    codes = b"".join(b"\\x%02x" % code for code in sorted(chosen - {ord("/")}))
    return (b"[" + codes + b"]" if codes else b"(?!)"), at + 1
