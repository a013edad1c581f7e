"""Schema and size limit of a host's answer to each request.

A host is not trusted: an answer that is larger or of another form is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.core.schema import (
    Flag,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    Object,
    Row,
    Schema,
    Text,
)
from clusterjob.node.host_server import commands, poll, results
from clusterjob.node.host_server.requests import HostRequest

MAX_LINE = 1 << 20  # bytes of an answer's JSON line, unless its request allows more
MAX_FILES = 10_000  # files of one node that an answer may name
MAX_ERROR = 2000  # characters of an error message that are kept

_TEXT = Text(10_000)
_TEXTS = ListOf(_TEXT, 1000)
_PATH = Text(4096)
_DIGEST = Text(64, "[0-9a-f]{64}")
_COUNT = Integer(0, 1 << 20)
_VERSION = ListOf(Integer(0, 1 << 20), 5)


@dataclass(frozen=True)
class AnswerSchema:
    """Form and size limits of one answer.

    Attributes:
        schema: schema of its JSON object.
        max_bytes: maximum number of bytes after the JSON line.
        max_line: maximum number of bytes of the JSON line.
    """

    schema: Schema
    max_bytes: int = 0
    max_line: int = MAX_LINE


_FILE = Object(
    {"path": _PATH, "size": Integer(0, poll.MAX_ANSWER)},
    {"offset": Integer(), "stamp": Text(200), "gone": Flag()},
)
_FILES = ListOf(_FILE, MAX_FILES)
_CHECK = Object(
    {
        "errors": _TEXTS,
        "identity": _TEXT,
        "reached_at": _TEXT,
        "host": _TEXT,
        "home": _PATH,
        "time": Number(1e11),
        "python": _TEXT,
        "torch": Nullable(Flag()),
        "free": Integer(),
        "gpus": _TEXTS,
    }
)
_FACTS = Object(
    {"torch": _TEXT, "broken": _TEXT, "fork": _TEXT, "seconds": Number()},
    {"cuda": _TEXT, "gpus": _COUNT, "driver_error": _TEXT, "backends": _TEXTS},
)
_INTERPRETER = Object(
    {
        "unfit": _TEXT,
        "setup": Flag(),
        "version": Nullable(_VERSION),
        "executable": _TEXT,
        "facts": Nullable(_FACTS),
        "died": _TEXT,
    }
)
_COMMAND = AnswerSchema(
    Object(
        optional={
            "number": Integer(),
            "code": Integer(-1000, 1000),
            "out": Integer(),
            "absent": _TEXT,
        }
    ),
    2 * commands.MAX_OUTPUT,
)
# By the class name of the request.
_ANSWERS = {
    "Check": AnswerSchema(_CHECK),
    "Fit": AnswerSchema(Object({"errors": _TEXTS})),
    "Facts": AnswerSchema(_INTERPRETER),
    "Install": AnswerSchema(Object({"missing": ListOf(_DIGEST, 100_000)}), max_line=8 << 20),
    "ReceiveFiles": AnswerSchema(Object({"wrong": ListOf(_DIGEST, 100_000)}), max_line=8 << 20),
    "Reserve": AnswerSchema(Object({"devices": Nullable(_TEXT), "short": _TEXT})),
    "Up": AnswerSchema(Object({"up": Flag()}, {"why": _TEXT})),
    "Cancel": AnswerSchema(Object({"running": Flag()})),
    "PollNode": AnswerSchema(
        Object({"known": Flag(), "alive": Flag(), "files": _FILES, "more": Flag()}),
        poll.MAX_ANSWER,
        max_line=4 << 20,
    ),
    "PollJobs": AnswerSchema(
        Object(
            {
                "jobs": ListOf(
                    Object({"known": Flag(), "files": ListOf(_FILE, 100_000), "more": Flag()}), 1000
                )
            }
        ),
        poll.MAX_ANSWER,
        max_line=16 << 20,
    ),
    # The request sets the limit of the bytes that follow.
    "Tree": AnswerSchema(Object({"absent": ListOf(_PATH)})),
    "Digests": AnswerSchema(
        Object({"digests": ListOf(Text(64, "([0-9a-f]{64})?"), results.MAX_DIGESTS)})
    ),
    "Get": AnswerSchema(
        Object({"lengths": ListOf(Integer(0, results.MAX_BYTES), results.MAX_PARTS)}),
        results.MAX_BYTES,
    ),
    "Listen": AnswerSchema(
        Object({"port": Integer(1, 65535), "addresses": ListOf(Text(64, r"[0-9A-Fa-f:.]+"), 1000)})
    ),
    "ProbeAddresses": AnswerSchema(
        Object({"reached": ListOf(Text(64), 1000), "why": MapOf(_TEXT, 1000)})
    ),
    "RunCommand": _COMMAND,
    "ReapCommand": _COMMAND,
}
# The answer to a request that returns nothing, such as Put, Start, Remove or DropCommand.
_EMPTY = AnswerSchema(Object())
# Average bytes of a tree's entry, which limits the answer to `Tree`.
TREE_ENTRY_BYTES = 400
# One entry of a tree: path, kind, mode, size, modification time in ns, target of a link.
TREE_ENTRY = Row((_PATH, Text(4, "file|dir|link"), Integer(0, 0o777), Integer(), Integer(), _PATH))
# Fields of every answer.
HEADER = Object({"size": Integer()}, {"error": Text(1 << 20)})


def answer_schema(request: HostRequest) -> AnswerSchema:
    """Return the schema of the answer to a request."""
    return _ANSWERS.get(type(request).__name__, _EMPTY)
