"""The user's network behind its bindings: casts, in-engine normalisation, and outputs as a tuple in the job's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """The inputs as the network takes them: float16 and uint8 as float32, normalised where the job says so."""
        arguments = []
        for k, x in enumerate(inputs):
            if self.specs[k].dtype in ("float16", "uint8"):
                x = x.to(torch.float32)
            if hasattr(self, f"factor_{k}"):
                x = x * getattr(self, f"factor_{k}") - getattr(self, f"offset_{k}")
            arguments.append(x)
        return arguments

    def outputs(self, returned: object) -> tuple[torch.Tensor, ...]:
        """What the network returned as a tuple; a dict or a named tuple with the job's names is taken by name, anything
        else in order.

        Raises:
            InputError: the number or the names of the outputs are not the job's, or one is not a tensor.
        """
        names = self.output_names
        values: list[Any]
        named = returned if isinstance(returned, dict) else _fields_of(returned)
        if all(n in named for n in names):
            values = [named[n] for n in names]
        elif isinstance(returned, torch.Tensor):
            values = [returned]
        else:
            values = list(returned) if isinstance(returned, list | tuple) else []
        if len(values) != len(names) or not all(isinstance(t, torch.Tensor) for t in values):
            raise InputError(_unlike_the_job(returned, names))
        half = (torch.float16, torch.bfloat16, torch.float64)
        return tuple(t.to(torch.float32) if t.dtype in half else t for t in values)


def _fields_of(returned: object) -> Mapping[str, object]:
    """The values of a named tuple by name; nothing for anything else."""
    names = getattr(returned, "_fields", ())
    return dict(zip(names, returned, strict=True)) if names and isinstance(returned, tuple) else {}


#: Tensors that a message lists.
_MOST_LISTED = 6


def _unlike_the_job(returned: object, names: tuple[str, ...]) -> str:
    """The message when the model's outputs are not the job's: what it returned, and the lines that help."""
    tensors = list(_tensors(returned, "out"))[:_MOST_LISTED]
    message = f"outputs: must be the tensors that the model returns (got {', '.join(names)}, and it returns "
    message += f"{described(returned)}). "
    flat = isinstance(returned, dict | torch.Tensor) or (isinstance(returned, tuple | list) and bool(returned))
    if flat and all(isinstance(v, torch.Tensor) for v in _parts(returned).values()):
        keys = [k if isinstance(returned, dict) else f"output_{i}" for i, k in enumerate(_parts(returned))]
        return message + "Name each of them in the job:\n    outputs:" + "".join(f"\n      {k}: {{}}" for k in keys)
    if not tensors:
        return message + "Return tensors from its forward."
    return (
        message
        + "Return tensors from a wrapper's forward:\n    out = self.model(*inputs)\n    return "
        + ", ".join(tensors)
    )


def _parts(value: object) -> dict[str, object]:
    """The parts of a container by how they are reached: a key, a place or a field."""
    if isinstance(value, dict):
        return {str(k): v for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(_fields_of(value))
    if isinstance(value, list | tuple):
        return {str(k): v for k, v in enumerate(value)}
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, int | float | str | bool):
        return {}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _tensors(value: object, path: str) -> Iterator[str]:
    """The expression of each tensor in a value, as `out["boxes"][0]`."""
    if isinstance(value, torch.Tensor):
        yield path
        return
    for key, part in _parts(value).items():
        if isinstance(value, dict):
            step = f'["{key}"]'
        else:
            step = f"[{key}]" if isinstance(value, list | tuple) and not hasattr(value, "_fields") else f".{key}"
        yield from _tensors(part, path + step)


def described(value: object) -> str:
    """A value in a few words, as `a dict of boxes: a list of 2 (float32 [3, 4], ...)`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None:
        return "None"
    parts = _parts(value)
    shown = [f"{k}: {described(v)}" for k, v in list(parts.items())[:3]] + (["..."] if len(parts) > 3 else [])
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        inside = ", ".join([described(v) for v in value[:3]] + (["..."] if len(value) > 3 else []))
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    if isinstance(value, dict):
        return f"a dict of {', '.join(shown) or 'nothing'}"
    return f"{type(value).__name__}({', '.join(shown)})"


def bind(
    network: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    normalize: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]],
    output_names: tuple[str, ...],
) -> Bound:
    """`network` behind its bindings, in eval mode."""
    return Bound(network, inputs, normalize, output_names).eval().requires_grad_(False)
