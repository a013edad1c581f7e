"""Where a job sends notifications: read the URLs on this machine, and pack them for node 0."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.errors import SpecError
from clusterjob.node.contract import NOTIFY_KINDS

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://\S+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_MAX_BYTES = 50_000  # maximum bytes of all URLs and commands, which travel in one variable
_ARRAY_TASKS = "array_tasks"  # each element of an array, as in sbatch's --mail-type
_FORMS = "write --notify URL, --notify VARIABLE, or --notify @FILE with one URL per line"


@dataclass(frozen=True, repr=False)
class NotifyPlace:
    """One value of --notify: a URL, or ``VARIABLE`` or ``@FILE`` that holds URLs.

    A URL contains a password. No text of this class contains it, except `given`.

    Attributes:
        given: the text of the user.
    """

    given: str

    def __str__(self) -> str:
        """Return the text without the secret: ``slack://***``, ``VARIABLE`` or ``@FILE``."""
        url = _URL.fullmatch(self.given)
        return f"{url[1]}://***" if url else self.given

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> NotifyPlace:
        """Return the place that a value of --notify names.

        Raises:
            SpecError: the text has none of the three forms; the error does not show it.
        """
        text = text.strip()
        if _URL.fullmatch(text) or _VARIABLE.fullmatch(text) or (text[:1] == "@" and text[1:]):
            return cls(text)
        raise SpecError("the value is not a URL", _FORMS)

    @property
    def file(self) -> Path | None:
        """The file that holds the URLs; None for another form."""
        return Path(self.given[1:]) if self.given.startswith("@") else None

    @property
    def variable(self) -> str:
        """The variable that holds the URLs; empty for another form."""
        return self.given if _VARIABLE.fullmatch(self.given) else ""

    def beside(self, base: Path) -> NotifyPlace:
        """Return the place with its file resolved against a directory.

        Raises:
            SpecError: the file's home directory is unknown.
        """
        try:
            return replace(self, given=f"@{base / self.file.expanduser()}") if self.file else self
        except RuntimeError as error:
            raise SpecError(f"--notify {self}: {error}") from error

    def urls(self, environ: Mapping[str, str]) -> list[str]:
        """Return the URLs: the text itself, or the lines of the variable or the file.

        Raises:
            SpecError: there is no URL; the error shows none.
        """
        text = self.given
        if self.variable:
            text = environ.get(self.variable, "")
            if not text:
                raise SpecError(f"--notify {self}: the variable is not set here", _FORMS)
        elif self.file is not None:
            try:
                text = self.file.read_text()
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "it is not text"
                raise SpecError(
                    f"--notify {self}: the file cannot be read: {why}", _FORMS
                ) from None
        elif text.endswith("://***"):
            raise SpecError(
                f"the job's --notify {self} is not recorded", "give --notify again with its URL"
            )
        lines = [line.strip() for line in text.splitlines()]
        urls = [line for line in lines if line and not line.startswith("#")]
        if not urls or not all(map(_URL.fullmatch, urls)):
            raise SpecError(f"--notify {self}: it does not hold a URL on each line", _FORMS)
        return urls


def check_kinds(kinds: Iterable[str]) -> None:
    """Refuse an unknown kind of event.

    Raises:
        SpecError: a kind is unknown.
    """
    known = (*NOTIFY_KINDS, _ARRAY_TASKS)
    for kind in kinds:
        if kind not in known:
            raise SpecError(f"--notify-on {kind!r}: unknown event", f"use {', '.join(known)}")


def check_urls(
    places: Iterable[NotifyPlace], environ: Mapping[str, str], python: str = ""
) -> list[str]:
    """Check the URLs with apprise; return a note if it is not installed here.

    Args:
        places: the values of --notify.
        environ: the variables of this process.
        python: the interpreter with which the job sends notifications; empty if it is not known.

    Raises:
        SpecError: a place has no URL, apprise cannot read one, or the job would have no apprise.
    """
    found = [(place, url) for place in places for url in place.urls(environ)]
    if not found:
        return []
    try:
        import apprise
    except ImportError:
        if python == sys.executable:
            raise SpecError(
                f"--notify {found[0][0]}: nothing would be sent: {python} has no apprise",
                "python -m pip install apprise, or use --notify-cmd",
            ) from None
        return [f"--notify {found[0][0]}: not checked, and the job's Python needs apprise"]
    import logging
    import warnings

    logging.getLogger("apprise").addHandler(logging.NullHandler())  # its errors may show the URL
    logging.getLogger("apprise").propagate = False
    for place, url in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modules that apprise's plug-ins import
            plugin = apprise.Apprise.instantiate(url)
        if plugin is None:
            scheme = url.partition("://")[0]
            raise SpecError(
                f"--notify {place}: apprise cannot read this {scheme}:// URL",
                "https://appriseit.com/services/ has the form of each service's URL",
            )
    return []


def packed(
    places: Iterable[NotifyPlace],
    commands: Iterable[str],
    kinds: Iterable[str],
    environ: Mapping[str, str],
    *,
    name: str,
    cluster: str,
    elements: int = 0,
) -> bytes:
    """Return the value of CLUSTERJOB_NOTIFICATIONS, which node 0's agent reads.

    Args:
        places: the values of --notify.
        commands: the values of --notify-cmd.
        kinds: the events to send.
        environ: the variables of this process.
        name: the job's name, for the messages.
        cluster: the cluster's name.
        elements: number of elements of an array, which sends as a whole unless the kinds have
            array_tasks; 0 for another job.

    Raises:
        SpecError: a place has no URL, or there are too many.
    """
    kinds = list(kinds)
    value = {
        "urls": [url for place in places for url in place.urls(environ)],
        "commands": list(commands),
        "on": kinds,
        "name": name,
        "cluster": cluster,
        "elements": 0 if _ARRAY_TASKS in kinds else elements,
    }
    data = json.dumps(value).encode()
    if len(data) > _MAX_BYTES:
        raise SpecError(
            f"--notify and --notify-cmd have {len(data)} bytes",
            f"the maximum is {_MAX_BYTES}: put a long command into a script",
        )
    return data
