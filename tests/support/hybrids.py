"""What the tests of hybrid modules share: one written by hand around plans that have a header and nothing else."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from trtpipe.bundle.hybrid import EngineStep, Hybrid, OperatorStep, StoredConstant, StoredPlan

#: y = engine1(erfc(engine0(image)) + bias), the bias a constant; as steps.
STEPS: tuple[EngineStep | OperatorStep, ...] = (
    EngineStep(engine=0, inputs=("x",), args=({"value": "image"},), outputs=("y",), out="first"),
    OperatorStep(op="aten.erfc.default", args=({"value": "first"},), out="odd"),
    OperatorStep(op="aten.add.Tensor", args=({"value": "odd"}, {"tensor": "c0"}), kwargs={"alpha": 2}, out="sum"),
    EngineStep(engine=1, inputs=("x",), args=({"value": "sum"},), outputs=("y",), out="second"),
)
BIAS = np.array([1.0, -2.0, 0.5], np.float32)


def plan_bytes(mask: int = 0x04, version: tuple[int, ...] = (1, 7, 1, 116), size: int = 64) -> bytes:
    """A TensorRT-RTX plan's header (see trt.plan) and zeros."""
    head = b"vtrt" + bytes(12) + struct.pack("<Q", size) + bytes(version) + bytes(4) + bytes([mask])
    return head.ljust(size, b"\0")


def hybrid(**changes: Any) -> Hybrid:
    """The module of `STEPS`; fields of its plan may be changed."""
    fields: dict[str, Any] = {
        "inputs": ("image",),
        "outputs": {"logits": {"value": "second"}},
        "steps": STEPS,
        "constants": {"c0": StoredConstant(dtype="float32", shape=(3,))},
    }
    return Hybrid(StoredPlan(**{**fields, **changes}), (plan_bytes(), plan_bytes()), {"c0": BIAS.tobytes()})
