"""The end of the line: everything that was made, as a bundle with its report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.bundle import golden
from trtpipe.bundle.format import write_bundle
from trtpipe.bundle.golden import KEPT_SAMPLES, Golden
from trtpipe.bundle.manifest import CALIBRATION, GOLDEN, GRAPH, REPORT, Manifest, describe_engine
from trtpipe.job.sections import Transform
from trtpipe.model.data import check_transform
from trtpipe.pipeline.cache.environment import environment, fingerprint, portable_job, source_fingerprint
from trtpipe.report.content import Answers, ReportContent
from trtpipe.report.page import render

if TYPE_CHECKING:
    import numpy as np

    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.bundle.manifest import Manifest
    from trtpipe.job.job import Job
    from trtpipe.pipeline.measure import Evidence
    from trtpipe.pipeline.stages import Front, Stages
    from trtpipe.values import Captured, CheckReport, Engine, OnnxModel, Quantized


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
        files = {GOLDEN: golden.to_bytes(golden.first(golden_data(front)))}
        if table is not None:
            files[CALIBRATION] = table_bytes(table)
        if engine.graph is not None:
            files[GRAPH] = engine.graph.data
        files[manifest.engine_file] = engine.data
        files[REPORT] = report_page(job, parts, manifest, files)
        return write_bundle(out / job.name, manifest, files, sign=sign)


def report_page(job: Job, parts: Parts, manifest: Manifest, files: Mapping[str, bytes]) -> bytes:
    """The bundle's report.html."""
    images = None if job.check.images is None else Path(job.check.images)
    baseline, ids = parts.front.baseline, parts.front.check_source.ids
    answers = Answers(baseline.outputs, parts.answers, ids, baseline.labels, images) if parts.answers else None
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


def table_bytes(table: CalibrationTable) -> bytes:
    """The table's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        table.save(path)
        return path.read_bytes()


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
    notes = [*front.loaded.notes, *front.baseline.notes, *quantized.notes, *report.notes]
    notes += engine.notes if engine is not None else ()
    notes += [f"check: skipped {s}" for s in front.check_source.skipped]
    if table is not None:
        notes += table.audit.warnings
    return Manifest(
        name=job.name,
        kind="kit" if engine is None else "bundle",
        engine=None if engine is None else describe_engine(engine, job.build, job.precision),
        inputs=front.loaded.inputs,
        outputs=front.loaded.outputs,
        # A folder of timing caches is this machine's own business.
        build=job.build.model_copy(update={"timing_cache": None, "calibration_cache": None}),
        opset=None if graph is None else graph.opset,
        precision=job.precision,
        layers=quantized.layers,
        # Images without a transform are only made tensors, which is a way too; None means that inputs are arrays.
        preprocessing=(check_transform(job) or Transform()) if job.check.images else None,
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


def golden_data(front: Front) -> Golden:
    """The first check samples with the baseline's answers on them."""
    first = next(iter(front.check_source.batches(KEPT_SAMPLES)))
    count = len(first.ids)
    labels = front.baseline.labels
    return Golden(
        dict(first.arrays),
        {n: a[:count] for n, a in front.baseline.outputs.items()},
        None if labels is None else labels[:count],
    )
