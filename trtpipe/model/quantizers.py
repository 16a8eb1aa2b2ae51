"""A PyTorch model that is quantized already: its Q/DQ and fake quantizers taken off, their scales kept as marks.

What `model.onnx.quantized` is for an ONNX file. These are known, all of them symmetric INT8:

- Q/DQ in a graph: what `convert_pt2e` writes (torchao, or PyTorch's own), and `torch.fake_quantize_*` of an export
- modules: `FakeQuantize` of PyTorch and torchao (QAT), `TensorQuantizer` of NVIDIA ModelOpt and pytorch-quantization
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from calib.algorithms import INT8_MAX, INT8_RANGE, WEIGHT_RANGE
from trtpipe.errors import InputError
from trtpipe.model.marks import ANY_SCALE, Mark
from trtpipe.model.nodes import add_constant, calls, constant_value, is_constant

_QUANTIZE = ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel")
_DEQUANTIZE = ("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel")
_FAKE = ("aten::fake_quantize_per_tensor_affine", "aten::fake_quantize_per_channel_affine")
_STEP = (
    "TensorRT takes symmetric INT8, one scale a tensor or one an output channel of a weight: quantize it so, or set "
    "calibration.recalibrate: true, which starts from its FP32 form."
)
_FLOAT = "Give the model in FP32, which trtpipe then quantizes itself."


class Marked(torch.nn.Module):
    """Stands in for a fake quantizer: `x`, or `x` times `factor`, marked with its scales."""

    factor: torch.Tensor

    def __init__(self, mark: Mark, factor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.scales: list[float] = list(mark.scales)
        self.axis: int = -1 if mark.axis is None else mark.axis
        self.register_buffer("factor", torch.ones(()) if factor is None else factor)
        self.scaled: bool = factor is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, of any dtype and shape, marked."""
        if self.scaled:
            x = x * self.factor
        return torch.ops.trtpipe.mark(x, self.scales, self.axis)  # type: ignore[no-any-return]


class UnfitQuantizer(torch.nn.Module):
    """Stands in for a fake quantizer that TensorRT cannot express, or that has no scale; executing it is an error."""

    def __init__(self, problem: InputError) -> None:
        super().__init__()
        self.problem = problem

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises the error, whatever x is, of any dtype and shape."""
        raise self.problem


def take_quantizers_off(network: torch.nn.Module, where: str, *, recalibrate: bool = False) -> torch.nn.Module:
    """The network in its FP32 form, with marks where it quantized; it is changed in place.

    Args:
        network: in eval mode, on the CPU.
        where: the key of the job that it came from, for messages.
        recalibrate: its scales are not used, so that any will do; marks have `ANY_SCALE`.

    Raises:
        InputError: it is quantized in a way that TensorRT cannot express; of a fake quantizer only when it is executed.
    """
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if type(tensor).__module__.startswith("torchao.") or tensor.is_quantized:
            kind = type(tensor).__name__ if not tensor.is_quantized else str(tensor.dtype)
            raise InputError(f"{where}: {name} must be in floating point (got {kind}). {_FLOAT}")
    every = dict(network.named_modules(remove_duplicate=False))  # one may have several names, in one parent too
    others: dict[torch.nn.Module, torch.nn.Module | None] = {}
    for place, child in every.items():
        path, _, name = place.rpartition(".")
        if child not in others and place:
            try:
                others[child] = _without(child, f"{where}: {place}", recalibrate)
            except InputError as error:
                others[child] = UnfitQuantizer(error)
        if (other := others.get(child)) is not None:
            setattr(every[path], name, other)
    for module in [m for m in network.modules() if isinstance(m, GraphModule)]:
        _take_qdq_off(module, where, recalibrate)
    return network


def _without(module: torch.nn.Module, where: str, recalibrate: bool) -> torch.nn.Module | None:
    """What stands in the place of a fake quantizer; None for any other module."""
    kinds = {c.__name__ for c in type(module).__mro__}  # of ModelOpt and torchao's QAT, which need not be installed
    if "FakeQuantizeBase" in kinds and hasattr(module, "activation_post_process"):
        return Marked(ANY_SCALE) if recalibrate else _of_fake_quantize(module, where)
    if "TensorQuantizer" in kinds and hasattr(module, "num_bits"):
        return _of_tensor_quantizer(module, where, recalibrate)
    title = f"{type(module).__module__}.{type(module).__name__}"
    if kinds & {"FakeQuantizerBase", "SequentialQuantizer"} or ".nn.quantized" in title:
        raise InputError(
            f"{where} must be a fake quantizer of symmetric INT8 with fixed scales (got {title}). {_FLOAT}"
        )
    return None


def _is_learned(module: Any) -> bool:
    """Whether the scale is a parameter (LSQ), which needs no data to have been seen."""
    return "scale" in dict(module.named_parameters(recurse=False))


def _of_fake_quantize(module: Any, where: str) -> torch.nn.Module:
    """As `convert` of PyTorch and torchao takes its scales: from its observer."""
    if not int(module.fake_quant_enabled[0]):
        return torch.nn.Identity()
    seen = None if _is_learned(module) else getattr(module.activation_post_process, "min_val", None)
    if seen is not None and (seen.numel() == 0 or bool(torch.isinf(seen).any())):
        raise InputError(f"{where} has seen no data, so it has no scale. Run the model on samples, then save it.")
    by_channel = (torch.per_channel_symmetric, torch.per_channel_affine, torch.per_channel_affine_float_qparams)
    axis = int(module.ch_axis) if module.qscheme in by_channel else None
    low, high = module.activation_post_process.quant_min, module.activation_post_process.quant_max
    scale, zero = module.calculate_qparams()
    return Marked(_mark(_affine_of(scale, zero, axis, low, high), where))


def _of_tensor_quantizer(module: Any, where: str, recalibrate: bool) -> torch.nn.Module:
    """NVIDIA's: the scale is amax / 127 (ModelOpt, tensor_quant.py)."""
    factor = getattr(module, "pre_quant_scale", None)
    off = bool(getattr(module, "_disabled", False)) or not getattr(module, "_if_quant", True)
    if off and factor is None:
        return torch.nn.Identity()
    rotated = bool(getattr(module, "rotate_is_enabled", False))
    changed = off or rotated  # what is quantized is not what would be without
    if recalibrate and not changed:
        return Marked(ANY_SCALE, factor)
    other = [
        what
        for what, there in (
            (f"num_bits {module.num_bits}", module.num_bits != 8),
            ("unsigned", bool(getattr(module, "unsigned", False))),
            ("blocks", getattr(module, "block_sizes", None) is not None),
            ("dynamic", getattr(module, "_dynamic", False) or getattr(module, "amax", None) is None),
            ("disabled with pre_quant_scale", off),
            ("a bias", getattr(module, "bias", None) is not None),
            ("a rotation", rotated),
        )
        if there
    ]
    if other:
        step = _FLOAT if changed else _STEP
        raise InputError(f"{where} must quantize to symmetric INT8 with a fixed amax (got {', '.join(other)}). {step}")
    axis = getattr(module, "axis", None)
    if isinstance(axis, Sequence):
        axis = axis[0] if len(axis) == 1 else None
    scale = module.amax.detach().float() / INT8_MAX
    axis = None if scale.numel() == 1 and axis is None else 0 if axis is None else int(axis)
    return Marked(_mark(_affine_of(scale, 0, axis, *INT8_RANGE), where), factor)


def _mark(affine: _TorchAffine, where: str) -> Mark:
    """The mark of these scales.

    Raises:
        InputError: TensorRT cannot express them.
    """
    if (affine.low, affine.high) not in (INT8_RANGE, WEIGHT_RANGE):  # some leave out the least
        low, high = INT8_RANGE
        raise InputError(f"{where} must quantize to {low} to {high} (got {affine.low} to {affine.high}). {_STEP}")
    if any(affine.zeros):
        raise InputError(f"{where} must have the zero point 0 (got {next(z for z in affine.zeros if z):g}). {_STEP}")
    if wrong := [s for s in affine.scales if not (math.isfinite(s) and s >= 0)]:
        raise InputError(f"{where} must have finite scales (got {wrong[0]}). Calibrate the model again.")
    return Mark(affine.scales, affine.axis)


def _take_qdq_off(graph: GraphModule, where: str, recalibrate: bool) -> None:
    changed = False
    unfit: list[InputError] = []  # what recalibration takes: said after what it does not
    for node in [n for n in calls(graph.graph) if _name(n) in (*_DEQUANTIZE, *_FAKE)]:
        source, affine = _quantized(graph, node, where)
        with graph.graph.inserting_before(node):
            if affine is not None:
                marked = ANY_SCALE
                try:
                    marked = marked if recalibrate else _mark(affine, f"{where}: {node.name}")
                except InputError as error:
                    unfit.append(error)
                axis = -1 if marked.axis is None else marked.axis
                mark = torch.ops.trtpipe.mark.default
                source = graph.graph.call_function(mark, (source, list(marked.scales), axis))
        source.meta = {**node.meta, **source.meta}
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
        changed = True
    for node in reversed([n for n in calls(graph.graph) if _name(n) in _QUANTIZE]):
        if node.users:
            raise InputError(
                f"{where}: {node.name} has a reader that is no dequantize ({next(iter(node.users))}). {_FLOAT}"
            )
        graph.graph.erase_node(node)
    if unfit:
        raise unfit[0]
    if changed:
        graph.graph.lint()
        graph.recompile()


@dataclass(frozen=True)
class _TorchAffine:
    """real = scale * (stored - zero), by tensor or along `axis`; stored integers are from `low` to `high`."""

    scales: tuple[float, ...]
    zeros: tuple[float, ...]
    axis: int | None
    low: int
    high: int


def _quantized(graph: GraphModule, node: Node, where: str) -> tuple[Node, _TorchAffine | None]:
    """What a dequantize or fake-quantize gives in float, and its scales: None for a bias, which stays in float."""
    affine, before = _affine(graph, node, where), node.args[0]
    assert isinstance(before, Node)
    source: Any
    stored = None
    if _name(node) in _FAKE:
        source = before
    elif before.op == "call_function" and _name(before) in _QUANTIZE:
        if _affine(graph, before, where) != affine:
            raise InputError(
                f"{where}: {node.name} dequantizes with another scale than {before.name} quantized. {_FLOAT}"
            )
        source = before.args[0]
    elif is_constant(before):
        stored = constant_value(graph, before)
        shape = [-1 if a == affine.axis else 1 for a in range(stored.dim())]
        scale, zero = (torch.tensor(v).reshape(shape) if len(v) > 1 else v[0] for v in (affine.scales, affine.zeros))
        name = f"{before.target}_float".replace(".", "_")
        source = add_constant(graph, name, (stored.float() - zero) * scale, node)
    else:
        raise InputError(f"{where}: {node.name} dequantizes what no quantize has made ({before.name}). {_FLOAT}")
    if stored is not None and stored.dtype == torch.int32:
        return source, None
    return source, affine


def _affine(graph: GraphModule, node: Node, where: str) -> _TorchAffine:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    for name in ("scale", "scales", "zero_point", "zero_points"):
        if isinstance(given.get(name), Node):
            if not is_constant(given[name]):
                raise InputError(f"{where}: {node.name} has a scale that is computed from the data. {_FLOAT}")
            given[name] = constant_value(graph, given[name])
    scale, zero = (given.get(n, given.get(f"{n}s")) for n in ("scale", "zero_point"))
    return _affine_of(scale, 0 if zero is None else zero, given.get("axis"), given["quant_min"], given["quant_max"])


def _affine_of(scale: Any, zero: Any, axis: int | None, low: Any, high: Any) -> _TorchAffine:
    """The same of tensors or numbers."""
    scales, zeros = (torch.as_tensor(v).detach().float().reshape(-1).tolist() for v in (scale, zero))
    return _TorchAffine(tuple(scales), tuple(zeros), axis, int(low), int(high))


def _name(node: Node) -> str:
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def quantizing(graph: GraphModule) -> Iterator[Node]:
    """The nodes of a graph that quantize or dequantize."""
    return (n for n in calls(graph.graph) if _name(n) in (*_QUANTIZE, *_DEQUANTIZE, *_FAKE))
