"""The packages that building a job imports."""

from __future__ import annotations

from trtpipe.job.job import Job
from trtpipe.model.torch_versions import building_modules
from trtpipe.packages import IMAGES, version


def required(job: Job) -> dict[str, str]:
    """The key of the job that asks for each module, by the module's name: what its target and route compile with is
    not among them."""
    needed = dict.fromkeys(building_modules(version("torch")), "model")
    counting = job.calibration is not None and job.precision.calibrated and job.calibration.has_samples
    if not counting or job.build.quantization == "implicit":  # TensorRT counts
        del needed["numba"]
    if "torchao" in needed:
        needed["torchao"] = folding(job)
    if job.check.images is not None:
        needed |= dict.fromkeys(IMAGES, "check.images")
    elif job.calibration_images is not None:
        needed |= dict.fromkeys(IMAGES, "calibration.images")
    if any(metric.function == "coco_map" for metric in job.check.metrics.values()):
        needed["pycocotools"] = "check.metrics"
    return needed


def folding(job: Job) -> str:
    """The key of the job that asks for what folds and quantizes its graph."""
    return f"precision.{job.precision.quantizing_key}" if job.precision.quantized else "model"
