"""The user's network behind its bindings: casts, in-engine normalisation, and outputs as a tuple in the job's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trtpipe.errors import InputError
from trtpipe.values import TensorSpec

#: Where the user's network sits in the wrapper; `graph.module_path` strips it again.
INNER = "network"


class Bound(torch.nn.Module):
    """Casts float16 and uint8 inputs to float32, normalises where the job says so, and calls the network.

    A uint8 input [N, C, ...] with a normalisation is scaled by 1/255 first; without one it keeps its 0-255 range.
    Outputs are float32 where they are floating point, in the order of `output_names`.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        inputs: Sequence[TensorSpec],
        normalize: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
        output_names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.network = network
        self.specs = tuple(inputs)
        self.output_names = output_names
        for k, spec in enumerate(inputs):
            if spec.name in normalize:
                mean, std = (torch.tensor(v, dtype=torch.float32) for v in normalize[spec.name])
                scale = 255.0 if spec.dtype == "uint8" else 1.0
                shape = (1, -1, *([1] * (len(spec.shape) - 2)))
                self.register_buffer(f"factor_{k}", (1.0 / (std * scale)).reshape(shape))
                self.register_buffer(f"offset_{k}", (mean / std).reshape(shape))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The network's outputs for `inputs` in their binding dtypes."""
        return self.outputs(self.network(*self.prepared(inputs)))

    def prepared(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs as the network itself wants them."""
        found = []
        for k, x in enumerate(inputs):
            if self.specs[k].dtype in ("float16", "uint8"):
                x = x.to(torch.float32)
            if hasattr(self, f"factor_{k}"):
                x = x * getattr(self, f"factor_{k}") - getattr(self, f"offset_{k}")
            found.append(x)
        return found

    def outputs(self, answer: Any) -> tuple[torch.Tensor, ...]:
        """The network's answer as a tuple; a dict is taken by name, anything else in order.

        Raises:
            InputError: the number or the names of the outputs are not the job's.
        """
        names = self.output_names
        if isinstance(answer, dict):
            missing = [n for n in names if n not in answer]
            if missing:
                raise InputError(f"outputs: must be among what the model returns, {list(answer)} (got {missing}).")
            found = [answer[n] for n in names]
        else:
            found = [answer] if isinstance(answer, torch.Tensor) else list(answer)
        if len(found) != len(names) or not all(isinstance(t, torch.Tensor) for t in found):
            kinds = [type(t).__name__ for t in found]
            raise InputError(f"outputs: must name each tensor that the model returns, {kinds} (got {list(names)}).")
        half = (torch.float16, torch.bfloat16, torch.float64)
        return tuple(t.to(torch.float32) if t.dtype in half else t for t in found)


def bind(
    network: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    normalize: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
    output_names: tuple[str, ...],
) -> Bound:
    """`network` behind its bindings, in eval mode."""
    return Bound(network, inputs, normalize, output_names).eval().requires_grad_(False)
