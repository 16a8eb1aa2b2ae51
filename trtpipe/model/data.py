"""The data sections of a job as calib's sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec, TransformSpec
from trtpipe.errors import InputError
from trtpipe.job.importable import on_path

if TYPE_CHECKING:
    from calib.data import Source
    from calib.samples import TransformSpec
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Data, Transform


def open_calibration(job: Job) -> Source:
    """The samples INT8 ranges are observed on.

    Raises:
        InputError: the job has none, or they are bad.
    """
    if job.calibration is None:
        raise InputError("calibration: must be given to calibrate (got none). Add calibration.images.")
    return _open(job, "calibration", job.calibration, job.calibration.transform)


def open_check(job: Job) -> Source:
    """The samples the result is compared on; images are transformed like calibration's unless the job says otherwise.

    Raises:
        InputError: they are bad.
    """
    return _open(job, "check", job.check, job.check_transform())


def _open(job: Job, where: str, data: Data, transform: Transform | None) -> Source:
    spec = DataSpec(
        images=data.images,
        arrays=data.arrays,
        factory=data.factory,
        transform=None if data.images is None else _transform(transform),
        samples=data.samples,
        seed=data.seed,
        workers=data.workers,
        on_bad_sample=data.on_bad_sample,
    )
    inputs = [
        InputSpec(s.name, s.dtype, tuple(d if isinstance(d, int) else None for d in s.shape[1:]))
        for s in job.input_specs()
    ]
    try:
        with on_path(job.folder):
            return open_source(spec, inputs)
    except CalibError as error:
        raise InputError(f"{where}: {error}") from error


def _transform(transform: Transform | None) -> TransformSpec:
    if transform is None:
        return TransformSpec()
    normalize = transform.normalize
    return TransformSpec(
        resize=transform.resize,
        center_crop=transform.center_crop,
        grayscale=transform.grayscale,
        interpolation=transform.interpolation,
        normalize_mean=None if normalize is None else tuple(normalize.mean),
        normalize_std=None if normalize is None else tuple(normalize.std),
        callable=transform.callable,
    )
