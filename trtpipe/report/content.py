"""What the report is made of: values that a build already has, and no more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from calib.types import Array
from trtpipe.model.labels import Boxes

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bundle.manifest import Manifest
    from trtpipe.evaluation.bench import Bench


@dataclass(frozen=True)
class Detections:
    """The outputs that are detections, as `evaluation.standard.detections` takes their names and categories.

    `steps` make an image file's picture what the boxes are in pixels of; `truth` are the labels, one a sample.
    """

    boxes: str
    scores: str
    classes: str
    steps: Sequence[Callable[[Image.Image], Image.Image]] = ()
    truth: Sequence[Boxes] | None = None
    categories: Sequence[int] | None = None


@dataclass(frozen=True)
class ComparedOutputs:
    """The outputs of the baseline, and of the checked engine or graph, on the same samples.

    Attributes:
        reference: the baseline's outputs, [S, ...] of any dtype by output name.
        outputs: the checked engine's or graph's, [S, ...] by output name.
        ids: names the samples; for images, the file relative to `images`.
        labels: int64 [S], -1 where unknown, or None.
        images: the folder that `ids` are files of; None when the samples are no images.
        detections: which outputs are boxes with scores; None where none are.
        unranked: names the outputs that are no class scores, whatever their shape.
    """

    reference: Mapping[str, Array]
    outputs: Mapping[str, Array]
    ids: Sequence[str]
    labels: Array | None = None
    images: Path | None = None
    detections: Detections | None = None
    unranked: Collection[str] = ()


@dataclass(frozen=True)
class ReportContent:
    """Everything `render` shows.

    Attributes:
        manifest: of the bundle, with its check; the sizes of its files come from `sizes`.
        sizes: bytes of each file of the bundle, by name; the report itself is not among them.
        compared: None where the outputs were not kept; the report then says so.
        table: the calibration table, with its histograms where they are at hand.
        scales: table key of each quantized input -> table key whose scale it has; empty where every one has its own.
        sensitivity: by module path, the SQNR of the output in dB when that module alone is quantized; inf where that
            changes nothing.
        latencies_ms: measured times of single batches, in milliseconds.
        bench: the measured modes side by side.
        measured_on: what executed the engine while `latencies_ms` were measured.
    """

    manifest: Manifest
    sizes: Mapping[str, int]
    compared: ComparedOutputs | None
    table: CalibrationTable | None
    scales: Mapping[str, str]
    sensitivity: Mapping[str, float]
    latencies_ms: Sequence[float]
    bench: Bench | None
    measured_on: str
