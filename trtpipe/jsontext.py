"""Values as JSON that pydantic and `float` read back: NaN and infinities, which JSON lacks, as strings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from calib.types import JsonObject

#: DEL and the control characters of C1, which a terminal would obey.
LATE_CONTROLS = range(127, 160)
#: JSON leaves them as they are. Outside of its texts JSON has no such character.
_CONTROLS = {c: f"\\u{c:04x}" for c in LATE_CONTROLS}


def json_text(value: object) -> str:
    """Dataclasses, mappings, sequences and numbers as JSON, indented by one, with a newline at the end."""
    return json_line(plain(value), indent=1) + "\n"


def json_line(value: object, indent: int | None = None) -> str:
    """What `plain` gave as JSON in UTF-8, on one line or indented, with every control character spelt out."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).translate(_CONTROLS)


def json_digest(value: object) -> str:
    """SHA-256, in hexadecimal, of a value of JSON's own types; the order of a mapping's keys is no part of it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plain_object(value: object) -> JsonObject:
    """`plain` of a dataclass or a mapping."""
    fields: JsonObject = plain(value)
    return fields


def plain(value: object, other: Callable[[object], object] | None = None) -> Any:
    """`value` in JSON's own types.

    Dataclasses, pydantic models and mappings become dicts; sequences, sets and NumPy arrays lists; NumPy's numbers
    Python's; NaN and the infinities "NaN", "Infinity" and "-Infinity".

    Args:
        value: anything.
        other: makes a JSON value of what JSON has no form for.

    Raises:
        TypeError: JSON has no form for it, and `other` is None.
    """
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(), other)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), other) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v, other) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, other) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), other)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if other is None:
        raise TypeError(f"JSON has no form for a {type(value).__name__}")
    return other(value)
