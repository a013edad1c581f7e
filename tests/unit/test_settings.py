"""Settings from flags, variables and files: each value is converted or is a ConfigError."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterjob.core.options import OPTIONS, read_setting
from clusterjob.errors import ConfigError

NUMBERS = ("nodes", "gpus_per_node", "nproc_per_node", "cpus_per_task", "max_restarts")


@pytest.mark.parametrize("key", NUMBERS)
def test_whole_number_setting_accepts_integer_and_text(key: str) -> None:
    assert [read_setting(key, value, origin="here") for value in (3, "3", " 3 ", "-3", "007")] == [
        3,
        3,
        3,
        -3,
        7,
    ]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("mem", "64G", 64 * 1024**3),
        ("mem", 64, 64 * 1024**2),
        ("time", "90s", 90),
        ("time", 30, 1800),
        ("time", dt.time(1, 30), 5400),
        ("name", "☃", "☃"),
        ("python", "python3", "python3"),
        ("workdir", "a/b", Path("a/b")),
        ("template", "~/t.j2", Path.home() / "t.j2"),
        ("setup", "one", ("one",)),
        ("setup", ["1", "2"], ("1", "2")),
        ("setup", [], ()),
        ("env", {}, {}),
        ("workdir", "~", Path.home()),
        (
            "env",
            {"A": 1, "B": True, "C": 0.5, "D": "x"},
            {"A": "1", "B": "true", "C": "0.5", "D": "x"},
        ),
        ("env", ["A=1", "B=x=y", "C="], {"A": "1", "B": "x=y", "C": ""}),
        ("set", ["k=v"], {"k": "v"}),
        ("grace", 2, 2.0),
        ("grace", "0.5", 0.5),
        ("start", "fork", "fork"),
        ("launcher", "ray", "ray"),
        *(("require_gpus", value, True) for value in (True, "true", "True", "1", "yes")),
        *(("require_gpus", value, False) for value in (False, "false", "0", "no")),
    ],
)
def test_value_of_setting_is_converted_to_its_type(key: str, value: Any, read: Any) -> None:
    assert read_setting(key, value, origin="here") == read
    assert type(read_setting(key, value, origin="here")) is type(read)


scalars = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.sampled_from(["~", "1e999"]),
)
toml = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("key", OPTIONS)
@given(value=toml)
@example(value=3)
@example(value="--5")
@example(value="9" * 5000)
@example(value="9" * 400 + "G")
@example(value=float("nan"))
@example(value=float("inf"))
@example(value="~nobody-of-this-name/x")
@example(value=10**400)
def test_any_value_of_file_is_accepted_or_config_error(key: str, value: Any) -> None:
    try:
        read_setting(key, value, origin="here")
    except ConfigError as error:
        message = error.message
    else:
        return
    assert message.startswith("here: ")
