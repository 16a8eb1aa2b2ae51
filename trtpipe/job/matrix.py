"""`matrix:` at the top of a job file: one named job for each combination of its axes.

    name: digits-{precision}-{target}
    matrix:
      precision: [fp16, int8]
      target: [tensorrt_rtx, onnxruntime]
      model.weights: {small: small.safetensors, large: large.safetensors}

An axis is the dotted path of a key (or one of `SHORT`). Its values are a list, or a mapping from a label to a value. A
value that is a mapping is laid over what the file says there; any other value replaces it. `{axis}` in `name` stands
for the label; labels of axes that the name leaves out are appended to it. No two axes set the same key.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calib.types import JsonObject
from trtpipe.errors import did_you_mean
from trtpipe.job.job import Job
from trtpipe.job.problems import shown, violation
from trtpipe.job.sections import NOT_QUANTIZED
from trtpipe.job.yamlfile import Document, KeyPath, Place

MATRIX_KEY = "matrix"
#: Axes that are known by their last word.
SHORT: Mapping[str, tuple[str, ...]] = {
    "target": ("build", "target"),
    "route": ("build", "route"),
    "algorithm": ("calibration", "algorithm"),
    "weights": ("model", "weights"),
}
#: What the axis `precision` may be written as. Formats by glob stay, and are refused where theirs is off.
_PRECISIONS: Mapping[str, JsonObject] = {
    label: {
        **{key: off for key, off in NOT_QUANTIZED.items() if key != "formats"},
        **{mode: mode in on for mode in ("fp16_mode", "bf16_mode", "int8_mode", "fp8_mode")},
    }
    for label, on in {
        "fp32": (),
        "fp16": ("fp16_mode",),
        "bf16": ("bf16_mode",),
        "int8": ("int8_mode",),
        "int8_fp16": ("int8_mode", "fp16_mode"),
        "int8_bf16": ("int8_mode", "bf16_mode"),
        "fp8": ("fp8_mode",),
        "fp8_fp16": ("fp8_mode", "fp16_mode"),
        "fp8_bf16": ("fp8_mode", "bf16_mode"),
    }.items()
}
#: More jobs than this in one file are a mistake.
MOST_CELLS = 10_000

_LABEL = re.compile(r"[A-Za-z0-9._-]+")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Cell:
    """One combination: `labels` by axis, and the document of its job, in which every value keeps its place.

    `sets`: the paths that any value of an axis sets, by axis.
    """

    labels: Mapping[str, str]
    document: Document
    sets: Mapping[str, frozenset[KeyPath]]

    def __str__(self) -> str:
        return _say(self.labels)


@dataclass(frozen=True)
class _Value:
    label: str
    value: object
    at: KeyPath  # of the value in the file


class _Problems(list[tuple[KeyPath, str]]):
    """(path, text of `violation`) of every problem of a matrix."""


def has_matrix(document: Document) -> bool:
    """Whether the file describes several jobs."""
    return isinstance(document.data, dict) and MATRIX_KEY in document.data


def expand(document: Document) -> tuple[tuple[Cell, ...], tuple[tuple[KeyPath, str], ...]]:
    """Every job of a file with a matrix, or what is wrong with the matrix: (path in the file, what must hold)."""
    problems = _Problems()
    raw = document.data[MATRIX_KEY]
    if not isinstance(raw, dict) or not raw:
        text = violation("be a mapping of axes to values", shown(raw), "Like {target: [tensorrt_rtx]}.")
        problems.append(((MATRIX_KEY,), text))
        return (), tuple(problems)
    axes = {name: _axis(name, values, document, problems) for name, values in raw.items()}
    if not problems and (count := math.prod(len(v) for v in axes.values())) > MOST_CELLS:
        problems.append(((MATRIX_KEY,), violation(f"make at most {MOST_CELLS} jobs", str(count), "Split the file.")))
    written = {
        axis: frozenset(path for value in values for path in _leaves(value.value, path_of(axis)))
        for axis, values in axes.items()
    }
    _check_apart(written, problems)
    _check_name(document.data.get("name"), axes, problems)
    if problems:
        return (), tuple(problems)
    cells = [
        _cell(document, dict(zip(axes, chosen, strict=True)), written) for chosen in itertools.product(*axes.values())
    ]
    seen: dict[str, Mapping[str, str]] = {}
    for cell in cells:
        name = str(cell.document.data.get("name"))
        if name in seen:
            got = f"{name!r} for {_say(seen[name])} and for {cell}"
            problems.append((("name",), violation("give each job a name of its own", got, "Name every axis in it.")))
            return (), tuple(problems)
        seen[name] = cell.labels
    return tuple(cells), ()


def path_of(axis: str) -> tuple[str, ...]:
    """The path in a job that an axis sets."""
    return SHORT.get(axis) or tuple(axis.split("."))


def _axis(name: str, values: object, document: Document, problems: _Problems) -> tuple[_Value, ...]:
    where: KeyPath = (MATRIX_KEY, name)
    sections = tuple(f for f in Job.model_fields if f != "name")
    first = path_of(name)[0]
    if first not in sections:
        near = did_you_mean(name, (*sections, *SHORT))
        must = f"be the path of a key, like build.target, or one of {', '.join(SHORT)}"
        problems.append((where, violation(must, name, near)))
        return ()
    if not isinstance(values, (list, dict)) or not values:
        problems.append((where, violation("be a list of values, or a mapping of labels to values", shown(values))))
        return ()
    cells = []
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        at = (*where, key)
        if isinstance(values, list) and isinstance(value, (dict, list)):
            hint = f"Write {name} as a mapping: {{label: value}}."
            problems.append((at, violation("have a label when it is not plain text or a number", shown(value), hint)))
            continue
        written = document.texts.get(at, str(value)) if isinstance(values, list) else key
        label = str(written) if isinstance(values, dict) else _label(str(written))
        if not _LABEL.fullmatch(label):
            problems.append((at, violation("be labelled with letters, digits, '.', '_' and '-'", shown(label))))
        if name == "precision" and isinstance(value, str):
            if value not in _PRECISIONS:
                must = f"be one of {', '.join(_PRECISIONS)}, or a mapping"
                problems.append((at, violation(must, shown(value), did_you_mean(value, tuple(_PRECISIONS)))))
                continue
            value = dict(_PRECISIONS[value])
        cells.append(_Value(label, value, at))
    labels = [v.label for v in cells]
    for i, value in enumerate(cells):
        if value.label in labels[:i]:
            problems.append((value.at, violation("have a label of its own", f"{value.label!r} again")))
            break
    return tuple(cells)


def setting(path: KeyPath, written: Mapping[str, frozenset[KeyPath]]) -> str | None:
    """The first axis that sets what is at `path`, a part of it, or what it is a part of."""
    axes = (a for a, paths in written.items() if any(path[: len(p)] == p or p[: len(path)] == path for p in paths))
    return next(axes, None)


def _check_apart(written: Mapping[str, frozenset[KeyPath]], problems: _Problems) -> None:
    """Refuse axes that set one key: the later would hide the earlier, whose label would be in the name."""
    for one, other in itertools.combinations(written, 2):
        for path in sorted(written[other]):
            if setting(path, {one: written[one]}):
                must = f"set other keys than {MATRIX_KEY}.{one}"
                problems.append(
                    ((MATRIX_KEY, other), violation(must, ".".join(map(str, path)), "Take one of the two axes out."))
                )
                break


def _label(text: str) -> str:
    """A list's value as its own label: of a path its last part without the suffix, and no character a name lacks."""
    stem = re.sub(r"\.[A-Za-z][A-Za-z0-9]*$", "", text.rsplit("/", 1)[-1]) if "/" in text else text
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)


def _check_name(name: object, axes: Mapping[str, object], problems: _Problems) -> None:
    if not isinstance(name, str):
        return  # reading the job says so
    for word in _PLACEHOLDER.findall(name):
        if word not in axes:
            must = f"hold placeholders of axes alone: {', '.join(axes)}"
            problems.append((("name",), violation(must, "{" + word + "}", did_you_mean(word, tuple(axes)))))


def _cell(document: Document, chosen: Mapping[str, _Value], sets: Mapping[str, frozenset[KeyPath]]) -> Cell:
    labels = {axis: value.label for axis, value in chosen.items()}
    data = {k: v for k, v in document.data.items() if k != MATRIX_KEY}
    keys, values, texts = dict(document.keys), dict(document.values), dict(document.texts)
    for axis, value in chosen.items():
        path = path_of(axis)
        _lay(data, path, value.value)
        for places in (keys, values, texts):
            _move(places, value.at, path)
        for written in _paths(value.value, path):  # a word like int8 stands for several keys
            keys.setdefault(written, keys.get(path, Place(1, 1)))
    if isinstance(data.get("name"), str):
        data["name"] = _named(data["name"], labels)
    return Cell(labels, Document(data, keys, values, texts), sets)


def _lay(data: JsonObject, path: tuple[str, ...], value: object) -> None:
    """Put `value` at `path`, mappings along the way copied; a mapping is laid over a mapping."""
    inner = data
    for part in path[:-1]:
        below = inner.get(part)
        inner[part] = dict(below) if isinstance(below, dict) else {}
        inner = inner[part]
    inner[path[-1]] = _over(inner.get(path[-1]), value)


def _over(below: object, above: object) -> object:
    if not isinstance(above, dict) or not isinstance(below, dict):
        return above
    return below | {k: _over(below.get(k), v) for k, v in above.items()}


def _move(places: dict[KeyPath, Any], source: KeyPath, target: KeyPath) -> None:
    """Let what stands at `source` also stand at `target`."""
    for path, place in list(places.items()):
        if path[: len(source)] == source:
            places[target + path[len(source) :]] = place


def _paths(value: object, at: KeyPath) -> Iterator[KeyPath]:
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*at, key))


def _leaves(value: object, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The keys that laying `value` at `at` sets."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*at, str(key)))
    else:
        yield at


def _named(name: str, labels: Mapping[str, str]) -> str:
    used = set(_PLACEHOLDER.findall(name))
    text = _PLACEHOLDER.sub(lambda match: labels[match.group(1)], name)
    return "-".join([text, *(label for axis, label in labels.items() if axis not in used)])


def _say(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}={label}" for axis, label in labels.items())
