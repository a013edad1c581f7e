"""Notes in shared memory: the progress of the console is kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from launching import new_folder
from written_job import lines_of

from clusterjob.node.logs.console import LineWriter
from clusterjob.node.logs.log_files import LogReader, Timeline, node_directory
from clusterjob.node.system.processes import SharedNote


def test_note_outlives_the_child_that_wrote_it() -> None:
    note = SharedNote(1000)
    assert note.read() == {}
    for value in range(3):
        child = os.fork()
        if child == 0:
            note.write({"value": value, "before": note.read().get("value")})
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert note.read() == {"value": value, "before": value - 1 if value else None}


def test_value_that_was_half_written_leaves_the_one_before() -> None:
    note = SharedNote(1000)
    for value in range(5):
        note.write({"value": value})
        whole = bytes(note._memory[:])
        note.write({"value": "next", "long": "x" * 100})
        torn = bytes(note._memory[:])
        changed = [place for place in range(len(whole)) if whole[place] != torn[place]]
        for cut in changed[
            :: max(1, len(changed) // 20)
        ]:  # the first bytes of the next value are there; its number is written last
            note._memory[:] = whole[:1] + torn[1:cut] + whole[max(1, cut) :]
            assert note.read() == {"value": value}
        note._memory[:] = whole


def test_value_that_is_too_long_is_not_written() -> None:
    note = SharedNote(100)
    note.write({"value": 1})
    note.write({"value": "x" * 100})
    assert note.read() == {"value": 1}


def test_reader_continues_at_the_positions_of_another(tmp_path: Path) -> None:
    directory = new_folder(node_directory(tmp_path, 0))
    log = directory / "rank0.out"
    log.write_bytes(b"one\ntwo\nunfin")
    Timeline(directory).note()
    first = LogReader(tmp_path, node=0)
    assert [line.text for line in lines_of(first)] == ["one", "two"]
    positions = json.loads(json.dumps(first.positions()))
    with log.open("ab") as stream:
        stream.write(b"ished\nfour\n")
    Timeline(directory).note()  # that of the next agent, which begins again
    second = LogReader(tmp_path, node=0)
    second.continue_at(positions)
    assert [line.text for line in lines_of(second, end=True)] == ["unfinished", "four"]


def test_numbers_of_lines_go_on() -> None:
    first = LineWriter()
    first.message("a\nb")
    assert LineWriter(first.next).message("c") == "3 clusterjob: c\n"
