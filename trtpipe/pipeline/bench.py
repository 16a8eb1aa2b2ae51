"""`trtpipe bench`: every mode that a job, or a bundle, can run in on this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import Array
from trtpipe.bundle.manifest import GRAPH
from trtpipe.errors import InputError, MissingError
from trtpipe.evaluation.bench import REFERENCE, WARM_UP, Bench, BenchData, Mode, Ready, measure_modes, outputs_of
from trtpipe.evaluation.speedup import HYBRID_UNTIMED
from trtpipe.machine import usable_cores
from trtpipe.model.baseline import HOLDING_BINDINGS
from trtpipe.model.computing import CPU, wanted_device
from trtpipe.model.repeating import fresh
from trtpipe.pipeline.cache.environment import environment
from trtpipe.pipeline.measure import TimedPlan, batched, check_samples, plan_of
from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import calibrate, compile_engine, narrow_of, prepare, quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.compatibility import problems
from trtpipe.runtime.device import device_of
from trtpipe.runtime.executor import NO_ENGINE, bundle_settings, open_graph
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt import driver
from trtpipe.trt.timing import TimedEngine
from trtpipe.values import BASELINES, MANIFEST

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bundle.format import Bundle
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter
    from trtpipe.values import LoadedModel

ROUNDS, SECONDS, SAMPLES = 100, 30.0, 256


@with_own_modules
def bench_job(
    job: Job,
    reporter: Reporter,
    *,
    rounds: int,
    seconds: float = SECONDS,
    samples: int = SAMPLES,
    engines: Mapping[str, Job] | None = None,
    left_out: Callable[[str], str] = lambda name: "",
) -> Bench:
    """Every mode of a job: PyTorch's, ONNX Runtime's and the engine's, compared with eager FP32.

    Args:
        job: the job; its batch is at most the `opt` of the batch dimension.
        reporter: receives the stages.
        rounds, seconds: each round runs every mode once; they end at whichever comes first.
        samples: at most this many check samples are run by each mode.
        engines: by the name of its rows, the job in another precision whose engine is timed; the job's own when None.
        left_out: by a mode's name, why it is not tried; empty when it is.

    Raises:
        TrtpipeError: what the modes are made of cannot be made; a mode that cannot run is a row that says why.
    """
    stages = Stages(reporter)
    prepared = prepare(job, stages)
    table = calibrate(job, prepared, stages)
    wanted = {"engine": job} if engines is None else engines
    plans = {name: _build_engine(variant, prepared, table, stages) for name, variant in wanted.items()}
    return bench_prepared(
        job, prepared, table, plans, stages, rounds=rounds, seconds=seconds, samples=samples, left_out=left_out
    )


def bench_prepared(
    job: Job,
    prepared: PreparedJob,
    table: CalibrationTable | None,
    plans: Mapping[str, Callable[[], TimedPlan]],
    stages: Stages,
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    samples: int = SAMPLES,
    left_out: Callable[[str], str] = lambda name: "",
) -> Bench:
    """The same for a prepared job; `plans`, by the names of rows, are called where a GPU can execute them."""
    from trtpipe.evaluation.gpu_modes import gpu_modes
    from trtpipe.evaluation.torch_modes import ModeSetup, torch_modes

    arrays, labels = check_samples(prepared, samples)
    data = batched(arrays, labels, prepared.inputs, prepared.outputs)
    batch = data.batching.size
    device = _device()
    first = next(iter(data.batches()))
    setup = ModeSetup(prepared.loaded, first, device, lambda: _whole(_batches(job, prepared), batch))
    kind = prepared.baseline.kind
    script = prepared.torchscript if BASELINES[kind] == "TorchScript" else None
    modes = [
        *torch_modes(setup, script, whole=kind in HOLDING_BINDINGS),
        *gpu_modes(setup),
        *_ort_modes(job, prepared, table, first),
    ]
    for name, plan in plans.items():
        modes += _engine_modes(plan, job.build.target, first, name)
    modes = [replace(m, cannot=m.cannot or left_out(m.name)) for m in modes]
    data = replace(data, reference=_reference(prepared.loaded, data))
    return _measured(job.name, modes, data, batch, rounds, seconds, stages, REFERENCE)


def bench_bundle(bundle: Bundle, reporter: Reporter, *, rounds: int, seconds: float, samples: int = SAMPLES) -> Bench:
    """The modes of a bundle, which needs no PyTorch: its graph in ONNX Runtime and its engine, on its golden data."""
    stages, manifest, golden = Stages(reporter), bundle.manifest, bundle.golden()
    data = batched(
        {n: a[:samples] for n, a in golden.inputs.items()},
        None if golden.labels is None else golden.labels[:samples],
        manifest.inputs,
        manifest.outputs,
        golden.outputs,
        golden.batch,
    )
    batch = data.batching.size
    first = next(iter(data.batches()))
    modes: list[Mode] = []
    if GRAPH in manifest.files:
        modes.append(_graph_mode(bundle, first))
    if manifest.engine is not None:
        fallback, misfits = bool(manifest.engine.fallback), problems(manifest, device_of(manifest.engine.target))
        modes += _engine_modes(
            lambda: TimedPlan(bundle.read(manifest.engine_file), bundle_settings(bundle), fallback, "; ".join(misfits)),
            manifest.engine.target,
            first,
        )
    return _measured(manifest.name, modes, data, batch, rounds, seconds, stages, "the bundle's baseline")


def _measured(
    name: str,
    modes: list[Mode],
    data: BenchData,
    batch: int,
    rounds: int,
    seconds: float,
    stages: Stages,
    reference: str,
) -> Bench:
    notes = busy(_load(), usable_cores())
    with stages("bench") as progress:
        rows, done = measure_modes(modes, data, batch=batch, rounds=rounds, seconds=seconds, progress=progress)
    samples = sum(len(next(iter(b.values()))) for b in data.batches())
    notes = tuple(dict.fromkeys((*notes, *busy(_load(), usable_cores()))))[:1]
    return Bench(name, batch, samples, done, WARM_UP, reference, usable_cores(), rows, environment(), notes)


def busy(load: float | None, cores: int) -> tuple[str, ...]:
    """A warning when the load average of the last minute is over the number of cores by more than one."""
    if load is None or load <= cores + 1:
        return ()
    return (f"load average {load:.1f} on {cores} cores: latencies are unreliable. Compare sizes and outputs",)


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _device() -> str:
    return "cpu" if wanted_device() == CPU else "cuda"


def _reference(loaded: LoadedModel, data: BenchData) -> dict[str, Array]:
    """The outputs of the eager FP32 model on the CPU."""
    import torch

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            outputs = loaded.module(*fresh([torch.from_numpy(arrays[s.name]) for s in loaded.inputs]))
        return {s.name: o.numpy().copy() for s, o in zip(loaded.outputs, outputs, strict=True)}

    return outputs_of(run, data)


def _whole(batches: Iterator[Mapping[str, Array]], size: int) -> Iterator[Mapping[str, Array]]:
    """The batches cut to `size` samples each; a rest that does not fill one is dropped."""
    for arrays in batches:
        total = len(next(iter(arrays.values())))
        yield from ({n: a[k : k + size] for n, a in arrays.items()} for k in range(0, total - size + 1, size))


def _batches(job: Job, prepared: PreparedJob) -> Iterator[Mapping[str, Array]]:
    """The samples that calibrate, or those of the check where none do, in batches of the check's size."""
    return (b.arrays for b in prepared.first_samples.batches(job.batch_size(job.check)))


#: Of ONNX Runtime's rows: the threads of other modes would find theirs on the cores.
_RESTS = "its threads rest after a run (session.force_spinning_stop), which by default keep the cores a while"


def _ort_modes(
    job: Job, prepared: PreparedJob, table: CalibrationTable | None, first: Mapping[str, Array]
) -> list[Mode]:
    """ONNX Runtime on the CPU, all else in FP32: the float graph and the INT8 one, optimized for speed, and that of
    the job's other number formats without optimizations, which break FP8."""
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.policy import modes_of
    from trtpipe.quantization.quantize import quantize as quantize_graph

    def graph(*, int8: bool = False, others: bool = False) -> Callable[[], bytes]:
        def make() -> bytes:
            one = prepared.corrected(table) if int8 or others else prepared
            amax, keep = {} if table is None else table.amax, keep_of(job, prepared.captured)
            narrow = narrow_of(job, prepared, table) if others else None
            made = quantize_graph(one.captured, int8=int8, half=None, keep=keep, amax=amax, ranges={}, narrow=narrow)
            return to_onnx(made).data

        return make

    int8, modes = job.precision.int8_mode and table is not None, modes_of(job.precision)
    name = "ONNX Runtime Q/DQ"
    rows = [
        _ort_mode("ONNX Runtime FP32", graph(), first),
        _ort_mode(f"{name} INT8", graph(int8=True), first, "" if int8 else "the job has no INT8 mode"),
    ]
    if modes.narrow:
        rows.append(_ort_mode(f"{name} {modes.title}", graph(int8=int8, others=True), first, as_written=True))
    return rows


def _ort_mode(
    name: str, graph: Callable[[], bytes], first: Mapping[str, Array], cannot: str = "", *, as_written: bool = False
) -> Mode:
    def prepare() -> Ready:
        data = graph()
        runner = OrtRunner(data, as_written=as_written)
        said = (
            ("each node is executed as it stands, without graph optimizations, which break FP8",) if as_written else ()
        )
        return Ready(lambda: runner.run(first), runner.run, len(data), (runner.name, _RESTS, *said), close=runner.close)

    return Mode(name, "cpu", prepare, cannot)


def _graph_mode(bundle: Bundle, first: Mapping[str, Array]) -> Mode:
    """A bundle's graph as `trtpipe run --graph` executes it."""

    def prepare() -> Ready:
        runner, notes = open_graph(bundle)
        size = bundle.manifest.files[GRAPH].size
        return Ready(lambda: runner.run(first), runner.run, size, (runner.name, _RESTS, *notes), close=runner.close)

    return Mode("ONNX Runtime, the bundle's graph", "cpu", prepare)


def _build_engine(
    job: Job, prepared: PreparedJob, table: CalibrationTable | None, stages: Stages
) -> Callable[[], TimedPlan]:
    """The engine of the job itself, compiled when it is asked for."""

    def make() -> TimedPlan:
        return plan_of(compile_engine(job, prepared, quantize(job, prepared, table, stages), stages))

    return make


def _engine_modes(
    plan: Callable[[], TimedPlan], target: str, first: Mapping[str, Array], named: str = "engine"
) -> list[Mode]:
    """The engine by CUDA events, launched by TensorRT and as a CUDA graph; where no GPU is, rows that say so."""
    once = functools.cache(plan)
    if target == "onnxruntime":
        cannot = NO_ENGINE
    else:
        gpu = driver.probe()
        cannot = "" if gpu.devices else f"no GPU executes an engine here: {gpu.problem}"

    def mode(name: str, cuda_graph: bool, transfers: bool) -> Mode:
        def prepare() -> Ready:
            made = once()
            if made.hybrid:
                raise InputError(HYBRID_UNTIMED)
            if made.misfit:
                raise MissingError(made.misfit)
            where = "copies from and to page-locked memory included" if transfers else "data on the GPU, no copies"
            with ExitStack() as opened:
                runner = opened.enter_context(TimedEngine(made.data, cuda_graph=cuda_graph, **made.settings))
                return Ready(
                    lambda: runner.run(first),
                    runner.run,
                    len(made.data),
                    (f"CUDA events; {where}; memory: plan, activations and bindings", runner.name, *runner.notes),
                    ms=lambda: runner.milliseconds(first, transfers=transfers),
                    peak_memory_bytes=lambda: len(made.data) + runner.device_memory_bytes + runner.bindings_bytes,
                    close=opened.pop_all().close,
                )

        return Mode(name, "cuda", prepare, cannot)

    return [
        mode(named, False, False),
        mode(f"{named}, CUDA graph", True, False),
        mode(f"{named}, with transfers", False, True),
    ]


def require_target(path: Path) -> str:
    """Whether `path` is a job file or a bundle: "job" or "bundle".

    Raises:
        InputError: it is neither.
    """
    if (path / MANIFEST).is_file():
        return "bundle"
    if path.is_dir() or not path.exists():
        got = "a folder" if path.is_dir() else "nothing"
        raise InputError(f"{path}: must be a job file or a bundle (got {got}). Check the path.")
    return "job"
