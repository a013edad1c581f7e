"""Which part of a split job may go on: at most one, whatever its nodes know."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Set
from itertools import chain, combinations, product

import pytest

from clusterjob.node.rendezvous.messages import Members
from clusterjob.node.rendezvous.succession import may_go_on
from clusterjob.node.system import processes

ALL = frozenset(range(5))


def subsets(nodes: Set[int]) -> Iterator[frozenset[int]]:
    sizes = range(len(nodes) + 1)
    return map(frozenset, chain.from_iterable(combinations(nodes, size) for size in sizes))


@pytest.mark.parametrize(
    ("members", "present", "expected"),
    [
        ({0, 1, 2}, {1, 2}, True),
        ({0, 1, 2}, {0}, False),
        ({0, 1}, {0}, True),
        ({0, 1}, {1}, False),
        ({0, 1, 2, 3}, {0, 3}, True),
        ({0, 1, 2, 3}, {1, 2}, False),
        ({0, 1}, {1, 2, 3}, False),  # nodes that were no members count for nothing
    ],
)
def test_part_of_a_job_goes_on_only_if_no_other_can(
    members: Set[int], present: Set[int], *, expected: bool
) -> None:
    assert may_go_on([Members(tuple(members), 0)], present) is expected


def test_two_parts_never_both_go_on() -> None:
    for members in map(frozenset, subsets(ALL)):
        group = [Members(tuple(members), min(members, default=0))]
        for part in subsets(ALL):
            assert not (may_go_on(group, part) and may_go_on(group, ALL - part))


def test_two_parts_never_both_go_on_while_a_new_round_is_not_seen_by_all() -> None:
    """Some nodes of a new round know only the last one, others know whether all have seen it."""
    last = Members(tuple(ALL), 0)
    for members in subsets(ALL):
        if not members or not may_go_on([last], members):
            continue
        for coordinator, seen in product(members, subsets(members)):
            new = Members(tuple(members), coordinator)
            knows = [[last, new], *([[new]] if seen == members else [])]
            for part in subsets(ALL):
                rest = ALL - part
                old = may_go_on([last], rest - seen)  # nodes that have seen it do not count
                for mine in knows:
                    if part & seen and may_go_on(mine, part):
                        assert not old
                        assert not any(may_go_on(theirs, rest) for theirs in knows if rest & seen)


def test_process_has_ended_only_if_this_machine_shows_it() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = processes.identity(child.pid)
    assert not processes.has_ended(identity)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert processes.has_ended(identity)
    assert not processes.has_ended("another-boot " + identity)
