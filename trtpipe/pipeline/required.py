"""The packages that building a job imports."""

from __future__ import annotations

from trtpipe.job.job import Job
from trtpipe.model.torch_versions import needs_torchao
from trtpipe.packages import BUILDING, CAPTURE, IMAGES, version


def required(job: Job) -> dict[str, str]:
    """The key of the job that asks for each module, by the module's name: what its target and route compile with is
    not among them."""
    needed = {name: "model" for name in (*CAPTURE, *BUILDING) if name != "torchao"}
    if job.check.images is not None or (job.calibration is not None and job.calibration.images is not None):
        needed |= dict.fromkeys(IMAGES, "check.images")
    if any(metric.function == "coco_map" for metric in job.check.metrics.values()):
        needed["pycocotools"] = "check.metrics"
    torch = version("torch")
    if torch is None or needs_torchao(torch):
        needed["torchao"] = folding(job)
    return needed


def folding(job: Job) -> str:
    """The key of the job that asks for what folds and quantizes its graph."""
    return f"precision.{job.precision.quantizing_key}" if job.precision.quantized else "model"
