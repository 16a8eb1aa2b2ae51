"""What a frozen pydantic model is: it refuses what it does not know, and its mappings stay as they are too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator

_Model = TypeVar("_Model", bound=BaseModel)


class ReadOnly(dict[Any, Any]):
    """A mapping that stays as it is, as a model that is frozen; what is made of it (`|`, `dict()`) may be changed."""

    def _refuse(self, *_given: object, **_named: object) -> NoReturn:
        raise TypeError("a mapping of a frozen value is read-only: make another value with model_copy")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[ReadOnly], tuple[dict[Any, Any]]]:
        return ReadOnly, (dict(self),)


def read_only(value: object) -> object:
    """`value`, read-only where it is a dict, or a tuple of them. What a dict holds in turn stays as it is: of arguments
    the user's code gets it, which may change what it was given."""
    if isinstance(value, dict):
        return ReadOnly(value)
    return tuple(map(read_only, value)) if type(value) is tuple else value


class Frozen(BaseModel):
    """A value that never changes: unknown keys are errors, fields and their mappings read-only."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*")
    @classmethod
    def _mappings_never_change(cls, value: object) -> object:
        return read_only(value)

    def model_copy(self: _Model, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> _Model:
        """As pydantic's, which validates no `update`: its mappings are read-only too."""
        changes = {name: read_only(value) for name, value in (update or {}).items()}
        return BaseModel.model_copy(self, update=changes, deep=deep)
