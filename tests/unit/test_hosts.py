"""Parsing of host lists and host files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterjob.core.hosts import MOST, Host, of_platform, parse_hosts, read_hostfile
from clusterjob.errors import SpecError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a", ["a"]),
        ("a,b[1-4],user@c:2222", ["a", "b1", "b2", "b3", "b4", "user@c:2222"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[3,1]x, m[2-3]", ["n3x", "n1x", "m2", "m3"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("root@n[1-2]:22", ["root@n1:22", "root@n2:22"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        (
            "2001:db8::1,[2001:db8::2]:2222,me@[fe80::1%eth0]:22",
            ["2001:db8::1", "[2001:db8::2]:2222", "me@[fe80::1%eth0]:22"],
        ),
        ("ssh://me@a:22", ["me@a:22"]),
        ("me@site.org@a", ["me@site.org@a"]),
        ("b,a,b", ["b", "a", "b"]),
    ],
)
def test_host_list_is_expanded_in_order(text: str, wanted: list[str]) -> None:
    assert [str(host) for host in parse_hosts(text)] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "a[1-2",
        "a]1",
        "a[x]",
        "a[2-1]",
        "a[1-99999]",
        "-oProxyCommand=x",
        "a:0",
        "a:99999",
        "a:b",
        "me@",
        "@a",
        "a;b",
        "a$(b)",
        "-l@a",
        "a/b",
        "a\nb c'd",
        "user@-a",
        "$(id)@a",
        "`id`@a",
        "a;b@c",
        "a|b@c",
        "a&b@c",
        "a>b@c",
        "a*@c",
        "{a}@c",
        "$HOME@c",
        "a(b)@c",
        "~root@c",
        "#a@b",
        "n[1-99][1-99]",
        "a[[1]]",
        "ü:1:2x",
    ],
)
def test_wrong_host_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_hosts(text)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@given(st.text(alphabet="ab1-9[],:@. -\n%", max_size=20))
@example("[:]")
@example("me@a:22")
def test_any_text_gives_hosts_or_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        hosts = parse_hosts(text)
        assert 0 < len(hosts) <= MOST
        assert not any(host.name.startswith("-") for host in hosts)
        assert [parse_hosts(str(host)) for host in hosts] == [(host,) for host in hosts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (f"gpu1\n{line}\n".encode(), "line 2: ")
            for line in ("gpu2 slots", "gpu2 slots=x", "gpu2 8", "gpu2 slots=0", "[", "gpu2;rm")
        ),
        (b"# nobody\n", "names no host"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_wrong_host_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_hostfile(path)
    assert str(path) in caught.value.message


def write(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gpu1\ngpu2\n", [("gpu1", None), ("gpu2", None)]),
        ("# two\ngpu1 slots=8\ngpu2 slots=4 max_slots=8 # old\n\n", [("gpu1", 8), ("gpu2", 4)]),
        ("n[01-02] slots=2", [("n01", 2), ("n02", 2)]),
        ("a,b\n", [("a", None), ("b", None)]),
        ('"10.0.0.1 slots=8"\n"10.0.0.2" slots="8"\n', [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("\r\ngpu1 slots=8\r\n", [("gpu1", 8)]),
        ("me@gpu1:2222", [("me@gpu1:2222", None)]),
    ],
)
def test_host_file_gives_hosts_and_slots(
    tmp_path: Path, text: str, wanted: list[tuple[str, int | None]]
) -> None:
    assert [(str(host), host.slots) for host in read_hostfile(write(tmp_path, text))] == wanted


@pytest.mark.parametrize("text", ["gpu1:8", "me@gpu1:1", "gpu1:22,gpu2:128"])
def test_number_of_workers_as_port_is_refused(tmp_path: Path, text: str) -> None:
    """Hydra and Horovod write HOST:WORKERS."""
    for parse in (parse_hosts, lambda text: read_hostfile(write(tmp_path, text))):
        with pytest.raises(SpecError, match=r"'(me@)?gpu\d:\d+' means port \d+ of gpu\d") as caught:
            parse(text)
        assert "slots=" in caught.value.hint


def test_host_file_and_port_of_mlp_mpi_task_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "10.0.0.1 slots=8\n10.0.0.2:2200 slots=8\n")
    environ = {"MLP_MPI_HOSTFILE": f'"{path}"', "MLP_SSH_PORT": "'2222'"}
    assert of_platform(environ) == (
        Host("10.0.0.1", None, port=2222, slots=8),
        Host("10.0.0.2", None, port=2200, slots=8),
    )
    assert of_platform({"MLP_MPI_HOSTFILE": str(path)})[0].port is None
    assert of_platform({}) == ()
    with pytest.raises(SpecError, match="MLP_SSH_PORT"):
        of_platform({**environ, "MLP_SSH_PORT": "many"})
