"""A job to its calibration table, as `build` calibrates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import calibration_table, own_table, unread_notes

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


@with_own_modules
def make_table(job: Job, reporter: Reporter) -> CalibrationTable:
    """The table that a build of this job in INT8 calibrates, or reads from `calibration.table`, with its audit; of a
    quantized model without a calibration section that of its own scales.

    Raises:
        InputError: the job has no calibration.
        TrtpipeError: whatever else a build would stop at before it.
    """
    stages = Stages(reporter)
    prepared = PreparedJob(job, stages)
    if job.calibration is None and job.precision.calibrated:
        return own_table(prepared)
    table = calibration_table(job, job.require_calibration(), prepared, stages)
    for note in unread_notes(job, "calibration"):  # a build's are in its report
        stages.note(note)
    return table
