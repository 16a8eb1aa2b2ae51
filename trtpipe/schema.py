"""JSON Schema of the job file, as a writer of YAML sees it; editors complete and check with it."""

from __future__ import annotations

from typing import Any

from trtpipe.sections import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a job file.

    Ranges of dynamic dimensions stand beside `shape` in a file, so every key of an input that is not its own is one.
    """
    schema = Job.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    spec = definitions["Input"]
    del spec["properties"]["dims"]
    spec["additionalProperties"] = {"$ref": "#/$defs/Range"}
    return {"$schema": DIALECT, "title": "trtpipe job", **{k: v for k, v in schema.items() if k != "title"}}
