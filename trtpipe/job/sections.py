"""The sections of a job file, each a pydantic model. What must hold between their fields is in `rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from calib.algorithms import PERCENTILE, Algorithm
from calib.samples import SOURCES, Interpolation, OnBadSample
from calib.types import JsonObject
from trtpipe.errors import either
from trtpipe.job.build_options import MOST_EXTENT, BuildOptions, Number
from trtpipe.job.limits import Limits, OwnMetric
from trtpipe.job.section import PlainArguments, Section, tuples
from trtpipe.values import (
    EXTENTS,
    BindingDtype,
    DimRange,
    Executed,
    NumberFormatName,
    RecordedBy,
    Route,
    Target,
)


def _range(value: object) -> object:
    """{min, opt, max} of whole numbers as a DimRange; anything else as it is, for pydantic to refuse."""
    if isinstance(value, dict) and set(value) == set(EXTENTS) and all(type(v) is int for v in value.values()):
        return DimRange(**value)
    return value


def _size(value: object) -> int | tuple[int, int]:
    """A positive integer, or height and width."""
    sizes = (value,) if isinstance(value, int) else value
    if isinstance(sizes, tuple) and all(type(s) is int and 1 <= s <= MOST_EXTENT for s in sizes):
        if isinstance(value, int):
            return value
        if len(sizes) == 2:
            return (sizes[0], sizes[1])
    raise PydanticCustomError("must", "be a positive integer or [height, width]")


def _dimension(value: object) -> int | str:
    if type(value) is int and 1 <= value <= MOST_EXTENT:
        return value
    if isinstance(value, str) and value.isidentifier():
        return value
    raise PydanticCustomError("must", "be a positive integer or the name of a dynamic dimension")


_EXTENT: JsonObject = {"type": "integer", "minimum": 1, "maximum": MOST_EXTENT}
Size = Annotated[
    int | tuple[int, int],
    BeforeValidator(_size),
    WithJsonSchema(
        {
            "anyOf": [
                _EXTENT,
                {"type": "array", "items": _EXTENT, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
Dimension = Annotated[
    int | str,
    BeforeValidator(_dimension),
    WithJsonSchema({"anyOf": [_EXTENT, {"type": "string"}]}),
]


#: What to do with a file of TorchScript, which torch.export does not take.
FROM_TORCHSCRIPT = "Write it as model.onnx, by torch.onnx.export of torch.jit.load, dynamo=False."


class ModelSource(Section):
    """Where the network comes from: factory, program or onnx. A torchscript file is what it is compared with."""

    factory: str | None = Field(default=None, description="package.module:callable returning an nn.Module")
    args: PlainArguments = Field(default_factory=dict, description="keyword arguments of the factory")
    weights: str | None = Field(default=None, description="state dict, or a checkpoint of one: .safetensors or .pt")
    torchscript: str | None = Field(
        default=None, description="a TorchScript file to compare with, instead of recording a baseline"
    )
    quantized: bool = Field(
        default=False, description="the factory's network has fake quantizers, whose scales are taken"
    )
    program: str | None = Field(default=None, description="a .pt2 file written by torch.export.save")
    onnx: str | None = Field(default=None, description="an ONNX file in FP32; ONNX Runtime is its baseline")
    baseline: RecordedBy = Field(default="trace", description="how the TorchScript baseline is recorded")


class Normalize(Section):
    """(x - mean) / std by channel, x in [0, 1]."""

    mean: tuple[float, ...] = Field(description="one number a channel, or one for all")
    std: tuple[float, ...] = Field(description="one number a channel, or one for all, each greater than 0")


class Transform(Section):
    """torchvision's transforms in this order: resize, center_crop, grayscale, to tensor, normalize."""

    resize: Size | None = Field(default=None, description="the shorter side in pixels, or [height, width]")
    center_crop: Size | None = Field(default=None, description="pixels, or [height, width]")
    grayscale: bool = Field(default=False, description="one channel instead of three")
    interpolation: Interpolation = Field(default="bilinear", description="used by resize")
    normalize: Normalize | None = Field(default=None, description="done by the host; the engine then takes floats")
    callable: str | None = Field(default=None, description="package.module:callable(PIL image) -> tensor, instead")


class Data(Section):
    """Samples: exactly one of images (an ImageFolder), arrays (.npy/.npz/.safetensors) and factory (a callable)."""

    images: str | None = Field(default=None, description="a folder of images, or of one folder for each class")
    arrays: str | None = Field(default=None, description="a .npy, .npz or .safetensors file, named like the inputs")
    factory: str | None = Field(default=None, description="package.module:callable returning an iterable of samples")
    transform: Transform | None = Field(default=None, description="what is done to each image")
    samples: Number | None = Field(default=None, description="how many; all when absent")
    batch_size: Number = Field(default=32, description="samples run at a time")
    seed: int = Field(
        default=0, ge=-(2**63), lt=2**63, description="which samples are drawn, when not all are, and their order"
    )
    workers: int = Field(default=0, ge=0, le=1024, description="processes that read and transform images")
    on_bad_sample: OnBadSample = Field(
        default="error", description="skip counts, names and reports what could not be read"
    )

    @property
    def has_samples(self) -> bool:
        """Whether a source of samples is named."""
        return any(getattr(self, source) for source in SOURCES)


Correction = Literal["equalization", "smoothing", "thresholds", "rounding", "bias"]
#: All of them, in the order they are tried.
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
#: Those that change the graph, so that its thresholds are others, and every number format; the others are INT8's.
GRAPH_CORRECTIONS: frozenset[Correction] = frozenset({"equalization", "smoothing"})


def _corrections(value: object) -> bool | tuple[Correction, ...]:
    """All, none, or the steps named."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple) and all(step in CORRECTIONS for step in value):
        if len(set(value)) < len(value):
            raise PydanticCustomError("must", "name each step once")
        return value
    raise PydanticCustomError("must", f"be true, false or a list of {either(CORRECTIONS)}")


class Calibration(Data):
    """What the ranges of activations are observed on, for every number format, and by which algorithm."""

    algorithm: Algorithm = Field(default="auto", description="how the threshold is chosen from a histogram")
    corrections: Annotated[bool | tuple[Correction, ...], BeforeValidator(_corrections)] = Field(
        default=True, description="change weights, biases and thresholds where INT8 then errs less; or which of these"
    )
    percentile: float = Field(default=PERCENTILE, gt=0, le=100, description="of algorithm: percentile")
    table: str | None = Field(default=None, description="a calibration.json to use instead of calibrating")
    recalibrate: bool = Field(
        default=False, description="calibrate a file that is quantized already, instead of taking its own scales"
    )


class Check(Data):
    """What the result is compared with its baseline on. `transform` is calibration's when absent; beside a
    `calibration.table` of images that had one it has to be given."""

    limits: Limits = Field(default=Limits(cosine_min=0.99), description="what must hold for the build to pass")
    metrics: dict[str, OwnMetric] = Field(default_factory=dict, description="further figures by the name they get")
    require: Executed = Field(default="graph", description="engine: fail where the engine itself cannot run")
    labels: str | None = Field(
        default=None,
        description="what is right for each sample: a folder of masks, a COCO file (.json), a .csv or a .npy; or a "
        "text file of the model's class names, one a line, that class folders are found in",
    )
    sensitivity: bool = Field(
        default=False,
        description="measure what quantization costs by module even where the check passes, for the report",
    )
    bench: bool = Field(default=False, description="time every mode, as `trtpipe bench` does, for the report")
    on_fail: Literal["error", "tune"] = Field(
        default="error", description="tune: keep as few modules as it takes out of their number format"
    )


class KeepGlobs(Section):
    """Globs over source module paths that stay out of a lower precision."""

    fp32: tuple[str, ...] = Field(default=(), description="stay in FP32")
    fp16: tuple[str, ...] = Field(default=(), description="stay in FP16 instead of a quantized format")
    bf16: tuple[str, ...] = Field(default=(), description="stay in BF16 instead of a quantized format")


#: What a job must ask for whose model is quantized already, and what to do where it does not.
INT8_ALONE = "be int8_mode, without other number formats, for a model that is quantized to INT8 already"
OR_RECALIBRATE = "Set int8_mode, or calibration.recalibrate to start from its FP32 form."


#: A float type of 16 bits.
Half = Literal["fp16", "bf16"]


#: The keys of `precision` by which nothing is quantized.
NOT_QUANTIZED: Mapping[str, object] = {
    "int8_mode": False, "fp8_mode": False, "nvfp4_mode": False, "weights": None, "formats": {},
}  # fmt: skip


class Precision(Section):
    """What the engine computes in; torch2trt's own words."""

    fp16_mode: bool = Field(default=False, description="compute in FP16 where that is safe")
    bf16_mode: bool = Field(default=False, description="compute in BF16 where that is safe")
    int8_mode: bool = Field(default=False, description="quantize convolutions, linears and matmuls to INT8")
    fp8_mode: bool = Field(
        default=False, description="quantize linears and matmuls to FP8 (E4M3), and convolutions where INT8 is off"
    )
    nvfp4_mode: bool = Field(default=False, description="quantize linears to NVFP4, their activations as they come")
    weights: Literal["int4", "nvfp4"] | None = Field(
        default=None, description="4 bits for the weights of linears alone, in blocks of 128 or 64 (int4), 16 (nvfp4)"
    )
    formats: dict[str, NumberFormatName] = Field(
        default_factory=dict,
        description="number format by glob over module paths, of those that are on; the last glob that fits decides",
    )
    placement: Literal["auto", "all"] = Field(
        default="auto",
        description="auto: with fp16_mode or bf16_mode, what gains nothing in 8 bits stays in that; all: nothing does",
    )
    keep: KeepGlobs = Field(default=KeepGlobs(), description="what stays out")

    @property
    def modes(self) -> tuple[NumberFormatName, ...]:
        """The number formats of activations and weights that are on: those whose key is their name and `_mode`."""
        return tuple(name for name in get_args(NumberFormatName) if getattr(self, f"{name}_mode", False))

    @property
    def calibrated(self) -> bool:
        """Whether activations are quantized, so that a calibration table is needed."""
        return bool(self.modes)

    @property
    def on(self) -> tuple[str, ...]:
        """The keys of the number formats that are on."""
        return (*(f"{name}_mode" for name in self.modes), *(("weights",) if self.weights else ()))

    @property
    def quantizing_key(self) -> str:
        """The key of the first mode that quantizes; `weights` where no activation is."""
        return next(iter(self.on), "weights")

    @property
    def half(self) -> Half | None:
        """The type of 16 bits that is on."""
        return "fp16" if self.fp16_mode else "bf16" if self.bf16_mode else None

    @property
    def four_bits(self) -> bool:
        """Whether weights are in formats of 4 bits, which are fitted to calibration samples."""
        return self.nvfp4_mode or self.weights is not None

    @property
    def quantized(self) -> bool:
        """Whether anything is."""
        return self.calibrated or self.weights is not None


class Range(Section):
    """The range of one dynamic dimension: 1 <= min <= opt <= max."""

    min: int = Field(ge=1, le=MOST_EXTENT, description="smallest size the engine takes")
    opt: int = Field(ge=1, le=MOST_EXTENT, description="the size TensorRT tunes for")
    max: int = Field(ge=1, le=MOST_EXTENT, description="largest size the engine takes")


class Input(Section):
    """One input binding. Every name in `shape` needs its range, given under that name beside it."""

    dtype: BindingDtype = Field(
        default="float32",
        description="of the binding, whatever the precision inside; a model that takes no uint8 has float32, 0 to 255",
    )
    shape: tuple[Dimension, ...] = Field(min_length=1, description="sizes and names of dimensions, the batch first")
    normalize: Normalize | None = Field(default=None, description="done inside the engine, on x/255 for uint8")
    dims: dict[str, Range] = Field(default_factory=dict, description="ranges; in a job file they stand beside shape")

    @model_validator(mode="before")
    @classmethod
    def _ranges_beside_shape(cls, raw: object) -> object:
        """`N: {min, opt, max}` stands beside `shape`; move it into `dims`, with ranges of names that `shape` lacks."""
        if not isinstance(raw, dict) or not isinstance(raw.get("dims", {}), dict):
            return raw
        shape = raw.get("shape", ())
        names = {d for d in shape if isinstance(d, str)} if isinstance(shape, (list, tuple)) else set()
        extra = {
            k for k, v in raw.items() if k not in cls.model_fields and isinstance(v, dict) and {"min", "max"} & set(v)
        }
        moved = (names | extra) - set(cls.model_fields)
        dims = dict(raw.get("dims", {})) | {k: v for k, v in raw.items() if k in moved}
        return {k: v for k, v in raw.items() if k not in moved} | {"dims": dims}


class Output(Section):
    """One output binding."""

    dtype: Literal["float32", "float16", "int32", "int64", "bool"] = Field(
        default="float32", description="of the binding, whatever the precision inside"
    )


class Build(BuildOptions, Section):
    """The route, the target and the builder's own options."""

    model_config = Section.model_config

    @model_validator(mode="before")
    @classmethod
    def _inner_values(cls, raw: object) -> object:
        """Lists within mappings are tuples too, as in `tensor_formats`, and the mappings in `profiles` are ranges."""
        if not isinstance(raw, dict):
            return raw
        inner = {k: {i: tuples(v) for i, v in d.items()} if isinstance(d, dict) else d for k, d in raw.items()}
        if isinstance(profiles := inner.get("profiles"), (list, tuple)):
            inner["profiles"] = tuple(
                {d: _range(r) for d, r in p.items()} if isinstance(p, dict) else p for p in profiles
            )
        return inner

    route: Route = Field(default="onnx", description="the frontend that lowers the model")
    target: Target = Field(default="tensorrt_rtx", description="what compiles it")
    use_onnx: bool = Field(
        default=False, description="route torch2trt: convert through its own ONNX export, not its converters"
    )
    allow_torch_fallback: bool = Field(
        default=False,
        description="route torch_tensorrt: what has no converter stays in PyTorch, and the bundle then needs PyTorch",
    )
