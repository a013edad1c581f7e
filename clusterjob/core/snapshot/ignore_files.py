"""Read the files with patterns of ignored files: .gitignore and .clusterjobignore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterjob.core.snapshot.git_revision import Git
from clusterjob.core.snapshot.ignore_rules import Patterns
from clusterjob.core.units import show_size
from clusterjob.errors import SubmitError

OWN_IGNORE = ".clusterjobignore"
_MAX_PATTERN_BYTES = 1 << 20  # maximum bytes of one pattern file
_MAX_PATTERN_LINES = 10_000  # maximum lines of one pattern file: each is tried on each path


@dataclass(frozen=True)
class Rules:
    """The patterns of one file, and the directory that they apply to.

    Attributes:
        patterns: the patterns.
        base: for a file below the root: path of its directory relative to the root, with a slash
            at the end; else empty.
        prefix: for a file above the root: path of the root relative to the file's directory, with a
            slash at the end; else empty.
    """

    patterns: Patterns
    base: str = ""
    prefix: str = ""

    def verdict(self, path: str, *, is_directory: bool) -> bool | None:
        """Return whether a path is excluded; None if no pattern matches it."""
        return self.patterns.verdict(
            self.prefix + path[len(self.base) :], is_directory=is_directory
        )


def excludes(rules: list[Rules], path: str, *, is_directory: bool) -> bool:
    """Return whether a path is excluded; the rules of the nearest directory override the others."""
    verdicts = (rule.verdict(path, is_directory=is_directory) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def of_directory(directory: Path, base: str, prefix: str = "") -> list[Rules]:
    """Return the rules of the pattern files in a directory; see `Rules`."""
    paths = (directory / ".gitignore", directory / OWN_IGNORE)
    return [Rules(_patterns_in(path), base, prefix=prefix) for path in paths if path.is_file()]


def _patterns_in(path: Path) -> Patterns:
    with path.open("rb") as stream:
        text = stream.read(_MAX_PATTERN_BYTES + 1)
    if len(text) > _MAX_PATTERN_BYTES:
        raise SubmitError(f"{path} holds more than {show_size(_MAX_PATTERN_BYTES)} of patterns")
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if len(lines) - 1 > _MAX_PATTERN_LINES:  # - 1: the empty text after the last line break
        raise SubmitError(f"{path} holds more than {_MAX_PATTERN_LINES:,} lines of patterns")
    return Patterns(lines)


def above(git: Git) -> list[Rules]:
    """Return the user's git ignore patterns, and those of the repository above a directory.

    The repository's patterns are ordered from its top directory down.
    """
    root, own = git.root, git.excludes_file
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    below = root.relative_to(top).parts if top is not None else ()
    prefix = "".join(f"{name}/" for name in below)
    found = [Rules(_patterns_in(own), prefix=prefix)] if own is not None else []
    if top is None:
        return found
    exclude = top / ".git" / "info" / "exclude"
    if exclude.is_file():
        found.append(Rules(_patterns_in(exclude), prefix=prefix))
    for depth in range(len(below)):
        found += of_directory(
            top.joinpath(*below[:depth]), "", prefix="".join(f"{name}/" for name in below[depth:])
        )
    return found
