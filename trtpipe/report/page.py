"""`report.html`: one page that stands alone. No network, no clock, and no script but the one that sorts a table."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calib.audit import CLIPPED, UNSTABLE
from trtpipe.evaluation.limits import ENGINE_SUFFIX, worst
from trtpipe.progress import size
from trtpipe.quantization.diagnose import BLAME, step_of
from trtpipe.report import charts, comparison
from trtpipe.report.content import ReportContent
from trtpipe.report.figures import compact, percent
from trtpipe.report.metric_rows import METRICS, metric_row
from trtpipe.report.thresholds import NUMBER_FORMATS, any_in_int8, beyond_int8, input_sqnr, scale_keys, table_warnings
from trtpipe.values import PRECISIONS_BY_WIDTH

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from calib.audit import TensorAudit
    from calib.table import CalibrationTable
    from trtpipe.bundle.manifest import Manifest
    from trtpipe.values import CheckReport, LayerPrecision, TensorSpec

_TEMPLATES = Path(__file__).with_name("templates")

#: Figures of a tensor's audit where its largest value is the threshold; INT8's own are not known then.
_EXACT = {"clipped": 0.0, "sqnr_db": None, "stability": None}
#: Histograms that are open at once; the rest is behind a click.
OPEN_HISTOGRAMS = 12
#: Rows after which a table scrolls by itself.
LONG_TABLE = 80


@dataclass(frozen=True)
class TensorCard:
    """One calibrated tensor: its histogram and what its threshold does."""

    key: str
    picture: str
    amax: str
    highest: str
    clipped: str
    sqnr: str
    stability: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class ModuleRow:
    """One operation of the graph. Bars are in percent of the column's largest; `*_sort` is what a click sorts by."""

    module: str
    op: str
    precision: str
    reason: str
    source: str
    sqnr: str
    sqnr_bar: float
    sqnr_sort: float
    sensitivity: str
    sensitivity_bar: float
    sensitivity_sort: float
    row: int = 0


#: Modules that a failed check lists.
WORST = 5


def render(content: ReportContent) -> str:
    """The page.

    Args:
        content: the build's values; its manifest must have been checked.

    Raises:
        ValueError: the manifest has no check or no engine: a kit has nothing to report yet.
    """
    manifest = content.manifest
    check, engine = manifest.check, manifest.engine
    if check is None or engine is None:
        raise ValueError("report: the manifest is a kit's, without an engine or a check")
    table = content.table
    unclipped = frozenset() if table is None else beyond_int8(manifest.layers, table, content.scales)
    modules = module_rows(manifest.layers, table, content.scales, content.sensitivity)
    confusion = None if content.compared is None else comparison.confusion(content.compared, manifest.class_names)
    shown = ((), ()) if content.compared is None else comparison.galleries(content.compared, manifest.class_names)
    metrics = [metric_row(m) for m in check.metrics]
    worst_rows = worst_modules(modules)
    blamed = [p for p in check.problems if worst_rows and p.startswith(BLAME)]
    return page(
        "report.html",
        name=manifest.name,
        check=check,
        engine=engine,
        manifest=manifest,
        headline=headline(manifest, check),
        # The list of modules stands in the place of the sentence that names the first of them.
        problems=[p for p in check.problems if p not in blamed],
        worst=worst_rows,
        step=" ".join(map(step_of, blamed)),
        packages=packages(manifest.environment),
        cards=cards(content, check),
        judged=[m for m in metrics if m.limit],
        measured=[m for m in metrics if not m.limit],
        several=len({m.output for m in check.metrics}) > 1,
        bindings=[binding("input", s) for s in manifest.inputs] + [binding("output", s) for s in manifest.outputs],
        confusion=confusion,
        matrix=None if confusion is None else charts.matrix(confusion),
        galleries=shown[0],
        not_shown=shown[1],
        modules=modules,
        has_sqnr=any(m.sqnr for m in modules),
        has_sensitivity=bool(content.sensitivity),
        shares=precision_shares(manifest.layers),
        long_table=LONG_TABLE,
        table=table,
        tensors=() if table is None else tensor_cards(table, unclipped),
        unclipped=bool(unclipped),
        warnings=() if table is None else table_warnings(table, unclipped),
        without_table=without_table(manifest),
        open_histograms=OPEN_HISTOGRAMS,
        coverage=coverage(table),
        bench=content.bench,
        distribution=charts.distribution(content.latencies_ms, "latency") if content.latencies_ms else None,
        measured_on=content.measured_on,
        sizes=sorted(content.sizes.items()),
        digests=digests(manifest),
    )


def page(template: str, **values: object) -> str:
    """`template` with `values`, each escaped, and a policy that lets nothing but the page's own script run."""
    script = (_TEMPLATES / "sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(script=script, style=style, policy=policy, **values)


@functools.cache
def _environment() -> Environment:
    """With the templates that were compiled, which takes a fifth of a second for a report."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"compact": compact, "percent": percent, "size": size, "prose": prose}
    return environment


def prose(text: str) -> Markup:
    """`text`, escaped, with what stands in backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped just now


def packages(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, version) of each package once: `a-b` and `a_b` are one (PEP 503)."""
    from packaging.utils import canonicalize_name

    by_name = {canonicalize_name(name): (name, version) for name, version in sorted(environment.items())}
    return sorted(by_name.values())


def worst_modules(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """The modules whose quantization alone costs the most, the worst first; each once."""
    first: dict[str, ModuleRow] = {}
    for row in rows:
        if row.sensitivity and row.sensitivity != compact(math.inf):
            first.setdefault(row.module, row)
    return sorted(first.values(), key=lambda row: row.sensitivity_sort)[:WORST]


def without_table(manifest: Manifest) -> str:
    """Why a build has no calibration table, in one sentence."""
    if manifest.build.quantization == "implicit":
        return "TensorRT calibrated by itself and chose what computes in INT8, so there is no table of thresholds."
    if any(layer.precision in NUMBER_FORMATS for layer in manifest.layers):
        return "Weights alone are quantized, so no activation was calibrated."
    return "Nothing is quantized, so nothing was calibrated."


def headline(manifest: Manifest, check: CheckReport) -> str:
    """The verdict in one sentence."""
    count = sum(m.limit is not None for m in check.metrics)
    wide = " + ".join(p.upper() for p in PRECISIONS_BY_WIDTH if any(layer.precision == p for layer in manifest.layers))
    what = "engine" if check.executed == "engine" else "graph"
    subject = f"The {wide + ' ' if wide else ''}{what}"
    where = f"on {check.samples:,} samples"
    if check.passed:
        limits = "the limit" if count == 1 else f"all {count} limits"
        return f"{subject} matches its {manifest.baseline} baseline {where}, within {limits} of the job."
    missed = [m.name for m in check.metrics if m.passed is False]
    if missed and all(name.endswith(ENGINE_SUFFIX) for name in missed):  # which the baseline may miss as well
        return f"{subject} misses limits of its job {where}: {', '.join(missed)}."
    if missed:
        return f"{subject} is too far from its {manifest.baseline} baseline {where}: {', '.join(missed)}."
    return f"{subject} was compared with its {manifest.baseline} baseline {where}, and the comparison proves nothing."


def cards(content: ReportContent, check: CheckReport) -> list[tuple[str, str, str]]:
    """The few figures above all others: (title, value, remark)."""
    by_name, several = worst(check.metrics), len({m.output for m in check.metrics}) > 1
    result: list[tuple[str, str, str]] = []
    if (m := by_name.get("accuracy_engine")) is not None:
        base = by_name.get("accuracy_baseline")
        result.append(("Accuracy", percent(m.value), "" if base is None else f"baseline {percent(base.value)}"))
    if (m := by_name.get("top1_agreement")) is not None:
        result.append(("Same class as the baseline", percent(m.value), f"of {check.samples:,} samples"))
    if (m := by_name.get("cosine")) is not None:
        result.append((METRICS["cosine"][0], compact(m.value), f"mean, of {m.output}" if several else "mean"))
    if (m := by_name.get("sqnr_db")) is not None:
        result.append(("SQNR", f"{compact(m.value)} dB", f"at {m.output}" if several else "at the output"))
    engine = content.manifest.engine
    if engine is not None and engine.file in content.sizes:
        result.append(("Engine", size(content.sizes[engine.file]), f"{engine.target} {engine.version}"))
    if engine is not None and engine.int8_weights is not None:
        weights = engine.int8_weights
        remark = f"found in it, of {size(weights.total)} in the graph"
        if weights.dequantized:
            remark += f"; {size(weights.dequantized)} are stored in floating point"
        result.append(("INT8 weights in the engine", size(weights.int8), remark))
    return result


def binding(side: str, spec: TensorSpec) -> tuple[str, str, str, str, str]:
    """(side, name, dtype, shape, ranges) of one binding."""
    shape = " × ".join(str(d) for d in spec.shape) or "scalar"
    ranges = ", ".join(f"{n}: {d.min} to {d.max}, best at {d.opt}" for n, d in spec.dims.items())
    return side, spec.name, spec.dtype, shape, ranges


def precision_shares(layers: Sequence[LayerPrecision]) -> list[tuple[str, int, float]]:
    """(precision, operations, percent of all) in the order of width."""
    counted = Counter(layer.precision for layer in layers)
    return [(p, counted[p], 100 * counted[p] / len(layers)) for p in PRECISIONS_BY_WIDTH if counted[p]]


def module_rows(
    layers: Sequence[LayerPrecision],
    table: CalibrationTable | None,
    scales: Mapping[str, str],
    sensitivity: Mapping[str, float],
) -> list[ModuleRow]:
    """Every operation in the graph's order, with the SQNR of its calibrated input and its sensitivity where known."""
    audits: Mapping[str, TensorAudit] = {} if table is None else table.audit.tensors
    rows = []
    keys = scale_keys(audits, scales)
    counts = any_in_int8(layers)
    ratios = [input_sqnr(layer, audits, keys) if counts else None for layer in layers]
    highest = max([r for r in ratios if r is not None], default=1.0)
    most = max((s for s in sensitivity.values() if math.isfinite(s)), default=1.0)
    for number, (layer, ratio) in enumerate(zip(layers, ratios, strict=True), 1):
        felt = sensitivity.get(layer.module) if layer.precision in NUMBER_FORMATS else None
        rows.append(
            ModuleRow(
                layer.module or "(model)", layer.op, layer.precision, layer.reason, layer.source,
                "" if ratio is None else f"{ratio:.1f}", _bar(ratio, highest), 1e9 if ratio is None else ratio,
                "" if felt is None else f"{felt:.1f}" if math.isfinite(felt) else compact(felt),
                _bar(felt if felt is None else min(felt, most), most),
                1e9 if felt is None else max(-1e8, min(felt, 1e8)), number,
            )
        )  # fmt: skip
    return rows


def _bar(value: float | None, most: float) -> float:
    return 0.0 if value is None or most <= 0 else round(100 * min(max(value / most, 0.0), 1.0), 1)


def tensor_cards(table: CalibrationTable, unclipped: Collection[str]) -> list[TensorCard]:
    """The calibrated tensors, those to look at first: flagged, then by falling instability and clipping.

    The threshold of those in `unclipped` is the largest value seen, and they have no figure of INT8's.
    """
    cards = []
    for key, seen in table.audit.tensors.items():
        exact, highest = key in unclipped, seen.max
        audit = seen.model_copy(update=_EXACT) if exact else seen
        amax = highest or table.amax[key] if exact else table.amax[key]
        flags: list[str] = [] if audit.state == "live" else [audit.state]
        if (audit.stability or 0.0) > UNSTABLE:
            flags.append("unstable")
        if audit.clipped > CLIPPED:
            flags.append("clipped")
        halves = None if table.histograms is None else table.histograms.get(key)
        picture = "" if halves is None else charts.histogram(halves[0] + halves[1], amax, f"|x| of {key}")
        order = (not flags, -(audit.stability or 0.0), -audit.clipped, key)
        card = TensorCard(
            key, picture, compact(amax), compact(highest),
            percent(audit.clipped, 3), "–" if audit.sqnr_db is None else f"{audit.sqnr_db:.1f} dB",
            "–" if audit.stability is None else percent(audit.stability, 1), tuple(flags),
        )  # fmt: skip
        cards.append((order, card))
    return [card for _, card in sorted(cards, key=lambda f: f[0])]


def coverage(table: CalibrationTable | None) -> list[tuple[str, int, float]]:
    """(class, samples, percent of the most) of the calibration data; empty without labels."""
    counts = {} if table is None or table.audit.coverage is None else table.audit.coverage
    most = max(counts.values(), default=0)
    return [(name, n, 100 * n / most if most else 0.0) for name, n in counts.items()]


def digests(manifest: Manifest) -> list[tuple[str, str]]:
    """Everything a reader can compare with another build."""
    named = [
        ("fingerprint", manifest.fingerprint),
        ("weights", manifest.weights_digest or ""),
        ("calibration table", manifest.calibration_digest or ""),
        *((f"file {name}", entry.sha256) for name, entry in sorted(manifest.files.items())),
    ]
    return [(name, digest) for name, digest in named if digest]
