"""YAML as data and nothing else: YAML 1.2 core scalars, text keys, and the place of every key and value.

PyYAML's own loader reads YAML 1.1, where the keys `N`, `no` and `on` are booleans and `1e-3` is text. Here only the
parser's events are used; what they mean is decided below. Anchors, aliases and tags are refused: a job file needs
none, and with them a small file can unfold into a large one or name a Python object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+")
_OCT = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Place:
    """Where something stands in the file; both count from 1."""

    line: int
    column: int


class YamlProblem(ValueError):
    """The text is not the YAML accepted here. `path` is where, as far as it was understood."""

    def __init__(self, place: Place, path: KeyPath, must: str, got: str, hint: str = "") -> None:
        super().__init__(must)
        self.place, self.path, self.must, self.got, self.hint = place, path, must, got, hint


@dataclass(frozen=True)
class Document:
    """A YAML document as plain values (dict, list, str, int, float, bool, None) and where each of them stood.

    `keys` is the place of the key (or list item) that leads to a path, `values` that of its value, and `texts` the
    scalar as it was written, so that `12.10` can still be distinguished from `12.1`.
    """

    data: Any
    keys: Mapping[KeyPath, Place]
    values: Mapping[KeyPath, Place]
    texts: Mapping[KeyPath, str]

    def place(self, path: KeyPath) -> Place:
        """The place of the key that leads to `path`, or of the nearest thing around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.keys:
                return self.keys[path[:end]]
        return self.values.get((), Place(1, 1))


def scalar(text: str) -> str | int | float | bool | None:
    """The value of a plain (unquoted) scalar by the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        try:
            return int(text)
        except ValueError:  # more digits than Python converts
            return text
    if _OCT.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse(text: str) -> Document:
    """The one document in `text`.

    Raises:
        YamlProblem: the text is no YAML, or uses a duplicate key, an anchor, an alias, a tag, a key that is not a
            scalar, or nests deeper than 32; or it is longer than 1 MiB or holds a second document.
    """
    if len(text) > MAX_BYTES:
        raise YamlProblem(Place(1, 1), (), f"be at most {MAX_BYTES} characters long", f"{len(text)}")
    return _DocumentBuilder(text).document()


class _DocumentBuilder:
    """Builds one Document out of the parser's events."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._keys: dict[KeyPath, Place] = {}
        self._values: dict[KeyPath, Place] = {}
        self._texts: dict[KeyPath, str] = {}

    def document(self) -> Document:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        events: Iterator[yaml.Event] = yaml.parse(self._text, Loader=loader)
        data: object = None
        documents = 0
        try:
            for event in events:
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise YamlProblem(_place(event), (), "be one document", "a second one after ---")
                    data = self._node(next(events), events, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
            what = " ".join(str(part) for part in (error.context, error.problem) if part)
            raise YamlProblem(at, (), "be valid YAML", what) from None
        except yaml.reader.ReaderError as error:  # whose position counts bytes or characters, as it was compiled
            before = self._text.partition(chr(error.character))[0]
            at = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
            raise YamlProblem(at, (), "be valid YAML", f"{error.reason}, here {error.character:#04x}") from None
        except yaml.YAMLError as error:
            raise YamlProblem(Place(1, 1), (), "be valid YAML", " ".join(str(error).split())) from None
        return Document(data, self._keys, self._values, self._texts)

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> object:
        self._values[path] = _place(event)
        if len(path) > MAX_DEPTH:
            raise YamlProblem(_place(event), path[:3], f"nest at most {MAX_DEPTH} deep", "more")
        if isinstance(event, yaml.AliasEvent):
            raise YamlProblem(_place(event), path, "not be an alias", f"*{event.anchor}", "Write the value out.")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise YamlProblem(_place(event), path, "not have an anchor", f"&{event.anchor}", "Write the value out.")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise YamlProblem(_place(event), path, "not have a tag", str(tag), "Write the plain value.")
        if isinstance(event, yaml.ScalarEvent):
            self._texts[path] = event.value
            return event.value if event.style else scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[object] = []
            while not isinstance(item := next(events), yaml.SequenceEndEvent):
                self._keys[(*path, len(items))] = _place(item)
                items.append(self._node(item, events, (*path, len(items))))
            return items
        mapping: dict[str, object] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            at = _place(key)
            if not isinstance(key, yaml.ScalarEvent) or key.tag is not None or key.anchor is not None:
                raise YamlProblem(at, path, "have plain text as keys", _kind(key))
            name = str(key.value)
            if name in mapping:
                first = self._keys[(*path, name)].line
                raise YamlProblem(at, (*path, name), "be given once", f"again, first on line {first}", "Remove one.")
            self._keys[(*path, name)] = at
            mapping[name] = self._node(next(events), events, (*path, name))
        return mapping


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    if mark is None:
        return Place(1, 1)
    return Place(mark.line + 1, mark.column + 1)


def _kind(event: yaml.Event) -> str:
    return {"AliasEvent": "an alias", "SequenceStartEvent": "a list", "MappingStartEvent": "a mapping"}.get(
        type(event).__name__, "a tagged or anchored key"
    )
