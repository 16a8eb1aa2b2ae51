"""An ONNX file as a PyTorch module."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtpipe.errors import InputError
from trtpipe.model.marks import mark
from trtpipe.model.onnx.operators import OPERATORS
from trtpipe.model.onnx.reading import OnnxFile, read
from trtpipe.model.onnx.values import MOST_NUMBERS, Constant, Node, Value, are_fixed, as_tensor, numbers
from trtpipe.onnx_format import ELEMENT_TYPES


class Scope(torch.nn.Module):
    """One part of a module path: it executes the nodes under the path, so that an exported graph knows their module."""

    def forward(self, node: Node, values: Sequence[Value | None]) -> tuple[Value, ...]:
        """The outputs of one node."""
        return execute(node, values)


def execute(node: Node, values: Sequence[Value | None]) -> tuple[Value, ...]:
    """The outputs of a node for its inputs, None for one that is left out.

    Raises:
        InputError: the node does what cannot be converted.
    """
    found = OPERATORS[node.op](node, *values)
    outputs = found if isinstance(found, tuple) else (found,)
    if any(node.outputs[len(outputs) :]):
        if node.op == "MaxPool":
            raise node.refused(
                "has a second output, the places of the maxima, which TensorRT does not compute",
                "Name as the job's outputs what is computed without them.",
            )
        raise node.refused_in_training("has outputs that only training needs")
    return outputs


_HOLDING_UINT8 = tuple(ELEMENT_TYPES[n] for n in ("float32", "int32", "int64", "float16", "float64", "bfloat16"))
#: Operators that compute nothing of their first input.
_MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Gather")


class OnnxNetwork(torch.nn.Module):
    """The network of a file. It takes the file's inputs in their order and returns its outputs by name.

    Its parameters and buffers are the file's initializers, under their names where these are paths.
    """

    def __init__(self, file: OnnxFile) -> None:
        super().__init__()
        self.file = file
        self._holders: dict[str, tuple[torch.nn.Module, str, Any]] = {}
        used = {name for n in file.nodes for name in n.inputs} | {b.name for b in file.outputs}
        for name, array in file.constants.items():
            if name in used:
                self._holders[name] = self._hold(name, array)
        # What nobody reads is not asked for: the mask of a Dropout, the statistics of a batch norm.
        self._nodes = [replace(n, outputs=tuple(o if o in used else "" for o in n.outputs)) for n in file.nodes]
        self._run = [self._scope(_parts(n.path)) if _parts(n.path) else execute for n in file.nodes]
        self._last = {name: k for k, n in enumerate(file.nodes) for name in n.inputs}
        self._kept = {b.name for b in file.outputs}
        # TensorRT takes uint8 as an input's dtype alone, and a cast that is made of it.
        self._wide = {b.name for b in file.inputs if b.dtype == "uint8" and self._is_only_cast(b.name)}

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs by name, in the file's dtypes and shapes, for `inputs` in the file's order."""
        values: dict[str, Value] = {
            name: Constant(getattr(holder, attribute), small)
            for name, (holder, attribute, small) in self._holders.items()
        }
        for binding, x in zip(self.file.inputs, inputs, strict=True):
            wide = binding.name in self._wide
            values[binding.name] = x if wide else x.to(getattr(torch, binding.dtype))
        sizes: list[Any] = [size for x in inputs for size in x.shape if not are_fixed([size])]
        for k, (node, run) in enumerate(zip(self._nodes, self._run, strict=True)):
            given = [_marked(node, k, values[name]) if name else None for k, name in enumerate(node.inputs)]
            values |= zip(node.outputs, run(node, given), strict=False)
            if any(size.node.expr.is_number for size in sizes):
                raise node.refused_of_sizes()
            for name in {n for n in node.inputs if self._last[n] == k} - self._kept:
                values.pop(name, None)
        return {b.name: as_tensor(values[b.name]) for b in self.file.outputs}

    def _is_only_cast(self, name: str) -> bool:
        """Whether a tensor's values are moved at most before they are cast to a dtype that holds them all."""
        readers = [n for n in self.file.nodes if name in n.inputs]
        return bool(readers) and all(
            n.inputs.index(name) == 0
            and n.inputs.count(name) == 1
            and (
                (n.op == "Cast" and n.get("to") in _HOLDING_UINT8)
                or (n.op in _MOVING and self._is_only_cast(n.outputs[0]))
            )
            for n in readers
        )

    def _hold(self, name: str, array: Any) -> tuple[torch.nn.Module, str, Any]:
        """Register a constant; its holder, its attribute there, and its numbers where it has few."""
        *path, attribute = _parts(name)
        holder = self._scope(path)
        while hasattr(holder, attribute):
            attribute += "_"
        tensor = torch.from_numpy(np.array(array))
        if tensor.is_floating_point():
            holder.register_parameter(attribute, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            holder.register_buffer(attribute, tensor)
        small = numbers(array.tolist()) if array.size <= MOST_NUMBERS else None
        return holder, attribute, small if small is None else small.reshape(array.shape)

    def _scope(self, parts: Sequence[str]) -> torch.nn.Module:
        """The module under a path, made where there is none."""
        scope: torch.nn.Module = self
        for part in parts:
            while hasattr(scope, part) and part not in scope._modules:
                part += "_"
            if part not in scope._modules:
                scope.add_module(part, Scope())
            scope = scope.get_submodule(part)
        return scope


def _marked(node: Node, place: int, value: Value) -> Value:
    return mark(as_tensor(value), node.marks[place]) if place in node.marks else value


def load_network(path: Path, outputs: Sequence[str] = (), *, recalibrate: bool = False) -> OnnxNetwork:
    """The network of a file, as far as `outputs` need it: tensors of the file, or all of its own outputs.

    Of a file with Q/DQ to `recalibrate`, the scales may be any: they are not used.

    Raises:
        InputError: the file cannot be read, or holds what cannot be converted.
    """
    return OnnxNetwork(read(path, frozenset(OPERATORS), outputs, recalibrate=recalibrate))


def require_bindings(file: OnnxFile, inputs: Mapping[str, Sequence[int | str]]) -> None:
    """Refuse a job whose bindings are not the file's.

    Args:
        file: the file.
        inputs: the job's shapes by name.

    Raises:
        InputError: a name is not the file's, or a dimension that the file fixes is another one.
    """
    there = ", ".join(map(str, file.inputs))
    if list(inputs) != [b.name for b in file.inputs]:
        whose = "the job's outputs need" if file.cut else "the file has"
        raise InputError(
            f"inputs: must be those of model.onnx, in its order (got {', '.join(inputs)}, and {whose} {there}). "
            "Name them as the file does."
        )
    for binding in file.inputs:
        shape = inputs[binding.name]
        known = shape if binding.shape is None else binding.shape
        fits = len(shape) == len(known) and all(
            isinstance(theirs, str) or mine == theirs for mine, theirs in zip(shape, known, strict=True)
        )
        if not fits:
            raise InputError(
                f"inputs.{binding.name}.shape: must fit model.onnx (got [{', '.join(map(str, shape))}], and the file "
                f"has {binding}). Give the file's numbers, or export it with dynamic axes."
            )


def _parts(path: str) -> list[str]:
    """The parts of a path as names of modules, none of which is a keyword of Python."""
    parts = (re.sub(r"\W", "_", part) for part in path.split(".") if part)
    return [f"{part}_" if keyword.iskeyword(part) else part for part in parts]
