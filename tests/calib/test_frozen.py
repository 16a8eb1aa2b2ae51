"""Models whose mappings are as frozen as their fields, of whoever makes them, copies them or reads them back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field, ValidationError

from calib.frozen import Frozen, ReadOnly


class Value(Frozen):
    named: dict[str, int]
    several: tuple[dict[str, int], ...] = ()
    default: dict[str, int] = Field(default_factory=lambda: {"d": 1})
    perhaps: dict[str, int] | None = None


VALUE = Value(named={"a": 1}, several=({"b": 2}, {}))
AGAIN = "a mapping of a frozen value is read-only: make another value with model_copy"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__("a", 2), lambda m: m.__delitem__("a"), lambda m: m.__ior__({"x": 1}),
        lambda m: m.clear(), lambda m: m.pop("a"), lambda m: m.popitem(), lambda m: m.update(x=1),
        lambda m: m.setdefault("x", 1),
    ],
)  # fmt: skip
def test_no_mapping_changes(change: Callable[[Any], object]) -> None:
    copied = VALUE.model_copy(update={"named": {"c": 3}, "perhaps": {"e": 4}})
    others = (copied, copied.model_copy(deep=True), pickle.loads(pickle.dumps(copied)), copy.deepcopy(copied))
    assert (copied.named, VALUE.named) == ({"c": 3}, {"a": 1})
    for value in (VALUE, *others, Value.model_validate_json(VALUE.model_dump_json())):
        for mapping in (value.named, *value.several, value.default, *filter(None, (value.perhaps,))):
            before = dict(mapping)
            with pytest.raises(TypeError) as raised:
                change(mapping)
            assert str(raised.value) == AGAIN
            assert mapping == before


def test_what_is_made_of_a_mapping_may_change() -> None:
    for made in (VALUE.named | {"x": 1}, dict(VALUE.named), VALUE.named.copy(), VALUE.model_dump()["named"]):
        assert type(made) is dict
    assert type(VALUE.named) is ReadOnly


def test_an_unknown_key_and_a_new_value_of_a_field_are_errors() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Value(named={}, other=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="Instance is frozen"):
        VALUE.named = {}
