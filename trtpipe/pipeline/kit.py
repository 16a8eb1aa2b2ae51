"""The line, cut before the engine: a job to a kit, where torch is; a kit to a bundle, where only its TensorRT is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.batching import Batching
from trtpipe.bundle.format import require_place, write_bundle
from trtpipe.bundle.kit import NOT_EXECUTED, bundle_contents, kit_contents, kit_graph
from trtpipe.bundle.manifest import CALIBRATION
from trtpipe.errors import InputError, MissingError
from trtpipe.evaluation.check import NO_ENGINE_RAN, CheckData, Damaged, check_engine
from trtpipe.evaluation.control import damaged_copy
from trtpipe.packages import present
from trtpipe.pipeline.assemble import describe, golden_data, int8_weights, table_files
from trtpipe.pipeline.build import Built, reason, retuned
from trtpipe.pipeline.cache.environment import environment, fingerprint
from trtpipe.pipeline.controls import engine_control
from trtpipe.pipeline.lowered import Lowered
from trtpipe.pipeline.measure import diagnosis_wanted, explained
from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.prepared import Stages
from trtpipe.pipeline.stages import (
    calibrate,
    check_graph,
    lowered_of,
    prepare,
    quantize,
)
from trtpipe.pipeline.validate import kit_refusals
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS
from trtpipe.routes.onnx import graph_engine, lowered_for, to_onnx
from trtpipe.runtime.compatibility import admit, require_fit
from trtpipe.runtime.device import this_device
from trtpipe.runtime.device_memory import lacking_memory
from trtpipe.runtime.executor import (
    activation_memory,
    not_executed_here,
    open_engine,
    why_not_here,
)
from trtpipe.runtime.recheck import golden_limits
from trtpipe.trt.builder import build_engine
from trtpipe.trt.flavour import without_effect
from trtpipe.trt.isolated import build_isolated
from trtpipe.values import CheckReport, Engine, OnnxModel

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Build, Precision
    from trtpipe.progress import Progress, Reporter

    #: Makes the engine of a graph.
    Compiling = Callable[[OnnxModel, Progress], Engine]


@with_own_modules
def write_kit(
    job: Job,
    out: Path,
    reporter: Reporter,
    *,
    sign: Sign | None = None,
    release: str | None = None,
    diagnose_seconds: float = DIAGNOSE_SECONDS,
) -> Built:
    """Take `job` down the line as far as its graph, check that, and write the kit `out/<name>`.

    Args:
        job: of route onnx.
        out: the folder that the kit goes to.
        reporter: receives the stages.
        sign: signs the kit's manifest, unless the check failed.
        diagnose_seconds: as of `build`.
        release: the device's TensorRT, like "8.6.1"; None for any from 10 on.

    Raises:
        TrtpipeError: with the exit code of what went wrong; before the check, nothing is then written.
    """
    if refused := [f"{option}: {text}" for option, text in kit_refusals(job, release)]:
        raise InputError("\n".join(refused))
    require_place(out / job.name)
    stages = Stages(reporter)
    prepared = prepare(job, stages)
    table = calibrate(job, prepared, stages)

    def checked(job: Job, table: CalibrationTable | None) -> tuple[Lowered, OnnxModel, CheckReport]:
        quantized = quantize(job, prepared, table, stages)
        with stages("export"):
            written_for = release if job.build.target == "tensorrt" else None
            graph = lowered_for(to_onnx(quantized, written_for), job.build.target)
        lowered = lowered_of(prepared, quantized, table, graph)
        report = check_graph(job, prepared, lowered, stages).report
        return lowered, graph, dataclasses.replace(report, notes=(*report.notes, *graph.notes))

    lowered, graph, report = checked(job, table)
    tried = ""
    if better := retuned(job, prepared, table, report, out, stages):
        job, table, how, tried = better
        lowered, graph, report = checked(job, table)
        report = dataclasses.replace(report, notes=(*report.notes, how))
    if note := without_effect("a kit", job.build.target, release):
        report = dataclasses.replace(report, notes=(*report.notes, note))
    requested = [key for key in ("sensitivity", "bench") if getattr(job.check, key)]
    if requested:  # both are for the report.html of a build, which a kit has not
        note = f"a kit has no report: {' and '.join(f'check.{key}' for key in requested)} measured nothing"
        report = dataclasses.replace(report, notes=(*report.notes, note))

    if job.build.timing_cache:
        note = "a kit takes no timing cache to its device: build.timing_cache has no effect there"
        report = dataclasses.replace(report, notes=(*report.notes, note))

    def written(report: CheckReport) -> Bundle:
        with stages("kit"):
            manifest = describe(job, lowered, prepared, report, None)
            extra = {} if table is None else table_files(table)
            calibration = extra.pop(CALIBRATION, None)
            data = golden_data(job, prepared, prepared.check_source.sample_count)
            contents = kit_contents(manifest, graph, data, calibration, extra)
            return write_bundle(out / job.name, *contents, sign=sign)

    kit = written(report)
    if diagnosis_wanted(job, report, diagnose_seconds, always=False):
        stages.note(f"check FAILED: {reason(report)}; kit: {kit.path}")
        report, _ = explained(job, prepared, table, report, stages, diagnose_seconds, always=False, tried=tried)
        kit = written(report)
    return Built(kit, report, stages.seconds)


def finish_kit(
    path: Path,
    out: Path,
    reporter: Reporter,
    *,
    key: Path | None = None,
    sign: Sign | None = None,
    timing_cache: str | None = None,
    compiler: Compiling | None = None,
) -> Built:
    """Verify the kit at `path`, build its engine here, check it where a GPU can execute it, and write `out/<name>`.

    Args:
        path: the kit's directory.
        out: the folder that the bundle goes to; not the one the kit is in.
        reporter: receives the stages.
        key: file of trusted public keys, or None.
        sign: signs the bundle's manifest, unless the check failed.
        timing_cache: this machine's folder of timing caches.
        compiler: makes the engine of a graph, and asks for what it needs of the device; when None, the engine is built
            as the kit says.

    Raises:
        TrtpipeError: with the exit code of what went wrong; before the check, nothing is then written.
    """
    stages = Stages(reporter)
    with stages("verify"):
        kit, signature = admit(path, key)
        graph = kit_graph(kit)
        manifest = kit.manifest
        if (out / manifest.name).resolve() == path.resolve():
            raise InputError(f"{path}: the bundle would replace its own kit. Give another folder: --out.")
        device = this_device()
        if compiler is None:
            require_fit(manifest, device)
        if why := lacking_memory(manifest.build, device):
            raise MissingError(why)  # before hours of compiling: the check executes the engine
        require_place(out / manifest.name)
    with stages("compile") as progress:
        build = manifest.build.model_copy(update={"timing_cache": timing_cache})
        make = compiler or partial(_compile, build, manifest.precision)
        engine = make(graph, progress)
    with stages("check") as progress:
        report, memory = _check(kit, engine, make, progress)
    if key is None:  # else its signature was held against that
        demand = "" if kit.signature else ", and this device has no key that demands a signature (--key)"
        note = f"the kit was taken as it is: {signature}{demand}"
        report = dataclasses.replace(report, notes=(note, *report.notes))
    with stages("bundle"):
        target = manifest.build.target
        finished, files = bundle_contents(
            kit,
            engine,
            check=report,
            fingerprint=fingerprint(manifest.fingerprint, target, "onnx"),
            environment=environment(),
            device_memory_bytes=memory,
            int8_weights=int8_weights(engine),
        )
        bundle = write_bundle(out / manifest.name, finished, files, sign=sign)
    assert bundle.manifest.check is not None
    return Built(bundle, bundle.manifest.check, stages.seconds)


def _compile(build: Build, precision: Precision, graph: OnnxModel, progress: Progress) -> Engine:
    """The engine of a kit's graph; for onnxruntime that graph itself."""
    if build.target == "onnxruntime":
        return graph_engine(graph)
    if build.target == "tensorrt_rtx":
        return build_isolated(graph, build, progress=progress, precision=precision)
    return build_engine(graph, build, progress=progress, precision=precision)


def _check(kit: Bundle, engine: Engine, make: Compiling, progress: Progress) -> tuple[CheckReport, int | None]:
    """The engine, or a graph for ONNX Runtime, on every sample of the kit, with a control built here, and the engine's
    activation memory; the kit's own check, with notes that say so and why, where nothing can execute it here.

    Raises:
        InputError: the kit was never checked.
    """
    manifest = kit.manifest
    recorded = manifest.check
    if recorded is None:
        raise InputError(f"{kit.path}: the kit does not hold the check of its graph. Prepare it again.")
    if engine.target != "onnxruntime" and not_executed_here(engine):
        notes = (*recorded.notes, NOT_EXECUTED, *filter(None, (why_not_here(engine),)))
        recorded = dataclasses.replace(recorded, notes=notes)
        if manifest.require == "engine":
            recorded = dataclasses.replace(recorded, passed=False, problems=(*recorded.problems, NO_ENGINE_RAN))
        return recorded, None
    golden = kit.golden()
    size = golden.batch or manifest.inputs[0].at("max")[0]
    data = CheckData(
        lambda: golden.batches(size),
        golden.outputs,
        golden.labels,
        golden.samples,
        Batching(manifest.inputs, manifest.outputs, size, manifest.build.profiles),
    )
    limits, notes = golden_limits(manifest, golden.samples, all_of_them=True)
    runner, executed = open_engine(engine)
    with runner:
        report = check_engine(
            runner,
            executed,
            data,
            limits,
            damaged=_control(kit_graph(kit), make, progress),
            require=manifest.require,
            control=recorded.control,
            warnings=recorded.warnings,
            progress=progress,
        )
        memory = activation_memory(runner)
    return dataclasses.replace(report, notes=(*report.notes, *notes)), memory


def _control(graph: OnnxModel, make: Compiling, progress: Progress) -> Damaged | None:
    """An engine of the damaged graph; None on a device without the package onnx, which damages it: the kit's own
    control then stands, and the report says how that was executed."""
    if not present("onnx"):
        return None
    copy, tensor, how = damaged_copy(graph)
    return engine_control(partial(make, copy, progress), copy, tensor, how)
