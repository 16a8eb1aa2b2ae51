"""What executes an engine, or its graph, on this machine: one decision for build, check, run, bench and export."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, get_args

import numpy as np

from calib.types import Array
from trtpipe.batching import Batching, joined
from trtpipe.bundle import golden as golden_data
from trtpipe.bundle.format import Bundle
from trtpipe.bundle.manifest import AGAIN, GRAPH, EngineInfo, describe_engine
from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.evaluation import check, metrics
from trtpipe.figures import apart
from trtpipe.job.sections import Build
from trtpipe.runtime.compatibility import placement_problems
from trtpipe.runtime.device import Device, this_device
from trtpipe.runtime.hybrid_runner import HybridRunner
from trtpipe.runtime.onnxruntime import Optimization, OrtRunner
from trtpipe.trt.platforms import rtx_support
from trtpipe.trt.runtime import EngineRunner, Specialization
from trtpipe.trt.validity import invalid_here
from trtpipe.values import CheckReport, Engine, Executed, Target, TensorSpec

#: The relative L2 error on the golden samples may be this much larger than in the check: another release or CPU rounds
#: other values of a quantized graph the other way. So may every error of a graph as it stands, for which there is
#: nothing closer, and of one on a server, whose ONNX Runtime computes FP16 in FP32, where the check rounds in between.
_ELSEWHERE = 1.25
#: Relative differences below this are float32 rounding: another order of summation, no other result.
_ROUNDING, _COSINE_ROUNDING = 1e-4, 1e-6


class OpenRunner(check.Runner, AbstractContextManager[Any], Protocol):
    """A runner that is loaded and released as a context manager.

    `name` is like "onnxruntime 1.31.1". More `notes` may come as it is opened and runs.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""


class RunnerSettings(TypedDict):
    """The arguments of an `EngineRunner` beside the plan, by name."""

    version_compatible: bool
    without_lean_runtime: bool
    refit: bytes | None
    plugins: Mapping[str, bytes]


#: Why no engine is executed where the job asks for none.
NO_ENGINE = "the target is onnxruntime: there is no engine"


def info_of(engine: Engine) -> EngineInfo:
    """The manifest's description of an engine, from the options that were honoured."""
    chosen = {k: v for k, v in engine.options.items() if k in ("hardware_compatibility", "runtime_platform")}
    compatible = bool(engine.options.get("version_compatible"))
    return describe_engine(engine, Build(target=engine.target, version_compatible=compatible, **chosen))


def not_executed_here(engine: Engine, device: Device | None = None) -> str:
    """Why this machine does not execute an engine that was built on it; empty where it does.

    An engine for other GPUs than the one here, or for another operating system, is as good as on a machine without one.
    """
    if engine.target == "onnxruntime":
        return NO_ENGINE
    device = device or this_device()
    if problems := placement_problems(info_of(engine), device, engine.graph.precisions if engine.graph else ()):
        return "; ".join(problems)
    here = device.compute_capability
    unknown = engine.target == "tensorrt_rtx" and here is not None and rtx_support(here).runs is None
    return invalid_here(engine.data) if unknown and not engine.fallback else ""


def activation_memory(runner: check.Runner) -> int | None:
    """Bytes of device memory that one execution needs beside weights and bindings; None of a graph or hybrid module."""
    return runner.device_memory_bytes if isinstance(runner, EngineRunner) else None


def open_engine(engine: Engine) -> tuple[OpenRunner, Executed]:
    """What executes a built engine here, and whether that is the engine or, where it does not fit, its graph.

    Raises:
        InputError: the engine does not fit this machine, and its route made no graph, or it needs plugins.
    """
    why = not_executed_here(engine)
    if not why:
        return engine_runner(engine.data, hybrid=bool(engine.fallback), settings=settings_of(engine)), "engine"
    if engine.plugins:
        raise InputError(
            f"check: an engine with plugins must be executed where it is built, as nothing else computes them (it is "
            f"not: {why}). Build it for the GPU here."
        )
    if engine.graph is None:
        raise InputError(
            f"check: a {engine.target} engine of this route has no graph to execute in its place (got no engine "
            f"either: {why}). Build where its GPU is, or take build.route: onnx."
        )
    return graph_as_checked(engine.graph.data, engine.target), "graph"


def without_specializations(engine: EngineInfo | None, graph: bool) -> str:
    """What is run and has no kernel specializations; "" for an engine of TensorRT-RTX, which has."""
    if graph or engine is None or engine.target == "onnxruntime":
        return "graph"
    if engine.target == "tensorrt":
        return "engine of TensorRT proper"
    return "engine with PyTorch in it" if engine.fallback else ""


def engine_runner(
    data: bytes, *, hybrid: bool, settings: RunnerSettings, specialization: Specialization | None = None
) -> OpenRunner:
    """What executes an engine, or a hybrid module: engines with PyTorch between them."""
    if not hybrid:
        return EngineRunner(data, **settings, specialization=specialization)
    compatible, without_lean = settings["version_compatible"], settings["without_lean_runtime"]
    return HybridRunner(data, version_compatible=compatible, without_lean_runtime=without_lean)


def graph_notes(engine: Engine, executed: Executed) -> tuple[str, ...]:
    """Why the graph was executed on a machine that has a GPU; without one `executed` says enough."""
    why = "" if executed == "engine" else why_not_here(engine)
    return (f"the graph was executed, as {why}",) if why else ()


def why_not_here(engine: Engine) -> str:
    """Why an engine that was just built does not run on this machine, which has a GPU or the driver of one; "" where it
    has neither, or the engine is its graph."""
    device = this_device()
    if engine.target == "onnxruntime" or not (device.compute_capability or device.has_driver):
        return ""
    if device.compute_capability is None:
        return f"no GPU can be used: {device.gpu}"
    return f"the engine does not run on this machine: {not_executed_here(engine, device)}"


def settings_of(engine: Engine) -> RunnerSettings:
    """How the runner of a built engine is opened."""
    stripped = engine.graph.data if engine.graph is not None and engine.options.get("strip_plan") else None
    return _settings(engine.options, stripped, engine.plugins)


def bundle_settings(bundle: Bundle) -> RunnerSettings:
    """How the runner of a bundle's engine is opened.

    Raises:
        InputError: it has plugins, and whose they are was not verified.
    """
    engine, plugins = bundle.manifest.engine, bundle.manifest.build.plugins
    assert engine is not None
    if plugins and not bundle.verified:
        raise InputError(
            f"{bundle.path}: holds plugins ({', '.join(plugins)}), native code that is loaded only from a bundle whose "
            "signature was verified. Give the public key of who signed it: --key (key= in Python)."
        )
    stripped = engine.options.get("strip_plan") and GRAPH in bundle.manifest.files
    return _settings(
        {**engine.options, "version_compatible": engine.version_compatible},
        bundle.read(GRAPH) if stripped else None,
        {name: bundle.read(name) for name in plugins},
    )


def _settings(options: Mapping[str, object], refit: bytes | None, plugins: Mapping[str, bytes]) -> RunnerSettings:
    return {
        "version_compatible": bool(options.get("version_compatible")),
        "without_lean_runtime": bool(options.get("exclude_lean_runtime")),
        "refit": refit,
        "plugins": plugins,
    }


def graph_as_checked(model: bytes, target: Target, *, tried: bool = False) -> OrtRunner:
    """The graph as a check executes it; `tried` as for `OrtRunner`."""
    return OrtRunner(model, as_written=is_exact(target), tried=tried)


def is_exact(target: Target) -> bool:
    """Whether a check executes every node of a graph as it stands: in the place of a TensorRT engine, and not where the
    graph is what users will open."""
    return target != "onnxruntime"


@dataclass(frozen=True)
class Distance:
    """How far outputs are from the baseline's, over some samples of one output: see `evaluation.metrics`."""

    cosine_worst: float
    max_abs: float
    relative_l2: float


def graph_runner(bundle: Bundle, *, as_written: bool = False, optimization: Optimization = "all") -> OrtRunner:
    """The graph of a bundle or kit in ONNX Runtime; `as_written` and `optimization` are as for `OrtRunner`.

    Raises:
        InputError: the bundle has no graph, or one that has other bindings than its manifest.
        MissingError, BuildError: as `OrtRunner`.
    """
    manifest = bundle.manifest
    if GRAPH not in manifest.files:
        raise InputError(f"{bundle.path}: must hold {GRAPH} to be run as a graph (it does not). Run it on its GPU.")
    runner = OrtRunner(bundle.read(GRAPH), as_written=as_written, optimization=optimization)
    for kind, specs, found in (("input", manifest.inputs, runner.inputs), ("output", manifest.outputs, runner.outputs)):
        wanted = {s.name: s.shape for s in specs}
        differ = [n for n in wanted.keys() & found.keys() if kind == "input" and not _fits(found[n], wanted[n])]
        if wanted.keys() != found.keys() or differ:
            raise InputError(
                f"{bundle.path}: {GRAPH} must have the manifest's {kind}s, {_shapes(wanted)} (got "
                f"{_shapes(found)}). {AGAIN}"
            )
    return runner


def _fits(found: Sequence[int | str | None], wanted: Sequence[int | str]) -> bool:
    """Whether two shapes have the same sizes where both fix one."""
    if len(found) != len(wanted):
        return False
    return all(a == b for a, b in zip(found, wanted, strict=True) if isinstance(a, int) and isinstance(b, int))


def _shapes(bindings: Mapping[str, Sequence[int | str | None]]) -> str:
    return ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in bindings.items()) or "none"


def open_graph(bundle: Bundle) -> tuple[OrtRunner, tuple[str, ...]]:
    """The graph of a bundle or kit, executed the fastest way that is as close to the baseline as the check was.

    ONNX Runtime's optimizations may change what a quantized graph computes, differently on other releases and CPUs. So
    they are used only where the golden inputs then give outputs within the distance that the check measured; else
    each node is executed as it stands, and a note says so.

    Raises:
        InputError: the bundle has no graph, or another one's.
        MissingError: onnxruntime is not installed.
        BuildError: ONNX Runtime refuses the graph.
    """
    try:
        with ExitStack() as held:
            runner = held.enter_context(graph_runner(bundle))
            if not (why := deviation(runner, bundle)):
                held.pop_all()
                return runner, ()
    except BuildError:
        why = "it refuses the graph"
    if why != unrecorded(bundle):
        why = f"with them {why}"
    exact = graph_runner(bundle, as_written=True)
    notes = [f"ONNX Runtime executes each node as it stands, without graph optimizations: {why}"]
    if not unrecorded(bundle) and (still := deviation(exact, bundle, _ELSEWHERE)):
        notes.append(f"as it stands, {still}: run `trtpipe check` on the bundle")
    return exact, tuple(notes)


def serving_optimization(bundle: Bundle) -> tuple[Optimization, tuple[str, ...]]:
    """The most optimization that another server's ONNX Runtime may do to the graph, and notes: its golden outputs are
    to be as close as in the check, with errors up to 1.25 times as large.

    Without onnxruntime here nothing can be tried: then none is allowed.

    Raises:
        InputError: the bundle has no graph, or another one's.
        BuildError: ONNX Runtime refuses the graph at every level.
    """
    why, difference = "", ""
    levels: tuple[Optimization, ...] = get_args(Optimization)
    for level in levels:
        why = difference
        try:
            with graph_runner(bundle, optimization=level) as runner:
                difference = deviation(runner, bundle, _ELSEWHERE)
        except MissingError as error:
            return "none", (f"graph optimizations are turned off, as the graph cannot be tried here: {error}",)
        except BuildError:
            if level == "none":
                raise
            difference = "ONNX Runtime refuses the graph"
        if not difference:
            return level, (f"graph optimizations are limited to {level!r}: with more, {why}.",) if why else ()
    if any(layer.precision == "fp16" for layer in bundle.manifest.layers):
        hint = "It computes FP16 in FP32 on a CPU, where the check rounds: judge what the server answers."
    else:
        hint = "Run `trtpipe check --graph` on the bundle."
    return "none", (f"even without graph optimizations {difference} in ONNX Runtime. {hint}",)


def deviation(runner: OpenRunner, bundle: Bundle, slack: float = 1.0) -> str:
    """The figure in which the outputs of `runner` on the golden inputs are further from the baseline than the check's.

    Empty where they are not: with a relative L2 error up to `_ELSEWHERE` times as large in any case, and the others up
    to `slack` times. A bundle without the figures of a check has no distance to be held to, and says that.
    """
    if unknown := unrecorded(bundle):
        return unknown
    manifest = bundle.manifest
    golden = golden_data.first(bundle.golden(), manifest.outputs)  # a kit holds every sample of its check
    size = golden.batch or manifest.inputs[0].at("opt")[0]
    how = Batching(manifest.inputs, manifest.outputs, size, manifest.build.profiles)
    pieces = (piece for batch in golden.batches(size) for piece in how.pieces(batch))
    got = joined(how.rows(runner.run(piece), samples) for piece, samples in pieces)
    for spec in manifest.outputs:
        if spec.name not in got:
            return f"no output {spec.name}"
        limit = _checked_distance(manifest.check, spec)
        if limit is not None and (why := _beyond(golden.outputs[spec.name], got[spec.name], limit, slack)):
            return f"output {spec.name} has {why} on the golden inputs"
    return ""


def unrecorded(bundle: Bundle) -> str:
    """A line that names an output whose distance no check has recorded; empty where all are recorded."""
    manifest = bundle.manifest
    missing = [s.name for s in manifest.outputs if _checked_distance(manifest.check, s) is None]
    return f"no check of output {missing[0]} is recorded that its outputs could be held to" if missing else ""


def _checked_distance(report: CheckReport | None, spec: TensorSpec) -> Distance | None:
    """The distance of one output in the check; None where it was not measured, or is not finite.

    The relative L2 error is that of the golden samples, or of all where that is more: a few may be worse than the mean.
    """
    if report is None:
        return None
    values = {m.name: m.value for m in report.metrics if m.output == spec.name}
    cosine, largest, error = (values.get(name, math.nan) for name in ("cosine_worst", "max_abs", "relative_l2"))
    found = Distance(cosine, largest, max(error, report.golden.get(spec.name, 0.0)))
    return found if all(map(math.isfinite, (cosine, largest, error))) else None


def _beyond(baseline: Array, got: Array, limit: Distance, slack: float = 1.0) -> str:
    """Which figure is beyond the check's; empty when none is. NaN and infinity always are.

    Args:
        slack: how many times as large as the check's the maximum difference may be, and 1 - cosine, which grows with
            the square of an error, its square; the relative L2 error may be `_ELSEWHERE` times as large in any case.
    """
    got = np.asarray(got, np.float32)
    if got.shape != baseline.shape or not np.isfinite(got).all():
        return "another shape, NaN or infinity"
    scale = float(np.abs(baseline).max(initial=0.0))
    least = limit.cosine_worst - max(_COSINE_ROUNDING, (slack**2 - 1) * (1 - limit.cosine_worst))
    most, error = limit.max_abs * max(1.001, slack), limit.relative_l2 * _ELSEWHERE
    figures = {
        "a worst cosine of": (float(metrics.cosine(baseline, got).min()), least, limit.cosine_worst, -1),
        "a maximum difference of": (
            metrics.max_abs(baseline, got), max(most, _ROUNDING * scale), limit.max_abs, 1
        ),
        "a relative L2 error of": (
            metrics.relative_l2(baseline, got), max(error, _ROUNDING), limit.relative_l2, 1
        ),
    }  # fmt: skip
    if baseline[0].size == 1:  # one number a sample: the cosine is of all samples together, and no worst of some
        del figures["a worst cosine of"]
    for what, (value, bound, checked, sign) in figures.items():
        if not sign * value <= sign * bound:
            here, there = apart(value, checked, 4)
            return f"{what} {here} (check: {there})"
    return ""
