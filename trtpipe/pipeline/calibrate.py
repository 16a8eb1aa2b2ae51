"""A job to its calibration table, as `build` calibrates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import calibration_table, unread_notes

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


@with_own_modules
def make_table(job: Job, reporter: Reporter) -> CalibrationTable:
    """The `calibration_table` of this job, with its audit.

    Raises:
        InputError: the job has no calibration section and quantizes nothing.
        TrtpipeError: whatever else a build would stop at before it.
    """
    stages = Stages(reporter)
    table = calibration_table(job, PreparedJob(job, stages), stages)
    for note in unread_notes(job, "calibration"):  # a build's are in its report
        stages.note(note)
    return table
