"""The results of the stages as plain data: what a bundle holds of them, and what the cache stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.values import Engine, LayerPrecision, OnnxModel, TensorSpec


@dataclass(frozen=True)
class Lowered:
    """A job's graph in its precisions.

    Attributes:
        inputs, outputs: the bindings.
        weights_digest, graph_digest: of the loaded model and of its captured graph.
        model_notes: notes of loading and capturing the model.
        layers, notes: the precision of each operation, and the notes of quantization.
        unmet: notes on what the job asks for and does not get, or at a cost.
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
    unmet: tuple[str, ...]
    table: CalibrationTable | None
    shared_scales: Mapping[str, str]
    graph: OnnxModel | None


@dataclass(frozen=True)
class Compiled:
    """An engine and what it was compiled from."""

    lowered: Lowered
    engine: Engine
