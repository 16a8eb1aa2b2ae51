"""What every section of a job file is: a frozen pydantic model that refuses what it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


def tuples(value: object) -> object:
    """`value` with every list in it, or in a list of it, as a tuple."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


class Section(BaseModel):
    """A part of a job: unknown keys are errors, nothing is converted (`"1"` is no integer), values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, raw: object) -> object:
        """A YAML list is what a tuple field is written as."""
        return {k: tuples(v) for k, v in raw.items()} if isinstance(raw, dict) else raw
