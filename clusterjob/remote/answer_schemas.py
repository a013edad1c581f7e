"""Schema and size limit of a host's answer to each call.

A host is not trusted: an answer that is larger or of another form is refused. Unknown fields are
ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from clusterjob.node.host_server import jobs, server

MAX_LINE = 1 << 20  # bytes of an answer's JSON line, unless its schema allows more
MAX_FILES = 10_000  # files of one node that an answer may name
MAX_PARTS = 1000  # maximum number of parts of results in one call
_MAX_ANSWER = jobs.MAX_BYTES + jobs.MAX_REPLACED
MAX_ERROR = 2000  # characters of an error message that are kept

_Text = Annotated[str, Meta(max_length=10_000)]
_Texts = Annotated[list[_Text], Meta(max_length=1000)]
_Path = Annotated[str, Meta(max_length=4096)]
_Digest = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]{64}\Z")]
_Digests = Annotated[list[_Digest], Meta(max_length=100_000)]
_DigestOrEmpty = Annotated[str, Meta(max_length=64, pattern=r"\A([0-9a-f]{64})?\Z")]
_Address = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9A-Fa-f:.]+\Z")]
_Integer = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Small = Annotated[int, Meta(ge=0, le=1 << 20)]
_Part = Annotated[int, Meta(ge=0, le=jobs.MAX_BYTES)]
_Version = Annotated[list[_Small], Meta(max_length=5)]


class SchemaError(ValueError):
    """A host's answer does not match its schema, or is too large; the message says where."""


@dataclass(frozen=True)
class AnswerSchema:
    """Form and size limits of one answer.

    Attributes:
        schema: type of its JSON object.
        max_bytes: maximum number of bytes after the JSON line.
        max_line: maximum number of bytes of the JSON line.
    """

    schema: Any
    max_bytes: int = 0
    max_line: int = MAX_LINE


def _list(kind: Any, most: int) -> Any:
    """Return the type of a list with at most `most` items."""
    return Annotated[list[kind], Meta(max_length=most)]


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Any:
    """Return the type of a JSON object with these fields."""
    absent = [(name, kind | UnsetType, UNSET) for name, kind in (optional or {}).items()]
    return msgspec.defstruct("Answer", [*required.items(), *absent])


# The fields of every answer.
ANSWER_HEADER = _object({"size": _Integer}, {"error": Annotated[str, Meta(max_length=1 << 20)]})

# A file of a job's directory, whose new bytes follow the answer.
_File = _object(
    {"path": _Path, "size": Annotated[int, Meta(ge=0, le=_MAX_ANSWER)]},
    {"offset": _Integer, "stamp": Annotated[str, Meta(max_length=200)], "gone": bool},
)
_PolledJob = _object({"known": bool, "alive": bool, "files": _list(_File, 100_000), "more": bool})
_CleanedJob = _object(
    {"size": _Integer, "stamp": Annotated[str, Meta(max_length=100)], "kept": _Text}
)
# Facts about torch in an interpreter.
_TorchFacts = _object(
    {
        "torch": _Text,
        "broken": _Text,
        "fork": _Text,
        "seconds": Annotated[float, Meta(gt=-1e300, lt=1e300)],
    },
    {"cuda": _Text, "gpus": _Small, "driver_error": _Text, "backends": _Texts},
)
_Command = _object(
    {},
    {
        "number": _Integer,
        "code": Annotated[int, Meta(ge=-1000, le=1000)],
        "out": _Integer,
        "absent": _Text,
    },
)

# The answer of each function of the host server.
ANSWERS = {
    "check": AnswerSchema(
        _object(
            {
                "errors": _Texts,
                "identity": _Text,
                "addresses": _list(_Address, 1000),
                "host": _Text,
                "home": _Path,
                "time": Annotated[float, Meta(gt=-1e11, lt=1e11)],
                "python": _Text,
                "torch": bool | None,
                "free": _Integer,
                "gpus": _Texts,
            }
        )
    ),
    "interpreter": AnswerSchema(
        _object(
            {
                "unfit": _Text,
                "setup": bool,
                "version": _Version | None,
                "executable": _Text,
                "torch": bool | None,
                "facts": _TorchFacts | None,
                "died": _Text,
            }
        )
    ),
    "install": AnswerSchema(_object({"missing": _Digests}), max_line=8 << 20),
    "has_file": AnswerSchema(_object({"stored": bool})),
    "receive": AnswerSchema(_object({"wrong": _Digests}), max_line=8 << 20),
    "clean": AnswerSchema(
        _object({"jobs": _list(_CleanedJob, 1000), "code": _Integer}), max_line=8 << 20
    ),
    "reserve": AnswerSchema(_object({"devices": _Text | None, "short": _Text})),
    "up": AnswerSchema(_object({"up": bool, "why": _Text})),
    "poll": AnswerSchema(
        _object({"jobs": _list(_PolledJob, 1000), "clock": Annotated[float, Meta(ge=0, lt=1e12)]}),
        _MAX_ANSWER,
        max_line=16 << 20,
    ),
    # The caller sets the limit of the bytes that follow.
    "tree": AnswerSchema(_object({"absent": _list(_Path, 10_000)})),
    "get": AnswerSchema(
        _object({"lengths": _list(_Part, MAX_PARTS)}),
        jobs.MAX_BYTES,
    ),
    "run_command": AnswerSchema(_Command, 2 * server.MAX_OUTPUT),
    "reap_command": AnswerSchema(_Command, 2 * server.MAX_OUTPUT),
}
# Functions such as put, start or remove return nothing.
NO_ANSWER = AnswerSchema(_object({}))
# Average bytes of a tree's entry, which limits the answer of `tree`.
TREE_ENTRY_BYTES = 400
# One entry of a tree: path, kind, mode, size, modification time in ns, target of a link, digest.
TreeEntry = tuple[
    _Path,
    Literal["file", "dir", "link"],
    Annotated[int, Meta(ge=0, le=0o777)],
    _Integer,
    _Integer,
    _Path,
    _DigestOrEmpty,
]


def check(data: Any, schema: Any) -> Any:
    """Convert parsed JSON to a type that describes the allowed values, and return the result.

    Raises:
        SchemaError: the JSON does not match the type.
    """
    try:
        return msgspec.convert(data, schema)
    except ValueError as error:  # ValidationError, or UnicodeEncodeError for a lone surrogate
        raise SchemaError(str(error)) from error
