"""What every section of a job file is: a frozen pydantic model that refuses what it does not know."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from calib.frozen import Frozen
from calib.types import JsonObject


def tuples(value: object) -> object:
    """`value` with every list in it, or in a list of it, as a tuple."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def _finite(args: JsonObject) -> JsonObject:
    todo = list[object](args.values())
    while todo:
        value = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("must", f"hold numbers of JSON, in which jobs are sent and kept, and no {value}")
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return args


#: Arguments of a callable, of JSON's own types.
PlainArguments = Annotated[JsonObject, AfterValidator(_finite)]


class Section(Frozen):
    """A part of a job: unknown keys are errors, nothing is converted (`"1"` is no integer), values never change."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, raw: object) -> object:
        """A YAML list is what a tuple field is written as."""
        return {k: tuples(v) for k, v in raw.items()} if isinstance(raw, dict) else raw
