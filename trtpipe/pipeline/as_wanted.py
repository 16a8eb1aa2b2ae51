"""A captured graph as its job wants it: what precision names is in it, a quantized model's scales are settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.errors import InputError

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.values import Captured


def as_the_job_wants(job: Job, captured: Captured) -> Captured:
    """`with_own_scales`, after every glob of the job's precision was found to match a module, and something was found
    to quantize where the job asks for it: before calibration.

    Raises:
        InputError: a glob does not, nothing is left to quantize; or as `with_own_scales`.
    """
    from trtpipe.model.sites import of_product
    from trtpipe.quantization.policy import checked_modes, modes_of
    from trtpipe.quantization.precision import Keep, checked_keep
    from trtpipe.quantization.quantize import checked_plan

    precision, modes = job.precision, modes_of(job.precision)
    keep = checked_keep(Keep(precision.keep.fp32, precision.keep.fp16, precision.keep.bf16), captured.graph)
    checked_modes(modes, tuple(s.consumer for s in captured.sites if of_product(s)))
    wanted = with_own_scales(job, captured)
    if job.places_qdq:  # precision.placement, which always leaves something, makes no difference
        checked_plan(wanted, int8=precision.int8_mode, keep=keep, modes=modes if modes.narrow else None)
    return wanted


def with_own_scales(job: Job, captured: Captured) -> Captured:
    """The captured graph as the job wants a quantized model's own scales; any other graph as it is.

    Raises:
        InputError: precision and calibration do not say what becomes of the scales, or there are none where they are
            to be taken.
    """
    from trtpipe.model.marks import is_marked
    from trtpipe.quantization.given import as_given, in_float

    data = job.calibration
    if not is_marked(captured.graph):
        if job.model.quantized:
            raise InputError(
                "model.quantized: must be left out for a network without fake quantizers (got true). Remove it."
            )
        if job.precision.calibrated and data is None:
            raise InputError(
                "calibration: must be given for a model without Q/DQ (got none). Add calibration.images, or "
                "calibration.table."
            )
        if data is not None and data.recalibrate:
            raise InputError(
                "calibration.recalibrate: must be left out for a model without Q/DQ (got true), which is calibrated "
                "anyhow. Remove it."
            )
        return captured
    if data is not None and data.recalibrate:
        return in_float(captured)
    on = [key for key in ("int8_mode", "fp8_mode", "nvfp4_mode", "weights") if getattr(job.precision, key)]
    if on != ["int8_mode"]:
        raise InputError(
            "precision: must be int8_mode, without other number formats, for a model that is quantized to INT8 already "
            f"(got {', '.join(on) or 'none'}). Set int8_mode, or calibration.recalibrate to start from its FP32 form."
        )
    if data is not None and (data.images or data.arrays or data.factory or data.table):
        raise InputError(
            "calibration: must be left out for a model that is quantized already, whose own scales are taken. Remove "
            "it, or set calibration.recalibrate: true."
        )
    return as_given(captured)
