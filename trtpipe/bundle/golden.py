"""Golden data: a few real inputs and what the baseline answered on them, as safetensors, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpipe.errors import InputError
from trtpipe.values import TensorSpec

Array = np.ndarray[Any, Any]

#: Samples in a bundle's golden data; a kit holds all it is to be checked on.
KEPT_SAMPLES = 8


@dataclass(frozen=True)
class Golden:
    """`inputs` in the binding dtypes, `outputs` the baseline's answers; each [S, ...] with one S.

    `labels` is int64 [S] (-1: unknown) or None.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    labels: Array | None = None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return int(next(iter(self.inputs.values())).shape[0])


def first(golden: Golden, count: int = KEPT_SAMPLES) -> Golden:
    """The first `count` samples, or all where there are fewer."""
    return Golden(
        {n: a[:count] for n, a in golden.inputs.items()},
        {n: a[:count] for n, a in golden.outputs.items()},
        None if golden.labels is None else golden.labels[:count],
    )


def to_bytes(golden: Golden) -> bytes:
    """The safetensors file: `input:<name>`, `output:<name>` and `labels`. The same data give the same bytes."""
    from safetensors.numpy import save

    tensors = {f"input:{n}": a for n, a in golden.inputs.items()} | {
        f"output:{n}": a for n, a in golden.outputs.items()
    }
    if golden.labels is not None:
        tensors["labels"] = golden.labels.astype(np.int64)
    data: bytes = save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)})
    return data


def from_bytes(data: bytes, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], where: str) -> Golden:
    """The golden data in `data`, checked against the bindings.

    Raises:
        InputError: not safetensors, a tensor missing, too many, of another dtype or shape than its binding.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    again = "Build the bundle again."
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{where}: must be a safetensors file (got: {error}). {again}") from None
    sides = {"input": inputs, "output": outputs}
    wanted = {f"{side}:{spec.name}": (side, spec) for side, specs in sides.items() for spec in specs}
    odd = sorted(set(wanted) ^ (set(tensors) - {"labels"}))
    if odd:
        raise InputError(
            f"{where}: must hold each binding once and nothing else (got a difference at {odd[0]}). {again}"
        )
    samples = {len(t) if t.ndim else -1 for t in tensors.values()}
    if len(samples) != 1 or min(samples) < 1:
        raise InputError(
            f"{where}: every tensor must hold the same samples, one or more (got {sorted(samples)}). {again}"
        )
    for key, (side, spec) in wanted.items():
        tensor = tensors[key]
        # The baseline answers in float32 whatever the output's binding dtype is.
        if side == "input" and tensor.dtype != np.dtype(spec.dtype):
            raise InputError(f"{where}: {key} must be {spec.dtype}, as its binding (got {tensor.dtype}). {again}")
        if not _fits(tensor.shape[1:], spec):
            raise InputError(
                f"{where}: {key} must have the shape {spec.shape} of its binding (got {tensor.shape}). {again}"
            )
    labels = tensors.get("labels")
    if labels is not None and (labels.ndim != 1 or labels.dtype != np.int64):
        raise InputError(f"{where}: labels must be int64 [S] (got {labels.dtype} {labels.shape}). {again}")
    return Golden(
        inputs={s.name: tensors[f"input:{s.name}"] for s in inputs},
        outputs={s.name: tensors[f"output:{s.name}"] for s in outputs},
        labels=labels,
    )


def _fits(sample_shape: tuple[int, ...], spec: TensorSpec) -> bool:
    """Whether one sample has the shape of `spec` without its first, the batch, dimension."""
    expected = spec.shape[1:]
    return len(sample_shape) == len(expected) and all(
        got == want if isinstance(want, int) else spec.dims[want].min <= got <= spec.dims[want].max
        for got, want in zip(sample_shape, expected, strict=True)
    )
