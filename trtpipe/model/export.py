"""torch.export with the job's named dynamic dimensions; `capture` and `quantize` both end in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtpipe.errors import BuildError
from trtpipe.values import TensorSpec

if TYPE_CHECKING:
    import torch


def example_inputs(inputs: Sequence[TensorSpec], size: int = 2) -> tuple[torch.Tensor, ...]:
    """Zeros for each input; every dynamic dimension is at `size` where its range allows, so that export keeps it."""
    import torch

    def extent(spec: TensorSpec, d: int | str) -> int:
        return d if isinstance(d, int) else min(max(size, spec.dims[d].min), spec.dims[d].max)

    def at(spec: TensorSpec) -> tuple[int, ...]:
        batch, rest = spec.shape[:1], spec.shape[1:]
        shape = [extent(spec, d) for d in batch]
        return (*shape, *(d if isinstance(d, int) else spec.dims[d].opt for d in rest))

    return tuple(torch.zeros(at(s), dtype=getattr(torch, s.dtype)) for s in inputs)


def export(module: torch.nn.Module, inputs: tuple[TensorSpec, ...]) -> torch.export.ExportedProgram:
    """`module` exported for `inputs`, each dynamic dimension under its own name and range.

    Raises:
        BuildError: torch.export refuses; the message is its own first lines.
    """
    import torch

    shared: dict[str, Any] = {}
    for spec in inputs:
        for name, r in spec.dims.items():
            if r.min < r.max:
                shared[name] = torch.export.Dim(name, min=r.min, max=r.max)
    shapes = tuple(
        {axis: shared[d] for axis, d in enumerate(spec.shape) if isinstance(d, str) and d in shared} for spec in inputs
    )
    star = type(module).__name__ == "Bound"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module, example_inputs(inputs), dynamic_shapes=(shapes,) if star else shapes)
    except Exception as error:
        text = "\n".join(str(error).strip().splitlines()[:12])
        raise BuildError(
            f"capture: torch.export must be able to capture the model (got {type(error).__name__}: {text}). "
            "Change the model's forward, or declare the dimension it fixes as a number in inputs.*.shape."
        ) from error
