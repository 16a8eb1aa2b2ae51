"""What the stages made, as plain data: all that a bundle says of them, and what the cache stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.quantization import placement

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.pipeline.front import Front
    from trtpipe.values import Engine, LayerPrecision, OnnxModel, Quantized, TensorSpec


@dataclass(frozen=True)
class Lowered:
    """A job's graph in its precisions.

    Attributes:
        inputs, outputs: the bindings.
        weights_digest, graph_digest: of the loaded model and of its captured graph.
        model_notes: what loading the model had to say.
        layers, notes: the precision of each operation, and what quantizing had to say.
        table: the calibration table; None when nothing is calibrated.
        shared_scales: by the key of each quantized tensor, that of the scale it shares.
        graph: as ONNX; None on a route that does not go through ONNX and has made none.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights_digest: str
    graph_digest: str
    model_notes: tuple[str, ...]
    layers: tuple[LayerPrecision, ...]
    notes: tuple[str, ...]
    table: CalibrationTable | None
    shared_scales: Mapping[str, str]
    graph: OnnxModel | None


@dataclass(frozen=True)
class Compiled:
    """An engine and what it was compiled from."""

    lowered: Lowered
    engine: Engine


def lowered_of(front: Front, quantized: Quantized, table: CalibrationTable | None, graph: OnnxModel | None) -> Lowered:
    """The data of a quantized graph."""
    return Lowered(
        inputs=front.loaded.inputs,
        outputs=front.loaded.outputs,
        weights_digest=front.loaded.weights_digest,
        graph_digest=front.captured.digest,
        model_notes=front.loaded.notes,
        layers=quantized.layers,
        notes=quantized.notes,
        table=table,
        shared_scales={} if table is None else _shared_scales(front),
        graph=graph,
    )


def _shared_scales(front: Front) -> dict[str, str]:
    return {s.key: s.group for s in placement.find_sites(front.captured.graph)[0] if s.axis is None}
