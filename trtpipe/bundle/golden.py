"""Golden data: a few real inputs and the baseline's outputs on them, as safetensors, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from calib.types import Array
from trtpipe.batching import KEPT_SAMPLES, has_shape
from trtpipe.bundle.manifest import AGAIN
from trtpipe.errors import InputError
from trtpipe.values import TensorSpec


@dataclass(frozen=True)
class Golden:
    """`inputs` in the binding dtypes, [S, ...]; `outputs` as of `Baseline`, one row a sample, [S, ...].

    `batch` is how many samples were run at a time where an output depends on the others of its batch, else None. An
    output without a batch axis has one row for each batch, [ceil(S / batch), ...]. `labels` is int64 [S] (-1: unknown)
    or None.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    labels: Array | None
    batch: int | None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return int(next(iter(self.inputs.values())).shape[0])

    def batches(self, size: int) -> list[dict[str, Array]]:
        """The inputs in order, [size, ...] each in their dtypes; the last batch may hold fewer."""
        return [{n: a[start : start + size] for n, a in self.inputs.items()} for start in range(0, self.samples, size)]


def first(golden: Golden, outputs: tuple[TensorSpec, ...], count: int = KEPT_SAMPLES) -> Golden:
    """The first `count` samples, or all where there are fewer; whole batches where outputs depend on those."""
    size = golden.batch or 1
    batches = -(-min(count, golden.samples) // size)
    count = min(count, golden.samples) if golden.batch is None else min(batches * size, golden.samples)
    rows = {s.name: count if s.batch_axis is not None else batches for s in outputs}
    return replace(
        golden,
        inputs={n: a[:count] for n, a in golden.inputs.items()},
        outputs={n: a[: rows[n]] for n, a in golden.outputs.items()},
        labels=None if golden.labels is None else golden.labels[:count],
    )


def to_bytes(golden: Golden) -> bytes:
    """The safetensors file: `input:<name>`, `output:<name>`, `labels`, `batch`. The same data give the same bytes."""
    tensors = {f"input:{n}": a for n, a in golden.inputs.items()} | {
        f"output:{n}": a for n, a in golden.outputs.items()
    }
    if golden.labels is not None:
        tensors["labels"] = golden.labels.astype(np.int64)
    if golden.batch is not None:
        tensors["batch"] = np.array([golden.batch], np.int64)
    data: bytes = save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)})
    return data


def tensors_of(data: bytes, where: str) -> dict[str, Array]:
    """The tensors of a safetensors file by name, in its dtypes and shapes.

    Raises:
        InputError: `data` is none.
    """
    try:
        tensors: dict[str, Array] = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{where}: must be a safetensors file (got: {error}). {AGAIN}") from None
    return tensors


def from_bytes(data: bytes, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], where: str) -> Golden:
    """The golden data in `data`, checked against the bindings.

    Raises:
        InputError: not safetensors, a tensor missing, too many, of another dtype or shape than its binding.
    """
    tensors = tensors_of(data, where)
    sides = {"input": inputs, "output": outputs}
    wanted = {f"{side}:{spec.name}": (side, spec) for side, specs in sides.items() for spec in specs}
    whole = {f"output:{s.name}" for s in outputs if s.batch_axis is None}
    batch = tensors.get("batch")
    known = set(wanted) | ({"labels", "batch"} & set(tensors)) | ({"batch"} if whole else set())
    if odd := sorted(known ^ set(tensors)):
        raise InputError(
            f"{where}: must hold each binding once and nothing else (got a difference at {odd[0]}). {AGAIN}"
        )
    if batch is not None and (batch.shape != (1,) or batch.dtype != np.int64 or batch[0] < 1):
        raise InputError(f"{where}: batch must be one int64 of at least 1 (got {batch.dtype} {batch.shape}). {AGAIN}")
    samples = {len(t) if t.ndim else -1 for n, t in tensors.items() if n not in whole and n != "batch"}
    if len(samples) != 1 or min(samples) < 1:
        raise InputError(
            f"{where}: every tensor must hold the same samples, one or more (got {sorted(samples)}). {AGAIN}"
        )
    for key, (side, spec) in wanted.items():
        tensor = tensors[key]
        # The baseline's outputs have the model's own dtypes, whatever those of their bindings are.
        if side == "input" and tensor.dtype != np.dtype(spec.dtype):
            raise InputError(f"{where}: {key} must be {spec.dtype}, as its binding (got {tensor.dtype}). {AGAIN}")
        if not tensor.ndim or not has_shape(tensor.shape[1:], spec.row_shape, spec.dims):
            raise InputError(
                f"{where}: {key} must have the shape {spec.shape} of its binding (got {tensor.shape}). {AGAIN}"
            )
        if key in whole and batch is not None and len(tensor) != -(-min(samples) // int(batch[0])):
            raise InputError(
                f"{where}: {key} must have a row for each {int(batch[0])} samples (got {len(tensor)} for "
                f"{min(samples)}). {AGAIN}"
            )
    labels = tensors.get("labels")
    if labels is not None and (labels.ndim != 1 or labels.dtype != np.int64):
        raise InputError(f"{where}: labels must be int64 [S] (got {labels.dtype} {labels.shape}). {AGAIN}")
    return Golden(
        inputs={s.name: tensors[f"input:{s.name}"] for s in inputs},
        outputs={s.name: tensors[f"output:{s.name}"] for s in outputs},
        labels=labels,
        batch=None if batch is None else int(batch[0]),
    )
