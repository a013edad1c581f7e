"""Every error that a user may see, as one tree.

Each error carries one line that says what is wrong, a hint that says what to do, and the exit code
of the command that meets it. Third-party errors are translated into these where the library is
called; the cause stays in ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Sequence


class ClusterJobError(Exception):
    """An error of ours: one line, a hint, and the exit code that the command line returns for it.

    Args:
        message: one line, without a trailing full stop, that names what is wrong.
        hint: what the user can do about it; by default what helps with any error of the kind.
    """

    exit_code = 1
    general_hint = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.general_hint
        if hint:
            self.__notes__ = [
                f"hint: {hint}"
            ]  # a script's traceback shows it, from Python 3.11 on (PEP 678)


class UsageError(ClusterJobError):
    """What the user asked for cannot be understood or makes no sense; nothing was started."""

    exit_code = 2
    general_hint = "--help lists what there is"


class SpecError(UsageError):
    """A field of the job is wrong: a node count of 0, a memory size that is none, a script that is
    not there.
    """

    general_hint = "`clusterjob submit --help` says what each option takes"


class ConfigError(UsageError):
    """A configuration file is broken, or holds a key that means nothing."""

    general_hint = "`clusterjob config` shows what holds here; `clusterjob submit --help` lists the settings, as options"


class Untrusted(ConfigError):
    """A project's configuration file would execute something, and the user has not trusted it.

    Args:
        message: which file.
        hint: how it is trusted.
        lines: what it would execute or follow.
    """

    def __init__(self, message: str, hint: str, lines: Sequence[str]) -> None:
        super().__init__(message, hint)
        self.lines = lines
        self.__notes__ = [*(f"  {line}" for line in lines), f"hint: {hint}"]


class TemplateError(UsageError):
    """A template cannot be rendered: a syntax error, an undefined name, a value that was not
    quoted.
    """

    general_hint = "each value goes through a filter: sh, sh_words, yaml or verbatim; `clusterjob render` shows a script without your template"


class UnknownCluster(UsageError):
    """No profile and no backend has this name."""


class JobNotFound(UsageError):
    """No recorded job has this id."""


class AmbiguousId(JobNotFound):
    """Several recorded jobs have an id that begins so.

    Args:
        text: what was written.
        ids: the ids of the jobs, the newest first.
    """

    def __init__(self, text: str, ids: Sequence[str]) -> None:
        super().__init__(
            f"{text!r} is the beginning of {len(ids)} jobs", f"it could be {', '.join(ids[:5])}"
        )
        self.ids = tuple(ids)


class PlaceError(UsageError):
    """The environment's variables do not give one place in a job: half-set, contradictory, or of
    the wrong level.
    """

    general_hint = "`clusterjob env` shows each variable and what was made of it"


class SubmitError(ClusterJobError):
    """The job could not be started; whatever had been started was stopped again."""


class SubmitInDoubtError(SubmitError):
    """The cluster did not answer, and the job may run all the same: its record and its directory
    stay.
    """


class JobFailed(ClusterJobError):
    """A job whose result was asked for has none: it failed, was cancelled or is lost."""


class RecordError(ClusterJobError):
    """A job's record or directory cannot be written or read."""


class GangError(ClusterJobError):
    """The agents of a job could not meet, or lost each other."""


class HostError(ClusterJobError):
    """A host cannot be used: it is not reached, not trusted, lets nobody in, or is unfit for the
    job.

    Args:
        host: the host as the user wrote it.
        why: what is wrong with it, one line.
        hint: what the user can do about it.
    """

    def __init__(self, host: str, why: str, hint: str = "") -> None:
        super().__init__(f"{host}: {why}", hint)
        self.host = host
        self.why = why
