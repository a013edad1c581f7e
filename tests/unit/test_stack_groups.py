"""Stacks as data: faulthandler's text, py-spy's JSON, groups, headlines, answers of nodes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside_job import ScriptedNodes, record_of
from launching import new_folder

from clusterjob.cli import main
from clusterjob.core.records import Record
from clusterjob.errors import InsideError
from clusterjob.insight import stacks as insight
from clusterjob.node.inside import MARKER
from clusterjob.node.logs.events import EventLog
from clusterjob.node.stacks import collect, grouping
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.system import codec
from clusterjob.node.verdict import JobState

TORCH = "/x/lib/python3.11/site-packages/torch/distributed"
LIBRARY = "/x/lib/python3.11"
MODULE = Frame("/w/train.py", 60, "<module>")
ALL_REDUCE = (
    Frame(f"{TORCH}/distributed_c10d.py", 3252, "all_reduce"),
    Frame(f"{TORCH}/c10d_logger.py", 83, "wrapper"),
    Frame("/w/train.py", 30, "step"),
    MODULE,
)
BROADCAST = (Frame(f"{TORCH}/distributed_c10d.py", 3151, "broadcast"), *ALL_REDUCE[2:])
DECODE = (Frame("/w/data.py", 41, "decode"), MODULE)
LIBRARY_ONLY = (Frame(f"{LIBRARY}/threading.py", 2, "wait"), Frame(f"{LIBRARY}/queue.py", 1, "get"))
LIBRARY_IN_LOAD = (Frame(os.__file__, 1, "wait"), Frame("/x/my data.py", 7, "load"), MODULE)
IMPORTING = (
    Frame("<frozen importlib._bootstrap>", 2, "_load"),
    Frame("/w/a.py", 1, "<module>"),
)


def stack(rank: int, main: Sequence[Frame], state: str = "sleeps (futex_wait)") -> RankStack:
    threads = (ThreadStack("MainThread", tuple(main)),) if main else ()
    return RankStack(rank, rank // 4, "gpu1", 100 + rank, state, bool(main), threads)


# -- parsing ---------------------------------------------------------------------------------------


def test_text_of_faulthandler_is_parsed_with_escapes_and_unknown_lines() -> None:
    text = (
        "Stack (most recent call first):\n"
        '  File "/x/my data.py", line 7 in load\n'
        '  File "/x/gr\\xf6\\u20ac.py", line ??? in gr\\xf6\\xdfe\n'
        "  File ???, line 3 in ???\n"
        "  ...\n"
        '  File "/w.pyz/clusterjob/node/program.py", line 116 in run_as_main\n'
        '  File "/w.pyz/clusterjob/node/launch.py", line 9 in launch\n'
    )
    (main,) = grouping.parse_threads(text)
    assert main == ThreadStack(
        "MainThread",
        (
            Frame("/x/my data.py", 7, "load"),
            Frame("/x/grö€.py", None, "größe"),
            Frame("???", 3, "???"),
        ),
    )


LINES = st.lists(
    st.text(max_size=40)
    | st.sampled_from(
        ["Thread loader", "Stack (most recent call first):", "\\udc80", "\\U0010ffff"]
    )
    | st.builds(
        '  File "{}", line {} in {}'.format,
        st.text(max_size=2000),
        st.integers() | st.just("???"),
        st.text(max_size=2000),
    ),
    max_size=400,
)


@settings(max_examples=150)
@given(lines=LINES)
def test_any_text_gives_bounded_frames(lines: list[str]) -> None:
    found = grouping.parse_threads("\n".join(lines))
    assert len(found) <= grouping.MAX_THREADS
    for thread in found:
        assert len(thread.frames) <= grouping.MAX_FRAMES
        for frame in thread.frames:
            assert len(frame.file) <= grouping.MAX_TEXT
            assert len(frame.function) <= grouping.MAX_TEXT
            assert frame.line is None or 0 <= frame.line < 10**9
    one = RankStack(0, 0, "h", 1, state="sleeps", answered=bool(found), threads=found)
    json.dumps(codec.plain(one)).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["os_thread_id", "thread_name", "frames", "name", "filename", "line"])
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)


@settings(max_examples=150)
@example(text='[{"os_thread_id": Infinity, "thread_name": "main", "frames": []}]')
@given(text=st.text(max_size=200) | JSON.map(json.dumps))
def test_any_output_of_py_spy_gives_stacks_or_nothing(text: str) -> None:
    for thread in collect.parse_py_spy(text, 7):
        assert all(isinstance(frame.file, str) for frame in thread.frames)


def test_main_thread_of_py_spy_is_first_and_native_frames_have_no_line() -> None:
    def frame(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "filename": "/w/a.py", "module": None, "line": 3, **more}

    native = frame("sleep", filename="", module="/lib/libc.so.6", line=40)
    start = frame("0x7fe603a4524a", filename="/lib/libc.so.6", module="/lib/libc.so.6", line=0)
    data = json.dumps(
        [
            {"os_thread_id": 9, "thread_name": "Thread-1", "frames": [frame("Loader.get")]},
            {"os_thread_id": 7, "thread_name": None, "frames": [native, frame("main"), start]},
        ]
    )
    assert collect.parse_py_spy(data, 7) == (
        ThreadStack(
            "MainThread", (Frame("/lib/libc.so.6", None, "sleep"), Frame("/w/a.py", 3, "main"))
        ),
        ThreadStack("Thread-1", (Frame("/w/a.py", 3, "Loader.get"),)),
    )


@pytest.mark.parametrize(
    "hook", ["/lib/clusterjob/node/workers/", "/j/python/clusterjob_hook/"], ids=["forked", "exec"]
)
def test_frames_and_threads_of_the_hook_are_left_out(hook: str) -> None:
    text = f"""\
Thread MainThread
  File "{hook}torch_patches.py", line 188 in timed
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "/w/train.py", line 3 in <module>
Thread loader
  File "/w/data.py", line 3 in get
Thread dumps
  File "{hook}torch_patches.py", line 62 in _serve
  File "/lib/python3.11/threading.py", line 982 in run
"""
    main, loader = grouping.parse_threads(text)
    assert [frame.function for frame in main.frames] == ["all_reduce", "<module>"]
    assert grouping.waits_for_peers(main.frames)
    assert loader == ThreadStack("loader", (Frame("/w/data.py", 3, "get"),))


# -- groups ----------------------------------------------------------------------------------------


def test_headline_of_issue_and_groups_with_smallest_first() -> None:
    stacks = [stack(rank, DECODE if rank == 3 else ALL_REDUCE) for rank in range(8)]
    groups = grouping.group(stacks)
    assert [each.ranks for each in groups] == [(3,), (0, 1, 2, 4, 5, 6, 7)]
    assert grouping.headline(groups) == (
        "7 ranks wait in all_reduce (train.py:30); rank 3 is in decode (data.py:41)"
    )
    data = grouping.to_json("train-1", stacks)
    assert list(data) == ["schema", "id", "ranks", "groups"]
    assert data["groups"][0] == {
        "ranks": [3],
        "frames": [
            {"file": "/w/data.py", "line": 41, "function": "decode"},
            {"file": "/w/train.py", "line": 60, "function": "<module>"},
        ],
        "state": "sleeps (futex_wait)",
    }
    assert list(data["ranks"][0]) == [
        "rank", "node_rank", "host", "pid", "state", "answered", "threads"
    ]  # fmt: skip


def test_ranks_at_different_lines_of_same_wait_are_one_group_and_other_lines_are_not() -> None:
    moved = (Frame(ALL_REDUCE[0].file, 3261, "all_reduce"), *ALL_REDUCE[1:])
    other = (*ALL_REDUCE[:2], Frame("/w/train.py", 31, "step"), MODULE)
    groups = grouping.group([stack(0, ALL_REDUCE), stack(1, moved), stack(2, other)])
    assert [each.ranks for each in groups] == [(2,), (0, 1)]
    assert grouping.headline(groups) == (
        "ranks 0-1 wait in all_reduce (train.py:30); rank 2 waits in all_reduce (train.py:31)"
    )


@pytest.mark.parametrize(
    ("stacks", "headline"),
    [
        ([], "no ranks"),
        ([stack(0, DECODE)], "rank 0 is in decode (data.py:41)"),
        (
            [stack(rank, ALL_REDUCE) for rank in range(8)],
            "all 8 ranks wait in all_reduce (train.py:30)",
        ),
        (
            [stack(0, ALL_REDUCE), stack(1, BROADCAST), stack(2, ALL_REDUCE)],
            "ranks 0, 2 wait in all_reduce (train.py:30); rank 1 waits in broadcast (train.py:30)",
        ),
        (
            [stack(0, DECODE), stack(1, (), "is stopped"), stack(2, (), "is stopped")],
            "ranks 1-2 do not answer: the process is stopped; rank 0 is in decode (data.py:41)",
        ),
        (
            [stack(0, DECODE), stack(1, DECODE, "is stopped (do_signal_stop)")],
            "rank 0 is in decode (data.py:41); rank 1 is stopped in decode (data.py:41)",
        ),
        ([stack(0, IMPORTING)], "rank 0 imports in <module> (a.py:1)"),
        ([stack(0, LIBRARY_ONLY)], "rank 0 waits in queue.get (threading.py:2)"),
        ([stack(0, LIBRARY_IN_LOAD)], "rank 0 is in load (my data.py:7)"),
    ],
    ids=["none", "one", "all", "two", "silent", "stopped", "importing", "library", "in library"],
)
def test_headline_names_what_each_group_does(stacks: list[RankStack], headline: str) -> None:
    assert grouping.headline(grouping.group(stacks)) == headline


def test_headline_of_many_groups_counts_the_others() -> None:
    many = [stack(rank, (Frame("/w/a.py", rank, "f"),)) for rank in range(9)]
    assert grouping.headline(grouping.group(many)).endswith("; 5 more ranks are elsewhere")


@pytest.mark.parametrize(
    ("innermost", "name"),
    [
        ("threading.py wait, queue.py get", "queue.get"),
        ("selectors.py select, multiprocessing/connection.py wait", "connection.wait"),
        ("subprocess.py _try_wait, subprocess.py run", "subprocess.run"),
        ("threading.py wait, TORCH/utils/data/dataloader.py __next__", "DataLoader"),
        ("DISTRIBUTED _new, DISTRIBUTED barrier", "barrier"),
        ("multiprocessing/queues.py Queue.get", "queues.get"),
        ("json/decoder.py decode, TORCH/utils/data/dataloader.py __next__", None),
    ],
)
def test_known_waits_are_named(innermost: str, name: str | None) -> None:
    text = innermost.replace("DISTRIBUTED", "TORCH/distributed/distributed_c10d.py")
    words = (each.split() for each in text.replace("TORCH", "site-packages/torch").split(", "))
    found = grouping.find_wait(
        [*(Frame(f"{LIBRARY}/{file}", 1, each) for file, each in words), MODULE]
    )
    assert (found[0] if found else None) == name


def test_own_file_with_name_of_library_is_no_wait() -> None:
    assert grouping.find_wait([Frame("/home/me/queue.py", 3, "get")]) is None


def test_directories_of_hosts_do_not_separate_groups() -> None:
    there = [Frame(frame.file.replace("/w/", "/home/me/w/"), 41, "f") for frame in DECODE]
    here = [Frame(frame.file, 41, "f") for frame in DECODE]
    assert len(grouping.group([stack(0, here), stack(1, there)])) == 1


def test_native_addresses_do_not_separate_groups() -> None:
    both = [
        stack(rank, (Frame("/lib/libc.so.6", None, f"0x7f{rank}"), *DECODE)) for rank in range(2)
    ]
    assert len(grouping.group(both)) == 1
    assert grouping.headline(grouping.group(both)) == "all 2 ranks are in decode (data.py:41)"


FRAMES = st.builds(
    Frame,
    st.text(max_size=20) | st.sampled_from([ALL_REDUCE[0].file, f"{LIBRARY}/queue.py"]),
    st.none() | st.integers(0, 99),
    st.text(max_size=20) | st.sampled_from(["all_reduce", "get"]),
)


@settings(max_examples=100)
@given(mains=st.lists(st.lists(FRAMES, max_size=5), max_size=12))
def test_any_stacks_give_groups_of_all_ranks_and_lines(mains: list[list[Frame]]) -> None:
    stacks = [stack(rank, main) for rank, main in enumerate(mains)]
    groups = grouping.group(stacks)
    assert sorted(rank for each in groups for rank in each.ranks) == list(range(len(mains)))
    sizes = [len(each.ranks) for each in groups]
    assert sizes == sorted(sizes)
    assert "\n" not in grouping.headline(groups) or any(
        "\n" in frame.function + frame.file for main in mains for frame in main
    )
    grouping.text(stacks, all_threads=True)


def test_frames_of_import_machinery_are_hidden() -> None:
    frozen = Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
    inner = Frame("/v/lib/python3.11/site-packages/torch/distributed/tensor/_ops.py", 80, "wrap")
    own = Frame("/w/model.py", 257, "configure")
    hook = Frame("/j/python/sitecustomize.py", 69, "_Finder.find_spec.<locals>.exec_module")
    first, *lines = grouping.text([stack(0, [inner, frozen, hook, frozen, own])])
    assert first == "rank 0 imports in configure (model.py:257)"
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["wrap", "configure"]


def test_text_shows_all_threads_of_smallest_group_alone() -> None:
    def with_loader(rank: int, main: Sequence[Frame]) -> RankStack:
        loader = ThreadStack("loader", (Frame("/w/data.py", 9, "read"),))
        return RankStack(
            rank, 0, "gpu1", 1, "sleeps", True, (ThreadStack("MainThread", tuple(main)), loader)
        )

    stacks = [with_loader(0, DECODE), with_loader(1, ALL_REDUCE), with_loader(2, ALL_REDUCE)]
    lines = grouping.text(stacks)
    assert (
        lines[0] == "ranks 1-2 wait in all_reduce (train.py:30); rank 0 is in decode (data.py:41)"
    )
    assert lines[2] == "rank 0 (node 0, gpu1, pid 1: sleeps)"
    assert lines[3] == "  decode (/w/data.py:41)"
    assert sum("read (/w/data.py:9)" in line for line in lines) == 1
    every = grouping.text(stacks, all_threads=True)
    assert sum("read (/w/data.py:9)" in line for line in every) == 3
    assert "  loader of rank 2:" in every


# -- answers of nodes ------------------------------------------------------------------------------


MakeRecord = Callable[..., Record]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRecord:
    return functools.partial(record_of, tmp_path, monkeypatch)


def running(*answers: bytes | None) -> ScriptedNodes:
    return ScriptedNodes(JobState.RUNNING, answers.__getitem__)


def node_answer(data: bytes, host: str = "gpu1") -> bytes:
    """Return what a node sends: its answer, whose object lacks the host."""
    return b"a login's text\n" + MARKER + data.replace(b"{", b'{"host": "%s", ' % host.encode(), 1)


def ranks_json(ranks: Sequence[int], **more: Any) -> bytes:
    found = [codec.plain(stack(rank, ALL_REDUCE)) | more for rank in ranks]
    return json.dumps({"ranks": found, "warnings": []}).encode()


def ask(made: Record, **options: Any) -> insight.JobStacks:
    return insight.of_job(made, **{"node": None, "rank": None, "native": False} | options)


def test_nodes_that_answer_are_shown_and_other_is_named(
    record: MakeRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    made = record(running(node_answer(ranks_json([0, 1])), None))
    found = ask(made)
    assert [each.rank for each in found.stacks] == [0, 1]
    assert found.errors == ["node 1: gpu1: no route to host"]
    assert main(["stacks", "t-1", "--json"]) == 255
    out, err = capsys.readouterr()
    assert [each["rank"] for each in json.loads(out)["ranks"]] == [0, 1]
    assert err == "clusterjob: node 1: gpu1: no route to host\n"


def test_job_whose_nodes_do_not_answer_is_one_error(record: MakeRecord) -> None:
    with pytest.raises(InsideError, match="node 0: gpu0: no route to host"):
        ask(record(running(None, None)))


def test_node_speaks_for_itself_alone_and_not_for_256_ranks(record: MakeRecord) -> None:
    forged = node_answer(ranks_json([0, 4], node_rank=1, host="gpu9"), host="gpu7")
    ranks = [codec.plain(stack(rank, ())) for rank in range(257)]
    many = node_answer(json.dumps({"ranks": ranks, "warnings": []}).encode())
    found = ask(record(running(forged, many)))
    assert {(each.node_rank, each.host) for each in found.stacks} == {(0, "gpu7")}
    assert found.errors == ["node 1: it sends too many ranks"]


def test_two_nodes_that_answer_for_one_rank_are_named(record: MakeRecord) -> None:
    forged = node_answer(ranks_json([0, 4]))
    found = ask(record(running(forged, node_answer(ranks_json([4, 5])))))
    assert [each.rank for each in found.stacks] == [0, 4, 5]
    assert found.warnings == ["nodes 0 and 1 both answer for rank 4: one of them is wrong"]


@settings(max_examples=60)
@given(
    data=st.binary(max_size=100)
    | JSON.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps({"ranks": [value], "warnings": [value]}).encode())
)
def test_any_answer_of_node_is_shown_or_one_error(data: bytes) -> None:
    made = Record(
        "t-1", "t", cluster="none", backend="none", job_dir=Path("/nonexistent"), nodes=1,
        submitted_at="", spec={},
    )  # fmt: skip
    backend = running(node_answer(data))
    with contextlib.suppress(InsideError):
        answer = insight._of_node(made, backend, node=0, rank=None, native=False)
        assert all(isinstance(each, RankStack) for each in answer.ranks)


def test_foreign_text_is_shown_without_control_characters(
    record: MakeRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = (Frame("/w/\x1b[2Ja.py", 1, "f\x1b]0;x\x07\ng"),)
    answer = {"ranks": [codec.plain(stack(0, hostile, "\x1b[31m"))], "warnings": ["\x1b[0m"]}
    record(running(node_answer(json.dumps(answer).encode())), nodes=1)
    for words in ([], ["--json"]):
        assert main(["stacks", "t-1", *words]) == 0
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "\x07" not in out + err


# -- jobs that do not run --------------------------------------------------------------------------


def save(made: Record, node: int, name: str, data: Any) -> None:
    directory = new_folder(made.job_dir / "logs" / f"node{node}")
    text = data if isinstance(data, str) else json.dumps(data)
    (directory / name).write_text(text)


def saved_json(ranks: Sequence[int], **more: Any) -> dict[str, Any]:
    return grouping.to_json("t-1", [stack(rank, DECODE) for rank in ranks]) | more


def test_last_saved_stacks_of_ended_job_are_shown(
    record: MakeRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    made = record(ScriptedNodes(JobState.FAILED))
    assert main(["stacks", "t-1"]) == 255
    assert "job t-1 has ended: FAILED" in capsys.readouterr().err
    save(made, 0, "stacks.json", saved_json([0]))
    save(made, 0, "stacks.restart1.json", saved_json([0, 1], why="hang", time="2026-01-01"))
    save(made, 1, "stacks.restart1.json", saved_json([1, 4]))
    save(made, 1, "stacks.restart9.txt", "text")
    assert main(["stacks", "t-1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [each["rank"] for each in json.loads(out)["ranks"]] == [0, 1, 4]
    assert err.startswith("clusterjob: job t-1 has ended: FAILED; these stacks were saved in ")
    assert err.endswith(": hang, 2026-01-01\n")
    assert [each.rank for each in ask(made, rank=4).stacks] == [4]


def test_saved_stacks_of_node_are_its_own_and_of_a_round_that_was_started(
    record: MakeRecord,
) -> None:
    made = record(ScriptedNodes(JobState.FAILED))
    save(made, 0, "stacks.json", saved_json([0, 4]))
    save(made, 1, "stacks.json", saved_json([1, 5]))
    save(made, 1, "stacks.attempt9.json", saved_json([5]))
    EventLog(made.job_dir / "events.jsonl").add("started", attempt=0, restart=0)
    assert [each.rank for each in ask(made).stacks] == [0, 4, 5]


@pytest.mark.parametrize(
    "data", ["", "{", "[]", '{"ranks": 3}', json.dumps(saved_json([0]))[:-30], "[" * 100_000]
)
def test_malformed_file_is_one_line_and_other_files_are_shown(
    record: MakeRecord, data: str
) -> None:
    made = record(ScriptedNodes(JobState.FAILED))
    save(made, 0, "stacks.json", data)
    with pytest.raises(InsideError, match="has ended"):
        ask(made)
    save(made, 1, "stacks.json", saved_json([4]))
    found = ask(made)
    assert [each.rank for each in found.stacks] == [4]
    assert [line.endswith("stacks.json is malformed") for line in found.warnings] == [True]
