"""Select jobs by state, name, cluster and time of submission."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from clusterjob.core.times import parse_recorded
from clusterjob.errors import UsageError, did_you_mean
from clusterjob.node.verdict import JobState


@dataclass(frozen=True)
class Selection:
    """The jobs that a command is about; an empty field selects all.

    Attributes:
        states: the states, of which a job has one.
        name: shell pattern for the job's name.
        cluster: the cluster's name.
        since: earliest time of submission.
    """

    states: frozenset[JobState] = frozenset()
    name: str = ""
    cluster: str = ""
    since: datetime | None = None

    def fits(self, name: str, cluster: str, *, submitted_at: str) -> bool:
        """Return whether a job in any state is selected."""
        if self.name and not fnmatch.fnmatchcase(name, self.name):
            return False
        if self.cluster and cluster != self.cluster:
            return False
        submitted = None if self.since is None else parse_recorded(submitted_at)
        return self.since is None or (submitted is not None and submitted >= self.since)

    def has_state(self, states: Collection[str]) -> bool:
        """Return whether one of a job's states is selected; an array's elements have several."""
        return not self.states or any(state in self.states for state in states)


def parse_states(texts: Iterable[str]) -> frozenset[JobState]:
    """Return the states that users name: words or prefixes of them, in any case, with commas.

    Raises:
        UsageError: a word is no state, or the beginning of several.
    """
    found = set()
    for word in (word.strip() for text in texts for word in text.split(",")):
        matches = [state for state in JobState if word and state.value.startswith(word.upper())]
        if len(matches) > 1:
            raise UsageError(
                f"--state {word}: it could be {' or '.join(map(str, matches))}", "write more of it"
            )
        if not matches:
            known = ", ".join(state.value for state in JobState)
            raise UsageError(
                f"--state {word!r} is not a state",
                did_you_mean(word.upper(), [state.value for state in JobState], f"use {known}"),
            )
        found.add(matches[0])
    return frozenset(found)
