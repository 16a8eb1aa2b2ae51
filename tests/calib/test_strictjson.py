from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from calib.strictjson import first_problem, loads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "^a key is given twice$"),
        ("[NaN]", "^NaN is not JSON$"),
        ("[-Infinity]", "^-Infinity is not JSON$"),
        ("[1e999]", "^1e999 is not JSON$"),
        ("[-1.5e400]", "^-1.5e400 is not JSON$"),
        ("[1,]", "Expecting value|Illegal trailing comma"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(text)


def test_a_value_is_read() -> None:
    assert loads('{"a": [1, 2.5, 1e308, 1e-999, null, "x"]}') == {"a": [1, 2.5, 1e308, 0.0, None, "x"]}


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = 0

    @field_validator("count")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("is negative")
        return value


class Outer(BaseModel):
    inner: tuple[Inner, ...]

    @model_validator(mode="after")
    def _one(self) -> Outer:
        if len(self.inner) > 1:
            raise ValueError("more than one")
        return self


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"inner": [{"count": -1}]}, "inner.0.count: is negative"),
        ({"inner": [{"other": 1}]}, "inner.0.other: Extra inputs are not permitted"),
        ({"inner": [{}, {}]}, "more than one"),
    ],
)
def test_the_first_problem_in_a_line(raw: object, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(raw)
    assert first_problem(caught.value) == problem
