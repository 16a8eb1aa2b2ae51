"""The values that flow down the line, from each stage to the next.

    Job -> LoadedModel -> Baseline -> Captured -> CalibrationTable -> Quantized -> Engine -> CheckReport -> Bundle

`Job` is in `job`, `CalibrationTable` in `calib.table`, `Bundle` in `bundle`. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from calib.types import Array, JsonMapping
from trtpipe.figures import CONFIDENCE_TEXT, beside, exact, span
from trtpipe.notebook import table_html

if TYPE_CHECKING:
    import torch

#: Binding dtypes by their NumPy names; BF16 has none and is only ever used inside an engine.
BindingDtype = Literal["float32", "float16", "uint8", "int8", "int32", "int64", "bool"]
BINDING_DTYPES: tuple[BindingDtype, ...] = get_args(BindingDtype)
#: Number formats below 16 bits, each with scales: see `quantization.formats`.
NumberFormatName = Literal["int8", "fp8", "int4", "nvfp4"]
PrecisionName = Literal["int4", "nvfp4", "int8", "fp8", "fp16", "bf16", "fp32"]
PRECISIONS_BY_WIDTH: tuple[PrecisionName, ...] = get_args(PrecisionName)  # the narrowest first
Executed = Literal["engine", "graph"]
Target = Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
Route = Literal["onnx", "torch_tensorrt", "torch2trt"]
SiteRule = Literal["Q1", "Q2", "Q4", "Q5", "Q8"]

MANIFEST, GOLDEN = "manifest.json", "golden.safetensors"  # the files that make a folder a bundle
ARCHIVE_SUFFIX = ".trtb"  # of a bundle as one file
Extent = Literal["min", "opt", "max"]
EXTENTS: tuple[Extent, ...] = get_args(Extent)  # of a dynamic dimension in an optimization profile


@dataclass(frozen=True)
class DimRange:
    """The range of one dynamic dimension: 1 <= min <= opt <= max."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class TensorSpec:
    """One binding. A str in `shape` names a dynamic dimension, whose range is in `dims`.

    `batch_axis` is the axis that has one entry a sample. None is an output of the whole batch (a scalar, a statistic
    over the batch, detections of all its images in one list, a matrix of all its pairs) or a constant. `classes` is
    False where a place in a sample's row is no class: the model has sorted the entries, or they are those of boxes.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    batch_axis: int | None = 0
    classes: bool = True

    def at(self, which: Extent) -> tuple[int, ...]:
        """The static shape with every dynamic dimension at its min, opt or max."""
        return tuple(d if isinstance(d, int) else int(getattr(self.dims[d], which)) for d in self.shape)

    def with_dim(self, name: str, size: int) -> tuple[int, ...]:
        """The shape with dimension `name` at `size` and every other dynamic one at its opt."""
        return tuple(size if d == name else o for d, o in zip(self.shape, self.at("opt"), strict=True))

    @property
    def row_shape(self) -> tuple[int | str, ...]:
        """The shape of one sample; of a batch where there is no batch axis."""
        return tuple(d for axis, d in enumerate(self.shape) if axis != self.batch_axis)

    @property
    def scores_classes(self) -> bool:
        """Whether it is a floating-point score for each of two or more classes a sample."""
        ranked = self.batch_axis is not None and self.classes and self.dtype.startswith("float")
        return ranked and len(self.row_shape) == 1 and self.row_shape[0] != 1

    @property
    def described(self) -> str:
        """Like `[N, 3, H, 224], H 160 to 320`; the batch's range is left out, as samples are cut to it."""
        ranges = [f", {d} {self.dims[d].min} to {self.dims[d].max}" for d in self.dynamic if d in self.row_shape]
        return f"[{', '.join(map(str, self.shape))}]{''.join(ranges)}"

    @property
    def dynamic(self) -> tuple[str, ...]:
        """Names of the dynamic dimensions, in order of first appearance."""
        return tuple(dict.fromkeys(d for d in self.shape if isinstance(d, str)))


ModelKind = Literal["eager", "program", "onnx"]


@dataclass(frozen=True)
class LoadedModel:
    """The user's model behind its bindings.

    `module` is in eval mode on the CPU, takes the inputs in order in their binding dtypes and returns a tuple of the
    outputs in order, in float32 or whole numbers (bindings' dtypes come when the graph is lowered). `kind` is what
    it was made of: eager code, a .pt2 program or an ONNX file. `classes` are the names that it gives its own.
    """

    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights_digest: str
    source: str
    notes: tuple[str, ...] = ()
    kind: ModelKind = "eager"
    classes: tuple[str, ...] | None = None


RecordedBy = Literal["trace", "script"]  # how a network becomes TorchScript
BaselineKind = Literal[RecordedBy, "torchscript", "program", "onnxruntime"]
#: What a reader calls the baseline of each kind.
BASELINES: Mapping[BaselineKind, str] = {
    "trace": "TorchScript", "script": "TorchScript", "torchscript": "TorchScript",
    "program": "exported program", "onnxruntime": "ONNX Runtime FP32",
}  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """The outputs of the model in FP32 on the check data: as TorchScript, or what `BASELINES` says of the kind.

    `outputs` by name: float32, or whole numbers that the model gives; [S, ...], one row a sample, or [B, ...], one a
    batch, where there is no batch axis. `labels`: int64 [S] or None (-1: unknown); `ids` of samples; `mixed`: outputs
    [S, ...] that depend on the batch.
    """

    kind: BaselineKind
    outputs: Mapping[str, Array]
    labels: Array | None
    ids: tuple[str, ...]
    notes: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """What an operation reads in INT8 in place of its own weight (`stored`: float32 on the grid of `scales`, float32
    [C_out], or int8 levels to be multiplied along `axis`) and `bias` (float32 [C_out]); None where it keeps its own."""

    stored: torch.Tensor | None
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    axis: int = 0


@dataclass(frozen=True)
class Site:
    """One input of one operation that gets a Q/DQ pair (`model.sites` has the rules).

    `key` is `<module path>:<role>`; `group` the key whose scale this tensor shares (its own where it shares none).
    `axis` is the kept axis of a weight, None for an activation. `rule`: Q1 for an input of a product, Q2 its weight, Q4
    the skip branch of an add, Q5 a tensor that shares a scale, Q8 other Q/DQ of a model that is quantized already.
    """

    consumer: torch.fx.Node
    producer: torch.fx.Node
    key: str
    group: str
    axis: int | None
    rule: SiteRule

    @property
    def shared(self) -> object:
        """What inputs with one scale have in common: an activation's group, a weight's constant and axis."""
        return self.group if self.axis is None else (self.producer, self.axis)


@dataclass(frozen=True)
class Skipped:
    """An operation that INT8 would want but cannot have, and why."""

    node: torch.fx.Node
    reason: str


@dataclass(frozen=True)
class Captured:
    """The hub: the model as one ATen graph with conv+bn and constants folded and attention spelt out.

    Every node keeps `nn_module_stack` and `stack_trace`. `sites` are the inputs that TensorRT would want quantized, in
    execution order, whatever the job keeps out of INT8; `skipped` the operations without one. `int8` holds, by name,
    the corrected weight and bias of an operation where quantized. `rounding`: the relative error of a dtype below FP32
    that the model has, or 0. `quantized`: it came with Q/DQ, read or not. `weights`, `literals`: of
    `read_weights_digest` and `graph_digest.literals`, the second also as older tables have it.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    digest: str
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()
    int8: Mapping[str, Int8Weight] = field(default_factory=dict)
    rounding: float = 0.0
    quantized: bool = False
    weights: str = ""
    literals: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of one operation of the graph, and the reason for it."""

    module: str
    op: str
    precision: PrecisionName
    reason: str
    source: str = ""


def computed_in(layers: Iterable[LayerPrecision]) -> tuple[PrecisionName, ...]:
    """The precisions of a graph's operations, each once, sorted."""
    return tuple(sorted({x.precision for x in layers}))


@dataclass(frozen=True)
class WeightBytes:
    """A graph's INT8 weights in the engine that was compiled from it, in bytes of INT8.

    `total` are the graph's, `int8` those that the engine stores in INT8, `dequantized` those that it stores in FP16 or
    FP32; how it stores the others is not known.
    """

    total: int
    int8: int
    dequantized: int


@dataclass(frozen=True)
class Quantized:
    """The captured graph with Q/DQ pairs and FP16/BF16 casts placed: strongly typed, ready to lower.

    `scales` maps a table key to the float32 scale of that activation, amax by its format's largest number; `layers`
    lists every computing operation, `unmet` says what the job asks for and does not get, or at a cost.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[LayerPrecision, ...]
    scales: Mapping[str, float]
    notes: tuple[str, ...]
    unmet: tuple[str, ...]


@dataclass(frozen=True)
class OnnxModel:
    """A checked ONNX file in memory; node names begin with the source module path. `notes`: what its target changed.

    `precisions` are those that its operations compute in (`computed_in`): an engine's floor depends on them.
    """

    data: bytes
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()
    precisions: tuple[PrecisionName, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """One operation of a hybrid engine that stayed in PyTorch: its module, its operator, and why."""

    module: str
    op: str
    reason: str
    source: str = ""


@dataclass(frozen=True)
class Engine:
    """A serialized plan (or, for onnxruntime, the ONNX file itself), its target and its bindings.

    `compute_capabilities` are like "8.6", empty for a portable engine, whose number formats may need a
    `minimum_compute_capability` above Ampere's 8.0; `graph` is the ONNX that was compiled, which is what a machine
    without a GPU can execute in the engine's place. With a `fallback`, `data` is a hybrid module (see
    `trtpipe.bundle.hybrid`): several plans and what PyTorch has to do between them. `timing_cache` is what TensorRT
    had measured by then, empty where none was kept. `plugins` are the libraries that it cannot be loaded without,
    content by name.
    """

    data: bytes
    target: Target
    version: str
    compute_capabilities: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graph: OnnxModel | None
    options: JsonMapping = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fallback: tuple[Fallback, ...] = ()
    minimum_compute_capability: str | None = None
    timing_cache: bytes = b""
    plugins: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One figure of the check. Without a `limit` in the job, that, `passed` and `larger_is_better` (of it) are None."""

    name: str
    output: str
    value: float
    limit: float | None = None
    passed: bool | None = None
    interval: tuple[float, float] | None = None
    larger_is_better: bool | None = None

    def __str__(self) -> str:
        """Like `cosine 0.91 (limit 0.99)`, or `top1_agreement 0.95 (limit 0.98, 95 % interval 0.9 to 0.98)`."""
        if self.limit is None:
            return f"{self.name} {self.value:.6g}"
        spread = "" if self.interval is None else f", {CONFIDENCE_TEXT} interval {self.interval_text}"
        return f"{self.name} {self.value_text} (limit {self.limit_text}{spread})"

    @property
    def value_text(self) -> str:
        """The value in six digits, or in more where fewer would take it across its limit."""
        return f"{self.value:.6g}" if self.limit is None else beside(self.value, self.limit)

    @property
    def limit_text(self) -> str:
        """The limit itself; empty without one."""
        return "" if self.limit is None else exact(self.limit)

    @property
    def interval_text(self) -> str:
        """Like `0.9898 to 1`, or `unknown`; empty where there is no interval."""
        return "" if self.interval is None else span(*self.interval, self.limit)


@dataclass(frozen=True)
class Control:
    """The same check on a copy with one tensor damaged, executed as said: it has to fail, or the check proves nothing.

    `unmoved` names outputs that met their limits in the copy too, where others missed theirs.
    """

    damaged: str
    how: str
    failed: bool
    samples: int
    executed: Executed = "graph"
    runner: str = ""
    unmoved: tuple[str, ...] = ()


def shortcomings(metrics: Iterable[Metric], problems: Iterable[str]) -> tuple[str, ...]:
    """Why a check failed: figures beyond their limits, with the output where there are several, then the problems."""
    every = tuple(metrics)
    several = len({m.output for m in every if m.output}) > 1
    missed = (f"{m.output}.{m}" if several and m.output else str(m) for m in every if m.passed is False)
    return (*missed, *problems)


@dataclass(frozen=True)
class CheckReport:
    """The result of a check: what was executed, on how many samples, and each metric beside its limit.

    `problems` fail the check; `warnings` do not, and say what makes its verdict or its engine doubtful. `golden` is the
    relative L2 error of each output on the first `batching.KEPT_SAMPLES`, which a bundle's golden data hold.
    """

    executed: Executed
    runner: str
    samples: int
    metrics: tuple[Metric, ...]
    control: Control
    passed: bool
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    golden: Mapping[str, float] = field(default_factory=dict)

    @property
    def who(self) -> str:
        """What executed it, like `graph executed by onnxruntime 1.31.1 on 360 samples`."""
        return f"{self.executed} executed by {self.runner} on {self.samples} samples"

    @property
    def why(self) -> tuple[str, ...]:
        """Why it failed: the figures beyond their limits, then the problems."""
        return shortcomings(self.metrics, self.problems)

    def _repr_html_(self) -> str:
        """The figures as a table, for a notebook."""
        word = "passed" if self.passed else "failed"
        verdicts = {None: "", True: "met", False: "missed"}
        rows = ((m.output, m.name, m.value_text, m.limit_text, verdicts[m.passed]) for m in self.metrics)
        return table_html(f"{word}: {self.who}", self.problems, ("output", "metric", "value", "limit", ""), rows)
