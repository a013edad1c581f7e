"""Sizes and durations: accepted and refused texts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterjob.core.units import (
    exact_duration,
    exact_size,
    parse_duration,
    parse_signal,
    parse_size,
    show_size,
)
from clusterjob.errors import SpecError

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64G", 64 * GIB),
        ("64g", 64 * GIB),
        ("64GB", 64 * GIB),
        ("64GiB", 64 * GIB),
        ("64 GiB", 64 * GIB),
        (" 64G ", 64 * GIB),
        ("512M", 512 * MIB),
        ("512", 512 * MIB),
        ("1.5T", 1536 * GIB),
        ("0.5K", 512),
        ("1K", 1024),
        ("007G", 7 * GIB),
    ],
)
def test_size_is_read_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "12 potatoes",
        "",
        " ",
        "G",
        "0",
        "0G",
        "0.0001K",
        "-1G",
        "+1G",
        "1e3G",
        "1,5G",
        "1.G",
        ".5G",
        "1 2G",
        "1GG",
        "1P",
        "nan",
        "inf",
        "1G\n2G",
        "0x10G",
    ],
)
def test_invalid_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(SpecError, match="is not a memory size") as caught:
        parse_size(text)
    assert repr(text) in caught.value.message
    assert "64G" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1d", 86400),
        ("1d12h", 129600),
        ("1d 12h", 129600),
        ("1.5h", 5400),
        ("2H", 7200),
        ("01:30:00", 5400),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
        ("1-12:00:00", 129600),
        ("0:0:1", 1),
        ("30", 1800),
        (" 30 ", 1800),
        ("1h30m15s", 5415),
    ],
)
def test_duration_is_read_in_seconds(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "",
        "-1m",
        "1:60:00",
        "1:00:60",
        "1:00",
        "1 fortnight",
        "h",
        "1h2",
        "1-1h",
        "٣٠",
        "1e3s",
        "1d-12:00:00",
        *("0", "0s", "0:00:00", "0.4s", "0d0h"),
    ],
)
def test_invalid_duration_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(SpecError, match=r"is not a duration|a duration must be positive") as caught:
        parse_duration(text)
    assert repr(text) in caught.value.message


@given(st.integers(0, 10**4), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_duration_as_clock_equals_duration_with_units(
    days: int, hours: int, minutes: int, seconds: int
) -> None:
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if total:
        assert parse_duration(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == total
        assert parse_duration(f"{days}d{hours}h{minutes}m{seconds}s") == total
        assert parse_duration(f"{days * 24 + hours}:{minutes}:{seconds}") == total


@given(st.one_of(st.text(), st.from_regex(r"\s*\d{0,20}[.:\-]?\d{0,5}\s*[KMGTBidhms]{0,3}\s*")))
@example("9" * 400 + "G")
@example("9" * 400 + "h")
@example("9" * 5000)
@example("1" + "0" * 308 + "T")
@example("9" * 400 + ":00:00")
def test_any_text_is_positive_number_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(SpecError):
            value = parse(text)
            assert isinstance(value, int)
            assert value > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (5, "5 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 KB"),
        (99_900, "99.9 KB"),
        (100_000, "100 KB"),
        (512_000_000, "512 MB"),
        (1_500_000_000, "1.5 GB"),
        (2 * 10**15, "2000 TB"),
    ],
)
def test_size_is_shown_with_three_digits_and_unit(size: int, text: str) -> None:
    assert show_size(size) == text


@pytest.mark.parametrize("text", ["SIGUSR1", "usr1", "SigUsr1"])
def test_name_of_signal_is_read_with_and_without_its_prefix(text: str) -> None:
    assert parse_signal(text) == "SIGUSR1"


@pytest.mark.parametrize("text", ["KILL", "SIGSTOP", "9", "0", "99999", "", "SIGNOTHING"])
def test_signal_that_no_script_can_handle_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not a signal that a script can handle"):
        parse_signal(text)


@given(st.integers(1, 10**9), st.integers(1, 1 << 50))
@example(7200, 513)
def test_exact_texts_are_read_back(seconds: int, size: int) -> None:
    assert parse_duration(exact_duration(seconds)) == seconds
    assert parse_size(exact_size(size)) == size


def test_exact_texts_are_as_people_write_them() -> None:
    assert [exact_duration(each) for each in (7200, 129600, 90)] == ["2h", "1d12h", "1m30s"]
    assert [exact_size(each) for each in (64 * GIB, 1536 * MIB)] == ["64G", "1536M"]
