"""The builder options of a job, by TensorRT's own names; `trt` honours each or refuses it at plan time."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class BuildOptions(BaseModel):
    """Everything that steers the TensorRT builder and is not the model's precision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute_capability: tuple[str, ...] = ()
    workspace: int | None = Field(default=None, ge=1, description="workspace memory pool, bytes")
    optimization_level: int | None = Field(default=None, ge=0, le=5)
    timing_cache: str | None = None
    profiling_verbosity: Literal["none", "layer_names_only", "detailed"] = "detailed"
    tf32: bool = True
