"""Implicit quantization, on TensorRT 8.6 to 10: a calibrator gives the ranges, TensorRT chooses the INT8 layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from calib import trt_calibrator
from calib.algorithms import AUTO_BASE, PERCENTILE
from calib.trt_calibrator import NativeCalibrator
from trtpipe.errors import BuildError, InputError
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.memory import open_memory
from trtpipe.values import TensorSpec

if TYPE_CHECKING:
    from calib.data import Source
    from trtpipe.trt.types import Builder, IBuilderConfig, IOptimizationProfile


@dataclass(frozen=True)
class NativeCalibration:
    """Where the ranges come from.

    `source` is a `calib.data.Source`. `algorithm` is one that TensorRT has: entropy_2, entropy, minmax or percentile.
    `file` keeps what TensorRT finds from samples, with `made_from`: whatever else the ranges depend on, like the digest
    of the graph.
    """

    source: Source
    algorithm: str = AUTO_BASE
    percentile: float = PERCENTILE
    batch_size: int = 1
    file: str | None = None
    made_from: Mapping[str, str] = field(default_factory=dict)


def make_calibrator(flavour: Flavour, calibration: NativeCalibration | None) -> NativeCalibrator:
    """TensorRT's calibrator over the given samples; `finish()` it after the build.

    Raises:
        InputError: without any; TensorRT would quantize to INT8 with ranges that were never measured.
    """
    if calibration is None:
        raise InputError("build.quantization: implicit has no samples. Give the job a calibration section.")
    return trt_calibrator.make_calibrator(
        flavour.module,
        calibration.source,
        batch_size=calibration.batch_size,
        algorithm=calibration.algorithm,
        percentile=calibration.percentile,
        cache=calibration.file,
        made_from=calibration.made_from,
        place=open_memory().place,
    )


def attach(
    flavour: Flavour,
    builder: Builder,
    config: IBuilderConfig,
    calibrator: NativeCalibrator,
    inputs: tuple[TensorSpec, ...],
    batch: int,
) -> IOptimizationProfile | None:
    """Set the calibrator and its profile; the profile, to be kept as long as the config.

    The batch that TensorRT reads is the opt shape of the calibration profile, so each dynamic dimension stands at its
    opt but the first one of a shape, the batch, which stands at `batch`.

    Raises:
        BuildError: TensorRT does not accept the profile.
    """
    with warnings.catch_warnings():
        # Deprecated in 10.1 in favour of explicit quantization, which is the default: the job asked for this.
        warnings.simplefilter("ignore", DeprecationWarning)
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
                f"build.quantization: {flavour.title} does not accept the calibration profile (batch {batch}). "
                "Set calibration.batch_size within the range of the inputs' batch."
            )
        return profile
