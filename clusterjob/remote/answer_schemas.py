"""Schema and size limit of a host's answer to each request.

A host is not trusted: an answer that is larger or of another form is refused. A class describes a
JSON object: a field that may be `UNSET` may be absent, and unknown fields are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from clusterjob.node.host_server import commands, poll, results
from clusterjob.node.host_server.requests import HostRequest

MAX_LINE = 1 << 20  # bytes of an answer's JSON line, unless its request allows more
MAX_FILES = 10_000  # files of one node that an answer may name
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


class AnswerHeader(Struct):
    """The fields of every answer."""

    size: _Integer
    error: Annotated[str, Meta(max_length=1 << 20)] | UnsetType = UNSET


class EmptyAnswer(Struct):
    """The answer to a request that returns nothing, such as Put, Start, Remove or DropCommand."""


class FileAnswer(Struct):
    """A file of a job's directory, whose new bytes follow the answer."""

    path: _Path
    size: Annotated[int, Meta(ge=0, le=poll.MAX_ANSWER)]
    offset: _Integer | UnsetType = UNSET
    stamp: Annotated[str, Meta(max_length=200)] | UnsetType = UNSET
    gone: bool | UnsetType = UNSET


class CheckAnswer(Struct):
    """The answer to `Check`."""

    errors: _Texts
    identity: _Text
    reached_at: _Text
    host: _Text
    home: _Path
    time: Annotated[float, Meta(gt=-1e11, lt=1e11)]
    python: _Text
    torch: bool | None
    free: _Integer
    gpus: _Texts


class FitAnswer(Struct):
    """The answer to `Fit`."""

    errors: _Texts


class TorchFacts(Struct):
    """Facts about torch in an interpreter."""

    torch: _Text
    broken: _Text
    fork: _Text
    seconds: Annotated[float, Meta(gt=-1e300, lt=1e300)]
    cuda: _Text | UnsetType = UNSET
    gpus: _Small | UnsetType = UNSET
    driver_error: _Text | UnsetType = UNSET
    backends: _Texts | UnsetType = UNSET


class FactsAnswer(Struct):
    """The answer to `Facts`."""

    unfit: _Text
    setup: bool
    version: _Version | None
    executable: _Text
    facts: TorchFacts | None
    died: _Text


class InstallAnswer(Struct):
    """The answer to `Install`."""

    missing: _Digests


class ReceiveFilesAnswer(Struct):
    """The answer to `ReceiveFiles`."""

    wrong: _Digests


class ReserveAnswer(Struct):
    """The answer to `Reserve`."""

    devices: _Text | None
    short: _Text


class UpAnswer(Struct):
    """The answer to `Up`."""

    up: bool
    why: _Text | UnsetType = UNSET


class CancelAnswer(Struct):
    """The answer to `Cancel`."""

    running: bool


class PollNodeAnswer(Struct):
    """The answer to `PollNode`."""

    known: bool
    alive: bool
    files: Annotated[list[FileAnswer], Meta(max_length=MAX_FILES)]
    more: bool


class PolledJob(Struct):
    """One job in the answer to `PollJobs`."""

    known: bool
    files: Annotated[list[FileAnswer], Meta(max_length=100_000)]
    more: bool


class PollJobsAnswer(Struct):
    """The answer to `PollJobs`."""

    jobs: Annotated[list[PolledJob], Meta(max_length=1000)]


class TreeAnswer(Struct):
    """The answer to `Tree`."""

    absent: Annotated[list[_Path], Meta(max_length=10_000)]


class DigestsAnswer(Struct):
    """The answer to `Digests`."""

    digests: Annotated[list[_DigestOrEmpty], Meta(max_length=results.MAX_DIGESTS)]


class GetAnswer(Struct):
    """The answer to `Get`."""

    lengths: Annotated[
        list[Annotated[int, Meta(ge=0, le=results.MAX_BYTES)]], Meta(max_length=results.MAX_PARTS)
    ]


class ListenAnswer(Struct):
    """The answer to `Listen`."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    addresses: Annotated[list[_Address], Meta(max_length=1000)]


class ProbeAddressesAnswer(Struct):
    """The answer to `ProbeAddresses`."""

    reached: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=1000)]
    why: Annotated[dict[str, _Text], Meta(max_length=1000)]


class CommandAnswer(Struct):
    """The answer to `RunCommand` and `ReapCommand`."""

    number: _Integer | UnsetType = UNSET
    code: Annotated[int, Meta(ge=-1000, le=1000)] | UnsetType = UNSET
    out: _Integer | UnsetType = UNSET
    absent: _Text | UnsetType = UNSET


# By the class name of the request.
_ANSWERS = {
    "Check": AnswerSchema(CheckAnswer),
    "Fit": AnswerSchema(FitAnswer),
    "Facts": AnswerSchema(FactsAnswer),
    "Install": AnswerSchema(InstallAnswer, max_line=8 << 20),
    "ReceiveFiles": AnswerSchema(ReceiveFilesAnswer, max_line=8 << 20),
    "Reserve": AnswerSchema(ReserveAnswer),
    "Up": AnswerSchema(UpAnswer),
    "Cancel": AnswerSchema(CancelAnswer),
    "PollNode": AnswerSchema(PollNodeAnswer, poll.MAX_ANSWER, max_line=4 << 20),
    "PollJobs": AnswerSchema(PollJobsAnswer, poll.MAX_ANSWER, max_line=16 << 20),
    # The request sets the limit of the bytes that follow.
    "Tree": AnswerSchema(TreeAnswer),
    "Digests": AnswerSchema(DigestsAnswer),
    "Get": AnswerSchema(GetAnswer, results.MAX_BYTES),
    "Listen": AnswerSchema(ListenAnswer),
    "ProbeAddresses": AnswerSchema(ProbeAddressesAnswer),
    "RunCommand": AnswerSchema(CommandAnswer, 2 * commands.MAX_OUTPUT),
    "ReapCommand": AnswerSchema(CommandAnswer, 2 * commands.MAX_OUTPUT),
}
_EMPTY = AnswerSchema(EmptyAnswer)
# Average bytes of a tree's entry, which limits the answer to `Tree`.
TREE_ENTRY_BYTES = 400
# One entry of a tree: path, kind, mode, size, modification time in ns, target of a link.
TreeEntry = tuple[
    _Path,
    Literal["file", "dir", "link"],
    Annotated[int, Meta(ge=0, le=0o777)],
    _Integer,
    _Integer,
    _Path,
]


def answer_schema(request: HostRequest) -> AnswerSchema:
    """Return the schema of the answer to a request."""
    return _ANSWERS.get(type(request).__name__, _EMPTY)


def check(data: Any, schema: Any) -> None:
    """Check parsed JSON against the type that describes it.

    Raises:
        SchemaError: it does not match.
    """
    try:
        msgspec.convert(data, schema)
    except ValueError as error:  # ValidationError, or UnicodeEncodeError for half a surrogate pair
        raise SchemaError(str(error)) from error
