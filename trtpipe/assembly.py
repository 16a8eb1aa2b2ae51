"""The end of the line: everything that was made, as a bundle with its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from calib.table import CalibrationTable
    from trtpipe.bundle import Bundle
    from trtpipe.job import Job
    from trtpipe.manifest import Manifest
    from trtpipe.pipeline import Front, Stages
    from trtpipe.values import Captured, CheckReport, Engine, Quantized


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


def shared_scales(captured: Captured) -> dict[str, str]:
    """The key of the shared scale of each quantized tensor, by the tensor's own key."""
    from trtpipe.placement import find_sites

    return {s.key: s.group for s in find_sites(captured.graph)[0] if s.axis is None}


def assemble(
    job: Job, out: Path, parts: Parts, stages: Stages, *, sign: Callable[[bytes], bytes] | None = None
) -> Bundle:
    """The bundle `out/<name>`, written."""
    from trtpipe import golden
    from trtpipe.bundle import write_bundle
    from trtpipe.manifest import CALIBRATION, GOLDEN, GRAPH, REPORT
    from trtpipe.pipeline import describe, golden_data, table_bytes

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
    from trtpipe.report import render
    from trtpipe.report.content import Answers, ReportContent

    images = None if job.check.images is None else Path(job.check.images)
    baseline, ids = parts.front.baseline, parts.front.check_source.ids
    answers = Answers(baseline.outputs, parts.answers, ids, baseline.labels, images) if parts.answers else None
    sizes = {name: len(data) for name, data in files.items()}
    return render(ReportContent(manifest, sizes, answers, parts.table, parts.scales)).encode()
