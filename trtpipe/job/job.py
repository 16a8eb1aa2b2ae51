"""The job: every section of a job file, and what its stages derive from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from trtpipe.errors import InputError
from trtpipe.job.broken import BrokenRules
from trtpipe.job.rules import broken
from trtpipe.job.section import Section
from trtpipe.job.sections import (
    CORRECTIONS,
    Build,
    Calibration,
    Check,
    Correction,
    Data,
    Input,
    ModelSource,
    Output,
    Precision,
    Transform,
)
from trtpipe.outputs import MOST_NAME, PLAIN_NAME
from trtpipe.values import DimRange, TensorSpec

#: Arguments of the metric coco_map that name outputs, and what they are by default; all but the boxes themselves are of
#: K candidates a sample.
COCO_OUTPUTS = {"boxes": "boxes", "scores": "scores", "classes": "labels"}
BOXED = {argument: name for argument, name in COCO_OUTPUTS.items() if argument != "boxes"}


class Job(Section):
    """One engine to build."""

    name: str = Field(
        pattern=PLAIN_NAME,
        max_length=MOST_NAME,
        description="also the name of the bundle's folder",
    )
    model: ModelSource
    inputs: dict[str, Input] = Field(
        min_length=1,
        description="the input bindings by name, in the model's order; tensors within one argument (a dict, list or "
        "tuple) by their paths, as batch.image or pair.0",
    )
    outputs: dict[str, Output] = Field(
        min_length=1,
        description="the output bindings by name, in the model's order; where that names its outputs itself (a dict, a "
        "dataclass, an ONNX model), those of these names, and the others are left out",
    )
    precision: Precision = Precision()
    calibration: Calibration | None = None
    build: Build = Build()
    check: Check
    worker: tuple[str, ...] = Field(
        default=(), description="what a fleet's worker must announce to build this, like sm87 or tensorrt=10.3"
    )
    _folder: Path | None = PrivateAttr(default=None)
    _text: str = PrivateAttr(default="")

    @property
    def folder(self) -> Path | None:
        """The folder the job file is in, where its modules are looked up too; None for a job made in Python."""
        return self._folder

    @property
    def text(self) -> str:
        """The job file as it was written, with every override as a comment below; empty for a job made in Python."""
        return self._text

    @property
    def callables(self) -> dict[str, str]:
        """Every `package.module:callable` that the job names, by its dotted path in the job file."""
        targets = {"model.factory": self.model.factory}
        targets |= {f"check.metrics.{n}.function": m.function for n, m in self.check.metrics.items() if not m.built_in}
        for name, data in (("calibration", self.calibration), ("check", self.check)):
            if data is not None:
                targets[f"{name}.factory"] = data.factory
                targets[f"{name}.transform.callable"] = data.transform.callable if data.transform else None
        return {option: target for option, target in targets.items() if target is not None}

    def read_from(self, folder: Path, text: str) -> Job:
        """The same job, as read from `text` in a file in `folder`."""
        job = self.model_copy()
        job._folder, job._text = folder, text
        return job

    @model_validator(mode="after")
    def _between_fields(self) -> Job:
        problems = tuple(broken({name: getattr(self, name) for name in type(self).model_fields}))
        if problems:
            raise BrokenRules(problems)
        return self

    def input_specs(self) -> tuple[TensorSpec, ...]:
        """The input bindings in the order of the file; a dimension of one size alone is a number in their shapes."""
        specs = []
        for name, i in self.inputs.items():
            fixed = {d: r.min for d, r in i.dims.items() if r.min == r.max}
            shape = tuple(fixed.get(d, d) if isinstance(d, str) else d for d in i.shape)
            dims = {d: DimRange(r.min, r.opt, r.max) for d, r in i.dims.items() if d not in fixed}
            specs.append(TensorSpec(name, i.dtype, shape, dims))
        return tuple(specs)

    def require_calibration(self) -> Calibration:
        """The calibration section; InputError where the job has none."""
        if self.calibration is None:
            raise InputError("calibration: the job has no calibration data. Add calibration.images.")
        return self.calibration

    @property
    def calibration_images(self) -> str | None:
        """The folder of images that the job is calibrated with, if it is by images."""
        return None if self.calibration is None else self.calibration.images

    def check_transform(self) -> Transform | None:
        """The transform of the check's images: its own, or calibration's."""
        if self.check.transform is None and self.check.images is not None and self.calibration is not None:
            return self.calibration.transform
        return self.check.transform

    @property
    def places_qdq(self) -> bool:
        """Whether Q/DQ are placed, in any number format: with implicit quantization TensorRT quantizes by itself."""
        return self.precision.quantized and self.build.quantization == "explicit"

    @property
    def places_int8(self) -> bool:
        """Whether INT8 Q/DQ are among those that are placed."""
        return self.precision.int8_mode and self.build.quantization == "explicit"

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The corrections that calibrating this job tries: INT8's, for no other format gains from them."""
        data = self.calibration
        if data is None or data.table is not None or self.build.quantization == "implicit":
            return ()
        if not self.precision.int8_mode or data.corrections is False:
            return ()
        return CORRECTIONS if data.corrections is True else data.corrections

    def unused(self) -> tuple[str, ...]:
        """What the calibration section gives and this job does not use, as notes."""
        data, precision = self.calibration, self.precision
        if data is None:
            return ()
        if precision.calibrated:
            return (*self._no_threshold(data), *self._no_corrections(data))
        if not precision.fp16_mode and precision.weights is None:
            of_images = self.check.images is not None
            shared = of_images and self.check.transform is None and data.transform is not None
            naming = of_images and self.check.labels is None and data.images is not None
            used = ["its transform"] * shared + ["its class folders, where it has any,"] * naming
            verb = "is" if used == ["its transform"] else "are"
            what = f"only {' and '.join(used)} {verb} used, by the check" if used else "not used"
            return (f"calibration: {what}, since precision.int8_mode and precision.fp16_mode are false",)
        of_int8 = ("algorithm", "percentile", *(("corrections",) if data.corrections is not False else ()))
        given = [n for n in of_int8 if n in data.model_fields_set]
        named = ", ".join(f"calibration.{n}" for n in given)
        notes: tuple[str, ...] = (f"{named}: not used, since precision.int8_mode is false",) if given else ()
        if "table" in data.model_fields_set:
            notes += ("calibration.table: not used, since precision has none of int8_mode, fp8_mode and nvfp4_mode",)
        return notes

    def _no_threshold(self, data: Calibration) -> tuple[str, ...]:
        """A note where an algorithm is given whose thresholds only the table keeps: other formats than INT8 have the
        largest values."""
        given = [f"calibration.{n}" for n in ("algorithm", "percentile") if n in data.model_fields_set]
        if not given or self.precision.int8_mode or data.table is not None:
            return ()
        return (f"{', '.join(given)}: of the table alone, no scale of this job, since precision.int8_mode is false",)

    def _no_corrections(self, data: Calibration) -> tuple[str, ...]:
        """A note where `calibration.corrections` is given and no correction is made."""
        if "corrections" not in data.model_fields_set or data.corrections is False:
            return ()
        if self.build.quantization == "implicit":
            return ("calibration.corrections: not used, since build.quantization is implicit",)
        if data.table is not None:
            held = "they" if self.precision.int8_mode else "equalization and smoothing"
            return (f"calibration.corrections: {held} are used where calibration.table holds them, and none is made",)
        if not self.precision.int8_mode:
            return ("calibration.corrections: not used, since precision.int8_mode is false",)
        return ()

    @property
    def boxed(self) -> frozenset[str]:
        """Names of the outputs that a metric takes for the scores and classes of boxes: they have no class a place."""
        args = [m.args for m in self.check.metrics.values() if m.function == "coco_map"]
        return frozenset(str(a.get(key, name)) for a in args for key, name in BOXED.items())

    def as_judged(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The outputs' bindings; those that are scores or classes of boxes are no class scores of samples."""
        return tuple(replace(s, classes=False) if s.name in self.boxed else s for s in outputs)

    def batch_size(self, data: Data) -> int:
        """The `batch_size` of `data`, within what the batch dimension of the inputs takes."""
        first = next(iter(self.inputs.values()))
        batch = first.shape[0]
        if isinstance(batch, int):
            return batch
        return max(first.dims[batch].min, min(data.batch_size, first.dims[batch].max))
