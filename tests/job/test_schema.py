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


def test_every_whole_number_has_a_largest_value():
    """What takes 64 or 32 bits in the end is refused by name before anything is done. The ranges of a profile are
    within those of the inputs, which have one."""

    def unbounded(schema, path=()):
        if isinstance(schema, dict):
            if schema.get("type") == "integer" and not {"maximum", "exclusiveMaximum", "enum", "const"} & set(schema):
                yield path
            for key, value in schema.items():
                yield from unbounded(value, (*path, key))
        elif isinstance(schema, list):
            for value in schema:
                yield from unbounded(value, path)

    found = {".".join(p) for p in unbounded(job_schema())}
    assert found == {f"$defs.DimRange.properties.{extent}" for extent in ("min", "opt", "max")}


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("build.workspace", 2**63 - 1),
        ("build.memory_pools={tactic_dram", 2**63 - 1),
        ("build.max_num_tactics", 2**31 - 1),
        ("build.max_aux_streams", 2**31 - 1),
        ("calibration.batch_size", 2**31 - 1),
        ("check.samples", 2**31 - 1),
        ("check.workers", 1024),
    ],
)
def test_a_number_that_nothing_can_take_is_refused_by_its_key(key, most, capsys):
    pool = "{" in key
    value = f"{key}: {most + 1}}}" if pool else f"{key}={most + 1}"
    assert main(["validate", "--job-only", str(ROOT / "configs" / "quickstart.yaml"), "--set", value]) == 2
    named = "build.memory_pools.tactic_dram" if pool else key
    assert f"{named}: must be at most {most} (got {most + 1})" in capsys.readouterr().err
