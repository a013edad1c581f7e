"""Expansion of Slurm host lists: order, leading zeros, and limits for hostile lists."""

from __future__ import annotations

import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterjob.errors import PlacementError
from clusterjob.node.system.ranges import expand_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1,3]x,m[2-4]", ["n1x", "n3x", "m2", "m3", "m4"]),
        ("gpu-[1-2]-[01-02]", ["gpu-1-01", "gpu-1-02", "gpu-2-01", "gpu-2-02"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("a[01-03,7],b-[1-2]-ib", ["a01", "a02", "a03", "a7", "b-1-ib", "b-2-ib"]),
        ("b2,b1,b[3,1]", ["b2", "b1", "b3", "b1"]),
        ("a[09-11],a[099-101]", ["a09", "a10", "a11", "a099", "a100", "a101"]),
        ("a[1-2][1-2]", ["a11", "a12", "a21", "a22"]),
        ("a[1-2]b[3]c[5-6]d", ["a1b3c5d", "a1b3c6d", "a2b3c5d", "a2b3c6d"]),
        ("[1-3]", ["1", "2", "3"]),
        (" a ,,b\tc\n", ["a", "b", "c"]),
        ("node.example.org,10.0.0.1,user@host", ["node.example.org", "10.0.0.1", "user@host"]),
        ("", []),
    ],
)
def test_host_list_is_expanded_in_written_order(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "a[1-2",
        "a]",
        "a[1-2]]",
        "a[[1-2]]",
        "a[3-1]",
        "a[]",
        "a[b]",
        "a[1,,2]",
        "a[-3]",
        "a[1-]",
        "a[1 - 2]",
        "a[١-٣]",
        "a[1-2-3]",
        "a;b",
        "$(id)",
        "a'b",
        'a"b',
        "a`b`",
        "a|b",
        "a\\b",
        "a\x00b",
        "../b",
    ],
)
def test_wrong_host_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        expand_hostlist(text)
    assert "is not a list of hosts" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "a[0-65536]",
        "a[0-99999999999999999]",
        "a[0-999][0-999]",
        "[0-9]" * 9,
        "a[0-65535],b",
        ",".join(["a[1-1000]"] * 66),
        "x" * 5000 + "[1-65536]",
        "a[" + "0" * 300 + "1-2]",
        "a[1-9]" + "y" * 300,
        "[" * 100000,
        "a[0-1]" * 1000,
        "a[0-65535]" + "[000000000000000001]" * 200,
        "x" * (1 << 23),
    ],
)
def test_hostile_host_list_is_refused_with_little_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PlacementError):
            expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_host_list_of_65536_names_is_accepted() -> None:
    assert len(expand_hostlist("a[0-65535]")) == 65536


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    return path


def _ranges() -> st.SearchStrategy[str]:
    padded = st.tuples(st.integers(0, 120), st.integers(1, 4)).map(
        lambda pair: f"{pair[0]:0{pair[1]}d}"
    )
    spans = st.tuples(padded, st.integers(0, 12)).map(
        lambda pair: f"{pair[0]}-{int(pair[0]) + pair[1]}"
    )
    return st.lists(padded | spans, min_size=1, max_size=4).map(
        lambda parts: f"[{','.join(parts)}]"
    )


_stems = st.text("abz-", min_size=1, max_size=3).map(lambda text: f"n{text}")
_items = st.one_of(
    _stems,
    st.tuples(_stems, _ranges()).map("".join),
    st.tuples(_stems, _ranges(), _stems, _ranges()).map("".join),
)  # the syntax that Slurm 22.05 supports


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(_items, min_size=1, max_size=4))
def test_expansion_equals_scontrol_output(slurm_conf: Path, items: list[str]) -> None:
    text = ",".join(items)
    environ = os.environ | {"SLURM_CONF": str(slurm_conf)}
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert expand_hostlist(text) == shown.stdout.split()


@given(st.text("ab[],-0129 ", max_size=40))
def test_any_text_gives_names_or_error(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except PlacementError:
        return
    assert all(name and not set(name) & set("[], ") for name in names)
