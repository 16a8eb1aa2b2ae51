"""What a job sets, as parts of its keys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel

from calib import strictjson

if TYPE_CHECKING:
    from trtpipe.job.job import Job

#: What ends the name of an order.
ORDER = " order"


def settings(job: Job) -> dict[str, object]:
    """Every setting that is not the default, by its dotted path, in JSON's own types.

    Beside what the job names itself (bindings, globs of formats, metrics, arguments) stand the names in its order,
    under `<path> order`: the first of two outputs is the network's first, of two globs that fit the last decides.
    """
    flat = dict(_flat(job.model_dump(mode="json", exclude_defaults=True)))
    return flat | dict(_orders(job))


def _flat(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of everything in nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, _below(at, key))
    else:
        yield at, value


def _orders(value: object, at: str = "") -> Iterator[tuple[str, list[str]]]:
    """Path and names of the mappings whose names are the job's own and no fields of a section."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _orders(getattr(value, name), _below(at, name))
    elif isinstance(value, Mapping):
        if len(value) > 1:
            yield at + ORDER, [str(name) for name in value]
        for name, inner in value.items():
            yield from _orders(inner, _below(at, str(name)))


def _below(at: str, key: str) -> str:
    """The path of a key; one with a dot or a space in it is quoted, or it could be that of another."""
    name = json.dumps(key) if "." in key or " " in key or not key else key
    return f"{at}.{name}" if at else name


def as_part(value: object) -> str:
    """A setting as one text: JSON, by which `"1"` is not 1."""
    return json.dumps(value)


def shown(part: str) -> str:
    """A setting's text as people write it: without quotes, unless it could be taken for another value then. What is no
    JSON is of a night before settings were kept as such."""
    try:
        value = strictjson.loads(part)
        if not isinstance(value, str):
            return part
    except (ValueError, RecursionError):
        return part
    try:
        strictjson.loads(value)
    except (ValueError, RecursionError):
        return value
    return part


def is_order(part: str) -> bool:
    """Whether a part's name is that of an order; the name of a file that the code reads may end alike."""
    return part.startswith("job ") and part.endswith(ORDER)


def is_reordered(before: str | None, now: str | None) -> bool:
    """Whether two orders have the same names: where they do not, what was added and removed says so by itself."""
    orders = [strictjson.loads(order) for order in (before, now) if order is not None]
    names = [Counter(order) for order in orders if isinstance(order, list)]
    return len(names) == 2 and names[0] == names[1]
