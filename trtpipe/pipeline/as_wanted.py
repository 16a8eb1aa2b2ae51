"""A captured graph as its job wants it: what precision names is in it, a quantized model's scales are settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calib.errors import some_of
from trtpipe.errors import InputError, titled
from trtpipe.job.sections import INT8_ALONE, OR_RECALIBRATE
from trtpipe.model.products import MATRIX_PRODUCTS
from trtpipe.trt.platforms import RTX_WITHOUT_FP32_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trtpipe.job.job import Job
    from trtpipe.values import Captured


def as_the_job_wants(job: Job, captured: Captured) -> Captured:
    """`with_own_scales`, after every glob of the job's precision was found to match a module, and something was found
    to quantize where the job asks for it, and no matrix product that the target cannot compile: before calibration.

    Raises:
        InputError: a glob does not, nothing is left to quantize; or as `with_own_scales` and `require_products`.
    """
    from trtpipe.model.nodes import calls, is_float, module_path, op_name
    from trtpipe.model.sites import of_product
    from trtpipe.quantization.policy import checked_modes, modes_of
    from trtpipe.quantization.precision import Keep, checked_keep
    from trtpipe.quantization.quantize import checked_plan

    precision, modes = job.precision, modes_of(job.precision)
    keep = checked_keep(Keep.of(precision.keep), captured.graph)
    checked_modes(modes, tuple(s.consumer for s in captured.sites if of_product(s)))
    products = [n for n in calls(captured.graph.graph) if op_name(n) in MATRIX_PRODUCTS and is_float(n)]
    require_products(job, (module_path(n) for n in products if not precision.fp16_mode or keep.fp32_glob(n)))
    wanted = with_own_scales(job, captured)
    if job.places_qdq:  # precision.placement, which always leaves something, makes no difference
        checked_plan(wanted, int8=precision.int8_mode, keep=keep, modes=modes if modes.narrow else None)
    return wanted


def require_products(job: Job, wide: Iterable[str]) -> None:
    """Refuse matrix products of FP32 tensors, by their modules, for a GPU that TensorRT-RTX compiles none for.

    Raises:
        InputError: there are some.
    """
    named = job.build.compute_capability if job.build.target == "tensorrt_rtx" else ()
    lacking = [capability for capability in named if capability in RTX_WITHOUT_FP32_PRODUCTS]
    if lacking and (modules := [titled(module) for module in dict.fromkeys(wide)]):
        without = "" if job.build.platform else f", or leave {', '.join(lacking)} out"  # a platform needs its own
        raise InputError(
            f"build.compute_capability: TensorRT-RTX compiles no matrix product of FP32 tensors for "
            f"{', '.join(lacking)} (got {some_of(modules, 3)}). Set precision.fp16_mode and keep none of them "
            f"in FP32{without}."
        )


def with_own_scales(job: Job, captured: Captured) -> Captured:
    """The captured graph as the job wants a quantized model's own scales; any other graph as it is.

    Raises:
        InputError: precision and calibration do not say what becomes of the scales, or there are none where they are
            to be taken.
    """
    from trtpipe.model.marks import is_marked
    from trtpipe.quantization.given import as_given, in_float

    data = job.calibration
    if job.model.quantized and not captured.quantized:
        raise InputError(
            "model.quantized: must be left out for a network without fake quantizers that are on (got true). Remove it."
        )
    if job.model.factory is not None and captured.quantized and not job.model.quantized:
        raise InputError(
            "model.quantized: must be true for a network with fake quantizers (got false). Set it, and "
            "precision.int8_mode, or give the network without them."
        )
    if not is_marked(captured.graph):
        if job.precision.calibrated and data is None:
            raise InputError(
                "calibration: must be given for a model in which no operation reads Q/DQ (got none). Add "
                "calibration.images, or calibration.table."
            )
        if data is not None and data.recalibrate:
            raise InputError(
                "calibration.recalibrate: must be left out for a model in which no operation reads Q/DQ (got true), "
                "which is calibrated anyhow. Remove it."
            )
        return captured
    if data is not None and data.recalibrate:
        return in_float(captured)
    if job.precision.on != ("int8_mode",):
        got = ", ".join(job.precision.on) or "none"
        raise InputError(f"precision: must {INT8_ALONE} (got {got}). {OR_RECALIBRATE}")
    if data is not None and (data.has_samples or data.table):
        raise InputError(
            "calibration: must be left out for a model that is quantized already, whose own scales are taken. Remove "
            "it, or set calibration.recalibrate: true."
        )
    return as_given(captured)
