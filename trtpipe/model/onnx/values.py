"""What flows between the operators of an ONNX graph: tensors, constants of the file, and numbers known beforehand.

Shapes are computed in ONNX by operators on integers (Shape, Gather, Concat, Reshape). Here these are `Numbers`: NumPy
arrays of Python's numbers or of torch's symbolic sizes, so that a dynamic dimension stays one when the graph is
captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.model.marks import Mark

#: An object array of int, float, bool or torch.SymInt.
Numbers = Array
#: A constant of at most this many elements can be numbers: axes, sizes, scales, limits.
MOST_NUMBERS = 64


@dataclass(frozen=True)
class Constant:
    """An initializer: its tensor, a parameter or a buffer of the network, and its numbers where it is small."""

    tensor: torch.Tensor
    numbers: Numbers | None


Value = torch.Tensor | Constant | Numbers


@dataclass(frozen=True)
class Node:
    """One operator of the file.

    `inputs` and `outputs` are names of tensors, "" for one that is left out; `version` is the opset; `marks` the scales
    of the inputs that the file quantizes, by position.
    """

    op: str
    name: str
    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    version: int
    marks: Mapping[int, Mark] = field(default_factory=dict)

    def refused_in_training(self, what: str) -> InputError:
        """The same, where the file is of a network in training mode."""
        return self.refused(what, "Export the network in eval mode.")

    def refused(self, what: str, step: str) -> InputError:
        """The error that this node cannot be converted."""
        return InputError(f"model.onnx: {self.op} ({self.name or self.path}) {what}. {step}")

    def refused_of_sizes(self) -> InputError:
        """The error that this node, as it is converted, takes one of the declared sizes alone."""
        return self.refused(
            "needs a dynamic size as a number", "Declare it as a number in inputs.*.shape, or export it with constants."
        )

    def get(self, name: str, default: object = None) -> Any:
        """An attribute, or its default."""
        return self.attributes.get(name, default)


def numbers(values: object) -> Numbers:
    """An object array of `values`, of any rank."""
    return np.array(values, dtype=object)


def are_numbers(*values: object) -> bool:
    """Whether values are known beforehand: numbers, and small constants of rank 0 or 1 beside them; constants alone
    are where they are integers."""
    beside = any(isinstance(v, np.ndarray) for v in values)

    def known(value: object) -> bool:
        if not isinstance(value, Constant):
            return isinstance(value, np.ndarray)
        small = value.numbers is not None and value.numbers.ndim <= 1
        return small and (beside or not value.tensor.is_floating_point())

    return all(known(v) for v in values)


def are_fixed(values: Iterable[Any]) -> bool:
    """Whether no dynamic size is among numbers: nothing can be decided by one, or it were that of the sample."""
    return not any(isinstance(v, torch.SymInt) for v in values)


def as_numbers(node: Node, value: Value | None) -> Numbers:
    """The numbers of a value.

    Raises:
        InputError: it is computed from the data, or in floats from a dynamic size.
    """
    if isinstance(value, Constant) and value.numbers is not None:
        return value.numbers
    if isinstance(value, np.ndarray):
        return value
    raise node.refused(
        "takes a shape, an axis or a limit that is computed from the data, which no engine can be built for, or in "
        "floats from a dynamic size, which is not converted",
        "Export the network with constants there, or with integers alone.",
    )


def as_list(node: Node, value: Value | None) -> list[Any]:
    """The numbers of a value in one list; arguments and errors as `as_numbers`."""
    return list(as_numbers(node, value).reshape(-1))


def as_number(node: Node, value: Value | None) -> Any:
    """The one number of a value; arguments and errors as `as_numbers`."""
    return as_list(node, value)[0]


def as_tensor(value: Value) -> torch.Tensor:
    """A value as a tensor: numbers become int64, float32 or bool."""
    if isinstance(value, Constant):
        return value.tensor
    if isinstance(value, torch.Tensor):
        return value
    flat = list(value.reshape(-1))
    if not are_fixed(flat):
        return torch.stack([torch.scalar_tensor(v, dtype=torch.int64) for v in flat]).reshape(value.shape)
    kind = torch.bool if all(isinstance(v, bool) for v in flat) and flat else None
    if kind is None:
        kind = torch.float32 if any(isinstance(v, float) for v in flat) else torch.int64
    return torch.tensor(flat, dtype=kind).reshape(value.shape)


def operands(values: Sequence[Value]) -> list[Any]:
    """Operands of an elementwise operator; a fixed number of rank 0 is that number where another operand is a tensor,
    as it is in PyTorch's own graphs."""
    found: list[Any] = []
    for value in values:
        one = value.numbers if isinstance(value, Constant) else value if isinstance(value, np.ndarray) else None
        if (
            one is not None
            and one.ndim == 0
            and are_fixed(one.flat)
            and any(isinstance(v, torch.Tensor) for v in values)
        ):
            found.append(one.item() if isinstance(one, np.ndarray) else one)
        else:
            found.append(as_tensor(value))
    return found
