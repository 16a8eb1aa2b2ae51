"""The line again, with every stage's result kept in the cache: only what changed is made.

Beside `pipeline`, whose functions it calls, this is the one module that knows the line. What a stage needs of an
earlier one whose result is in the cache is read from there: the module, the graph and the program, which only live in
memory, are made when a stage that is not in the cache asks for them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from calib.errors import CalibError
from calib.table import CalibrationTable
from trtpipe.model.capture import capture
from trtpipe.model.data import open_check
from trtpipe.model.load import load_model
from trtpipe.pipeline import stages as pipeline
from trtpipe.pipeline.assemble import Parts, assemble, shared_scales
from trtpipe.pipeline.build import Built, build, gather
from trtpipe.pipeline.cache.store import Cache, DamagedEntry, Entry
from trtpipe.pipeline.stages import Front, Stages
from trtpipe.routes.onnx import compile_graph, release, to_onnx
from trtpipe.values import (
    Baseline,
    Captured,
    Engine,
    Fallback,
    LayerPrecision,
    LoadedModel,
    OnnxModel,
    Quantized,
    TensorSpec,
)

if TYPE_CHECKING:
    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.pipeline.cache.keys import StageKeys
    from trtpipe.progress import Reporter

_GRAPH, _ENGINE, _TABLE, _OUTPUTS = "model.onnx", "model.engine", "calibration.json", "outputs.safetensors"
_HISTOGRAMS = "calibration.histograms.safetensors"
#: Stands for what only lives in memory and was not needed.
_NOT_KEPT: Any = None

T = TypeVar("T")


@dataclass(frozen=True)
class Rebuilt:
    """What was built, and the stages that were not run because the cache had their result."""

    built: Built
    reused: tuple[str, ...]


class Memory:
    """The latest model and graph in this process: jobs of one matrix that follow each other share them.

    `folder` is that of the latest job file, whose modules may be loaded.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._key = ""
        self._values: dict[str, Any] = {}

    def has(self, key: str, name: str) -> bool:
        """Whether the value was made for this key already."""
        return key == self._key and name in self._values

    def once(self, key: str, name: str, make: Callable[[], T]) -> T:
        """The value of this name made for this key; what other keys made is forgotten."""
        if key != self._key:
            self._key, self._values = key, {}
        if name not in self._values:
            self._values[name] = make()
        found: T = self._values[name]
        return found


@dataclass(frozen=True)
class _Lowered:
    """What the bundle and the compiler need of all stages up to the graph."""

    loaded: LoadedModel
    captured: Captured
    quantized: Quantized
    table: CalibrationTable | None
    scales: Mapping[str, str]
    graph: OnnxModel | None


def rebuild(job: Job, out: Path, reporter: Reporter, cache: Cache, keys: StageKeys, memory: Memory) -> Rebuilt:
    """`pipeline.build`, with results of stages taken from the cache and put there.

    Raises:
        TrtpipeError: as `pipeline.build`.
    """
    if job.check.on_fail == "tune":  # its result depends on the check: nothing in between can be reused
        return Rebuilt(build(job, out, reporter), ())
    line = _Line(job, Stages(reporter), cache, keys, memory)
    engine, lowered = line.engine()
    source, baseline = line.checked
    front = Front(lowered.loaded, source, baseline, lowered.captured)
    answers: dict[str, Any] = {}
    report = pipeline.check(
        job,
        front,
        engine,
        line.stages,
        made_of=lambda: (line.loaded, line.quantized()[1]),
        table=lowered.table,
        keep=answers.update,
    )
    report, evidence = gather(job, front, lowered.table, engine, report, line.stages)
    parts = Parts(front, lowered.table, lowered.scales, lowered.quantized, engine, report, answers, evidence)
    bundle = assemble(job, out, parts, line.stages)
    return Rebuilt(Built(bundle, report, line.stages.seconds), tuple(line.reused))


class _Line:
    """One job on its way down."""

    def __init__(self, job: Job, stages: Stages, cache: Cache, keys: StageKeys, memory: Memory) -> None:
        self.job, self.stages, self.cache, self.keys, self.memory = job, stages, cache, keys, memory
        self.reused: list[str] = []

    @cached_property
    def loaded(self) -> LoadedModel:
        def make() -> LoadedModel:
            with self.stages("model"):
                return load_model(self.job, self.job.folder)

        return self.memory.once(self.keys.model, "model", make)

    @cached_property
    def captured(self) -> Captured:
        loaded = self.loaded
        if self.memory.has(self.keys.model, "capture"):
            self.reused.append("capture")

        def make() -> Captured:
            with self.stages("capture"):
                return capture(loaded)

        return self.memory.once(self.keys.model, "capture", make)

    @cached_property
    def check_source(self) -> Source:
        return open_check(self.job)

    @cached_property
    def checked(self) -> tuple[Source, Baseline]:
        """The check samples and the baseline's answers."""

        def make() -> tuple[tuple[Source, Baseline], dict[str, Any], dict[str, bytes]]:
            source, baseline = pipeline.record(self.job, self.loaded, self.stages)
            facts, files = _keep_baseline(baseline)
            return (source, baseline), {**facts, "classes": source.classes}, files

        def read(entry: Entry) -> tuple[Source, Baseline]:
            source, baseline = open_check(self.job), _baseline(entry)
            if source.labels is not None and source.classes is not None:
                names = entry.facts["classes"]
                source = source.without_labels() if names is None else source.numbered_by(names)
            return source, baseline

        return self._kept("baseline", self.keys.baseline, make, read)

    def table(self) -> CalibrationTable | None:
        """The calibration table, None when nothing is quantized."""
        if self.keys.calibration is None:
            return None

        def make() -> tuple[CalibrationTable | None, dict[str, Any], dict[str, bytes]]:
            front = Front(self.loaded, self.check_source, _NOT_KEPT, self.captured)
            table = pipeline.calibrate(self.job, front, self.stages)
            return table, {}, _table_files(table)

        return self._kept("calibration", self.keys.calibration, make, _table)

    def quantized(self) -> tuple[CalibrationTable | None, Quantized]:
        """The quantized program itself."""
        table = self.table()
        front = Front(self.loaded, self.check_source, _NOT_KEPT, self.captured)
        return table, pipeline.quantize(self.job, front, table, self.stages)

    def lowered(self) -> _Lowered:
        """The graph as ONNX."""

        def make() -> tuple[_Lowered, dict[str, Any], dict[str, bytes]]:
            table, quantized = self.quantized()
            with self.stages("export"):
                graph = to_onnx(quantized, release(self.job))
            made = _Lowered(self.loaded, self.captured, quantized, table, self._scales(table), graph)
            return made, *_keep_lowered(made)

        return self._kept("graph", self.keys.graph, make, _lowered)

    def engine(self) -> tuple[Engine, _Lowered]:
        """The engine with what led to it."""
        by_onnx = self.job.build.route == "onnx"

        def make() -> tuple[tuple[Engine, _Lowered], dict[str, Any], dict[str, bytes]]:
            if by_onnx:
                lowered = self.lowered()
                assert lowered.graph is not None
                with self.stages("compile") as progress:
                    engine = compile_graph(self.job, lowered.graph, progress)
            else:
                table, quantized = self.quantized()
                engine = pipeline.compile_engine(self.job, self.loaded, quantized, self.stages)
                scales = self._scales(table)
                lowered = _Lowered(self.loaded, self.captured, quantized, table, scales, engine.graph)
            facts, files = _keep_lowered(lowered)
            facts["engine"] = {
                "version": engine.version,
                "compute_capabilities": list(engine.compute_capabilities),
                "options": dict(engine.options),
                "notes": list(engine.notes),
                "fallback": [dataclasses.asdict(f) for f in engine.fallback],
            }
            return (engine, lowered), facts, {**files, _ENGINE: engine.data}

        def read(entry: Entry) -> tuple[Engine, _Lowered]:
            lowered, facts = _lowered(entry), entry.facts["engine"]
            return Engine(
                data=entry.read(_ENGINE),
                target=self.job.build.target,
                version=facts["version"],
                compute_capabilities=tuple(facts["compute_capabilities"]),
                inputs=lowered.loaded.inputs,
                outputs=lowered.captured.outputs,
                graph=lowered.graph,
                options=facts["options"],
                notes=tuple(facts["notes"]),
                fallback=tuple(Fallback(**f) for f in facts.get("fallback", ())),
            ), lowered

        if by_onnx and self.job.build.target == "onnxruntime":  # the graph is the engine
            return make()[0]
        return self._kept("engine", self.keys.engine, make, read)

    def _scales(self, table: CalibrationTable | None) -> dict[str, str]:
        return {} if table is None else shared_scales(self.captured)

    def _kept(
        self,
        kind: str,
        key: str,
        make: Callable[[], tuple[T, Mapping[str, Any], Mapping[str, bytes]]],
        read: Callable[[Entry], T],
    ) -> T:
        """A stage's result from the cache; made, and kept, when it is not there. One process at a time makes it."""
        found = self._read(kind, key, read)
        if found is not None:
            return found
        waiting = self.stages.note_of(f"{kind}: another process is making the same; waiting for it")
        with self.cache.lock(kind, key, waiting):
            found = self._read(kind, key, read)
            if found is not None:
                return found
            value, facts, files = make()
            self.cache.put(kind, key, facts, files)
            return value

    def _read(self, kind: str, key: str, read: Callable[[Entry], T]) -> T | None:
        entry = self.cache.get(kind, key)
        if entry is None:
            return None
        try:
            value = read(entry)
        except (DamagedEntry, CalibError, KeyError, TypeError, ValueError):
            self.cache.discard(kind, key)
            return None
        self.reused.append(kind)
        return value


def _keep_baseline(baseline: Baseline) -> tuple[dict[str, Any], dict[str, bytes]]:
    from safetensors.numpy import save

    tensors = {f"output:{n}": np.ascontiguousarray(a) for n, a in baseline.outputs.items()}
    if baseline.labels is not None:
        tensors["labels"] = baseline.labels
    facts = {
        "kind": baseline.kind,
        "ids": list(baseline.ids),
        "eager_max_abs": baseline.eager_max_abs,
        "notes": list(baseline.notes),
    }
    return facts, {_OUTPUTS: save(tensors)}


def _baseline(entry: Entry) -> Baseline:
    from safetensors.numpy import load

    tensors, facts = load(entry.read(_OUTPUTS)), entry.facts
    outputs = {n.removeprefix("output:"): a for n, a in tensors.items() if n.startswith("output:")}
    labels = tensors.get("labels")
    return Baseline(
        _NOT_KEPT, facts["kind"], outputs, labels, tuple(facts["ids"]), facts["eager_max_abs"], tuple(facts["notes"])
    )


def _keep_lowered(lowered: _Lowered) -> tuple[dict[str, Any], dict[str, bytes]]:
    loaded, quantized, graph = lowered.loaded, lowered.quantized, lowered.graph
    facts: dict[str, Any] = {
        "inputs": _specs().dump_python(loaded.inputs, mode="json"),
        "outputs": _specs().dump_python(lowered.captured.outputs, mode="json"),
        "weights_digest": loaded.weights_digest,
        "source": loaded.source,
        "model_notes": list(loaded.notes),
        "graph_digest": lowered.captured.digest,
        "graph_notes": list(lowered.captured.notes),
        "layers": _layers().dump_python(quantized.layers, mode="json"),
        "scales": dict(quantized.scales),
        "notes": list(quantized.notes),
        "shared_scales": dict(lowered.scales),
        "opset": None if graph is None else graph.opset,
        "onnx_notes": [] if graph is None else list(graph.notes),
    }
    return facts, _table_files(lowered.table) | ({} if graph is None else {_GRAPH: graph.data})


def _table_files(table: CalibrationTable | None) -> dict[str, bytes]:
    """The table's JSON, and its histograms where it has them."""
    if table is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        table.save(Path(folder, _TABLE))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _table(entry: Entry) -> CalibrationTable | None:
    if _TABLE not in entry.files:
        return None
    for name in entry.files:
        if name.startswith("calibration."):
            entry.read(name)
    return CalibrationTable.load(entry.path / _TABLE, histograms=_HISTOGRAMS in entry.files)


def _lowered(entry: Entry) -> _Lowered:
    facts = entry.facts
    inputs = _specs().validate_python(facts["inputs"])
    outputs = _specs().validate_python(facts["outputs"])
    layers = _layers().validate_python(facts["layers"])
    graph = None
    if facts["opset"] is not None:
        graph = OnnxModel(entry.read(_GRAPH), facts["opset"], inputs, outputs, tuple(facts["onnx_notes"]))
    return _Lowered(
        LoadedModel(_NOT_KEPT, inputs, outputs, facts["weights_digest"], facts["source"], tuple(facts["model_notes"])),
        Captured(_NOT_KEPT, inputs, outputs, facts["graph_digest"], tuple(facts["graph_notes"])),
        Quantized(_NOT_KEPT, inputs, outputs, layers, facts["scales"], tuple(facts["notes"])),
        _table(entry),
        facts["shared_scales"],
        graph,
    )


def _specs() -> Any:
    return TypeAdapter(tuple[TensorSpec, ...])


def _layers() -> Any:
    return TypeAdapter(tuple[LayerPrecision, ...])
