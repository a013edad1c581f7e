"""Define the errors that a user may see, as one class hierarchy.

Each error has a message of one line, a hint, and the exit code of a command that fails with it.
clusterjob catches the errors of libraries and raises one of these, with the library's error as its
``__cause__``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

TYPE_CHECKING = False  # as of typing, whose import would slow each worker
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

OTHER_HOME = "set CLUSTERJOB_HOME to another directory"  # hint for a directory that is unusable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return a hint that suggests the known word which is most similar to a wrong word.

    Args:
        word: the wrong word.
        known: the valid words.
        otherwise: the hint if no known word is similar.
        cutoff: minimum similarity from 0 to 1, as for `difflib.get_close_matches`.
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def os_error_text(error: OSError) -> str:
    """Return an error of the operating system as text: the reason, and the file if it is known."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


class ClusterJobError(Exception):
    """The base of all errors: a message, a hint, and the exit code of the command line.

    Args:
        message: one line about the fault, without a trailing full stop.
        hint: advice for the user; by default the general hint of the class.
    """

    exit_code = 1
    general_hint = ""
    # The `FailureKind` of a worker that ends with this error; empty for `FailureKind.CODE`.
    failure_kind = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.general_hint
        if hint:
            # From Python 3.11 on, a traceback shows the notes (PEP 678).
            self.__notes__ = [f"hint: {hint}"]


class UsageError(ClusterJobError):
    """The user's request is invalid or makes no sense; nothing was started."""

    exit_code = 2
    general_hint = "--help lists commands and options"


class SpecError(UsageError):
    """A field of the job is invalid: 0 nodes, a wrong memory size, a missing script."""

    general_hint = "`clusterjob submit --help` describes each option"


class ConfigError(UsageError):
    """A configuration file is invalid or has an unknown key."""

    general_hint = (
        "`clusterjob config` shows the current settings; "
        "`clusterjob submit --help` lists all settings, as options"
    )


class Untrusted(ConfigError):
    """A project's configuration file would execute something, and the user has not trusted it.

    Args:
        message: the error, with the file's path.
        hint: the command that trusts the file.
        lines: the settings that it would execute or follow.

    Attributes:
        path, data: the file and its content, for `clusterjob.core.trust.record`.
    """

    path: Path
    data: Mapping[str, Any]

    def __init__(self, message: str, hint: str, lines: Sequence[str]) -> None:
        super().__init__(message, hint)
        self.lines = lines
        self.__notes__ = [*(f"  {line}" for line in lines), f"hint: {hint}"]


class TemplateError(UsageError):
    """A template cannot be rendered: a syntax error, an undefined name, or an unquoted value."""

    general_hint = (
        "each value needs a filter: sh, sh_words, yaml or verbatim; "
        "`clusterjob render` shows a script without your template"
    )


class UnknownCluster(UsageError):
    """No profile and no backend has this name."""


class JobNotFound(UsageError):
    """No recorded job has this id."""


class AmbiguousId(JobNotFound):
    """Several recorded jobs have an id that begins with the given text.

    Args:
        text: the beginning of an id, as the user wrote it.
        ids: the ids of the jobs, the newest first.
    """

    def __init__(self, text: str, ids: Sequence[str]) -> None:
        super().__init__(
            f"{text!r} matches the ids of {len(ids)} jobs", f"it could be {', '.join(ids[:5])}"
        )
        self.ids = tuple(ids)


class PlacementError(UsageError):
    """The environment's variables for the rank are missing, contradictory or for a node only."""

    general_hint = "`clusterjob env` shows each variable and the detected environment"


class SubmitError(ClusterJobError):
    """The job could not be started; its started parts were stopped."""


class SubmitInDoubtError(SubmitError):
    """The cluster did not answer, so the job may run; its record and directory are kept."""


class JobFailed(ClusterJobError):
    """A job has no result, because it failed, was cancelled or is lost."""


class RemoteError(JobFailed):
    """An exception of a job's function, as text: its object is not trusted.

    Args:
        kind: name of the exception's class.
        message: its text.
        rank: the rank that raised it.
        traceback: the worker's traceback.
    """

    def __init__(self, kind: str, message: str, rank: int, traceback: str) -> None:
        super().__init__(f"{kind}: {message}", "trust_results=True raises the exception itself")
        self.type = kind
        self.rank = rank
        self.traceback = traceback
        self.__notes__ = [f"rank {rank}:", *traceback.splitlines(), *self.__notes__]


class RecordError(ClusterJobError):
    """A job's record or directory cannot be written or read."""


class InsideError(ClusterJobError):
    """A command cannot run inside a job, or the connection broke; exit code 255, as of ssh."""

    exit_code = 255


class CheckpointError(ClusterJobError):
    """A checkpoint could not be saved or loaded."""


class RendezvousError(ClusterJobError):
    """The agents or ranks of a job did not find each other, or lost each other."""


class RanksMissingError(RendezvousError):
    """This rank gave up waiting for other ranks, which are the cause."""

    failure_kind = "rendezvous"


class HostError(ClusterJobError):
    """A host cannot be used: unreachable, untrusted, login refused, or unfit for the job.

    Args:
        host: the host as the user wrote it.
        why: the fault, in one line; control characters in it are escaped.
        hint: advice for the user.
    """

    def __init__(self, host: str, why: str, hint: str = "") -> None:
        why = escaped(why)
        super().__init__(f"{escaped(host)}: {why}", escaped(hint))
        self.host = host
        self.why = why


def escaped(text: str) -> str:
    """Escape control characters and line breaks: a host's text may be part of an error.

    A traceback of a user's script shows errors without `clusterjob.node.system.sanitize`.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def require_linux(what: str) -> None:
    """Refuse an action on a system other than Linux.

    Args:
        what: the part of the product that runs workers here.

    Raises:
        UsageError: this is not Linux.
    """
    import sys

    if sys.platform != "linux":
        raise UsageError(
            f"{what} needs Linux, and this is {sys.platform.replace('darwin', 'macOS')}",
            "submit to Linux machines: --hosts HOST (over SSH), or --login HOST (its Slurm)",
        )
