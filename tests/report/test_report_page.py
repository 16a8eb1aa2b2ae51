"""What the report says, figure by figure."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_sample as samples

from trtpipe.evaluation.limits import judged
from trtpipe.job.limits import Limits, MetricLimits
from trtpipe.job.sections import Build
from trtpipe.quantization.diagnose import BLAME, blame
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.report.content import ReportContent
from trtpipe.report.metric_rows import allowance, metric_row
from trtpipe.report.page import (
    cards,
    headline,
    module_rows,
    packages,
    precision_shares,
    render,
    worst_modules,
)
from trtpipe.values import Control, LayerPrecision, Metric, WeightBytes


class _Markup(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_the_verdict_comes_before_everything_else(tmp_path: Path) -> None:
    page = render(samples.content(tmp_path))
    assert page.index("top1_agreement.") < page.index("What was executed")
    assert "The INT8 + FP16 + FP32 graph is too far from its TorchScript baseline on 8 samples: top1_agreement." in page


def test_a_passed_check_says_so_and_a_graph_is_never_called_an_engine(tmp_path: Path) -> None:
    manifest = samples.manifest()
    assert manifest.check is not None
    check = dataclasses.replace(manifest.check, passed=True, metrics=(Metric("cosine", "y", 1.0, 0.9, True),))
    page = render(samples.content(tmp_path, manifest=samples.manifest(check=check)))
    assert "graph matches its TorchScript baseline on 8 samples, within the limit of the job." in page
    assert "The engine itself was not run" in page
    engine = dataclasses.replace(check, executed="engine")
    page = render(samples.content(tmp_path, manifest=samples.manifest(check=engine)))
    assert "engine matches its TorchScript baseline" in page
    assert "The engine itself was not run" not in page


def test_a_check_that_cannot_fail_is_no_proof(tmp_path: Path) -> None:
    manifest = samples.manifest()
    assert manifest.check is not None
    check = dataclasses.replace(manifest.check, metrics=(), control=Control("head", "scale x 127", False, 8))
    assert headline(manifest, check).endswith("and the comparison proves nothing.")
    assert "passed too: this check proves nothing" in render(
        samples.content(tmp_path, manifest=samples.manifest(check=check))
    )


@pytest.mark.parametrize(
    ("value", "limit", "best", "used"),
    [
        (0.995, 0.99, 1.0, 0.5),  # half of the 0.01 that may be lost is lost
        (0.97, 0.98, 1.0, 1.5),
        (1.0, 1.0, 1.0, 0.0),
        (0.9, 1.0, 1.0, math.inf),
        (0.02, 0.01, 0.0, 2.0),
        (-0.01, 0.01, 0.0, 0.0),  # more accurate than the baseline uses nothing
        (26.0, 20.0, math.inf, 10 ** (-6 / 20)),  # 6 dB above: half of the noise's amplitude
        (math.inf, 20.0, math.inf, 0.0),
        (math.nan, 0.9, 1.0, math.inf),
    ],
)
def test_the_share_of_a_limit_that_is_used(value: float, limit: float, best: float, used: float) -> None:
    assert allowance(value, limit, best) == pytest.approx(used)


def test_a_metric_has_its_interval_and_the_bar_ends_at_one_and_a_half_limits() -> None:
    row = metric_row(Metric("top1_agreement", "y", 0.95, 0.98, False, (0.94, 0.99)))
    assert (row.value, row.limit, row.interval) == ("95 %", "≥ 98 %", "94 % to 99 %")
    assert row.bar == "100.00"  # 5 points of the 2 allowed: cut at 1.5
    assert row.whisker == "left:33.33%;width:66.67%"
    assert not row.undecided  # the whole interval misses
    assert metric_row(Metric("top1_agreement", "y", 0.985, 0.98, True, (0.97, 0.99))).undecided
    assert not metric_row(Metric("top1_agreement", "y", 0.995, 0.98, True, (0.985, 0.999))).undecided
    assert metric_row(Metric("max_abs", "y", 0.5, 2.0, True)).limit == "≤ 2"


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.4, 0.5, 0.6, math.nan])
@pytest.mark.parametrize(("limit", "name", "sign"), [
    ("min", "m_engine", "≥"), ("max", "m_engine", "≤"), ("drop_max", "m_drop", "≤"),
])  # fmt: skip
def test_a_limit_of_a_jobs_own_metric_is_shown_as_it_is_meant(
    confident: bool, value: float, limit: str, name: str, sign: str
) -> None:
    """Whatever came of it: at the limit, beyond it, unsure, or no number."""
    limits = Limits(cosine_min=0.9, confident=confident, metrics={"m": MetricLimits(**{limit: 0.5})})
    figure = judged(Metric(name, "y", value, interval=(value - 0.2, value + 0.2)), limits)
    assert metric_row(figure).limit == f"{sign} 0.5"
    assert metric_row(Metric("new_metric", "y", 0.5)).title == "new metric"


def test_precisions_are_counted_from_narrow_to_wide() -> None:
    layers = [LayerPrecision("a", "conv2d", p, "") for p in ("fp32", "int8", "int8", "fp16")]  # type: ignore[arg-type]
    assert precision_shares(layers) == [("int8", 2, 50.0), ("fp16", 1, 25.0), ("fp32", 1, 25.0)]


def test_what_the_engine_holds_of_the_int8_weights_is_a_card_of_its_own(tmp_path: Path) -> None:
    def shown(weights: WeightBytes | None) -> list[tuple[str, str, str]]:
        manifest = samples.manifest()
        assert manifest.engine is not None
        engine = manifest.engine.model_copy(update={"int8_weights": weights})
        content = samples.content(tmp_path, manifest=manifest.model_copy(update={"engine": engine}))
        assert manifest.check is not None
        return [card for card in cards(content, manifest.check) if card[0] == "INT8 weights in the engine"]

    assert shown(None) == []
    title = "INT8 weights in the engine"
    assert shown(WeightBytes(3_000_000, 2_000_000, 0)) == [(title, "2.0 MB", "found in it, of 3.0 MB in the graph")]
    assert shown(WeightBytes(3_000_000, 2_000_000, 1_000_000)) == [
        (title, "2.0 MB", "found in it, of 3.0 MB in the graph; 1.0 MB are stored in floating point")
    ]


def test_a_module_that_shares_a_scale_shows_the_ratio_of_that_scale(tmp_path: Path) -> None:
    content = samples.content(tmp_path)
    rows = re.findall(r"<tr id=[^>]*>\s*<td data-sort=.*?</tr>", render(content), re.S)
    assert len(rows) == 5
    ratio = f"{content.table.audit.tensors['stem:input'].sqnr_db:.1f} dB"  # type: ignore[union-attr]
    assert ratio in rows[0]  # stem itself
    assert ratio in rows[4]  # head2, by `scales`
    assert " dB" not in rows[3]  # head stays in FP32 and reads nothing quantized
    assert "24.2 dB" in rows[1]  # sensitivity


def test_calibration_shows_thresholds_and_what_to_look_at_first(tmp_path: Path) -> None:
    page = render(samples.content(tmp_path))
    cards = re.findall(r"<h4>.*?</h4>", page)
    assert re.sub("<.*?>", "", cards[0]) == "block.conv:input unstable"
    assert page.count('<svg class="hist"') == 3  # two live tensors and the latencies; a dead tensor has no picture
    assert "no sample of 1 classes was drawn: horse" in page


def test_a_dead_tensor_that_comes_first_does_not_hide_that_histograms_are_drawn(tmp_path: Path) -> None:
    content = samples.content(tmp_path)
    assert content.table is not None
    assert content.table.histograms is not None
    first = "block.conv:input"  # unstable, so the first card
    left = {key: halves for key, halves in content.table.histograms.items() if key != first}
    page = render(dataclasses.replace(content, table=dataclasses.replace(content.table, histograms=left)))
    assert re.sub("<.*?>", "", re.findall(r"<h4>.*?</h4>", page)[0]) == f"{first} unstable"
    assert "How often each magnitude was seen" in page
    assert "so none is drawn" not in page


def test_without_histograms_the_report_says_why_none_is_drawn(tmp_path: Path) -> None:
    content = samples.content(tmp_path)
    assert content.table is not None
    page = render(dataclasses.replace(content, table=dataclasses.replace(content.table, histograms=None)))
    assert "No histograms of this table came with it, so none is drawn" in page


def test_what_was_not_measured_or_kept_is_said(tmp_path: Path) -> None:
    bare = samples.content(tmp_path, compared=None, table=None, bench=None, latencies_ms=(), scales={}, sensitivity={},
                           manifest=samples.manifest(layers=(), notes=()))  # fmt: skip
    page = render(bare)
    assert 'id="speed"' not in page
    assert "The answers to single samples were not kept" in page
    assert "Nothing is quantized, so nothing was calibrated." in page
    assert "does not say which operation computes in what" in page
    assert "None: nothing fell back, nothing was skipped." in page


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    assert render(samples.content(tmp_path)) == render(samples.content(tmp_path))


def test_names_stay_text(tmp_path: Path) -> None:
    page = render(samples.hostile(tmp_path))
    good = _Markup(render(samples.content(tmp_path)))
    bad = _Markup(page)
    assert {tag for tag, _ in bad.tags} <= {tag for tag, _ in good.tags}
    assert sum(tag == "script" for tag, _ in bad.tags) == 1
    assert not [a for _, attributes in bad.tags for a in attributes if a.startswith("on")]
    assert samples.HOSTILE not in page
    assert html.escape(samples.HOSTILE, quote=False)[:20] in page.replace("&#34;", '"').replace("&#39;", "'")
    assert "{{7*7}}" in bad.text  # and is not 49: a name is no template either


def test_nothing_is_fetched(tmp_path: Path) -> None:
    for tag, attributes in _Markup(render(samples.content(tmp_path))).tags:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
    assert "default-src &#39;none&#39;" in render(samples.content(tmp_path))


def test_a_kit_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the manifest is a kit's, without an engine or a check"):
        render(samples.content(tmp_path, manifest=samples.manifest(check=None)))


def test_what_stands_in_backticks_is_code_everywhere(tmp_path: Path) -> None:
    content = samples.content(tmp_path)
    check = content.manifest.check
    assert check is not None
    changed = dataclasses.replace(check, problems=("run `trtpipe <b>check</b>` again",))
    manifest = content.manifest.model_copy(update={"check": changed, "notes": ("see `a` and `b`", "one ` alone")})
    page = render(dataclasses.replace(content, manifest=manifest))
    assert "<li>run <code>trtpipe &lt;b&gt;check&lt;/b&gt;</code> again</li>" in page
    assert "<li>see <code>a</code> and <code>b</code></li>" in page
    assert "<li>one ` alone</li>" in page


@pytest.mark.parametrize("tried", ["", "check.on_fail: tune has tried 3 candidates: none met the limits."])
def test_a_failed_check_lists_the_worst_modules_with_links_to_their_rows(tmp_path: Path, tried: str) -> None:
    content = samples.content(tmp_path)
    check = content.manifest.check
    assert check is not None
    some = Sensitivity(
        (ModuleSensitivity("block.conv", "net.py:9", "conv2d", 12.0, 12.0, None, 1),), 8, 4, 1.0, 1.0, 0.1
    )
    line = blame(some, "fp16", (), tried)
    assert line.startswith(BLAME)
    failed = dataclasses.replace(check, problems=("output y holds NaN", line))
    manifest = content.manifest.model_copy(update={"check": failed})
    page = render(dataclasses.replace(content, manifest=manifest, sensitivity={"stem": 30.5, "block.conv": 12.0}))
    listed = re.search(r'<ol class="worst">(.*?)</ol>', page, re.S)
    assert listed is not None
    assert re.findall(r'href="#(module-\d+)">([^<]+)</a> <span class="num">([^<]+)<', listed[1]) == [
        ("module-2", "block.conv", "12.0 dB"), ("module-1", "stem", "30.5 dB"),
    ]  # fmt: skip
    for anchor, module in (("module-2", "block.conv"), ("module-1", "stem")):
        row = re.search(rf'<tr id="{anchor}">.*?</tr>', page, re.S)
        assert row is not None
        assert f">{module}<" in row[0]
    assert line not in page
    step = tried or "Keep the first in precision.keep.fp16, or run <code>trtpipe tune</code>."
    assert step in page
    assert ("trtpipe tune" in page) == (not tried)
    without = render(dataclasses.replace(content, manifest=manifest, sensitivity={}))
    assert line.replace("`trtpipe tune`", "<code>trtpipe tune</code>") in without
    assert "<ol" not in without


def test_the_module_that_ruins_an_output_is_the_worst(tmp_path: Path) -> None:
    """Quantized alone it makes the output NaN: minus infinity, and not the infinity of what makes no difference."""
    layers = samples.content(tmp_path).manifest.layers
    names = list(dict.fromkeys(layer.module for layer in layers if layer.precision == "int8"))[:2]
    rows = module_rows(layers, None, {}, dict(zip(names, (-math.inf, math.inf), strict=True)))
    shown = {row.module: row.sensitivity for row in rows if row.module in names}
    assert list(shown.values()) == ["−∞", "∞"]
    assert [row.module for row in worst_modules(rows)] == names[:1]
    assert all(math.isfinite(row.sensitivity_sort) for row in rows)


def test_how_close_to_the_limit_is_said_in_words() -> None:
    def words(name: str, value: float, limit: float) -> str:
        return metric_row(Metric(name, "y", value, limit, True)).closeness

    assert words("cosine", 0.995, 0.99) == "50 % of the error that is allowed"
    assert words("top1_agreement", 0.9, 0.95) == "2 times the error that is allowed"
    assert words("accuracy_drop", 0.0, 0.01) == "0 % of the error that is allowed"
    assert words("max_abs", 1.0, 0.0) == "beyond any limit"
    assert words("miou_drop", 0.02, 0.01) == "2 times the error that is allowed"
    assert words("miou_engine", 0.94, 0.999) == ""  # nobody knows its best value
    assert words("sqnr_db", 26.0, 20.0) == "50 % of the error that is allowed"


def test_a_metric_without_a_best_value_has_no_bar_and_is_not_said_to_be_far_from_the_baseline(tmp_path: Path) -> None:
    manifest = samples.manifest()
    assert manifest.check is not None
    metric = Metric("miou_engine", "logits", 0.94, 0.999, False, (0.93, 0.95))
    check = dataclasses.replace(manifest.check, passed=False, metrics=(metric,))
    assert (
        headline(manifest, check) == "The INT8 + FP16 + FP32 graph misses limits of its job on 8 samples: miou_engine."
    )
    page = render(samples.content(tmp_path, manifest=samples.manifest(check=check)))
    assert "gauge" not in page[page.index('id="metrics"') : page.index("</table>", page.index('id="metrics"'))]


def test_the_figures_at_the_top_are_those_of_the_worst_output(tmp_path: Path) -> None:
    manifest = samples.manifest()
    assert manifest.check is not None
    metrics = (
        Metric("cosine", "anchors", 1.0), Metric("sqnr_db", "anchors", float("inf")),
        Metric("cosine", "scores", 0.97), Metric("sqnr_db", "scores", 26.5),
    )  # fmt: skip
    check = dataclasses.replace(manifest.check, metrics=metrics)
    shown = cards(samples.content(tmp_path, manifest=samples.manifest(check=check)), check)
    assert ("Cosine similarity", "0.97", "mean, of scores") in shown
    assert ("SQNR", "26.5 dB", "at scores") in shown


def test_classes_without_names_are_said_to_be_indices(tmp_path: Path) -> None:
    content = samples.content(tmp_path)
    said = "Classes are shown by their index, as the job does not name them."
    assert said not in render(content)
    nameless = content.manifest.model_copy(update={"class_names": None})
    page = render(dataclasses.replace(content, manifest=nameless))
    assert said in page
    assert "<strong>class 0 → class 1</strong>" in page


def _in(precision: str, content: ReportContent) -> ReportContent:
    """The sample's page with every operation that is in INT8 in another format."""
    layers = tuple(
        dataclasses.replace(layer, precision=precision if layer.precision == "int8" else layer.precision)  # type: ignore[arg-type]
        for layer in content.manifest.layers
    )
    return dataclasses.replace(content, manifest=content.manifest.model_copy(update={"layers": layers}))


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "fp16"])
def test_without_int8_no_figure_of_int8s_thresholds_is_shown(tmp_path: Path, precision: str) -> None:
    """The sample's table has an unstable and a clipped threshold; what INT8 does not read is not clipped."""
    shown = samples.content(tmp_path)
    assert shown.table is not None
    page = render(_in(precision, shown))
    text = _Markup(page).text
    assert "Input SQNR" not in text
    assert not [w for w in ("clipped 0.1", "need more samples", "of their values clipped") if w in text]
    assert 'warn">unstable' not in page
    assert 'warn">dead' in page  # that is of the data
    assert "no sample of 1 classes was drawn: horse" in text
    assert "A tensor that nothing reads in INT8 is not clipped" in text
    for threshold, highest in re.findall(r"<dt>threshold</dt><dd>(\S+) of (\S+)</dd>", page):
        assert threshold == highest or float(highest) == 0
    in_int8 = [dataclasses.replace(layer, precision="int8") for layer in shown.manifest.layers]
    manifest = shown.manifest.model_copy(update={"layers": tuple(in_int8)})
    assert "that nothing reads in INT8" not in _Markup(render(dataclasses.replace(shown, manifest=manifest))).text


def test_of_weights_alone_it_is_not_said_that_nothing_is_quantized(tmp_path: Path) -> None:
    page = render(dataclasses.replace(_in("int4", samples.content(tmp_path)), table=None, scales={}))
    assert "Weights alone are quantized, so no activation was calibrated." in page
    assert "Nothing is quantized" not in page


def test_of_what_tensorrt_calibrated_it_is_not_said_that_nothing_is_quantized(tmp_path: Path) -> None:
    manifest = samples.manifest(build=Build(target="tensorrt_rtx", quantization="implicit"))
    page = render(samples.content(tmp_path, manifest=manifest, table=None, scales={}))
    assert "TensorRT calibrated by itself and chose what computes in INT8, so there is no table of thresholds." in page
    assert "Nothing is quantized" not in page


def test_a_package_that_two_spellings_name_is_shown_once() -> None:
    environment = {"nvidia_modelopt": "1.0", "nvidia-modelopt": "1.0", "NVIDIA.ModelOpt": "1.0", "torch": "2.14.1"}
    assert packages(environment) == [("nvidia_modelopt", "1.0"), ("torch", "2.14.1")]
