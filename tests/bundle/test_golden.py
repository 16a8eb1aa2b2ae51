"""Golden data: safetensors that PyTorch's world reads, held against the bindings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import shipping

from trtpipe.bundle import golden
from trtpipe.errors import InputError
from trtpipe.values import TensorSpec

INPUTS, OUTPUTS = (shipping.INPUT,), (shipping.OUTPUT,)


def test_round_trip_is_exact_and_stable() -> None:
    data = golden.to_bytes(shipping.golden_data())
    read = golden.from_bytes(data, INPUTS, OUTPUTS, "g")
    np.testing.assert_array_equal(read.outputs["logits"], shipping.golden_data().outputs["logits"])
    assert read.labels is not None
    assert read.labels.tolist() == [0, 1, 2, 0]
    assert read.samples == 4
    assert golden.to_bytes(read) == data


def test_a_slice_is_written_in_its_own_order() -> None:
    images = np.arange(2 * 3 * 8 * 8, dtype=np.float32).reshape(8, 8, 3, 2).transpose(3, 2, 0, 1)
    data = golden.to_bytes(golden.Golden({"image": images}, {"logits": np.zeros((2, 3), np.float32)}, None, None))
    np.testing.assert_array_equal(golden.from_bytes(data, INPUTS, OUTPUTS, "g").inputs["image"], images)


@pytest.mark.parametrize(("batch", "kept"), [(None, 5), (1, 5), (2, 6), (4, 7), (7, 7)])
def test_the_first_samples_are_whole_batches_where_outputs_depend_on_them(batch: int | None, kept: int) -> None:
    """An output of the batch has one row for each: the last batch may be smaller."""
    batches = -(-7 // (batch or 1))
    rows = {"logits": np.arange(21, dtype=np.float32).reshape(7, 3), "mean": np.arange(batches, dtype=np.float32)}
    whole = golden.Golden({"image": np.zeros((7, 3, 8, 8), np.float32)}, rows, np.arange(7), batch)
    first = golden.first(whole, (shipping.OUTPUT, TensorSpec("mean", "float32", (), batch_axis=None)), 5)
    assert (first.samples, len(first.outputs["logits"]), first.batch) == (kept, kept, batch)
    assert first.labels is not None
    assert first.labels.tolist() == list(range(kept))
    assert first.outputs["mean"].tolist() == list(range(-(-kept // (batch or 1))))


def tensors(**changes: Any) -> dict[str, Any]:
    image, logits = np.zeros((2, 3, 8, 8), np.float32), np.zeros((2, 3), np.float32)
    return {k: v for k, v in {"input:image": image, "output:logits": logits, **changes}.items() if v is not None}


BAD = [
    (
        tensors(**{"input:image": None}),
        "g: must hold each binding once and nothing else (got a difference at input:image)",
    ),
    (tensors(extra=np.zeros(2)), "(got a difference at extra)"),
    (
        tensors(**{"output:logits": np.zeros((3, 3), np.float32)}),
        "must hold the same samples, one or more (got [2, 3])",
    ),
    (
        tensors(**{"input:image": np.zeros((2, 3, 8, 8))}),
        "g: input:image must be float32, as its binding (got float64)",
    ),
    (tensors(**{"output:logits": np.zeros((2, 4), np.float32)}), "g: output:logits must have the shape ('N', 3)"),
    (
        tensors(**{"output:logits": np.zeros((3, 3), np.float32)}),
        "g: every tensor must hold the same samples, one or more (got [2, 3]). Fetch or build the bundle again.",
    ),
    (tensors(labels=np.zeros(2, np.int32)), "g: labels must be int64 [S] (got int32 (2,))"),
    (tensors(**{"input:image": np.zeros((0, 3, 8, 8), np.float32), "output:logits": np.zeros((0, 3))}), "(got [0])"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=range(len(BAD)))
def test_refused(content: dict[str, Any], message: str) -> None:
    from safetensors.numpy import save

    with pytest.raises(InputError) as caught:
        golden.from_bytes(save(content), INPUTS, OUTPUTS, "g")
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}garbage"])
def test_not_safetensors(data: bytes) -> None:
    with pytest.raises(InputError, match=r"g: must be a safetensors file|g: must hold each binding"):
        golden.from_bytes(data, INPUTS, OUTPUTS, "g")


@pytest.mark.parametrize("batch", [np.array([0]), np.array([2, 2]), np.array([2], np.int32)])
def test_the_batch_of_whole_outputs_is_one_size(batch: np.ndarray) -> None:
    from safetensors.numpy import save

    whole = (dataclasses.replace(shipping.OUTPUT, batch_axis=None),)
    with pytest.raises(InputError) as caught:
        golden.from_bytes(save(tensors(batch=batch)), INPUTS, whole, "g")
    got = f"{batch.dtype} {batch.shape}"
    assert (
        str(caught.value) == f"g: batch must be one int64 of at least 1 (got {got}). Fetch or build the bundle again."
    )
