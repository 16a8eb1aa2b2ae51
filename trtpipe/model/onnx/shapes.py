"""Operators of ONNX that compute and apply shapes: on numbers where these are known beforehand, on tensors else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from trtpipe.model.onnx.values import (
    MOST_NUMBERS,
    Node,
    Numbers,
    Value,
    are_fixed,
    are_numbers,
    as_list,
    as_number,
    as_numbers,
    as_tensor,
    numbers,
)
from trtpipe.onnx_format import ELEMENT_TYPES

#: torch's dtype by the number that ONNX has for it.
_DTYPES: Mapping[int, torch.dtype] = {
    ELEMENT_TYPES[name]: getattr(torch, name)
    for name in ("float32", "uint8", "int8", "int16", "int32", "int64", "bool", "float64")
}


def axes_of(node: Node, name: str, value: Value | None) -> list[int] | None:
    """A list that is an attribute in older opsets and an input in newer ones; None where it is left out."""
    if node.get(name) is not None:
        return [int(v) for v in node.get(name)]
    return None if value is None else as_list(node, value)


def _shape(node: Node, x: Value) -> Numbers:
    shape = list(x.shape if isinstance(x, np.ndarray) else as_tensor(x).shape)
    return numbers(shape[node.get("start", 0) : node.get("end")])


def _size(node: Node, x: Value) -> Numbers:
    return numbers(math.prod(as_tensor(x).shape))


def _cast(node: Node, x: Value) -> Value:
    dtype = _DTYPES.get(node.get("to"))
    if dtype is None:
        raise node.refused(f"casts to a type that is not known here ({node.get('to')})", "Export it in FP32.")
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    cast = either(kind, lambda _, x: as_tensor(x).to(dtype), (lambda size: size) if kind is int else None)
    return cast(node, x)


def either(
    on_numbers: Callable[..., Any],
    on_tensors: Callable[..., Value],
    on_sizes: Callable[..., Any] | None = None,
) -> Callable[..., Value]:
    """An elementwise operator: by element where every operand is known beforehand, on tensors else.

    Args:
        on_numbers: of Python's numbers; a float that it gives is rounded to float32, in which ONNX computes.
        on_tensors: of the node and its inputs.
        on_sizes: of elements one of which is a dynamic size, to a whole number or a size; it may give NotImplemented.
            A number made of a size any other way (`float`, `max`, an `if`) would be that of the one size with which the
            graph is captured: where there is no such function, tensors are computed, whose dtype is ONNX's.
    """

    def of_elements(elements: Sequence[Any]) -> Any:
        if any(isinstance(e, torch.SymInt) for e in elements):
            return NotImplemented if on_sizes is None else on_sizes(*elements)
        found = on_numbers(*elements)
        return float(np.float32(found)) if isinstance(found, float) else found

    def operator(node: Node, *values: Value) -> Value:
        if are_numbers(*values):
            together = np.broadcast_arrays(*(as_numbers(node, v) for v in values), subok=False)
            found = np.empty(together[0].shape, dtype=object)
            for index in np.ndindex(found.shape):
                found[index] = of_elements([a[index] for a in together])
            if not any(f is NotImplemented for f in found.flat):
                return found
        return on_tensors(node, *values)

    return operator


def largest(*sizes: Any) -> Any:
    """The largest of numbers and dynamic sizes: one of them where it is that for all sizes that are declared."""

    def larger(a: Any, b: Any) -> Any:
        if statically_known_true(a >= b):
            return a
        return b if statically_known_true(b >= a) else torch.sym_max(a, b)

    return reduce(larger, sizes)


def smallest(*sizes: Any) -> Any:
    """The smallest of numbers and dynamic sizes, as `largest`."""

    def smaller(a: Any, b: Any) -> Any:
        if statically_known_true(a <= b):
            return a
        return b if statically_known_true(b <= a) else torch.sym_min(a, b)

    return reduce(smaller, sizes)


def _gather(node: Node, x: Value, indices: Value) -> Value:
    axis = node.get("axis", 0)
    if are_numbers(x) and are_numbers(indices):
        return numbers(np.take(as_numbers(node, x), as_numbers(node, indices).astype(np.int64), axis=axis))
    data = as_tensor(x)
    if are_numbers(indices):
        places = as_numbers(node, indices)
        if places.ndim == 0:
            return data.select(axis, places.item())
        size = data.shape[axis]
        if places.ndim == 1 and are_fixed(places):
            return data.index_select(axis, as_tensor(numbers([p + size if p < 0 else p for p in places.tolist()])))
    where = as_tensor(indices).to(torch.int64)
    where = torch.where(where < 0, where + data.shape[axis], where)  # ONNX counts from the end too
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return functional.embedding(where, data)
    axis %= data.dim()
    return data.index_select(axis, where.reshape(-1)).reshape(*data.shape[:axis], *where.shape, *data.shape[axis + 1 :])


def _unsqueeze(node: Node, x: Value, axes: Value | None = None) -> Value:
    given = axes_of(node, "axes", axes) or []
    if are_numbers(x):
        return np.expand_dims(as_numbers(node, x), tuple(given))
    data = as_tensor(x)
    rank = data.dim() + len(given)
    for axis in sorted(a % rank for a in given):
        data = data.unsqueeze(axis)
    return data


def _squeeze(node: Node, x: Value, axes: Value | None = None) -> Value:
    given = axes_of(node, "axes", axes)
    if are_numbers(x):
        return np.squeeze(as_numbers(node, x), None if given is None else tuple(given))
    data = as_tensor(x)
    if given is None:
        return data.squeeze()
    return data.squeeze(given[0] if len(given) == 1 else tuple(given))


def _concat(node: Node, *parts: Value) -> Value:
    if are_numbers(*parts):
        return np.concatenate([as_numbers(node, p) for p in parts], axis=node.get("axis", 0))
    return torch.cat([as_tensor(p) for p in parts], dim=node.get("axis", 0))


def _slice(
    node: Node,
    x: Value,
    starts: Value | None = None,
    ends: Value | None = None,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    first, last = axes_of(node, "starts", starts) or [], axes_of(node, "ends", ends) or []
    along = axes_of(node, "axes", axes) or list(range(len(first)))
    by = [1] * len(first) if steps is None else as_list(node, steps)
    known = are_numbers(x) and are_fixed(first) and are_fixed(last)
    data: Any = as_numbers(node, x) if known else as_tensor(x)
    for axis, low, high, step in zip(along, first, last, by, strict=True):
        axis %= data.ndim
        if not known and step < 0:  # which no slice of PyTorch has
            data, size = data.flip(axis), data.shape[axis]
            low, high, step = (*(_from_the_end(node, n, size) for n in (low, high)), -step)
        data = data[(*[slice(None)] * axis, slice(low, high, step))]
    return numbers(data) if known else data


def _from_the_end(node: Node, place: Any, size: Any) -> Any:
    """A place of an axis, counted from its other end: -1 is the first, and what lies beyond an end is that end."""
    if isinstance(place, int):
        return -1 - place if place < 0 else largest(0, size - 1 - place)
    raise node.refused("goes backwards from or to a dynamic size", "Export it with constants there.")


def _split(node: Node, x: Value, sizes: Value | None = None) -> tuple[Value, ...]:
    axis, given, count = node.get("axis", 0), axes_of(node, "split", sizes), len(node.outputs)
    if are_numbers(x):
        known = as_numbers(node, x)
        size = known.shape[axis]
        ends = np.cumsum(given or [-(-size // count)] * count)[:-1]
        return tuple(np.split(known, [min(size, e) for e in ends], axis=axis))
    data = as_tensor(x)
    if given is None and not are_fixed([data.shape[axis]]):
        raise node.refused_of_sizes()
    return tuple(torch.split(data, given or -(-data.shape[axis] // count), dim=axis))


def _reshape(node: Node, x: Value, shape: Value | None = None) -> Value:
    wanted = axes_of(node, "shape", shape) or []
    if are_numbers(x) and are_fixed(wanted):
        return as_numbers(node, x).reshape(wanted)
    data = as_tensor(x)
    if not node.get("allowzero", 0):
        wanted = [data.shape[k] if isinstance(w, int) and w == 0 else w for k, w in enumerate(wanted)]
    return data.reshape(wanted)


def _flatten(node: Node, x: Value) -> Value:
    if are_numbers(x):
        known = as_numbers(node, x)
        return known.reshape(math.prod(known.shape[: node.get("axis", 1)]), -1)
    data, axis = as_tensor(x), node.get("axis", 1)
    if axis == 1:
        return torch.flatten(data, 1) if data.dim() > 1 else data.reshape(data.shape[0], 1)
    axis = axis if axis >= 0 else axis + data.dim()
    return data.reshape(math.prod(data.shape[:axis]), -1)


def _expand(node: Node, x: Value, shape: Value) -> Value:
    if are_numbers(x) and are_fixed(as_list(node, shape)):
        known = as_numbers(node, x)
        return np.broadcast_to(known, np.broadcast_shapes(known.shape, tuple(as_list(node, shape))))
    data, wanted = as_tensor(x), as_list(node, shape)
    own = [1] * (len(wanted) - data.dim()) + list(data.shape)
    wanted = [1] * (len(own) - len(wanted)) + wanted
    return data.expand([o if isinstance(w, int) and w == 1 else w for o, w in zip(own, wanted, strict=True)])


def _constant_of_shape(node: Node, shape: Value) -> Value:
    wanted = as_list(node, shape)
    value = node.get("value")
    one = np.zeros(1, np.float32) if value is None else np.array(value).reshape(-1)
    small = len(wanted) <= 1 and are_fixed(wanted) and all(w <= MOST_NUMBERS for w in wanted)
    if small and one.dtype.kind in "iub":
        return numbers([one[0].item()] * math.prod(wanted)).reshape(wanted)
    return torch.full(wanted, one[0].item(), dtype=torch.from_numpy(one).dtype)


def _range(node: Node, start: Value, limit: Value, step: Value) -> Value:
    ends = [as_number(node, v) for v in (start, limit, step)]
    if all(isinstance(e, int) for e in ends):
        found = list(range(*ends))
        if len(found) <= MOST_NUMBERS:
            return numbers(found)
    return torch.arange(*ends)


def _pad(
    node: Node, x: Value, pads: Value | None = None, value: Value | None = None, axes: Value | None = None
) -> Value:
    data, given = as_tensor(x), axes_of(node, "pads", pads) or []
    along = list(range(data.dim())) if axes is None else [a % data.dim() for a in as_list(node, axes)]
    both = {a: (given[k], given[k + len(along)]) for k, a in enumerate(along)}
    fill = node.get("value", 0.0) if value is None else as_number(node, value)
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        node.get("mode", "constant")
    ]
    first = min((a for a, p in both.items() if not are_fixed(p) or p != (0, 0)), default=data.dim() - 1)
    if mode != "constant":  # PyTorch wants a pair for every spatial dimension
        spatial = min(2, data.dim() - 1)
        if first < spatial:
            raise node.refused(f"pads the batch or the channels in mode {node.get('mode')}", "Export it with Concat.")
        first = spatial
    flat = [p for a in range(data.dim() - 1, first - 1, -1) for p in both.get(a, (0, 0))]
    return functional.pad(data, flat, mode=mode, **({"value": fill} if mode == "constant" and fill else {}))


def _transpose(node: Node, x: Value) -> Value:
    if are_numbers(x):
        return as_numbers(node, x).transpose(node.get("perm"))
    data = as_tensor(x)
    return data.permute(node.get("perm") or list(range(data.dim()))[::-1])


def _tile(node: Node, x: Value, repeats: Value) -> Value:
    times = as_list(node, repeats)
    return np.tile(as_numbers(node, x), times) if are_numbers(x) and are_fixed(times) else as_tensor(x).repeat(times)


def _depth_to_space(node: Node, x: Value) -> Value:
    data, size = as_tensor(x), node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(data, size)
    n, c, h, w = data.shape
    parts = data.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // size**2, h * size, w * size)


def _space_to_depth(node: Node, x: Value) -> Value:
    data, size = as_tensor(x), node.get("blocksize")
    n, c, h, w = data.shape
    parts = data.reshape(n, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * size**2, h // size, w // size)


def _dropout(node: Node, x: Value, ratio: Value | None = None, training: Value | None = None) -> Value:
    if training is not None and as_number(node, training):
        raise node.refused_in_training("is in training mode")
    return x


def _identity(node: Node, x: Value) -> Value:
    return x


SHAPES: Mapping[str, Callable[..., Any]] = {
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Identity": _identity,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
