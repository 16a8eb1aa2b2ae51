"""Implicit quantization, on TensorRT 8.6 to 10: a calibrator gives the ranges, TensorRT chooses the INT8 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtpipe.errors import BuildError, InputError
from trtpipe.trt.flavour import Flavour
from trtpipe.values import TensorSpec


@dataclass(frozen=True)
class Calibration:
    """Where the ranges come from: a calibration cache of this very TensorRT, or samples.

    `source` is a `calib.data.Source`; `algorithm` is one of TensorRT's (entropy_2, entropy, minmax); `cache` is the
    text of a calibration cache for the network's tensor names.
    """

    cache: bytes | None = None
    source: Any = None
    algorithm: str = "entropy_2"
    batch_size: int = 1


def make_calibrator(flavour: Flavour, calibration: Calibration | None) -> Any:
    """TensorRT's calibrator over the given ranges or samples.

    Raises:
        InputError: without either; TensorRT would make INT8 of ranges that nobody measured.
    """
    if calibration is None or (calibration.cache is None and calibration.source is None):
        raise InputError(
            "build.quantization: implicit must have ranges (got neither samples nor a calibration cache). "
            "Give the job a calibration section."
        )
    from calib import trt_calibrator

    return trt_calibrator.make(
        flavour.module,
        calibration.algorithm,
        calibration.source,
        batch_size=calibration.batch_size,
        cache=calibration.cache,
    )


def attach(
    flavour: Flavour, builder: Any, config: Any, calibrator: Any, inputs: tuple[TensorSpec, ...], batch: int
) -> Any:
    """Set the calibrator and its profile; the profile, to be kept as long as the config.

    The batch that TensorRT reads is the opt shape of the calibration profile, so each dynamic dimension stands at its
    opt but the first one of a shape, the batch, which stands at `batch`.
    """
    config.int8_calibrator = calibrator
    if not any(spec.dynamic for spec in inputs):
        return None
    profile = builder.create_optimization_profile()
    for spec in inputs:
        first = spec.shape[0] if spec.shape else None
        shape = spec.with_dim(first, batch) if isinstance(first, str) else spec.at("opt")
        profile.set_shape(spec.name, shape, shape, shape)
    if not config.set_calibration_profile(profile):
        raise BuildError(
            f"build.quantization: {flavour.title} must accept the calibration profile (got batch {batch}). "
            "Set calibration.batch_size within the range of the inputs' batch."
        )
    return profile
