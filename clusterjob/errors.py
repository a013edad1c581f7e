"""Every error that a user may see, as one tree.

Each error carries one line that says what is wrong, a hint that says what to do, and the exit code of the command that
meets it. Third-party errors are translated into these where the library is called; the cause stays in ``__cause__``.
"""

from __future__ import annotations


class ClusterJobError(Exception):
    """An error of ours: one line, a hint, and the exit code that the command line returns for it.

    Args:
        message: one line, without a trailing full stop, that names what is wrong.
        hint: what the user can do about it; empty when there is nothing useful to say.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ClusterJobError):
    """What the user asked for cannot be understood or makes no sense; nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """A field of the job is wrong: a node count of 0, a memory size that is none, a script that is not there."""


class ConfigError(UsageError):
    """A configuration file is broken, or holds a key that means nothing."""


class TemplateError(UsageError):
    """A template cannot be rendered: a syntax error, an undefined name, a value that was not quoted."""


class UnknownCluster(UsageError):
    """No profile and no backend has this name."""


class JobNotFound(UsageError):
    """No recorded job has this id."""


class PlaceError(UsageError):
    """The environment's variables do not give one place in a job: half-set, contradictory, or of the wrong level."""


class SubmitError(ClusterJobError):
    """The job could not be started; whatever had been started was stopped again."""


class RecordError(ClusterJobError):
    """A job's record or directory cannot be written or read."""


class GangError(ClusterJobError):
    """The agents of a job could not meet, or lost each other."""
