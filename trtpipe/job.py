"""The job file: pydantic models of every section. Paths in them are absolute once `load_job` has read them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trtpipe.build_options import BuildOptions
from trtpipe.values import BINDING_DTYPES, DimRange, Route, Target, TensorSpec


class Section(BaseModel):
    """A part of a job: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """Where the network comes from: exactly one of factory, torchscript and program."""

    factory: str | None = Field(default=None, description="package.module:callable returning an nn.Module")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    weights: str | None = Field(default=None, description=".safetensors, or .pt read with weights_only")
    torchscript: str | None = Field(default=None, description="a TorchScript file")
    program: str | None = Field(default=None, description="a .pt2 file written by torch.export.save")
    baseline: Literal["trace", "script"] = "trace"


class Normalize(Section):
    """(x - mean) / std by channel, x in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Transform(Section):
    """torchvision's transforms in this order: resize, center_crop, grayscale, to tensor, normalize."""

    resize: int | tuple[int, int] | None = None
    center_crop: int | tuple[int, int] | None = None
    grayscale: bool = False
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    normalize: Normalize | None = None
    callable: str | None = Field(default=None, description="package.module:callable(PIL image) -> tensor, instead")


class Data(Section):
    """Samples: exactly one of images (an ImageFolder), arrays (.npy/.npz/.safetensors) and factory (a callable)."""

    images: str | None = None
    arrays: str | None = None
    factory: str | None = None
    transform: Transform | None = None
    samples: int | None = Field(default=None, ge=1, description="how many; all when absent")
    batch_size: int = Field(default=32, ge=1)
    seed: int = 0
    workers: int = Field(default=0, ge=0)
    on_bad_sample: Literal["error", "skip"] = "error"


class Calibration(Data):
    """What INT8 ranges are observed on, and by which algorithm."""

    algorithm: Literal["entropy_2", "entropy", "minmax", "percentile", "mse"] = "entropy_2"
    percentile: float = Field(default=99.99, gt=0, le=100)
    table: str | None = Field(default=None, description="a calibration.json to use instead of calibrating")


class Limits(Section):
    """What the check must meet; each is optional, and at least one must be set for the check to be able to fail."""

    cosine_min: float | None = Field(default=None, ge=-1, le=1)
    max_abs_max: float | None = Field(default=None, ge=0)
    relative_l2_max: float | None = Field(default=None, ge=0)
    sqnr_db_min: float | None = None
    top1_agreement_min: float | None = Field(default=None, ge=0, le=1)
    accuracy_drop_max: float | None = Field(default=None, ge=0, le=1)
    speedup_over_fp16_min: float | None = Field(default=None, gt=0)


class Check(Data):
    """What the result is compared with its baseline on. `transform` is calibration's when absent."""

    limits: Limits = Limits(cosine_min=0.99)
    require: Literal["graph", "engine"] = "graph"
    on_fail: Literal["error", "tune"] = "error"


class Keep(Section):
    """Globs over source module paths that stay out of a lower precision."""

    fp32: tuple[str, ...] = ()
    fp16: tuple[str, ...] = ()


class Precision(Section):
    """What the engine computes in; torch2trt's own words."""

    fp16_mode: bool = False
    bf16_mode: bool = False
    int8_mode: bool = False
    keep: Keep = Keep()


class Input(Section):
    """One input binding. Every name in `shape` needs its range, given under that name beside it."""

    dtype: Literal["float32", "float16", "uint8", "int8", "int32", "int64", "bool"] = "float32"
    shape: tuple[int | str, ...]
    normalize: Normalize | None = Field(default=None, description="done inside the engine, on x/255 for uint8")
    dims: dict[str, DimRange] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _ranges_beside_shape(cls, raw: Any) -> Any:
        """`N: {min, opt, max}` stands beside `shape`; move it into `dims`."""
        if not isinstance(raw, dict):
            return raw
        names = {d for d in raw.get("shape", ()) if isinstance(d, str)}
        dims = dict(raw.get("dims", {})) | {k: v for k, v in raw.items() if k in names}
        return {k: v for k, v in raw.items() if k not in names} | {"dims": dims}


class Output(Section):
    """One output binding."""

    dtype: Literal["float32", "float16", "int32", "int64", "bool"] = "float32"


class Build(BuildOptions):
    """The route, the target and the builder's own options."""

    route: Route = "onnx"
    target: Target = "tensorrt_rtx"


class Job(Section):
    """One engine to build."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: Model
    inputs: dict[str, Input] = Field(min_length=1)
    outputs: dict[str, Output] = Field(min_length=1)
    precision: Precision = Precision()
    calibration: Calibration | None = None
    build: Build = Build()
    check: Check

    def input_specs(self) -> tuple[TensorSpec, ...]:
        """The input bindings in the order of the file."""
        return tuple(TensorSpec(n, i.dtype, i.shape, i.dims) for n, i in self.inputs.items())


assert set(BINDING_DTYPES) == set(Input.model_fields["dtype"].annotation.__args__)  # type: ignore[union-attr]
