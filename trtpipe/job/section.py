"""What every section of a job file is: a frozen pydantic model that refuses what it does not know."""

from __future__ import annotations

import math
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from calib.types import JsonObject


def tuples(value: object) -> object:
    """`value` with every list in it, or in a list of it, as a tuple."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


class ReadOnly(dict[Any, Any]):
    """A mapping that stays as it is, as a model that is frozen; what is made of it (`|`, `dict()`) may be changed."""

    def _refuse(self, *_given: object, **_named: object) -> NoReturn:
        raise TypeError("a mapping of a job is read-only: make another job with model_copy")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[ReadOnly], tuple[dict[Any, Any]]]:
        return ReadOnly, (dict(self),)


def read_only(value: object) -> object:
    """`value`, read-only where it is a dict, or a tuple of them. What a dict of arguments holds stays as it is: the
    user's code gets it, which may change what it was given."""
    if isinstance(value, dict):
        return ReadOnly(value)
    return tuple(map(read_only, value)) if type(value) is tuple else value


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


class Section(BaseModel):
    """A part of a job: unknown keys are errors, nothing is converted (`"1"` is no integer), values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, raw: object) -> object:
        """A YAML list is what a tuple field is written as."""
        return {k: tuples(v) for k, v in raw.items()} if isinstance(raw, dict) else raw

    @field_validator("*")
    @classmethod
    def _mappings_never_change(cls, value: object) -> object:
        return read_only(value)
