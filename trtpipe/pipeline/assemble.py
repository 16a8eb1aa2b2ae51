"""The end of the line: everything that was made, as a bundle with its report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
    from numpy.typing import NDArray

    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.job.job import Job
    from trtpipe.pipeline.front import Stages
    from trtpipe.pipeline.lowered import Compiled, Lowered
    from trtpipe.pipeline.measure import Evidence
    from trtpipe.values import Baseline, CheckReport, Engine


@dataclass(frozen=True)
class Checked:
    """A built engine and what it was checked against and with what result: all that a bundle is made of.

    `outputs` are those of the engine, or of the graph that was executed for it, on every check sample, [S, ...] by
    name.
    """

    compiled: Compiled
    source: Source
    baseline: Baseline
    report: CheckReport
    outputs: Mapping[str, NDArray[np.generic]]


def assemble(
    job: Job, out: Path, checked: Checked, evidence: Evidence, stages: Stages, *, sign: Sign | None = None
) -> Bundle:
    """The bundle `out/<name>`, written."""
    lowered, engine = checked.compiled.lowered, checked.compiled.engine
    with stages("bundle"):
        manifest = describe(job, lowered, checked.source, checked.baseline, checked.report, engine)
        files = {GOLDEN: golden.to_bytes(golden.first(golden_data(checked.source, checked.baseline)))}
        if lowered.table is not None:
            files[CALIBRATION] = table_bytes(lowered.table)
        if engine.graph is not None:
            files[GRAPH] = engine.graph.data
        files[manifest.engine_file] = engine.data
        files[REPORT] = report_page(job, checked, evidence, manifest, files)
        return write_bundle(out / job.name, manifest, files, sign=sign)


def report_page(
    job: Job, checked: Checked, evidence: Evidence, manifest: Manifest, files: Mapping[str, bytes]
) -> bytes:
    """The bundle's report.html."""
    images = None if job.check.images is None else Path(job.check.images)
    baseline, lowered = checked.baseline, checked.compiled.lowered
    answers = None
    if checked.outputs:
        answers = Answers(baseline.outputs, checked.outputs, checked.source.ids, baseline.labels, images)
    modules = () if evidence.sensitivity is None else evidence.sensitivity.modules
    return render(
        ReportContent(
            manifest,
            {name: len(data) for name, data in files.items()},
            answers,
            lowered.table,
            lowered.shared_scales,
            {m.module: m.sqnr_db for m in modules},
            evidence.latencies_ms,
            evidence.bench,
            checked.report.runner if evidence.latencies_ms else "",
        )
    ).encode()


def table_bytes(table: CalibrationTable) -> bytes:
    """The table's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        table.save(path)
        return path.read_bytes()


def describe(
    job: Job, lowered: Lowered, source: Source, baseline: Baseline, report: CheckReport, engine: Engine | None
) -> Manifest:
    """The manifest of the bundle, or, without an engine, of the kit."""
    table, graph = lowered.table, lowered.graph
    calibration = None if table is None else table.digest
    parts = {"weights": lowered.weights_digest, "graph": lowered.graph_digest, "calibration": calibration}
    made_from = source_fingerprint(job, parts)
    notes = [*lowered.model_notes, *baseline.notes, *lowered.notes, *report.notes]
    notes += engine.notes if engine is not None else ()
    notes += [f"check: skipped {s}" for s in source.skipped]
    if table is not None:
        notes += table.audit.warnings
    return Manifest(
        name=job.name,
        kind="kit" if engine is None else "bundle",
        engine=None if engine is None else describe_engine(engine, job.build),
        inputs=lowered.inputs,
        outputs=lowered.outputs,
        # A folder of timing caches is this machine's own business.
        build=job.build.model_copy(update={"timing_cache": None, "calibration_cache": None}),
        opset=None if graph is None else graph.opset,
        precision=job.precision,
        layers=lowered.layers,
        # Images without a transform are only made tensors, which is a way too; None means that inputs are arrays.
        preprocessing=(check_transform(job) or Transform()) if job.check.images else None,
        class_names=source.classes,
        calibration_digest=calibration,
        weights_digest=lowered.weights_digest,
        check=report,
        limits=job.check.limits,
        require=job.check.require,
        job=portable_job(job),
        environment=environment(),
        fingerprint=made_from if engine is None else fingerprint(made_from, job.build.target),
        notes=tuple(dict.fromkeys(notes)),
    )


def golden_data(source: Source, baseline: Baseline) -> Golden:
    """The first check samples with the baseline's outputs on them."""
    first = next(iter(source.batches(KEPT_SAMPLES)))
    count = len(first.ids)
    return Golden(
        dict(first.arrays),
        {n: a[:count] for n, a in baseline.outputs.items()},
        None if baseline.labels is None else baseline.labels[:count],
    )
