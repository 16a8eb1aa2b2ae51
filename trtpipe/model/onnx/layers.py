"""Operators of ONNX with weights or windows: convolutions, pools, normalisations, resizing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from trtpipe.model.onnx.shapes import axes_of
from trtpipe.model.onnx.values import Node, Value, as_list, as_tensor

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_MAX_POOLS = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEAN_POOLS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _optional(value: Value | None) -> torch.Tensor | None:
    return None if value is None else as_tensor(value)


def _windows(node: Node, x: torch.Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and (begin, end) paddings by spatial axis."""
    rank = len(kernel)
    strides, dilations = node.get("strides") or [1] * rank, node.get("dilations") or [1] * rank
    auto = node.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            if s != 1 and not isinstance(size, int):
                raise node.refused("pads by a size that is dynamic (auto_pad)", "Export it with pads, or a fixed size.")
            whole = (k - 1) * d if s == 1 else max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
            less = whole // 2
            pads.append((less, whole - less) if auto == "SAME_UPPER" else (whole - less, less))
        return strides, dilations, pads
    flat = [0] * (2 * rank) if auto == "VALID" else node.get("pads") or [0] * (2 * rank)
    return strides, dilations, list(zip(flat[:rank], flat[rank:], strict=True))


def _padded(
    x: torch.Tensor, pads: list[tuple[int, int]], fill: float, most: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """`x` and the symmetric padding left to do; `x` is padded here where a side differs or has more than `most`."""
    if all(a == b and a <= m for (a, b), m in zip(pads, most, strict=True)):
        return x, [a for a, _ in pads]
    return functional.pad(x, [p for pair in reversed(pads) for p in pair], value=fill), [0] * len(pads)


def _conv(node: Node, x: Value, w: Value, b: Value | None = None) -> Value:
    data, weight = as_tensor(x), as_tensor(w)
    kernel = list(weight.shape[2:])
    strides, dilations, pads = _windows(node, data, kernel)
    data, padding = _padded(data, pads, 0.0, [2**31] * len(kernel))
    convolution: Any = _CONVOLUTIONS[len(kernel) - 1]
    found: torch.Tensor = convolution(data, weight, _optional(b), strides, padding, dilations, node.get("group", 1))
    return found


def _conv_transpose(node: Node, x: Value, w: Value, b: Value | None = None) -> Value:
    data, weight = as_tensor(x), as_tensor(w)
    kernel = list(weight.shape[2:])
    strides, dilations, pads = _windows(node, data, kernel)
    if (
        node.get("output_shape")
        or node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        or any(a != e for a, e in pads)
    ):
        raise node.refused("has an output_shape or uneven pads", "Export it with even pads and output_padding.")
    more = node.get("output_padding") or [0] * len(kernel)
    transposed: Any = _TRANSPOSED[len(kernel) - 1]
    found: torch.Tensor = transposed(
        data, weight, _optional(b), strides, [a for a, _ in pads], more, node.get("group", 1), dilations
    )
    return found


def _linear(node: Node, x: Value, w: Value, b: Value | None = None) -> Value:
    return functional.linear(as_tensor(x), as_tensor(w), _optional(b))


def _gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    left = as_tensor(a).t() if node.get("transA", 0) else as_tensor(a)
    right = as_tensor(b).t() if node.get("transB", 0) else as_tensor(b)
    product = left @ right
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    product = product if alpha == 1.0 else product * alpha
    if c is None:
        return product
    return product + (as_tensor(c) if beta == 1.0 else as_tensor(c) * beta)


def _matmul(node: Node, a: Value, b: Value) -> Value:
    return torch.matmul(as_tensor(a), as_tensor(b))


def _started(pooled: torch.Tensor, x: torch.Tensor, pads: list[tuple[int, int]], strides: list[int]) -> torch.Tensor:
    """The windows of a pool that start in `x` [N, C, ...] or in the padding before it; ONNX has no others.

    With ceil_mode one more may start in the padding behind, which PyTorch takes for data where it was padded before.
    """
    ends = [-(-(size + a) // stride) for size, (a, _), stride in zip(x.shape[2:], pads, strides, strict=True)]
    windows: Any = (..., *(slice(None, end) for end in ends))
    return pooled[windows]


def _max_pool(node: Node, x: Value) -> Value:
    data, kernel = as_tensor(x), node.get("kernel_shape")
    strides, dilations, pads = _windows(node, data, kernel)
    padded, padding = _padded(data, pads, float("-inf"), [k // 2 for k in kernel])
    pool: Any = _MAX_POOLS[len(kernel) - 1]
    more = bool(node.get("ceil_mode", 0))
    found: torch.Tensor = pool(padded, kernel, strides, padding, dilations, more)
    return _started(found, data, pads, strides) if more and padded is not data else found


def _average_pool(node: Node, x: Value) -> Value:
    data, kernel = as_tensor(x), node.get("kernel_shape")
    strides, dilations, pads = _windows(node, data, kernel)
    whole = bool(node.get("count_include_pad", 0))
    uneven = any(a != b or a > k // 2 for (a, b), k in zip(pads, kernel, strict=True))
    if any(d != 1 for d in dilations):
        raise node.refused("has dilations", "Write it as a depthwise convolution of equal weights.")
    if uneven and not whole:
        raise node.refused("has uneven pads that are not counted", "Export it with even pads.")
    padded, padding = _padded(data, pads, 0.0, [k // 2 for k in kernel])
    pool: Any = _MEAN_POOLS[len(kernel) - 1]
    more = bool(node.get("ceil_mode", 0))
    found: torch.Tensor = pool(padded, kernel, strides, padding, more, whole)
    return _started(found, data, pads, strides) if more and padded is not data else found


def _global_average(node: Node, x: Value) -> Value:
    data = as_tensor(x)
    return data.mean(dim=tuple(range(2, data.dim())), keepdim=True)


def _global_max(node: Node, x: Value) -> Value:
    data = as_tensor(x)
    return data.amax(dim=tuple(range(2, data.dim())), keepdim=True)


def _batch_norm(node: Node, x: Value, scale: Value, bias: Value, mean: Value, var: Value) -> Value:
    if node.get("training_mode", 0):  # by the batch's own statistics
        raise node.refused_in_training("is in training mode")
    return functional.batch_norm(
        as_tensor(x),
        as_tensor(mean),
        as_tensor(var),
        as_tensor(scale),
        as_tensor(bias),
        False,
        0.1,  # of training alone
        node.get("epsilon", 1e-5),
    )


def _instance_norm(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    eps = node.get("epsilon", 1e-5)
    return functional.instance_norm(as_tensor(x), weight=as_tensor(scale), bias=as_tensor(bias), eps=eps)


def _layer_norm(node: Node, x: Value, scale: Value, bias: Value | None = None) -> Value:
    data, weight = as_tensor(x), as_tensor(scale)
    shape = [int(d) for d in data.shape[node.get("axis", -1) :]]
    return functional.layer_norm(data, shape, weight.expand(shape), _optional(bias), node.get("epsilon", 1e-5))


def _rms_norm(node: Node, x: Value, scale: Value) -> Value:
    data = as_tensor(x)
    shape = [int(d) for d in data.shape[node.get("axis", -1) :]]
    return functional.rms_norm(data, shape, as_tensor(scale), node.get("epsilon", 1e-5))


def _group_norm(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    data, groups = as_tensor(x), node.get("num_groups")
    weight, offset = as_tensor(scale), as_tensor(bias)
    if weight.shape[0] != data.shape[1]:  # opset 18 has one number a group
        weight, offset = (v.repeat_interleave(int(data.shape[1]) // groups) for v in (weight, offset))
    return functional.group_norm(data, groups, weight, offset, node.get("epsilon", 1e-5))


def _lrn(node: Node, x: Value) -> Value:
    size, alpha, beta = node.get("size"), node.get("alpha", 1e-4), node.get("beta", 0.75)
    if size % 2 == 0:
        raise node.refused(f"has an even size ({size})", "Export it with an odd one.")
    return functional.local_response_norm(as_tensor(x), size, alpha, beta, node.get("bias", 1.0))


def _is_whole(lengths: Sequence[Any]) -> bool:
    """Whether all are whole numbers but for the rounding of a scale to float32."""
    fixed = [n for n in lengths if isinstance(n, float)]
    return all(abs(n - round(n)) <= 1e-6 * n for n in fixed) and not any(isinstance(n, torch.SymFloat) for n in lengths)


def _length(size: Any, scale: Any) -> Any:
    """A size times a scale: an integer, or a dynamic size, where the scale is whole."""
    return size * int(scale) if float(scale).is_integer() else size * scale


def _resize(node: Node, x: Value, *inputs: Value | None) -> Value:
    data = as_tensor(x)
    given = [None, *inputs] if len(inputs) == 1 else list(inputs)  # opset 10 and Upsample have no region of interest
    scales = axes_of(node, "scales", given[1]) if len(given) > 1 else axes_of(node, "scales", None)
    sizes = as_list(node, given[2]) if len(given) > 2 and given[2] is not None else None
    along = [a % data.dim() for a in node.get("axes") or range(data.dim())]
    by = dict(zip(along, (sizes or scales) or (), strict=True))
    fixed = all(by.get(a, 1) in (1, 1.0) if not sizes else by.get(a, data.shape[a]) == data.shape[a] for a in (0, 1))
    mode, how = node.get("mode", "nearest"), node.get("coordinate_transformation_mode", "half_pixel")
    if node.op == "Upsample" or node.version < 11:
        how = "asymmetric"
    rank = data.dim() - 2
    lengths = [by.get(a, 1) if sizes else _length(d, by.get(a, 1)) for a, d in enumerate(data.shape)]
    # ONNX multiplies in float32, in which 12 * (28 / 12) is 28, and in PyTorch's float64 less.
    rounded = not sizes and any(
        int(np.float32(n) * np.float32(by.get(a, 1))) != int(lengths[a])
        for a, n in enumerate(data.shape)
        if isinstance(n, int) and isinstance(lengths[a], int | float)
    )
    names = {
        "nearest": "nearest",
        "linear": ("linear", "bilinear", "trilinear")[rank - 1] if 1 <= rank <= 3 else "",
        "cubic": "bicubic",
    }
    known = rank >= 1 and fixed and not node.get("exclude_outside", 0) and node.get("cubic_coeff_a", -0.75) == -0.75
    known = known and node.get("keep_aspect_ratio_policy", "stretch") == "stretch" and (mode != "cubic" or rank == 2)
    if mode == "nearest":
        known = known and how != "tf_crop_and_resize"
        if known and not _is_torch_nearest(node, data, by, bool(sizes), how):
            places = _nearest(node, data.shape[2:], [by.get(a) for a in range(2, data.dim())], bool(sizes))
            if places:
                for axis, taken in enumerate(places, 2):
                    data = data.index_select(axis, torch.from_numpy(taken))
                return data
            known = False
    else:
        whole = _is_whole(lengths[2:])
        known = known and not node.get("antialias", 0) and (not rounded or _is_whole(lengths[2:]))
        known = known and (
            how == "half_pixel"
            or (how == "align_corners" and whole)
            or (how == "pytorch_half_pixel" and not any(isinstance(n, (int, float)) and n < 2 for n in lengths[2:]))
        )
    if not known:
        plain = {"cubic_coeff_a": -0.75, "exclude_outside": 0, "antialias": 0, "keep_aspect_ratio_policy": "stretch"}
        odd = [f"{a} {node.get(a, usual)}" for a, usual in plain.items() if node.get(a, usual) != usual]
        odd += [] if mode == "nearest" or _is_whole(lengths[2:]) else ["by scales that give no whole sizes"]
        raise node.refused(
            f"resizes in a way that is not converted ({', '.join([f'mode {mode}', how, *odd])})",
            "Export it with mode nearest (asymmetric, floor), or linear or cubic (half_pixel, cubic_coeff_a -0.75, "
            "nothing else set), from fixed sizes to whole ones.",
        )
    spatial = [by.get(a, data.shape[a] if sizes else 1.0) for a in range(2, data.dim())]
    options: dict[str, Any] = {} if mode == "nearest" else {"align_corners": how == "align_corners"}
    if sizes or how == "align_corners" or (rounded and mode != "nearest"):
        sized = spatial if sizes else [round(n) if isinstance(n, float) else n for n in lengths[2:]]
        return functional.interpolate(data, size=sized, mode=names[mode], **options)
    return functional.interpolate(data, scale_factor=[float(s) for s in spatial], mode=names[mode], **options)


def _nearest(node: Node, shape: Sequence[Any], wanted: Sequence[Any], sizes: bool) -> tuple[NDArray[np.int64], ...]:
    """The elements that ONNX Runtime takes along each axis that is resized, empty where a length or what is wanted of
    it is not known beforehand, or nothing is left.

    Args:
        shape: spatial.
        wanted: sizes or scales of the same axes, None for one that stays.
    """
    wanted = [w if w is not None else n if sizes else 1.0 for w, n in zip(wanted, shape, strict=True)]
    if not all(isinstance(n, int) for n in shape) or not all(isinstance(w, (int, float)) for w in wanted):
        return ()
    names = ("mode", "nearest_mode", "coordinate_transformation_mode")
    attributes = tuple((n, node.attributes[n]) for n in names if n in node.attributes)
    return _taken(node.op, node.version, attributes, tuple(shape), tuple(wanted), sizes)


@lru_cache(maxsize=256)
def _taken(
    op: str, version: int, attributes: tuple[tuple[str, Any], ...], shape: tuple[int, ...], wanted: Any, sizes: bool
) -> tuple[NDArray[np.int64], ...]:
    """ONNX Runtime resizes pictures whose elements are their places: its roundings differ from version to version."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    by = np.array([1, len(shape), *wanted], np.int64) if sizes else np.array([1, 1, *wanted], np.float32)
    inputs = ["x", "by"] if op == "Upsample" or version < 11 else ["x", "roi", *([""] * sizes), "by"]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, ["y"], **dict(attributes))],
        "places",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, len(shape), *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(by, "by"), numpy_helper.from_array(np.zeros(0, np.float32), "roi")],
    )
    opset = max(version, 9) if op == "Upsample" else version
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y = session.run(["y"], {"x": np.indices(shape).astype(np.float32)[None]})[0][0]
    if not y.size:
        return ()
    return tuple(np.moveaxis(y[a], a, 0).reshape(y.shape[1 + a], -1)[:, 0].astype(np.int64) for a in range(len(shape)))


def _is_torch_nearest(node: Node, data: torch.Tensor, by: Mapping[int, Any], sizes: bool, how: str) -> bool:
    """Whether torch's nearest takes the same elements: tried on every index of fixed sizes, of others by 64 of them."""
    floor = node.op == "Upsample" or node.version < 11 or node.get("nearest_mode") == "floor"
    for axis in range(2, data.dim()):
        size, wanted = data.shape[axis], by.get(axis)
        if wanted is None:
            continue
        if not isinstance(size, int) or not isinstance(wanted, (int, float)):
            if how == "asymmetric" and floor:
                continue
            size, wanted = 64, float(wanted) if isinstance(wanted, (int, float)) and not sizes else 0.0
            if not wanted.is_integer() or wanted < 1:
                return False
        places = _nearest(node, [size], [wanted], sizes)
        if not places or (not sizes and len(places[0]) != int(size * wanted)):
            return False
        step = np.float32(size / len(places[0]) if sizes else 1 / wanted)
        own = np.floor(np.arange(len(places[0]), dtype=np.float32) * step).astype(np.int64)
        if not np.array_equal(places[0], np.minimum(own, size - 1)):
            return False
    return True


def _grid_sample(node: Node, x: Value, grid: Value) -> Value:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node.get("mode", "linear"), node.get("mode", "bilinear"))
    return functional.grid_sample(
        as_tensor(x), as_tensor(grid), mode, node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    )


LAYERS: Mapping[str, Callable[..., Any]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LayerNormalization": _layer_norm,
    "Linear": _linear,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "Upsample": _resize,
}
