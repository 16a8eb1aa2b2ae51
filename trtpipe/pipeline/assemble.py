"""The end of the line: everything that was made, as a bundle with its report."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.batching import joined
from trtpipe.bundle import golden
from trtpipe.bundle.format import write_bundle
from trtpipe.bundle.golden import KEPT_SAMPLES, Golden
from trtpipe.bundle.manifest import CALIBRATION, GOLDEN, GRAPH, REPORT, Manifest, describe_engine
from trtpipe.job.sections import Transform
from trtpipe.pipeline.cache.environment import environment, fingerprint, portable_job, source_fingerprint
from trtpipe.pipeline.stages import batching
from trtpipe.report.content import Answers, ReportContent
from trtpipe.report.page import render
from trtpipe.routes.compiled_precision import read_back
from trtpipe.trt.weights import stored_weights

if TYPE_CHECKING:
    import numpy as np

    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.bundle.manifest import Manifest
    from trtpipe.job.job import Job
    from trtpipe.pipeline.measure import Evidence
    from trtpipe.pipeline.stages import Front, Stages
    from trtpipe.values import Captured, CheckReport, Engine, OnnxModel, Quantized, WeightBytes


@dataclass(frozen=True)
class Parts:
    """Everything a bundle is made of.

    `scales` maps each quantized tensor's key to that of the scale it shares; `answers` are what was executed in the
    check answered on all samples, [S, ...] by output name.
    """

    front: Front
    table: CalibrationTable | None
    scales: Mapping[str, str]
    quantized: Quantized
    engine: Engine
    report: CheckReport
    answers: Mapping[str, np.ndarray[Any, Any]]
    evidence: Evidence


def shared_scales(captured: Captured) -> dict[str, str]:
    """The key of the shared scale of each quantized tensor, by the tensor's own key."""
    from trtpipe.quantization.placement import find_sites

    return {s.key: s.group for s in find_sites(captured.graph)[0] if s.axis is None}


def assemble(job: Job, out: Path, parts: Parts, stages: Stages, *, sign: Sign | None = None) -> Bundle:
    """The bundle `out/<name>`, written."""
    front, table, engine = parts.front, parts.table, parts.engine
    with stages("bundle"):
        manifest = describe(job, front, table, parts.quantized, parts.report, engine, engine.graph)
        files = {GOLDEN: golden.to_bytes(golden_data(job, front))}
        if table is not None:
            files |= table_files(table)
        if engine.graph is not None:
            files[GRAPH] = engine.graph.data
        files[manifest.engine_file] = engine.data
        files[REPORT] = report_page(job, parts, manifest, files)
        return write_bundle(out / job.name, manifest, files, sign=sign)


def report_page(job: Job, parts: Parts, manifest: Manifest, files: Mapping[str, bytes]) -> bytes:
    """The bundle's report.html."""
    images = None if job.check.images is None else Path(job.check.images)
    baseline, ids = parts.front.baseline, parts.front.check_source.ids
    # Of outputs that have one row a sample: the page is about samples.
    names = [s.name for s in parts.front.captured.outputs if s.batch_axis is not None]
    rows = [{n: a[n] for n in names if n in a} for a in (baseline.outputs, parts.answers)]
    answers = Answers(rows[0], rows[1], ids, baseline.labels, images) if rows[1] else None
    sizes = {name: len(data) for name, data in files.items()}
    evidence = parts.evidence
    found = () if evidence.sensitivity is None else evidence.sensitivity.modules
    return render(
        ReportContent(
            manifest,
            sizes,
            answers,
            parts.table,
            parts.scales,
            {m.module: m.sqnr_db for m in found},
            evidence.latencies_ms,
            evidence.bench,
            parts.report.runner if evidence.latencies_ms else "",
        )
    ).encode()


def table_files(table: CalibrationTable) -> dict[str, bytes]:
    """The table's file, and that of its corrections where it has any; histograms stay behind."""
    with tempfile.TemporaryDirectory() as folder:
        replace(table, histograms=None).save(Path(folder, CALIBRATION))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def describe(
    job: Job,
    front: Front,
    table: CalibrationTable | None,
    quantized: Quantized,
    report: CheckReport,
    engine: Engine | None,
    graph: OnnxModel | None,
) -> Any:
    """The manifest of the bundle, or, without an engine, of the kit."""
    calibration = None if table is None else table.digest
    parts = {"weights": front.loaded.weights_digest, "graph": front.captured.digest, "calibration": calibration}
    source = source_fingerprint(job, parts)
    notes = [*job.unused(), *front.loaded.notes, *front.baseline.notes, *quantized.notes, *report.notes]
    notes += engine.notes if engine is not None else ()
    notes += [f"check: skipped {s}" for s in front.check_source.skipped]
    if table is not None:
        notes += table.audit.warnings
        notes += [f"calibration: {s}" for s in (table.corrections.steps if table.corrections else ())]
    return Manifest(
        name=job.name,
        kind="kit" if engine is None else "bundle",
        engine=None
        if engine is None
        else describe_engine(engine, job.build, job.precision, int8_weights=_int8_weights(engine)),
        inputs=front.loaded.inputs,
        outputs=front.captured.outputs,
        # A folder of timing caches is this machine's own business.
        build=job.build.model_copy(update={"timing_cache": None, "calibration_cache": None}),
        opset=None if graph is None else graph.opset,
        precision=job.precision,
        layers=quantized.layers if graph is None else read_back(quantized.layers, graph),
        # Images without a transform are only made tensors, which is a way too; None means that inputs are arrays.
        preprocessing=(job.check_transform() or Transform()) if job.check.images else None,
        class_names=front.check_source.classes,
        calibration_digest=calibration,
        weights_digest=front.loaded.weights_digest,
        check=report,
        limits=job.check.limits,
        require=job.check.require,
        job=portable_job(job),
        environment=environment(),
        fingerprint=source if engine is None else fingerprint(source, job.build.target),
        notes=tuple(dict.fromkeys(notes)),
    )


def _int8_weights(engine: Engine) -> WeightBytes | None:
    """How the engine stores its graph's INT8 weights; None where it is the graph, or has none."""
    if engine.target == "onnxruntime" or engine.graph is None or engine.fallback:
        return None
    found = stored_weights(engine.data, engine.graph.data)
    return found if found.total else None


def golden_data(job: Job, front: Front, count: int = KEPT_SAMPLES) -> Golden:
    """The first `count` check samples, in whole batches where an output has no batch axis, and their outputs."""
    how, baseline = batching(job, front), front.baseline
    batches = itertools.islice(front.check_source.batches(how.size), -(-count // how.size))
    inputs = joined(b.arrays for b in batches)
    samples = len(next(iter(inputs.values())))
    labels = None if baseline.labels is None else baseline.labels[:samples]
    held = Golden(inputs, how.first(baseline.outputs, samples), labels, how.size if how.whole else None)
    return golden.first(held, how.outputs, count)
