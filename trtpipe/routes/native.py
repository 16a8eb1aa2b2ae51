"""What TensorRT's own calibrators read, for the routes that let TensorRT calibrate."""

from __future__ import annotations

from collections.abc import Mapping

from calib.algorithms import AUTO_BASE
from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.model.data import open_calibration
from trtpipe.trt.implicit import NativeCalibration


def native_calibration(job: Job, made_from: Mapping[str, str]) -> NativeCalibration:
    """The job's calibration samples in its batch size, for implicit quantization.

    Args:
        job: what TensorRT finds is kept in its `build.calibration_cache`.
        made_from: what else the ranges depend on, by name: the cache is not used for anything else.

    Raises:
        InputError: the job has none.
    """
    data = job.calibration
    if data is None:
        raise InputError(
            "calibration: must give samples for build.quantization implicit (got none). Add calibration.images, or use "
            "explicit."
        )
    return NativeCalibration(
        source=open_calibration(job),
        algorithm=AUTO_BASE if data.algorithm == "auto" else data.algorithm,
        percentile=data.percentile,
        batch_size=job.batch_size(data),
        file=job.build.calibration_cache,
        made_from=dict(made_from),
    )
