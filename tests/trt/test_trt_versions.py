from __future__ import annotations

from pathlib import Path

from trtpipe.job.build_options import BuildOptions
from trtpipe.job.sections import Build
from trtpipe.trt.flavour import title
from trtpipe.trt.options import OPTIONS
from trtpipe.trt.versions import RELEASES, document, listed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(), "write it again: see trtpipe/trt/versions.py"


def test_what_is_not_listed_is_honoured_by_every_release():
    for option in OPTIONS:
        default = BuildOptions.model_fields[option.field].get_default(call_default_factory=True)
        if option.field not in listed():
            assert option.needs(default) == ()


def test_the_contract_runs_on_the_releases_of_the_page():
    source = (PAGE.parents[1] / "tests" / "contract" / "releases.py").read_text()
    for name, version in RELEASES:
        assert name == "tensorrt_rtx" or f'"{version}"' in source


def row(text):
    (line,) = (line for line in document().splitlines() if line.startswith(f"| {text} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_rows_that_were_observed():
    assert title(*RELEASES[0]) == "TensorRT 8.6.1"
    assert row("strong typing") == ["-", "yes", "yes", "yes", "yes", "TensorRT 10.0 or later or TensorRT-RTX"]
    assert row("`quantization: implicit`") == ["yes", "yes", "yes", "-", "-"]
    assert row("`tactic_sources: [cudnn]`") == ["yes", "yes", "yes", "-", "-"]
    assert row("`timing_cache: timing`") == ["yes", "yes", "yes", "yes", "-"]
    assert row("`editable_timing_cache: true`") == ["-", "-", "yes", "yes", "-"]
    assert row("`compute_capability: [8.6]`") == ["-", "-", "-", "-", "yes"]
    assert Build(timing_cache="timing")
