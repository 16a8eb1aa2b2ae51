"""The metrics of a job's check, and the limits that their figures, and those of every check, must meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from trtpipe.figures import CONFIDENCE_TEXT, own_limit
from trtpipe.job.section import PlainArguments, Section

#: Limits on a share of the samples, which have intervals.
SHARE_LIMITS = ("top1_agreement_min", "accuracy_drop_max")
#: The metrics that are built in, and whether a larger figure is better.
BUILT_IN_METRICS: Mapping[str, bool] = {
    "top5": True, "miou": True, "coco_map": True, "psnr": True, "ssim": True, "mae": False, "cosine": True,
}  # fmt: skip
#: Arguments of theirs that name an output, where they are text.
OF_OUTPUTS = ("output", "boxes", "scores", "classes")


class OwnMetric(Section):
    """A figure of the check that the job names. A name alone stands for its function."""

    function: str = Field(
        description=f"{', '.join(BUILT_IN_METRICS)}, or package.module:callable(outputs, labels, ids)"
    )
    args: PlainArguments = Field(default_factory=dict, description="further keyword arguments of the function")
    better: Literal["higher", "lower"] | None = Field(
        default=None, description="which figures of a callable are better; higher when absent"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, raw: object) -> object:
        return {"function": raw} if isinstance(raw, str) else raw

    @property
    def built_in(self) -> bool:
        """Whether the function is one of trtpipe's own."""
        return self.function in BUILT_IN_METRICS

    @property
    def larger_is_better(self) -> bool:
        """Whether larger figures are better."""
        return BUILT_IN_METRICS.get(self.function, self.better != "lower")


class MetricLimits(Section):
    """What a metric of check.metrics must meet."""

    min: float | None = Field(default=None, description="least figure of what is executed")
    max: float | None = Field(default=None, description="largest figure of what is executed")
    drop_max: float | None = Field(
        default=None, ge=0, description="by how much it may be worse than the baseline's, in the metric's own unit"
    )

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {n: v for n, v in self.model_dump().items() if v is not None}


class Limits(Section):
    """What the check must meet; each is optional, and at least one must be set for the check to be able to fail."""

    cosine_min: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="cosine similarity with the baseline, mean of the samples; "
        "of one number a sample, over all samples",
    )
    cosine_worst_min: float | None = Field(
        default=None, ge=-1, le=1, description="cosine similarity with the baseline of the worst sample"
    )
    max_abs_max: float | None = Field(default=None, ge=0, description="largest absolute difference")
    relative_l2_max: float | None = Field(default=None, ge=0, description="|engine - baseline| / |baseline|")
    sqnr_db_min: float | None = Field(default=None, description="signal to quantization noise ratio, dB")
    top1_agreement_min: float | None = Field(default=None, ge=0, le=1, description="share of equal argmax")
    accuracy_drop_max: float | None = Field(
        default=None, ge=0, le=1, description="top-1 accuracy lost against the labels, 0.01 is one point"
    )
    speedup_over_fp16_min: float | None = Field(default=None, gt=0, description="needs require: engine")
    confident: bool = Field(
        default=False,
        description=f"figures with a {CONFIDENCE_TEXT} confidence interval (shares of the samples, metrics): all of it "
        "must meet the limit",
    )
    metrics: dict[str, MetricLimits] = Field(default_factory=dict, description="limits of the figures of check.metrics")

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by name; those of metrics as `metrics.<name>.<limit>`."""
        own = {own_limit(n, k): v for n, limits in self.metrics.items() for k, v in limits.given.items()}
        return {n: v for n, v in self.model_dump(exclude={"confident", "metrics"}).items() if v is not None} | own
