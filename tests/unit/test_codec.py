"""Encoding and validation of messages between processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.rendezvous import messages
from clusterjob.node.system.codec import (
    Codec,
    Limit,
    MalformedMessageError,
)
from clusterjob.node.workers import forkserver_messages

CODECS = [
    messages.FROM_AGENT,
    messages.FROM_COORDINATOR,
    forkserver_messages.FROM_AGENT,
    forkserver_messages.FROM_WORKER,
    forkserver_messages.FROM_FORKSERVER,
]


@dataclass(frozen=True)
class Inner:
    rank: int


@dataclass(frozen=True)
class AllTypes:
    flag: bool
    count: Annotated[int, Limit(9, minimum=1)]
    seconds: float
    name: Annotated[str, Limit(5)]
    maybe: str | None
    ranks: Annotated[tuple[int, ...], Limit(2)]
    inner: Inner
    variables: dict[str, str]
    note: str = ""


MESSAGE = AllTypes(
    True,
    9,
    seconds=0.5,
    name="five5",
    maybe=None,
    ranks=(1, 2),
    inner=Inner(3),
    variables={"A": "b"},
)
CODEC = Codec(AllTypes)


def encoded(**changes: Any) -> dict[str, Any]:
    return json.loads(CODEC.encode(MESSAGE)) | changes


def test_message_is_equal_after_json_round_trip() -> None:
    assert CODEC.decode(encoded()) == MESSAGE


def test_text_of_a_map_may_be_longer_than_other_texts() -> None:
    variables = {"A": "x" * (1 << 20)}
    assert CODEC.decode(encoded(variables=variables)).variables == variables


def test_missing_field_with_default_gets_default() -> None:
    data = encoded()
    del data["note"]
    assert CODEC.decode(data) == MESSAGE


def test_unknown_field_is_ignored() -> None:
    assert CODEC.decode(encoded(added=1)) == MESSAGE


@pytest.mark.parametrize("name", ["Nothing", None, 7, ["AllTypes"], {}])
def test_unknown_message_is_refused_by_name(name: object) -> None:
    with pytest.raises(MalformedMessageError) as refused:
        CODEC.decode(encoded(type=name))
    assert str(refused.value) == f"unknown message {name!r}"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(AllTypes)][:-1])
def test_missing_field_is_refused_by_name(field: str) -> None:
    data = encoded()
    del data[field]
    with pytest.raises(MalformedMessageError, match=f"no {field}"):
        CODEC.decode(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flag", 1),
        ("flag", None),
        ("count", 0),
        ("count", 10),
        ("count", True),
        ("count", 1.0),
        ("seconds", -1.0),
        ("seconds", float("nan")),
        ("seconds", float("inf")),
        ("seconds", 10**400),  # math.isfinite raises OverflowError
        ("seconds", True),
        ("name", "longer"),
        ("name", 5),
        ("maybe", 5),
        ("ranks", [1, 2, 3]),
        ("ranks", [-1]),
        ("ranks", {"1": 2}),
        ("inner", {"rank": "1"}),
        ("inner", [1]),
        ("variables", {"A": 1}),
        ("variables", []),
    ],
)
def test_wrong_value_is_refused_with_field_name(field: str, value: object) -> None:
    with pytest.raises(MalformedMessageError, match=field):
        CODEC.decode(encoded(**{field: value}))


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_any_json_is_decoded_or_refused(codec: Codec, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(codec._kinds)))
    names = [field.name for field in dataclasses.fields(codec._kinds[kind])]
    fields = data.draw(st.dictionaries(st.sampled_from([*names, "other"]), json_values))
    try:
        message = codec.decode({"type": kind, **fields})
    except MalformedMessageError:
        return
    assert codec.decode(json.loads(codec.encode(message))) == message


@pytest.mark.parametrize("codec", CODECS)
def test_no_message_has_field_named_type(codec: Codec) -> None:
    for kind in codec._kinds.values():
        assert "type" not in {field.name for field in dataclasses.fields(kind)}


def test_message_for_many_peers_is_encoded_once() -> None:
    first = messages.Refused("first")
    text = messages.FROM_COORDINATOR.encode(first)
    assert messages.FROM_COORDINATOR.encode(first) is text
    assert json.loads(text) == {"type": "Refused", "why": "first"}
    other = messages.FROM_COORDINATOR.encode(messages.Refused("other"))
    assert json.loads(other) == {"type": "Refused", "why": "other"}
