"""JSON from files that anyone may have written: read strictly, and a schema's objections in one line."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from pydantic import ValidationError


def loads(text: str | bytes) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, a key of an object is given twice, or a number is NaN, Infinity or beyond float64,
            as 1e999 is.
        RecursionError: it is nested too deeply.
    """
    value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def first_problem(error: ValidationError) -> str:
    """`path.to.key: message` of the first of pydantic's objections; the message alone where it is to the whole."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("model_type", "dataclass_type"):  # pydantic's words name a class of the code's
        message = "Input should be an object of JSON"
    return f"{path}: {message}" if path else message
