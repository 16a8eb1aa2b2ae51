"""How results of stages are stored: facts that are JSON, and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from calib.table import CalibrationTable
from calib.table_files import histograms_path
from calib.types import Array, JsonObject
from trtpipe.bundle.manifest import CALIBRATION, ENGINE, GRAPH, TIMING_CACHE
from trtpipe.pipeline.lowered import Compiled, Lowered
from trtpipe.trt.facts import engine_of, facts_of
from trtpipe.values import Baseline, Fallback, LayerPrecision, OnnxModel, TensorSpec, computed_in

if TYPE_CHECKING:
    from trtpipe.pipeline.cache.store import Entry

T = TypeVar("T")
Stored = tuple[JsonObject, Mapping[str, bytes]]
#: The model's outputs by name at each of `model.corners`.
CornerOutputs = tuple[Mapping[str, Array], ...]

_TENSORS = "outputs.safetensors"
_HISTOGRAMS = histograms_path(Path(CALIBRATION)).name
_SPECS = TypeAdapter(tuple[TensorSpec, ...])
_LAYERS = TypeAdapter(tuple[LayerPrecision, ...])


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How one kind of result is stored.

    `kind` is its name in the cache, and `stage` the field of `StageKeys` that has its key: a kind that is not named
    like its stage is a part of it, which no report lists as reused. `dump` gives the facts and the files of a value;
    `load` the value of an entry, and raises DamagedEntry, CalibError, KeyError, TypeError or ValueError for an entry
    that `dump` did not write.
    """

    kind: str
    stage: str
    dump: Callable[[T], Stored]
    load: Callable[[Entry], T]


def _dump_tensors(tensors: Mapping[str, Array]) -> Stored:
    """The facts and the file of arrays by name; their order is a fact, since the file has one of its own."""
    return {"order": list(tensors)}, {_TENSORS: save_tensors({n: np.ascontiguousarray(a) for n, a in tensors.items()})}


def _load_tensors(entry: Entry) -> dict[str, Array]:
    tensors = load_tensors(entry.read(_TENSORS))
    return {name: tensors[name] for name in entry.facts["order"]}


def _dump_specs(specs: tuple[TensorSpec, ...]) -> Stored:
    return {"specs": _SPECS.dump_python(specs, mode="json")}, {}


def _load_specs(entry: Entry) -> tuple[TensorSpec, ...]:
    return _SPECS.validate_python(entry.facts["specs"])


@dataclass(frozen=True)
class Recorded:
    """The baseline, and the names that number its labels: None where they are numbers, or there are none."""

    baseline: Baseline
    classes: tuple[str, ...] | None


def _dump_recorded(recorded: Recorded) -> Stored:
    baseline = recorded.baseline
    tensors = {f"output:{n}": a for n, a in baseline.outputs.items()}
    if baseline.labels is not None:
        tensors["labels"] = baseline.labels
    order, files = _dump_tensors(tensors)
    facts = {
        **order,
        "kind": baseline.kind,
        "ids": list(baseline.ids),
        "notes": list(baseline.notes),
        "mixed": list(baseline.mixed),
        "classes": None if recorded.classes is None else list(recorded.classes),
    }
    return facts, files


def _load_recorded(entry: Entry) -> Recorded:
    tensors, facts = _load_tensors(entry), entry.facts
    outputs = {n.removeprefix("output:"): a for n, a in tensors.items() if n.startswith("output:")}
    baseline = Baseline(
        facts["kind"],
        outputs,
        tensors.get("labels"),
        tuple(facts["ids"]),
        tuple(facts["notes"]),
        tuple(facts["mixed"]),
    )
    return Recorded(baseline, None if facts["classes"] is None else tuple(facts["classes"]))


def _dump_figures(figures: npt.NDArray[np.float64]) -> Stored:
    return {"figures": figures.tolist()}, {}


def _load_figures(entry: Entry) -> npt.NDArray[np.float64]:
    return np.array(entry.facts["figures"], np.float64)


def _dump_corners(corners: CornerOutputs) -> Stored:
    order, files = _dump_tensors({f"{k}:{n}": a for k, outputs in enumerate(corners) for n, a in outputs.items()})
    return {"corners": len(corners), **order}, files


def _load_corners(entry: Entry) -> CornerOutputs:
    corners: list[dict[str, Array]] = [{} for _ in range(entry.facts["corners"])]
    for name, array in _load_tensors(entry).items():
        at, _, output = name.partition(":")
        corners[int(at)][output] = array
    return tuple(corners)


def _dump_table(table: CalibrationTable | None) -> Stored:
    return {}, {} if table is None else table.files(CALIBRATION)


def _load_table(entry: Entry) -> CalibrationTable | None:
    if CALIBRATION not in entry.files:
        return None
    for name in entry.files:
        if name.startswith("calibration."):
            entry.read(name)  # checks its digest
    return CalibrationTable.load(entry.path / CALIBRATION, histograms=_HISTOGRAMS in entry.files)


def _dump_lowered(lowered: Lowered) -> Stored:
    graph = lowered.graph
    facts = {
        "inputs": _SPECS.dump_python(lowered.inputs, mode="json"),
        "outputs": _SPECS.dump_python(lowered.outputs, mode="json"),
        "weights_digest": lowered.weights_digest,
        "graph_digest": lowered.graph_digest,
        "model_notes": list(lowered.model_notes),
        "layers": _LAYERS.dump_python(lowered.layers, mode="json"),
        "notes": list(lowered.notes),
        "unmet": list(lowered.unmet),
        "shared_scales": dict(lowered.shared_scales),
        "onnx": None if graph is None else {"opset": graph.opset, "notes": list(graph.notes)},
    }
    table = {} if lowered.table is None else lowered.table.files(CALIBRATION)
    return facts, table | ({} if graph is None else {GRAPH: graph.data})


def _load_lowered(entry: Entry) -> Lowered:
    facts = entry.facts
    inputs, outputs = _SPECS.validate_python(facts["inputs"]), _SPECS.validate_python(facts["outputs"])
    layers = _LAYERS.validate_python(facts["layers"])
    graph = None
    if facts["onnx"] is not None:
        opset, notes = facts["onnx"]["opset"], tuple(facts["onnx"]["notes"])
        graph = OnnxModel(entry.read(GRAPH), opset, inputs, outputs, notes, computed_in(layers))
    return Lowered(
        inputs=inputs,
        outputs=outputs,
        weights_digest=facts["weights_digest"],
        graph_digest=facts["graph_digest"],
        model_notes=tuple(facts["model_notes"]),
        layers=layers,
        notes=tuple(facts["notes"]),
        unmet=tuple(facts["unmet"]),
        table=_load_table(entry),
        shared_scales=facts["shared_scales"],
        graph=graph,
    )


def _dump_compiled(compiled: Compiled) -> Stored:
    facts, files = _dump_lowered(compiled.lowered)
    engine = compiled.engine
    about = facts_of(engine) | {
        "fallback": [dataclasses.asdict(f) for f in engine.fallback],
        "plugins": list(engine.plugins),
    }
    held = {ENGINE: engine.data, TIMING_CACHE: engine.timing_cache, **engine.plugins}
    return {**facts, "engine": about}, {**files, **held}


def _load_compiled(entry: Entry) -> Compiled:
    lowered, about = _load_lowered(entry), entry.facts["engine"]
    graph = lowered.graph
    engine = engine_of(about, entry.read(ENGINE), inputs=lowered.inputs, outputs=lowered.outputs, graph=graph)
    held = dataclasses.replace(
        engine,
        fallback=tuple(Fallback(**f) for f in about["fallback"]),
        timing_cache=entry.read(TIMING_CACHE),
        plugins={name: entry.read(name) for name in about["plugins"]},
    )
    return Compiled(lowered, held)


SPECS: Codec[tuple[TensorSpec, ...]] = Codec("outputs", "model", _dump_specs, _load_specs)
CORNERS: Codec[CornerOutputs] = Codec("corners", "baseline", _dump_corners, _load_corners)
RECORDED: Codec[Recorded] = Codec("baseline", "baseline", _dump_recorded, _load_recorded)
TABLE: Codec[CalibrationTable | None] = Codec("calibration", "calibration", _dump_table, _load_table)
FIGURES: Codec[npt.NDArray[np.float64]] = Codec("samples", "baseline", _dump_figures, _load_figures)
LOWERED: Codec[Lowered] = Codec("graph", "graph", _dump_lowered, _load_lowered)
COMPILED: Codec[Compiled] = Codec("engine", "engine", _dump_compiled, _load_compiled)
