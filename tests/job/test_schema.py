import json
from pathlib import Path

import pytest

import trtpipe
from trtpipe.cli.main import main
from trtpipe.job import yamlfile
from trtpipe.job.job import Job
from trtpipe.job.json_schema import job_markdown, job_schema

ROOT = Path(trtpipe.__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def objects(schema):
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_the_schema_in_configs_is_current():
    assert json.loads((ROOT / "configs" / "job.schema.json").read_text()) == job_schema(), "run make schema"


def test_the_page_in_docs_is_current():
    assert (ROOT / "docs" / "job-file.md").read_text() == job_markdown(), "run make schema"


def test_schema_prints_it(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == job_markdown()
    assert main(["schema", "--markdown", "--json"]) == 2


def test_no_object_takes_an_unknown_key():
    free = {s["title"] for s in objects(job_schema()) if s.get("additionalProperties") is not False}
    assert free == {"Input"}
    assert job_schema()["$defs"]["Input"]["additionalProperties"] == {"$ref": "#/$defs/Range"}


def test_every_key_is_explained():
    cells = [line.split(" | ") for line in job_markdown().splitlines() if line.startswith("| `")]
    assert len(cells) > 60
    assert [cell[0] for cell in cells if not cell[-1].strip("| ")] == []


def test_every_section_is_in_the_page():
    page = job_markdown()
    for name in Job.model_fields:
        assert f"| `{name}` |" in page
    for title in ("inputs.<input>", "outputs.<output>", "calibration.transform", "check.limits", "precision.keep"):
        assert f"### `{title}`" in page


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_jobs_in_configs_name_their_schema_and_fit_it(path):
    first, *_ = text = path.read_text().splitlines()
    assert first == "# yaml-language-server: $schema=job.schema.json"
    data = yamlfile.parse("\n".join(text)).data
    top = job_schema()
    assert set(data) <= set(top["properties"])
    for name, value in data.items():
        reference = top["properties"][name].get("$ref", "").rpartition("/")[2]
        if reference:
            assert set(value) <= set(top["$defs"][reference]["properties"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_jobs_in_configs_validate(path, capsys):
    assert main(["validate", "--job-only", str(path)]) == 0


def test_the_page_shows_every_default_that_a_section_sets() -> None:
    """A job without `check.limits` is held to one: what a section's default sets beyond its keys' own is shown."""
    page = job_markdown()
    assert "| `limits` | mapping | `cosine_min: 0.99` | what must hold for the build to pass |" in page
    for name, definition in job_schema()["$defs"].items():
        for key, prop in definition.get("properties", {}).items():
            if isinstance(value := prop.get("default"), dict) and "$ref" in prop:
                own = job_schema()["$defs"][prop["$ref"].rpartition("/")[2]]["properties"]
                for inner, set_to in value.items():
                    if set_to != own[inner].get("default", set_to):
                        assert f"`{inner}: {set_to}`" in page, (name, key)
