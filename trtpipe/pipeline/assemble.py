"""The last stage: everything that was built, as a bundle with its report."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from calib.images import geometry
from calib.samples import TransformSpec
from trtpipe.batching import KEPT_SAMPLES, joined, unranked
from trtpipe.bundle import golden
from trtpipe.bundle.format import write_bundle
from trtpipe.bundle.golden import Golden
from trtpipe.bundle.manifest import (
    CALIBRATION,
    GRAPH,
    REPORT,
    TIMING_CACHE,
    UNRECORDED,
    Manifest,
    describe_engine,
)
from trtpipe.job.job import COCO_OUTPUTS
from trtpipe.job.sections import Transform
from trtpipe.packages import present
from trtpipe.pipeline.cache.environment import environment, fingerprint, portable_job, source_fingerprint
from trtpipe.pipeline.judged import Judged, batching
from trtpipe.pipeline.tables import table_notes
from trtpipe.report.content import ComparedOutputs, Detections, ReportContent
from trtpipe.report.page import render
from trtpipe.routes.compiled_precision import read_back
from trtpipe.trt.weights import stored_weights
from trtpipe.values import BASELINES, GOLDEN

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.job.job import Job
    from trtpipe.model.labels import Labels
    from trtpipe.pipeline.lowered import Compiled, Lowered
    from trtpipe.pipeline.measure import Evidence
    from trtpipe.pipeline.prepared import PreparedJob, Stages
    from trtpipe.values import CheckReport, Engine, WeightBytes


@dataclass(frozen=True)
class Checked:
    """A built engine, what it was checked against, and the result: all that a bundle is made of."""

    compiled: Compiled
    prepared: PreparedJob
    judged: Judged


def assemble(job: Job, out: Path, checked: Checked, evidence: Evidence, stages: Stages, *, sign: Sign | None) -> Bundle:
    """The bundle `out/<name>`, written."""
    lowered, engine = checked.compiled.lowered, checked.compiled.engine
    with stages("bundle"):
        judged = checked.judged
        manifest = describe(job, lowered, checked.prepared, judged.report, engine, judged.device_memory_bytes)
        files = {GOLDEN: golden.to_bytes(golden_data(job, checked.prepared))}
        if lowered.table is not None:
            files |= table_files(lowered.table)
        if engine.graph is not None:
            files[GRAPH] = engine.graph.data
        files[manifest.engine_file] = engine.data
        if engine.timing_cache:
            files[TIMING_CACHE] = engine.timing_cache
        files |= engine.plugins
        files[REPORT] = report_page(job, checked, evidence, manifest, files)
        return write_bundle(out / job.name, manifest, files, sign=sign)


def report_page(
    job: Job, checked: Checked, evidence: Evidence, manifest: Manifest, files: Mapping[str, bytes]
) -> bytes:
    """The bundle's report.html."""
    images = None if job.check.images is None else Path(job.check.images)
    baseline, lowered = checked.prepared.baseline, checked.compiled.lowered
    # Of outputs that have one row a sample: the page is about samples.
    names = [s.name for s in lowered.outputs if s.batch_axis is not None]
    rows = [{n: a[n] for n in names if n in a} for a in (baseline.outputs, checked.judged.outputs)]
    ids = checked.prepared.check_source.ids
    boxes = detections_of(job, checked.prepared.judgement.labels)
    ranks = tuple(s.name for s in manifest.outputs if unranked(s))
    compared = ComparedOutputs(rows[0], rows[1], ids, baseline.labels, images, boxes, ranks) if rows[1] else None
    modules = () if evidence.sensitivity is None else evidence.sensitivity.modules
    return render(
        ReportContent(
            manifest,
            {name: len(data) for name, data in files.items()},
            compared,
            lowered.table,
            lowered.shared_scales,
            {m.module: m.sqnr_db for m in modules},
            evidence.latencies_ms,
            evidence.bench,
            checked.judged.report.runner if evidence.latencies_ms else "",
        )
    ).encode()


def detections_of(job: Job, labels: Labels) -> Detections | None:
    """The outputs that the job's metric coco_map is about, and how their boxes lie in the images; None without one."""
    metric = next((m for m in job.check.metrics.values() if m.function == "coco_map"), None)
    if metric is None:
        return None
    names = {k: str(metric.args.get(k, name)) for k, name in COCO_OUTPUTS.items()}
    transform = job.check_transform()
    whole = transform is None or transform.callable is not None
    steps = (
        ()
        if transform is None or whole
        else geometry(TransformSpec(resize=transform.resize, center_crop=transform.center_crop))
    )
    categories = metric.args.get("categories")
    truth = labels if isinstance(labels, tuple) else None
    return Detections(**names, categories=categories, steps=steps, truth=truth)


def table_files(table: CalibrationTable) -> dict[str, bytes]:
    """The table's file, and that of its corrections where it has any; histograms stay behind."""
    return replace(table, histograms=None).files(CALIBRATION)


def describe(
    job: Job,
    lowered: Lowered,
    prepared: PreparedJob,
    report: CheckReport,
    engine: Engine | None,
    device_memory_bytes: int | None = None,
) -> Manifest:
    """The manifest of the bundle, or, without an engine, of the kit."""
    table, source, baseline = lowered.table, prepared.check_source, prepared.baseline
    graph = lowered.graph if engine is None else engine.graph
    calibration = None if table is None else table.digest
    parts = {"weights": lowered.weights_digest, "graph": lowered.graph_digest, "calibration": calibration}
    plugins = {} if engine is None else engine.plugins
    parts |= {} if graph is None else {"onnx": hashlib.sha256(graph.data).hexdigest()}
    parts |= {f"plugin {name}": hashlib.sha256(data).hexdigest() for name, data in plugins.items()}
    made_from = source_fingerprint(job, parts)
    notes = [*lowered.notes]
    if table is not None:
        notes += table_notes(job, table, lowered)
    notes += report.notes
    notes += engine.notes if engine is not None else ()  # last, as where it is made of a kit
    return Manifest(
        name=job.name,
        kind="kit" if engine is None else "bundle",
        engine=None
        if engine is None
        else describe_engine(
            engine, job.build, device_memory_bytes=device_memory_bytes, int8_weights=int8_weights(engine)
        ),
        inputs=lowered.inputs,
        outputs=job.as_judged(lowered.outputs),
        # A folder of timing caches is this machine's own business, and plugins lie in the bundle.
        build=job.build.model_copy(
            update={**{n: type(job.build).model_fields[n].default for n in UNRECORDED}, "plugins": tuple(plugins)}
        ),
        opset=None if graph is None else graph.opset,
        precision=job.precision,
        layers=lowered.layers if graph is None else read_back(lowered.layers, graph),
        # Images without a transform are only made tensors, which is a way too; None means that inputs are arrays.
        preprocessing=(job.check_transform() or Transform()) if job.check.images else None,
        class_names=source.classes,
        calibration_digest=calibration,
        weights_digest=lowered.weights_digest,
        baseline=BASELINES[baseline.kind],
        mixed=baseline.mixed,
        check=report,
        limits=job.check.limits,
        require=job.check.require,
        job=portable_job(job),
        environment=environment(),
        fingerprint=made_from if engine is None else fingerprint(made_from, job.build.target, job.build.route),
        notes=tuple(dict.fromkeys(notes)),
    )


def int8_weights(engine: Engine) -> WeightBytes | None:
    """How the engine stores its graph's INT8 weights; None where it is the graph, or has none, and on a device without
    the package onnx, which reads the graph."""
    if engine.target == "onnxruntime" or engine.graph is None or engine.fallback or not present("onnx"):
        return None
    stored = stored_weights(engine.data, engine.graph.data)
    return stored if stored.total else None


def golden_data(job: Job, prepared: PreparedJob, count: int = KEPT_SAMPLES) -> Golden:
    """The first `count` check samples, in whole batches where an output depends on those, and their outputs."""
    how, baseline = batching(job, prepared), prepared.baseline
    batches = itertools.islice(prepared.check_source.batches(how.size), -(-count // how.size))
    inputs = joined(b.arrays for b in batches)
    samples = len(next(iter(inputs.values())))
    labels = None if baseline.labels is None else baseline.labels[:samples]
    held = Golden(
        inputs, how.first(baseline.outputs, samples), labels, how.size if how.whole or baseline.mixed else None
    )
    return golden.first(held, how.outputs, count)
