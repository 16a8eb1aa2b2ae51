"""What TensorRT's own calibrators read, for the routes that let TensorRT calibrate."""

from __future__ import annotations

from calib.algorithms import AUTO_BASE
from calib.data import Source
from trtpipe.job.job import Job
from trtpipe.trt.implicit import NativeCalibration


def native_calibration(job: Job, samples: Source) -> NativeCalibration:
    """What TensorRT calibrates by: samples in the job's batch size, and its algorithm.

    A route adds what else the ranges depend on there.

    Args:
        job: what TensorRT finds is kept in its `build.calibration_cache`.
        samples: those of its calibration.

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
    )
