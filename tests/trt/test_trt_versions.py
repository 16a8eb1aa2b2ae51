from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trtpipe.job.build_options import BuildOptions
from trtpipe.job.sections import Build
from trtpipe.trt.flavour import title, unsupported
from trtpipe.trt.options import OPTIONS, needs_driver, refusals
from trtpipe.trt.versions import RELEASES, document

MEASURED = json.loads((Path(__file__).resolve().parents[2] / "docs" / "rtx-options.json").read_text())
PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(MEASURED), "write it again: see trtpipe/trt/versions.py"


def test_what_is_not_listed_is_honoured_by_every_release():
    listed = set(re.findall(r"^\| `(\w+): ", document(MEASURED).partition("### ")[0], re.M))
    assert len(listed) > 10
    for option in OPTIONS:
        default = BuildOptions.model_fields[option.field].get_default(call_default_factory=True)
        if option.field not in listed:
            assert default is None or option.needs(default) == ()


def test_the_page_says_of_each_release_what_never_ran():
    text = PAGE.read_text().partition("## What was checked, and what never ran")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [title(*r) for r in RELEASES]
    assert all(checked and never for _, checked, never in rows)


def test_the_contract_runs_on_the_releases_of_the_page():
    source = (PAGE.parents[1] / "tests" / "contract" / "releases.py").read_text()
    for name, version in RELEASES:
        assert name == "tensorrt_rtx" or f'"{version}"' in source


#: What no measurement shows on a machine without a GPU: keys of trtpipe's own, and those that only refuse.
UNMEASURED = {"platform", "log_level", "quantization", "calibration_cache", "editable_timing_cache",
              "error_on_timing_cache_miss", "exclude_lean_runtime", "device_types", "plugins"}  # fmt: skip
#: Values that ask for what TensorRT-RTX does anyway.
AS_IT_IS = {("tensor_formats", '{"image": ["linear"]}')}


def test_every_option_was_measured_on_rtx():
    assert set(MEASURED["options"]) | UNMEASURED == set(BuildOptions.model_fields), (
        "measure it: a value in VALUES of benchmarks/rtx_options.py"
    )
    assert MEASURED["tensorrt_rtx"] == RELEASES[-1][1], "measure again: benchmarks/rtx_options.py"


@pytest.mark.parametrize(
    ("option", "measured"),
    [pytest.param(o, r, id=f"{o}-{json.dumps(r['value'])}-{len(r['with'])}")
     for o, rows in MEASURED["options"].items() for r in rows],
)  # fmt: skip
def test_the_table_says_what_was_measured_on_rtx(option, measured):
    """What changes a plan is honoured; what changes nothing, or ends in an error, is refused or asks for a GPU."""
    build = Build.model_validate({"target": "tensorrt_rtx", option: measured["value"], **measured["with"]})
    refused = f"build.{option}" in {
        *dict(refusals(build, None, *RELEASES[-1])),
        *needs_driver(build, "tensorrt_rtx"),
    }
    same = (option, json.dumps(measured["value"])) in AS_IT_IS
    assert refused == (measured["effect"] != "plan" and not same), measured


def row(text):
    line = next(line for line in document(MEASURED).splitlines() if line.startswith(f"| {text} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_rows_that_were_observed():
    assert title(*RELEASES[0]) == "TensorRT 8.6.1"
    assert row("strong typing") == ["-", "yes", "yes", "yes", "yes", "TensorRT 10.0 or later or TensorRT-RTX"]
    assert row("`quantization: implicit`") == ["yes", "yes", "yes", "-", "-"]
    assert row("`tactic_sources: [cudnn]`") == ["yes", "yes", "yes", "-", "-"]
    assert row("`sparse_weights: true`") == ["yes", "yes", "yes", "yes", "-"]
    assert row("`timing_cache: timing`") == ["yes", "yes", "yes", "yes", "-"]
    assert row("`editable_timing_cache: true`") == ["-", "-", "yes", "yes", "-"]
    assert row("`compute_capability: [8.6]`") == ["-", "-", "-", "-", "yes"]
    assert Build(timing_cache="timing")


def test_every_release_of_the_page_is_one_that_jobs_may_be_for() -> None:
    """A column of another says what nothing here can be built for."""
    assert {version: unsupported(name, version) for name, version in RELEASES} == {
        version: None for _, version in RELEASES
    }
