from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter

from trtpipe.jsontext import json_line, json_text, plain


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


class Model(BaseModel):
    point: Point


def test_values_become_jsons_own_types() -> None:
    assert plain(Model(point=Point(1.5, ("a",)))) == {"point": {"x": 1.5, "names": ["a"]}}
    assert plain({1: np.float32(0.5), "b": np.arange(2), "c": {3}}) == {"1": 0.5, "b": [0, 1], "c": [3]}
    assert plain([None, True, "x"]) == [None, True, "x"]


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_numbers_that_json_lacks_are_read_back(value: float, text: str) -> None:
    assert plain(value) == plain(np.float32(value)) == text
    for read in (float(text), TypeAdapter(float).validate_python(text)):
        assert read == value or (math.isnan(read) and math.isnan(value))
    assert json.loads(json_text({"x": value})) == {"x": text}


def test_what_json_has_no_form_for() -> None:
    with pytest.raises(TypeError, match=r"^JSON has no form for a bytes$"):
        plain([b"ab"])
    assert plain([b"ab"], len) == [2]


def test_no_control_character_is_in_json_as_it_is_and_each_is_read_back() -> None:
    every = "".join(map(chr, range(0xA1))) + "\u00e9\u4e2d"
    for text in (json_text({every: [every]}), json_line({every: [every]}), json_line({every: [every]}, indent=2)):
        assert {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} <= {"\n"}
        assert json.loads(text) == {every: [every]}
    assert json_line("\x9b\u00e9") == '"\\u009b\u00e9"'
