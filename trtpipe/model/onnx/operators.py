"""The operators of ONNX that can be converted, by name: each a function of its node and its inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from trtpipe.model.onnx.layers import LAYERS
from trtpipe.model.onnx.shapes import SHAPES, axes_of, either, largest, smallest
from trtpipe.model.onnx.values import (
    Node,
    Value,
    are_numbers,
    as_list,
    as_number,
    as_numbers,
    as_tensor,
    numbers,
    operands,
)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    return lambda node, x: function(as_tensor(x))


def _tensors(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """A function of operands, each a tensor or a Python number."""
    return lambda node, *values: function(*operands(values))


def _all(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    """A function of two tensors, applied to any number of them."""
    return lambda node, *values: reduce(function, [as_tensor(v) for v in values])


def _divided(a: Any, b: Any) -> torch.Tensor:
    whole = not any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (a, b))
    found: torch.Tensor = torch.div(torch.as_tensor(a), b, rounding_mode="trunc") if whole else a / b
    return found


def _quotient(a: Any, b: Any) -> Any:
    """Of numbers and of dynamic sizes: that of integers rounded towards zero, without deciding by its sign."""
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return largest(0, a // b) + smallest(0, -(-a // b))


def _decided(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison of dynamic sizes, where it has one answer for all that are declared."""

    def of_sizes(a: Any, b: Any) -> Any:
        answer = compare(a, b)
        if statically_known_true(answer):
            return True
        return False if statically_known_true(torch.sym_not(answer)) else NotImplemented

    return of_sizes


def _power_of_numbers(base: Any, exponent: Any) -> Any:
    return type(base)(base**exponent)  # of an integer it is one, whatever the exponent


def _power_of_sizes(base: Any, exponent: Any) -> Any:
    return base**exponent if isinstance(exponent, int) and exponent >= 0 else NotImplemented


def _power(node: Node, x: Value, exponent: Value) -> Value:
    base, power = operands((x, exponent))
    found: torch.Tensor = torch.pow(base, power)
    return found.to(base.dtype) if isinstance(base, torch.Tensor) else found


def _modulo(node: Node, a: Value, b: Value) -> Value:
    of_signs_as = _OF_DIVIDEND if node.get("fmod", 0) else _OF_DIVISOR
    return of_signs_as(node, a, b)


#: The remainder of a division whose sign is that of the one or the other.
_OF_DIVIDEND = either(math.fmod, _all(torch.fmod))
_OF_DIVISOR = either(operator.mod, _all(torch.remainder), operator.mod)


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def _where(node: Node, condition: Value, a: Value, b: Value) -> Value:
    x, y = operands((a, b))
    return torch.where(as_tensor(condition), x, y)


def _clip(node: Node, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    least = node.get("min") if low is None else as_number(node, low)
    most = node.get("max") if high is None else as_number(node, high)
    if least is None and most is None:
        return x
    return torch.clamp(as_tensor(x), least, most)


def _softmax(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """Before opset 13 it is over all axes from `axis` on."""

    def softmax(node: Node, x: Value) -> Value:
        data = as_tensor(x)
        axis = node.get("axis", -1 if node.version >= 13 else 1) % data.dim()
        if node.version >= 13 or axis == data.dim() - 1:
            return function(data, dim=axis)
        return function(data.flatten(axis), dim=-1).reshape(data.shape)

    return softmax


def _hard_sigmoid(node: Node, x: Value) -> Value:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return functional.hardsigmoid(as_tensor(x))
    return torch.clamp(as_tensor(x) * alpha + beta, 0.0, 1.0)


def _prelu(node: Node, x: Value, slope: Value) -> Value:
    data = as_tensor(x)
    return torch.where(data < 0, data * as_tensor(slope), data)


def _gelu(node: Node, x: Value) -> Value:
    return functional.gelu(as_tensor(x), approximate=node.get("approximate", "none"))


def _selu(node: Node, x: Value) -> Value:
    alpha, gamma = node.get("alpha"), node.get("gamma")
    if alpha is None and gamma is None:
        return functional.selu(as_tensor(x))
    return functional.elu(as_tensor(x), 1.6732632 if alpha is None else alpha) * (1.0507010 if gamma is None else gamma)


def _with(function: Callable[..., torch.Tensor], **defaults: float) -> Callable[..., Value]:
    """An activation with attributes, in the order that the function takes them."""
    return lambda node, x: function(as_tensor(x), *(node.get(name, value) for name, value in defaults.items()))


def _thresholded(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return functional.threshold(x, alpha, 0.0)


def _one_hot(node: Node, indices: Value, depth: Value, values: Value) -> Value:
    data, classes, axis = as_tensor(indices), as_number(node, depth), node.get("axis", -1)
    off, on = as_tensor(values)
    at = axis % (data.dim() + 1)
    known = torch.arange(classes).reshape(-1, *(1 for _ in range(data.dim() - at)))
    return torch.where(_from_the_start(data, classes).unsqueeze(at) == known, on, off)


def _reduced(function: Callable[..., torch.Tensor], of_numbers: Callable[..., Any] | None) -> Callable[..., Value]:
    """A reduction over `axes`, all of them where none is given; `of_numbers` is that of a list of sizes."""

    def reduction(node: Node, x: Value, axes: Value | None = None) -> Value:
        given = axes_of(node, "axes", axes)
        if of_numbers is not None and are_numbers(x) and as_numbers(node, x).ndim == 1:
            if not given and node.get("noop_with_empty_axes", 0):
                return x
            one = of_numbers(as_list(node, x))
            return numbers([one] if node.get("keepdims", 1) else one)
        data = as_tensor(x)
        if not given:
            if node.get("noop_with_empty_axes", 0):  # each element by itself: ReduceL2 gives |x|
                return function(data.unsqueeze(-1), (data.dim(),), False)
            given = list(range(data.dim()))
        return function(data, tuple(a % data.dim() for a in given), bool(node.get("keepdims", 1)))

    return reduction


def _product(x: torch.Tensor, axes: tuple[int, ...], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _argument(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def argument(node: Node, x: Value) -> Value:
        if node.get("select_last_index", 0):
            raise node.refused("takes the last of equal elements", "Export it with select_last_index 0.")
        return function(as_tensor(x), dim=node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))

    return argument


def _top_k(node: Node, x: Value, k: Value | None = None) -> tuple[Value, ...]:
    count = node.get("k") if k is None else as_number(node, k)
    found = torch.topk(
        as_tensor(x), count, node.get("axis", -1), bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    )
    return found.values, found.indices


def _cumsum(node: Node, x: Value, axis: Value) -> Value:
    data, along = as_tensor(x), as_number(node, axis)
    turned = data.flip(along) if node.get("reverse", 0) else data
    if node.get("exclusive", 0):  # of what is before each, so that no rounding of its own is in it
        before = turned.narrow(along, 0, turned.shape[along] - 1)
        turned = torch.cat([torch.zeros_like(turned.narrow(along, 0, 1)), before], along)
    total = torch.cumsum(turned, along, dtype=None if data.is_floating_point() else data.dtype)
    return total.flip(along) if node.get("reverse", 0) else total


def _trilu(node: Node, x: Value, k: Value | None = None) -> Value:
    diagonal = 0 if k is None else as_number(node, k)
    return (torch.triu if node.get("upper", 1) else torch.tril)(as_tensor(x), diagonal)


def _from_the_start(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Indices that may be negative, as torch.gather and scatter want them."""
    return torch.where(indices < 0, indices + size, indices).to(torch.int64)


def _gather_elements(node: Node, x: Value, indices: Value) -> Value:
    data, axis = as_tensor(x), node.get("axis", 0)
    return torch.gather(data, axis, _from_the_start(as_tensor(indices), data.shape[axis]))


def _gather_nd(node: Node, x: Value, indices: Value) -> Value:
    if node.get("batch_dims", 0):
        raise node.refused("has batch_dims", "Export it without them.")
    return as_tensor(x)[tuple(as_tensor(indices).unbind(-1))]


def _plain_scatter(node: Node) -> None:
    if node.get("reduction", "none") != "none":
        raise node.refused(f"reduces by {node.get('reduction')}", "Export it without a reduction.")


def _scatter_elements(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    _plain_scatter(node)
    data, axis = as_tensor(x), node.get("axis", 0)
    return torch.scatter(data, axis, _from_the_start(as_tensor(indices), data.shape[axis]), as_tensor(updates))


def _scatter_nd(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    _plain_scatter(node)
    return as_tensor(x).index_put(tuple(as_tensor(indices).unbind(-1)), as_tensor(updates))


def _einsum(node: Node, *values: Value) -> Value:
    return torch.einsum(node.get("equation"), *(as_tensor(v) for v in values))


def _lp_normalization(node: Node, x: Value) -> Value:
    return functional.normalize(as_tensor(x), p=float(node.get("p", 2)), dim=node.get("axis", -1))


def _mean_of(node: Node, *values: Value) -> Value:
    total: torch.Tensor = reduce(operator.add, [as_tensor(v) for v in values])
    return total / len(values)


def _norm(order: int) -> Callable[..., torch.Tensor]:
    return lambda x, axes, keep: torch.linalg.vector_norm(x, order, axes, keep)


_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Sub": operator.sub,
}
_UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "HardSwish": functional.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": functional.mish,
    "Reciprocal": torch.reciprocal,
    "Relu": functional.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_REDUCED: Mapping[str, Callable[..., torch.Tensor]] = {
    "ReduceL1": _norm(1),
    "ReduceL2": _norm(2),
    "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keep)),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": torch.sum,
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keep),
}

#: Reductions of a list of sizes to one number.
_OF_SIZES: Mapping[str, Callable[..., Any]] = {
    "ReduceMax": lambda sizes: largest(*sizes),
    "ReduceMin": lambda sizes: smallest(*sizes),
    "ReduceProd": math.prod,
    "ReduceSum": sum,
}

#: By operator: a function of the node and its inputs (None where one is left out) to its output or outputs.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    **SHAPES,
    **LAYERS,
    **{name: _unary(f) for name, f in _UNARY.items()},
    **{name: either(f, _tensors(f), _decided(f)) for name, f in _COMPARED.items()},
    **{name: either(f, _tensors(f), f) for name, f in _ARITHMETIC.items()},
    **{name: _reduced(f, _OF_SIZES.get(name)) for name, f in _REDUCED.items()},
    "Abs": either(abs, _unary(torch.abs), lambda size: largest(size, -size)),
    "And": either(operator.and_, _all(torch.logical_and)),
    "ArgMax": _argument(torch.argmax),
    "ArgMin": _argument(torch.argmin),
    "Ceil": either(math.ceil, _unary(torch.ceil)),
    "Celu": _with(functional.celu, alpha=1.0),
    "Clip": _clip,
    "CumSum": _cumsum,
    "Div": either(_quotient, _tensors(_divided), _quotient),
    "Einsum": _einsum,
    "Elu": _with(functional.elu, alpha=1.0),
    "Floor": either(math.floor, _unary(torch.floor)),
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _with(functional.leaky_relu, alpha=0.01),
    "LogSoftmax": _softmax(functional.log_softmax),
    "LpNormalization": _lp_normalization,
    "Max": either(max, _all(torch.maximum), largest),
    "Mean": _mean_of,
    "Min": either(min, _all(torch.minimum), smallest),
    "Mod": _modulo,
    "Neg": either(operator.neg, _unary(torch.neg), operator.neg),
    "Not": either(operator.not_, _unary(torch.logical_not)),
    "OneHot": _one_hot,
    "Or": either(operator.or_, _all(torch.logical_or)),
    "PRelu": _prelu,
    "Pow": either(_power_of_numbers, _power, _power_of_sizes),
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Selu": _selu,
    "Sign": either(lambda n: (n > 0) - (n < 0), _unary(torch.sign)),
    "Softmax": _softmax(functional.softmax),
    "Sqrt": either(math.sqrt, _unary(torch.sqrt)),
    "Sum": _all(torch.add),
    "ThresholdedRelu": _with(_thresholded, alpha=1.0),
    "TopK": _top_k,
    "Trilu": _trilu,
    "Where": either(_chosen, _where, _chosen),
    "Xor": either(operator.xor, _all(torch.logical_xor)),
}
