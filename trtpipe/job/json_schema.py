"""The job file described for editors (JSON Schema) and for people (Markdown), both made from its models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from calib.types import JsonObject
from trtpipe.figures import exact
from trtpipe.job.job import Job
from trtpipe.outputs import PLAIN_NAME

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = JsonObject

_HEAD = """\
# The job file

<!-- Made by `make schema` from sections.py, limits.py, build_options.py and json_schema.py of trtpipe/job. -->

A job is one YAML file. `trtpipe validate job.yaml` says what is wrong with one, with its line: all
that shows without running code of yours and from the packages' metadata; `--deep` runs the model too, and finds globs
that match nothing, and packages that are installed and cannot be imported, for two.
`trtpipe schema` prints its JSON Schema, with which an editor completes and checks when the first line names it:

```yaml
# yaml-language-server: $schema=job.schema.json
```

- Paths are relative to the folder of the job file.
- A shell may pipe a job file in, `trtpipe validate <(command)`, and a key, but to `nightly` and `tune` no job file. Its
  paths are relative to the current folder. Any other pipe or device is refused where a file is to be read.
- Scalars are those of YAML 1.2: only `true` and `false` (and `True`, `TRUE`, ...) are booleans, and nothing is
  converted, so `"1"` is text.
- An unknown key, a key given twice, an anchor, an alias or a tag is an error.
- `--set section.key=value` overrides any key but `matrix` and what its axes set, once; the value is YAML.
- A callable is `package.module:name`, looked for in the folder of the job file first; none of yours may be in a module
  `calib` or `trtpipe`, as those are trtpipe's own packages.
"""


def job_schema() -> Schema:
    """JSON Schema (2020-12) of a job file.

    Ranges of dynamic dimensions stand beside `shape` in a file, so every key of an input that is not its own is one. A
    `matrix` may give what is otherwise required, and its axes stand in the name as {axis}.
    """
    schema = Job.model_json_schema()
    definitions: Schema = schema["$defs"]
    spec = definitions["Input"]
    del spec["properties"]["dims"]
    spec["additionalProperties"] = {"$ref": "#/$defs/Range"}
    metrics = definitions["Check"]["properties"]["metrics"]  # a name alone stands for its function
    metrics["additionalProperties"] = {"anyOf": [{"type": "string"}, metrics["additionalProperties"]]}
    build = definitions["Build"]
    build["properties"] = {k: build["properties"][k] for k in ("route", "target")} | build["properties"]
    properties = schema["properties"]
    # of a matrix, with its axes: {precision}
    properties["name"]["pattern"] = PLAIN_NAME.replace("0-9]", "0-9{]", 1).replace("._", "._{}")
    properties["matrix"] = {
        "type": "object",
        "description": "axes of several jobs in one file, one for each combination; docs/nightly.md has the form",
        "minProperties": 1,
    }
    required = {"required": schema.pop("required")}
    schema |= {"if": {"required": ["matrix"]}, "then": {"required": ["name"]}, "else": required}
    return {"$schema": DIALECT, "title": "trtpipe job", **{k: v for k, v in schema.items() if k != "title"}}


def job_markdown() -> str:
    """The reference of the job file: one table of keys for each section, in the order of a file."""
    schema = job_schema()
    definitions: Mapping[str, Schema] = schema["$defs"]
    parts = [_HEAD, "\n".join(_table(schema, definitions))]
    todo = [(name, prop) for name, prop in schema["properties"].items()]
    first: dict[str, str] = {}
    while todo:
        path, prop = todo.pop(0)
        for suffix, section in _sections(prop, definitions):
            where = path + suffix.replace("<>", f"<{path.rpartition('.')[2].removesuffix('s')}>")
            title = f"## `{where}`" if "." not in where else f"### `{where}`"
            text = section.get("description", "")
            if first.setdefault(section["title"], where) != where:
                parts.append(f"{title}\n\nAs `{first[section['title']]}`.")
                continue
            parts.append(f"{title}\n\n{text}\n\n" + "\n".join(_table(section, definitions)))
            todo[:0] = [(f"{where}.{name}", inner) for name, inner in section["properties"].items()]
            if where.endswith("<input>"):
                parts.append(_range_note(definitions["Range"]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sections(prop: Schema, definitions: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """The sections a property leads to, each with what is added to its path: `.<>` for a mapping of sections."""
    for option in (prop, *prop.get("anyOf", ())):
        if "$ref" in option:
            section = definitions[option["$ref"].rpartition("/")[2]]
            if "properties" in section:
                yield "", section
        elif isinstance(values := option.get("additionalProperties"), dict):
            for choice in (values, *values.get("anyOf", ())):
                if "$ref" in choice:
                    yield ".<>", definitions[choice["$ref"].rpartition("/")[2]]


def _range_note(section: Schema) -> str:
    keys = ", ".join(f"`{name}` ({prop['description']})" for name, prop in section["properties"].items())
    return f"Every dimension named in `shape` has its range beside it, under its own name: {keys}."


def _table(section: Schema, definitions: Mapping[str, Schema]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    required = set(section.get("required") or section.get("else", {}).get("required", ()))
    for name, prop in section["properties"].items():
        default = "required" if name in required else _default(prop, definitions)
        text = prop.get("description") or _linked(prop, definitions)
        cells = (f"`{name}`", _kind(prop, definitions), default, text)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _linked(prop: Schema, definitions: Mapping[str, Schema]) -> str:
    """The first sentence of the section a property leads to."""
    for _, section in _sections(prop, definitions):
        return str(section.get("description", "")).partition(".")[0].partition(":")[0]
    return ""


def _default(prop: Schema, definitions: Mapping[str, Schema]) -> str:
    """In YAML; of a section the keys that are not at their own defaults."""
    value = prop.get("default")
    if isinstance(value, dict):
        own = definitions[prop["$ref"].rpartition("/")[2]]["properties"] if "$ref" in prop else {}
        return ", ".join(f"`{k}: {json.dumps(v)}`" for k, v in value.items() if v != own.get(k, {}).get("default", v))
    return "" if value in (None, []) else f"`{json.dumps(value).strip(chr(34))}`"


def _kind(prop: Schema, definitions: Mapping[str, Schema]) -> str:
    if "anyOf" in prop:
        options = [_kind(o, definitions) for o in prop["anyOf"] if o.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "$ref" in prop:
        inner = definitions[prop["$ref"].rpartition("/")[2]]
        return "mapping" if "properties" in inner else _kind(inner, definitions)
    if "enum" in prop:
        return ", ".join(f"`{v}`" for v in prop["enum"])
    if "const" in prop:
        return f"`{prop['const']}`"
    kind = str(prop.get("type", "any"))
    if kind == "array":
        if "prefixItems" in prop:
            return f"[{', '.join(_kind(i, definitions) for i in prop['prefixItems'])}]"
        items = prop.get("items", {})
        return f"list of {_kind(items, definitions)}" if items else "list"
    if kind == "object":
        values = prop.get("additionalProperties")
        return f"mapping of {_kind(values, definitions)}" if isinstance(values, dict) and values else "mapping"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}
    return words.get(kind, kind) + _bounds(prop)


def _bounds(prop: Schema) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    given = [(sign, prop[key]) for key, sign in signs.items() if key in prop]
    bounds = [f"{sign} {f'{bound:,}' if isinstance(bound, int) else exact(bound)}" for sign, bound in given]
    return f" {', '.join(bounds)}" if bounds else ""
