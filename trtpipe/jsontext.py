"""Values as JSON text that pydantic reads back: infinity and NaN, which JSON lacks, as the strings inf, -inf, nan."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """Dataclasses, mappings, sequences and numbers as JSON, indented by one, with a newline at the end."""
    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, sequences as lists; NaN and infinities as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
