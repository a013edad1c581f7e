"""Read the secrets of a job on this machine, and pack them into one file for the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.errors import SpecError

_MAX_BYTES = 100_000  # maximum bytes of a value; Linux: 131,072 per NAME=VALUE (MAX_ARG_STRLEN)


@dataclass(frozen=True)
class Secret:
    """A variable of the workers whose value is never shown or recorded.

    Attributes:
        name: name of the variable.
        file: the file with the value; None for this process's variable of that name.
    """

    name: str
    file: Path | None = None

    def __str__(self) -> str:
        """Return the argument of --secret, which does not contain the value."""
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
                f"--secret {name} uses the variable of this environment",
            )
        try:
            return cls(name, Path(path).expanduser() if equals else None)
        except RuntimeError as error:
            raise SpecError(f"--secret {name}: the file's home directory is unknown") from error

    def beside(self, base: Path) -> Secret:
        """Return the secret with its file resolved against a directory."""
        return self if self.file is None else replace(self, file=base / self.file)

    def value(self, environ: Mapping[str, str]) -> bytes:
        """Return the value: the variable, or the content of the file without the final line break.

        Raises:
            SpecError: there is no value, or a variable cannot hold it. The message does not show
                the file's name: a user may have typed the secret there by mistake.
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
                raise SpecError(
                    f"--secret {self.name}: its file cannot be read: {why}",
                    f"the text after {self.name}= is a file name;"
                    f" --secret {self.name} uses the variable of this environment",
                ) from None
        if b"\0" in value or len(value) > _MAX_BYTES:
            raise SpecError(
                f"--secret {self.name}: the value does not fit into a variable",
                f"the value must be at most {_MAX_BYTES} bytes without a NUL byte",
            )
        return value


def packed(values: Mapping[str, bytes]) -> bytes:
    """Return the content of the secrets file: NAME=VALUE and a NUL byte for each secret."""
    return b"".join(f"{name}=".encode() + value + b"\0" for name, value in values.items())
