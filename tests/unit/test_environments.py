"""From variables to a place: pure, total, and honest about what contradicts itself."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import PlaceError
from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import detect
from clusterjob.node.environments.topology import Topology, Worker

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OURS = {
    "CLUSTERJOB_NNODES": "3", "CLUSTERJOB_NODE_RANK": "2", "CLUSTERJOB_NPROC_PER_NODE": "8",
    "CLUSTERJOB_MASTER_ADDR": "n0", "CLUSTERJOB_MASTER_PORT": "2222",
}  # fmt: skip


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# -- nothing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "", "LOCAL_RANK": "", "CLUSTERJOB_NNODES": ""},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "h"},
    ],
)
def test_an_environment_that_names_no_job_is_sound(environ: dict[str, str]) -> None:
    finding = detect(environ)
    assert (finding.source, finding.place, finding.level, finding.sound) == (
        "none",
        None,
        "none",
        True,
    )
    assert finding.check() is finding


# -- the torch family --------------------------------------------------------------------------------------------------------


def test_a_process_of_torchrun() -> None:
    finding = detect(TORCHRUN)
    assert finding.place == Worker(
        Topology(
            2, 1, nproc_per_node=4, master_addr="10.0.0.1", master_port=29500, source="torchrun"
        ),
        5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
    )
    assert (finding.source, finding.level, finding.conflicts) == ("torchrun", "worker", ())
    assert finding.evidence == {
        "rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK",
        "nnodes": "GROUP_WORLD_SIZE", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT",
    }  # fmt: skip


def test_a_process_whose_launcher_is_unknown() -> None:
    assert detect(without(TORCHRUN, "TORCHELASTIC_RUN_ID")).source == "env"


@pytest.mark.parametrize(("local_rank", "nproc", "first"), [(0, 4, 0), (3, 4, 4), (0, 1, 4)])
def test_our_own_agent_s_variables_give_the_worker_that_it_meant(
    local_rank: int, nproc: int, first: int
) -> None:
    world = World(
        0,
        "10.0.0.1",
        master_port=4321,
        agent_store=True,
        node_rank=1,
        nnodes=2,
        nproc=nproc,
        first_rank=first,
        world_size=8,
    )
    environ = contract.worker_variables(world, local_rank, job_id="job", max_restarts=3)
    environ |= {contract.JOB_ID: "job", contract.REPORT_FD: "5:77"}
    finding = detect(environ)
    assert finding.source == "clusterjob"
    assert finding.place == Worker(
        Topology(
            2,
            1,
            nproc_per_node=nproc,
            master_addr="10.0.0.1",
            master_port=4321,
            source="clusterjob",
        ),
        first + local_rank,
        local_rank=local_rank,
        world_size=8,
        local_world_size=nproc,
    )


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_half_set_process_is_refused_and_the_missing_variable_named(missing: str) -> None:
    for environ in (without(TORCHRUN, missing), TORCHRUN | {missing: "  "}):
        finding = detect(environ)
        assert (finding.place, finding.level, finding.sound) == (None, "none", False)
        with pytest.raises(PlaceError, match=f"{missing} is not set"):
            finding.check()


def test_rank_without_local_rank_counts_nodes_unless_something_else_says_that_it_is_a_process_s() -> (
    None
):
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert detect(alone).level == "node"
    for variable in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        assert "LOCAL_RANK is not set" in "; ".join(detect(alone | {variable: "1"}).conflicts)


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_PORT",
    ],
)
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "0x1", "1_0", "²", "٣", "4 4", "+1"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    finding = detect(TORCHRUN | {name: value})
    assert finding.place is None
    assert f"{name}={value!r} is not a whole number" in "; ".join(finding.conflicts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "8"}, "rank is 8"),
        ({"LOCAL_RANK": "4"}, "local_rank is 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "local_world_size is 9"),
        ({"GROUP_RANK": "2"}, "node_rank is 2"),
        ({"MASTER_PORT": "0"}, "master_port is 0"),
        ({"WORLD_SIZE": "0"}, "0"),
    ],
)
def test_what_is_impossible_together_is_named(change: dict[str, str], words: str) -> None:
    finding = detect(TORCHRUN | change)
    assert finding.place is None
    assert words in "; ".join(finding.conflicts)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:29500", "h\x1b[31m", "\udcff", "a b", "[]"])
@pytest.mark.parametrize(
    ("environ", "name"), [(TORCHRUN, "MASTER_ADDR"), (OURS, "CLUSTERJOB_MASTER_ADDR")]
)
def test_a_master_that_is_no_host_is_refused(
    environ: dict[str, str], name: str, address: str
) -> None:
    assert f"{name}={address!r} is no host" in "; ".join(
        detect(environ | {name: address}).conflicts
    )


def test_a_master_s_ipv6_address_may_have_brackets() -> None:
    place = detect(TORCHRUN | {"MASTER_ADDR": "[fd00::1]"}).place
    assert isinstance(place, Worker)
    assert place.topology.master_addr == "fd00::1"


def test_the_node_is_worked_out_where_no_variable_gives_it() -> None:
    finding = detect(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert finding.place == Worker(
        Topology(
            2, 1, nproc_per_node=4, master_addr="10.0.0.1", master_port=29500, source="torchrun"
        ),
        5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
    )
    assert "node_rank" not in finding.evidence


def test_one_node_where_nothing_speaks_of_more() -> None:
    finding = detect(
        without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
        | {"LOCAL_RANK": "5"}
    )
    assert finding.place == Worker(
        Topology(
            1, 0, nproc_per_node=8, master_addr="10.0.0.1", master_port=29500, source="torchrun"
        ),
        5,
        local_rank=5,
        world_size=8,
        local_world_size=8,
    )


def test_white_space_around_a_value_is_no_part_of_it() -> None:
    assert (
        detect({name: f" {value}\n" for name, value in TORCHRUN.items()}).place
        == detect(TORCHRUN).place
    )


# -- our own family ----------------------------------------------------------------------------------------------------------


def test_a_node_of_ours() -> None:
    finding = detect(OURS)
    assert finding.place == Topology(
        3, 2, nproc_per_node=8, master_addr="n0", master_port=2222, source="clusterjob"
    )
    assert (finding.source, finding.level) == ("clusterjob", "node")
    assert finding.evidence == {
        "nnodes": "CLUSTERJOB_NNODES", "node_rank": "CLUSTERJOB_NODE_RANK",
        "nproc_per_node": "CLUSTERJOB_NPROC_PER_NODE", "master_addr": "CLUSTERJOB_MASTER_ADDR",
        "master_port": "CLUSTERJOB_MASTER_PORT",
    }  # fmt: skip


def test_a_node_of_ours_may_leave_open_what_the_agent_decides() -> None:
    assert detect(
        without(OURS, "CLUSTERJOB_NPROC_PER_NODE", "CLUSTERJOB_MASTER_PORT")
    ).place == Topology(
        3, 2, nproc_per_node=None, master_addr="n0", master_port=None, source="clusterjob"
    )


def test_several_nodes_never_meet_at_a_default() -> None:
    finding = detect(without(OURS, "CLUSTERJOB_MASTER_ADDR"))
    assert finding.place is None
    assert "CLUSTERJOB_MASTER_ADDR is not set" in "; ".join(finding.conflicts)


def test_a_single_node_needs_no_address() -> None:
    assert detect({"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"}).place == Topology(
        1, 0, nproc_per_node=None, master_addr="127.0.0.1", master_port=None, source="clusterjob"
    )


@pytest.mark.parametrize("missing", ["CLUSTERJOB_NNODES", "CLUSTERJOB_NODE_RANK"])
def test_a_half_set_node_is_refused(missing: str) -> None:
    with pytest.raises(PlaceError, match=f"{missing} is not set"):
        detect(without(OURS, missing)).check()


def test_an_impossible_node_is_named() -> None:
    assert "node_rank is 3, outside 0..2" in "; ".join(
        detect(OURS | {"CLUSTERJOB_NODE_RANK": "3"}).conflicts
    )


# -- both --------------------------------------------------------------------------------------------------------------------


def test_a_worker_s_own_variables_come_before_its_node_s() -> None:
    finding = detect(OURS | TORCHRUN)
    assert finding.level == "worker"
    assert {item.variable for item in finding.ignored} == {
        "CLUSTERJOB_NNODES",
        "CLUSTERJOB_NODE_RANK",
        "CLUSTERJOB_MASTER_ADDR",
        "CLUSTERJOB_MASTER_PORT",
        "CLUSTERJOB_NPROC_PER_NODE",
    }
    assert all(item.why for item in finding.ignored)


def test_a_half_set_worker_does_not_fall_back_to_its_node() -> None:
    assert not detect(OURS | without(TORCHRUN, "WORLD_SIZE")).sound


# -- whatever the variables hold -------------------------------------------------------------------------------------------

NAMES = [
    *TORCHRUN,
    *OURS,
    "CLUSTERJOB_JOB_ID",
    "CLUSTERJOB_REPORT_FD",
    "TORCHELASTIC_RESTART_COUNT",
]
values = (
    st.integers(-1, 9).map(str)
    | st.sampled_from(["", " ", "h", "65536", "99999999999999999999", "١", "a b", '"2"'])
    | st.text(max_size=4)
)
environs = st.dictionaries(st.sampled_from(NAMES), values)


def facts(place: Any) -> None:
    """What is true of every place, whatever it was read from."""
    node = place.topology if isinstance(place, Worker) else place
    assert 0 <= node.node_rank < node.nnodes
    assert node.master_addr
    assert node.master_port is None or 0 < node.master_port < 65536
    if isinstance(place, Worker):
        assert 0 <= place.rank < place.world_size
        assert 0 <= place.local_rank < place.local_world_size <= place.world_size


@given(environs)
def test_any_mapping_gives_a_sound_place_or_its_conflicts(environ: dict[str, str]) -> None:
    kept = dict(environ)
    finding = detect(types.MappingProxyType(environ))
    assert environ == kept
    assert detect(environ) == finding
    assert not (finding.place is not None and finding.conflicts)
    assert all(environ[variable].strip() for variable in finding.evidence.values())
    if finding.place is not None:
        facts(finding.place)
        assert finding.check() is finding
    elif finding.source != "none":
        with pytest.raises(PlaceError):
            finding.check()
    assert (
        finding.level
        == {Worker: "worker", Topology: "node", type(None): "none"}[type(finding.place)]
    )


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_number_that_python_refuses_to_read_is_a_conflict(name: str) -> None:
    assert not detect(TORCHRUN | {name: "1" * 5000}).sound


@given(environs)
def test_variables_of_others_change_nothing(environ: dict[str, str]) -> None:
    assert detect(environ | {"HOME": "/", "MY_RANK": "7", "LD_PRELOAD": "x"}) == detect(environ)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 9))
def test_every_rank_of_every_world_is_found_again(sizes: list[int], restart: int) -> None:
    seen = []
    first = 0
    for node_rank, nproc in enumerate(sizes):
        world = World(
            restart,
            "h",
            master_port=1234,
            agent_store=False,
            node_rank=node_rank,
            nnodes=len(sizes),
            nproc=nproc,
            first_rank=first,
            world_size=sum(sizes),
        )
        for local_rank in range(nproc):
            place = detect(
                contract.worker_variables(world, local_rank, job_id="job", max_restarts=9)
            ).place
            assert isinstance(place, Worker)
            assert (
                place.topology.node_rank,
                place.topology.nnodes,
                place.local_rank,
                place.local_world_size,
            ) == (
                node_rank,
                len(sizes),
                local_rank,
                nproc,
            )
            seen.append(place.rank)
        first += nproc
    assert seen == list(range(sum(sizes)))


def test_more_than_one_node_of_unknown_size_is_refused() -> None:
    """RANK=9 with LOCAL_RANK=1 is no world of one node, whatever else is not set."""
    environ = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    found = detect(environ)
    assert found.place is None
    assert any("LOCAL_WORLD_SIZE" in conflict for conflict in found.conflicts)
    assert detect(environ | {"LOCAL_WORLD_SIZE": "8"}).place is not None
    assert detect(environ | {"RANK": "1"}).place is not None
