"""Secrets of a job: where each value is read on this machine, and the file that carries all of them
to the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.errors import SpecError

_LARGEST = 100_000  # bytes; Linux takes 131,072 for one variable with its name (MAX_ARG_STRLEN)


@dataclass(frozen=True)
class Secret:
    """A variable of the workers whose value is shown and recorded nowhere.

    Attributes:
        name: the variable.
        file: the file that has the value; None for this process's own variable of that name.
    """

    name: str
    file: Path | None = None

    def __str__(self) -> str:
        """Return what --secret takes; the value is not in it."""
        return self.name if self.file is None else f"{self.name}={self.file}"

    @classmethod
    def parse(cls, text: str) -> Secret:
        """Return the secret that ``NAME`` or ``NAME=FILE`` names.

        Raises:
            SpecError: there is no file after the equals sign.
        """
        name, equals, path = text.partition("=")
        if equals and not path:
            raise SpecError(
                f"--secret {name}= names no file",
                f"--secret {name} takes the variable of this environment",
            )
        try:
            return cls(name, Path(path).expanduser() if equals else None)
        except RuntimeError as error:
            raise SpecError(f"--secret {name}: the file's home directory is unknown") from error

    def beside(self, base: Path) -> Secret:
        """Return the same secret, with its file relative to a directory."""
        return self if self.file is None else replace(self, file=base / self.file)

    def value(self, environ: Mapping[str, str]) -> bytes:
        """Return the value: the variable, or the file's content without the line break at its end.

        Raises:
            SpecError: there is none, or no variable can carry it. The message does not show what
                was written after the name: it may be the secret itself, by mistake.
        """
        if self.file is None:
            if self.name not in environ:
                raise SpecError(
                    f"--secret {self.name}: it is not set here",
                    f"export {self.name}, or name a file: --secret {self.name}=FILE",
                )
            value = environ[self.name].encode(errors="surrogateescape")
        else:
            try:
                value = self.file.read_bytes().removesuffix(b"\n").removesuffix(b"\r")
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "no such file"
                hint = f"what follows {self.name}= is a file; --secret {self.name} takes the variable of this environment"
                raise SpecError(
                    f"--secret {self.name}: its file cannot be read: {why}", hint
                ) from None
        if b"\0" in value or len(value) > _LARGEST:
            raise SpecError(
                f"--secret {self.name}: a variable cannot carry the value",
                f"it is text of at most {_LARGEST} bytes",
            )
        return value


def packed(secrets: Iterable[Secret], environ: Mapping[str, str]) -> bytes:
    """Return the content of the file that carries secrets: NAME=VALUE and a NUL byte for each.

    Raises:
        SpecError: one has no value, or no variable can carry it.
    """
    return b"".join(
        f"{secret.name}=".encode() + secret.value(environ) + b"\0" for secret in secrets
    )
