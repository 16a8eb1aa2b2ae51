"""What TensorRT's own calibrators read, for the routes that let TensorRT calibrate."""

from __future__ import annotations

from collections.abc import Mapping

from calib.algorithms import AUTO_BASE
from calib.data import Source
from trtpipe.job.job import Job
from trtpipe.trt.implicit import NativeCalibration


def native_calibration(job: Job, samples: Source, made_from: Mapping[str, str]) -> NativeCalibration:
    """What TensorRT calibrates by: samples in the job's batch size, and its algorithm.

    Args:
        job: what TensorRT finds is kept in its `build.calibration_cache`.
        samples: those of its calibration.
        made_from: what else the ranges depend on, by name: the cache is not used for anything else.

    Raises:
        InputError: the job has no calibration section.
    """
    data = job.require_calibration()
    return NativeCalibration(
        source=samples,
        algorithm=AUTO_BASE if data.algorithm == "auto" else data.algorithm,
        percentile=data.percentile,
        batch_size=job.batch_size(data),
        file=job.build.calibration_cache,
        made_from=dict(made_from),
    )
