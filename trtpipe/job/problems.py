"""One problem of a job file as one line, and pydantic's errors as such problems.

The form, written down once:

    <file>:<line>: <dotted.path>: must <what must hold> (got <value>). <next step>

`<file>:<line>` is `--set` for a value that came from the command line.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from trtpipe.errors import ExitCode, InputError, MissingError, did_you_mean, either
from trtpipe.job.yamlfile import KeyPath
from trtpipe.outputs import PLAIN_NAME_RULE

#: More legal keys than this do not help in one line.
_MOST_LISTED = 12


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where.

    `file` is None for a value given with --set; `line` and `column` count from 1. `missing`: the job is good, and this
    machine lacks something it needs.
    """

    file: str | None
    line: int | None
    column: int | None
    path: str
    text: str
    missing: bool = False

    @property
    def message(self) -> str:
        """The problem without its place in the file."""
        return f"{self.path}: {self.text}" if self.path else self.text

    def as_dict(self) -> dict[str, str | int | None]:
        """For JSON: file, line, column, path and message."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "path": self.path,
            "message": self.message,
        }

    @property
    def exit_code(self) -> ExitCode:
        """That of the errors for bad input and for what is missing."""
        return MissingError.exit_code if self.missing else InputError.exit_code

    def __str__(self) -> str:
        where = "--set" if self.file is None else self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.message}"


def violation(must: str, got: str, hint: str = "") -> str:
    """`must <what must hold> (got <value>). <next step>`."""
    return f"must {must} (got {got}). {hint}".rstrip()


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: object, limit: int = 60) -> str:
    """A value as it looks in YAML, cut when long."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"[:limit] if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(v, 20) for v in value)}]"[:limit] if value else "an empty list"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def explain(error: ErrorDetails, legal_keys: Sequence[str]) -> str:
    """One of pydantic's errors as the text of a Problem.

    Args:
        error: one of `ValidationError.errors()`.
        legal_keys: the keys that are legal where the error is; used for a key that is not.
    """
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    key = str(error["loc"][-1]) if error["loc"] else ""
    if kind == "extra_forbidden":
        near = did_you_mean(key, legal_keys)
        if len(legal_keys) > _MOST_LISTED:
            return violation(f"be one of the {len(legal_keys)} keys that `trtpipe schema` lists here", key, near)
        return violation(f"be one of the keys {either(legal_keys)}", key, near)
    if kind == "missing":
        return violation("be given", "nothing")
    if kind == "literal_error":
        words = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        return violation(f"be {either(words)}", shown(value), did_you_mean(value, words, 0.75))
    if kind == "must":
        return violation(error["msg"], shown(value))
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch" and error["loc"] == ("name",):
        return violation(PLAIN_NAME_RULE, shown(value))
    if kind == "string_too_long":
        return violation(f"have at most {context['max_length']} letters", f"{len(value)}")
    if kind == "too_short" and context["min_length"] == 1:
        return violation("have at least one entry", shown(value))
    limits = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    for name, words_ in limits.items():
        if name in context:
            bound = context[name]
            return violation(f"be {words_} {bound if isinstance(bound, int) else f'{bound:.12g}'}", shown(value))
    if kind == "bool_type" and isinstance(value, str):
        return violation("be true or false", shown(value), _boolean_hint(value))
    kinds = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "dataclass_exact_type": "{min, opt, max}, whole numbers",
        "model_attributes_type": "a mapping",
    }
    if kind in kinds:
        return violation(f"be {kinds[kind]}", shown(value))
    return violation(re.sub(r"^\w+ should ", "", error["msg"]), shown(value))


def _boolean_hint(text: str) -> str:
    if text.lower() in ("yes", "on", "y", "1", "true"):
        return "Write true, without quotes."
    if text.lower() in ("no", "off", "n", "0", "false"):
        return "Write false, without quotes."
    return ""


def legal_keys(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """The keys that are legal beside the last part of `path`, in a file that `model` describes."""
    section: object = model
    for part in path[:-1]:
        section = _inside(section, part)
        if section is None:
            return ()
    return tuple(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else ()


def _inside(section: object, part: str | int) -> object:
    """The type one step further down: a model's field, or the value type of a mapping of models."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        field = section.model_fields.get(str(part))
        if field is None:
            return None
        kind: object = field.annotation
    elif typing.get_origin(section) is dict:
        kind = typing.get_args(section)[1]
    else:
        return None
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    return kind
