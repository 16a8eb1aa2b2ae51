from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter

from trtpipe.jsontext import json_text, plain


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
