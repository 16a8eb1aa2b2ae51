"""The line, cut after calibration: a job to its calibration table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.errors import InputError
from trtpipe.model.capture import capture
from trtpipe.model.data import open_calibration, open_check
from trtpipe.model.load import load_model
from trtpipe.pipeline.stages import Stages, observe, overlap_notes

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


def make_table(job: Job, reporter: Reporter) -> CalibrationTable:
    """What `build` would calibrate for this job: the table with its audit.

    Raises:
        InputError: the job has no calibration, or names a table in place of data.
        TrtpipeError: whatever else a build would stop at before it.
    """
    if job.calibration is None:
        raise InputError("calibration: must be given to calibrate (got none). Add calibration.images.")
    if job.calibration.table is not None:
        raise InputError(
            f"calibration.table: must be absent to calibrate (got {job.calibration.table}). Give calibration.images."
        )
    stages = Stages(reporter)
    with stages("model"):
        loaded = load_model(job, job.folder)
    with stages("capture"):
        captured = capture(loaded)
    with stages("calibrate") as progress:
        source = open_calibration(job)
        for note in overlap_notes(source, open_check(job)):
            progress.note(note)
        digests = {"weights": loaded.weights_digest, "graph": captured.digest}
        return observe(job, job.calibration, captured, source, digests, progress)
