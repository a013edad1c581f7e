"""What a host may answer to each question: its schema, and the bytes that may follow. A host is not
trusted with more.
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

MOST_LINE = 1 << 20  # bytes of an answer's line, where the question allows no more
MOST_FILES = 10_000  # files of one node that an answer may name
MOST_ERROR = 2000  # characters of an error's text that are kept

_TEXT = Text(10_000)
_TEXTS = ListOf(_TEXT, 1000)
_PATH = Text(4096)
_DIGEST = Text(64, "[0-9a-f]{64}")
_COUNT = Integer(0, 1 << 20)
_VERSION = ListOf(Integer(0, 1 << 20), 5)


@dataclass(frozen=True)
class Answer:
    """What the answer to a question may be.

    Attributes:
        schema: of its object.
        most_bytes: that may follow its line.
        most_line: bytes of the line.
    """

    schema: Schema
    most_bytes: int = 0
    most_line: int = MOST_LINE


_FILE = Object(
    {"path": _PATH, "size": Integer(0, poll.MOST_OF_ANSWER)},
    {"offset": Integer(), "stamp": Text(200), "gone": Flag()},
)
_FILES = ListOf(_FILE, MOST_FILES)
_CHECK = Object(
    {
        "troubles": _TEXTS,
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
    {"cuda": _TEXT, "gpus": _COUNT, "trouble": _TEXT, "backends": _TEXTS},
)
_INTERPRETER = Object(
    {
        "trouble": _TEXT,
        "setup": Flag(),
        "version": Nullable(_VERSION),
        "executable": _TEXT,
        "facts": Nullable(_FACTS),
        "died": _TEXT,
    }
)
_COMMAND = Answer(
    Object(
        optional={
            "number": Integer(),
            "code": Integer(-1000, 1000),
            "out": Integer(),
            "absent": _TEXT,
        }
    ),
    2 * commands.MOST,
)
_ANSWERS = {
    "check": Answer(_CHECK),
    "fit": Answer(Object({"troubles": _TEXTS})),
    "facts": Answer(_INTERPRETER),
    "land": Answer(Object({"missing": ListOf(_DIGEST, 100_000)}), most_line=8 << 20),
    "blobs": Answer(Object({"wrong": ListOf(_DIGEST, 100_000)}), most_line=8 << 20),
    "reserve": Answer(Object({"devices": Nullable(_TEXT), "short": _TEXT})),
    "up": Answer(Object({"up": Flag()}, {"why": _TEXT})),
    "cancel": Answer(Object({"running": Flag()})),
    "look": Answer(
        Object({"known": Flag(), "alive": Flag(), "files": _FILES, "more": Flag()}),
        poll.MOST_OF_ANSWER,
        most_line=4 << 20,
    ),
    "looks": Answer(
        Object(
            {
                "jobs": ListOf(
                    Object({"known": Flag(), "files": ListOf(_FILE, 100_000), "more": Flag()}), 1000
                )
            }
        ),
        poll.MOST_OF_ANSWER,
        most_line=16 << 20,
    ),
    "tree": Answer(Object({"absent": ListOf(_PATH)})),  # and bytes, as many as the asker allows
    "digests": Answer(
        Object({"digests": ListOf(Text(64, "([0-9a-f]{64})?"), results.MOST_DIGESTS)})
    ),
    "get": Answer(
        Object({"lengths": ListOf(Integer(0, results.MOST), results.MOST_PARTS)}), results.MOST
    ),
    "listen": Answer(
        Object({"port": Integer(1, 65535), "addresses": ListOf(Text(64, r"[0-9A-Fa-f:.]+"), 1000)})
    ),
    "probe": Answer(Object({"reached": ListOf(Text(64), 1000), "why": MapOf(_TEXT, 1000)})),
    "run": _COMMAND,
    "reap": _COMMAND,
}
NOTHING = Answer(
    Object()
)  # to questions that are only obeyed: put, start, remove, wish, hush, drop
MOST_ENTRY = 400  # bytes of one of a tree, on the average
ENTRY = Row(
    (_PATH, Text(4, "file|dir|link"), Integer(0, 0o777), Integer(), Integer(), _PATH)
)  # of a tree
HEADER = Object({"size": Integer()}, {"error": Text(1 << 20)})  # of every answer


def answer_to(op: str) -> Answer:
    """Return what the answer to a question may be."""
    return _ANSWERS.get(op, NOTHING)
