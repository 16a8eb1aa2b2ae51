"""A job to its calibration table, as `build` calibrates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import calibration_table

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


def make_table(job: Job, reporter: Reporter) -> CalibrationTable:
    """The table that a build of this job in INT8 calibrates, or reads from `calibration.table`, with its audit.

    Raises:
        InputError: the job has no calibration.
        TrtpipeError: whatever else a build would stop at before it.
    """
    calibration = job.require_calibration()
    stages = Stages(reporter)
    prepared = PreparedJob(job, stages)
    return calibration_table(job, calibration, prepared, stages)
