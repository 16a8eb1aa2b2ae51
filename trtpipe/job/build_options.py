"""The builder options of a job, by TensorRT's own names; `trt` honours each or refuses it at plan time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from calib.frozen import Frozen
from trtpipe.values import DimRange

#: Extents of a tensor are 32-bit in ONNX Runtime's, TensorRT's and Triton's tools.
MOST_EXTENT = 2**31 - 1

MemoryPool = Literal["dla_managed_sram", "dla_local_dram", "dla_global_dram", "tactic_dram", "tactic_shared_memory"]
TacticSource = Literal["cublas", "cublas_lt", "cudnn", "edge_mask_convolutions", "jit_convolutions"]
TensorFormat = Literal[
    "linear", "chw2", "chw4", "chw16", "chw32", "hwc", "hwc8", "hwc16", "dhwc", "dhwc8", "cdhw32", "dla_linear",
    "dla_hwc4",
]  # fmt: skip
#: Formats of a binding by its dtype; any other dtype is linear alone. TensorRT's documentation, "I/O Formats", and what
#: the builder of TensorRT-RTX 1.7.1 takes. INT8 has others where the graph around it allows: those are not taken.
TENSOR_FORMATS: Mapping[str, tuple[TensorFormat, ...]] = {
    "float32": ("linear", "chw32", "hwc", "dhwc"),
    "float16": tuple(f for f in get_args(TensorFormat) if f != "dhwc"),
    "uint8": ("linear", "hwc"),
}
#: The least dimensions of a tensor in a format, with the batch, where they are not 3: NvInferRuntimeBase.h, which
#: TensorRT-RTX 1.7.1 keeps to.
FORMAT_DIMENSIONS: Mapping[TensorFormat, int] = {"linear": 0, "dhwc": 4, "dhwc8": 4, "cdhw32": 4}
DeviceType = Literal["gpu", "dla"]
#: TensorRT's bindings take 64 bits of memory and 32 of everything else.
Bytes = Annotated[int, Field(ge=1, le=2**63 - 1, description="bytes")]
Number = Annotated[int, Field(ge=1, le=MOST_EXTENT)]

PlatformName = Literal[
    "jetson_nano", "jetson_tx2", "jetson_xavier_nx", "jetson_agx_xavier", "jetson_orin_nano", "jetson_orin_nx",
    "jetson_agx_orin", "jetson_thor", "t4", "a10", "a100", "l4", "h100", "h200", "b200", "rtx_20", "rtx_30", "rtx_40",
    "rtx_50",
]  # fmt: skip

#: A GPU's compute capability, like 8.6.
CAPABILITY = r"^[0-9]+\.[0-9]$"
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]


def _capability(value: object) -> str:
    text = str(value) if isinstance(value, (str, float)) else ""
    if re.fullmatch(CAPABILITY, text):
        return text
    raise PydanticCustomError("must", "be a compute capability like 8.6")


ComputeCapability = Annotated[
    str,
    BeforeValidator(_capability),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": CAPABILITY}]}),
]


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise PydanticCustomError("must", "name each once")
    return value


class BuildOptions(Frozen):
    """Everything that steers the TensorRT builder and is not the model's precision."""

    compute_capability: Annotated[tuple[ComputeCapability, ...], AfterValidator(_each_once)] = Field(
        default=(),
        json_schema_extra={"uniqueItems": True},
        description="GPUs an RTX engine is for, like 8.6; none: portable across Ampere and later (with FP8 8.9, with "
        "NVFP4 12.0)",
    )
    platform: PlatformName | None = Field(
        default=None, description="the device the engine is for; the job is held against what it can do"
    )
    quantization: Literal["explicit", "implicit"] = Field(
        default="explicit", description="explicit: Q/DQ in the graph; implicit: TensorRT 8.6-10 with a calibrator"
    )
    calibration_cache: str | None = Field(
        default=None,
        description="quantization implicit: file that keeps what TensorRT's calibrator found; refused for another "
        "model, data, algorithm, batch size or TensorRT",
    )
    profiles: tuple[dict[str, DimRange], ...] = Field(
        default=(),
        description="several optimization profiles, each {dimension: {min, opt, max}}; else one, as inputs says. "
        "Together they take every size that inputs declares; what none of them has is refused, by the graph too",
    )
    workspace: Bytes | None = Field(default=None, description="workspace memory pool, bytes")
    memory_pools: dict[MemoryPool, Bytes] = Field(
        default_factory=dict,
        description="limits of the other memory pools, bytes; dla_*, powers of 2 from 4096 on, for layers on a DLA",
    )
    optimization_level: int | None = Field(
        default=None, ge=0, le=5, description="how long TensorRT searches for tactics; its own default when absent"
    )
    tiling_optimization_level: Literal["none", "fast", "moderate", "full"] | None = Field(
        default=None, description="how long TensorRT searches for tilings"
    )
    l2_limit_for_tiling: Bytes | None = Field(default=None, description="L2 cache a tiled kernel may use, bytes")
    max_num_tactics: Number | None = Field(default=None, description="tactics tried a layer")
    avg_timing_iterations: Number | None = Field(default=None, description="runs a tactic's time is averaged over")
    max_aux_streams: int | None = Field(default=None, ge=0, le=MOST_EXTENT, description="streams beside the main one")
    tactic_sources: tuple[TacticSource, ...] | None = Field(
        default=None, description="exactly these are used; cublas, cublas_lt and cudnn not with hardware_compatibility"
    )
    timing_cache: str | None = Field(
        default=None, description="folder of timing caches, one for each TensorRT, GPU and driver"
    )
    editable_timing_cache: bool = Field(default=False, description="a cache whose tactics can be changed")
    error_on_timing_cache_miss: bool = Field(
        default=False, description="fail instead of timing what the cache does not hold"
    )
    profiling_verbosity: Literal["none", "layer_names_only", "detailed"] = Field(
        default="detailed", description="what the engine can tell of its layers"
    )
    log_level: Literal["error", "warning", "info", "verbose"] = Field(
        default="error",
        description="TensorRT's own messages shown while building; warnings are kept in the report in any case",
    )
    tf32: bool = Field(default=True, description="FP32 matmuls and convolutions may use TF32")
    sparse_weights: bool = Field(
        default=False, description="use 2:4 sparse kernels where the weights allow, from compute capability 8.0 on"
    )
    strict_nans: bool = Field(
        default=False, description="keep NaN and Inf as IEEE 754 has them, also under sparse_weights"
    )
    direct_io: bool = Field(default=False, description="no reformatting at the bindings: fail instead")
    tensor_formats: dict[str, tuple[TensorFormat, ...]] = Field(
        default_factory=dict,
        description="memory formats allowed at a binding, by its name; chw16 and dla_* for layers on a DLA",
    )
    hardware_compatibility: HardwareCompatibility = Field(
        default="none", description="other GPUs that a TensorRT engine runs on too"
    )
    version_compatible: bool = Field(default=False, description="runs on later releases of its major version")
    exclude_lean_runtime: bool = Field(
        default=False, description="with version_compatible: the runtime is shipped apart"
    )
    runtime_platform: Literal["same_as_build", "windows_amd64"] = Field(
        default="same_as_build", description="operating system that the engine is for"
    )
    strip_plan: bool = Field(default=False, description="leave the weights out of the plan; they are refitted at load")
    refit: Literal["none", "all", "identical", "individual"] = Field(
        default="none", description="weights that can be changed in the built engine"
    )
    weight_streaming: bool = Field(default=False, description="weights may stay in host memory at run time")
    default_device_type: DeviceType = Field(
        default="gpu", description="what runs a layer that device_types does not name"
    )
    dla_core: int | None = Field(default=None, ge=0, le=1, description="which DLA core runs what is on DLA")
    gpu_fallback: bool = Field(default=False, description="layers that DLA cannot run go to the GPU")
    device_types: dict[str, DeviceType] = Field(
        default_factory=dict,
        description="device by glob over module paths, which holds for all inside too; the last glob that fits decides",
    )
    plugins: tuple[str, ...] = Field(
        default=(), description="libraries of TensorRT plugins for operations of torch.library: docs/routes.md"
    )

    @property
    def other_platform(self) -> tuple[str, str] | None:
        """The operating system, as `sys.platform` has it, and the machine that an engine is for; None: those of the
        machine that builds it."""
        return ("win32", "x86_64") if self.runtime_platform == "windows_amd64" else None

    @property
    def uses_dla(self) -> bool:
        """Whether any layer is to run on a DLA."""
        return self.default_device_type == "dla" or "dla" in self.device_types.values()
