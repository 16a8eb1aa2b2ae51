"""The corners of what a job declares: its graph against its model at the least and the largest dynamic dimensions.

The check samples are all of a few sizes. A model that decides by a shape (`if x.shape[0] == 1`, `squeeze()`) may do
another thing at the others, and a captured graph holds one way alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.errors import BuildError
from trtpipe.model.failures import first_line
from trtpipe.values import Captured, LoadedModel, TensorSpec

if TYPE_CHECKING:
    import torch

#: Float32 sums in another order differ by less than this, of the largest output, in all but this share of the values.
TOLERANCE, FEW = 1e-3, 0.1


def corners(inputs: Sequence[TensorSpec], samples: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Inputs with every dynamic dimension at its least; and all but the batch at their largest, which the check has at
    its own largest. Nothing where no dimension is dynamic.

    Args:
        inputs: the input bindings.
        samples: a batch of them, [B, ...] by name; it is repeated or cut to the sizes.
    """
    least = [spec.at("min") for spec in inputs]
    largest = [(low[0], *spec.at("max")[1:]) for low, spec in zip(least, inputs, strict=True)]
    fixed = least == [spec.at("max") for spec in inputs]
    for shapes in [] if fixed else [least] if least == largest else [least, largest]:
        found = {}
        for spec, shape in zip(inputs, shapes, strict=True):
            value = samples[spec.name]
            for axis, extent in enumerate(shape):
                value = np.take(value, np.arange(extent) % value.shape[axis], axis)
            found[spec.name] = np.ascontiguousarray(value)
        yield found


def described(arrays: Mapping[str, Array]) -> str:
    """The inputs by name and shape, as `image [1, 3, 224, 224]`."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def require_corners(loaded: LoadedModel, captured: Captured, samples: Mapping[str, Array]) -> None:
    """Hold the captured graph against the model at the corners, both in float32.

    Args:
        loaded: the model behind its bindings.
        captured: its graph.
        samples: one batch of check samples.

    Raises:
        BuildError: at a corner the model or its graph does not run, or they differ in shape or in their values.
    """
    import torch

    for arrays in corners(loaded.inputs, samples):
        args = tuple(torch.from_numpy(arrays[s.name]) for s in loaded.inputs)
        where = described(arrays)
        with torch.inference_mode():
            wanted = _outputs(loaded.module, args, f"the model fails on {where}, which the job declares")
            found = _outputs(captured.graph, args, f"the graph of the model fails on {where}, which the job declares")
        for spec, one, other in zip(loaded.outputs, wanted, found, strict=True):
            if difference := _difference(one, other):
                raise BuildError(
                    f"capture: the graph must answer as the model for {where} too (got {difference} in output "
                    f"{spec.name}). The model decides by a shape (an if, squeeze(), a number taken from x.shape): make "
                    "it compute the same for every size, or declare in inputs only sizes that it treats alike."
                )


def _outputs(module: torch.nn.Module, args: Sequence[torch.Tensor], failing: str) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(module(*(a.clone() for a in args)))  # a model may write to its inputs
    except Exception as error:
        raise BuildError(
            f"capture: {failing}: {first_line(error)}. Narrow the range in inputs, or make the model take it."
        ) from error


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> str:
    """What is different, in a few words; empty where nothing is. A few values may: a decision that is nearly a tie."""
    if wanted.shape != found.shape:
        return f"the shape {list(found.shape)} instead of {list(wanted.shape)}"
    a, b = wanted.double().numpy(), found.double().numpy()
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    off = ~np.isclose(a, b, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True)
    return f"{off.mean():.0%} other values" if off.mean() > FEW else ""
