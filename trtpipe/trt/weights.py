"""How a plan stores a graph's INT8 weights, read from its bytes without a GPU.

A plan cannot be deserialized without a GPU, and its EngineInspector names layers and not what is stored. TensorRT-RTX
1.7.1, though, keeps weights uncompressed, as they were given or with the channels last, padded with zeros where they
are few: every INT8 weight of the networks of benchmarks/sizes.py stands in its plan byte by byte. So a weight that is
found in INT8 is stored in INT8, one that is found as FP16 or FP32 was dequantized when the engine was built, and of the
others nothing is known. TensorRT proper may reorder and compress what it stores: there nothing need be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.values import WeightBytes

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Smaller weights might be found by chance.
SHORTEST_BYTES = 64
#: Channels are padded to a multiple of one of these, with zeros.
PADDED_TO = (4, 8, 16, 32)


def stored_weights(plan: bytes, graph: bytes) -> WeightBytes:
    """What of the INT8 weights of an ONNX graph stands in the plan that was compiled from it.

    Args:
        plan: a serialized engine.
        graph: an ONNX file with its weights inside.
    """
    total = int8 = dequantized = 0
    for weight, scales, axis in _int8_weights(graph):
        total += weight.size
        if any(layout in plan for layout in _layouts(weight)):
            int8 += weight.size
        else:
            shape = [-1 if d == axis else 1 for d in range(weight.ndim)]
            wide = weight.astype(np.float32) * scales.astype(np.float32).reshape(shape if scales.ndim else ())
            if any(layout in plan for kind in (np.float16, np.float32) for layout in _layouts(wide.astype(kind))):
                dequantized += weight.size
    return WeightBytes(total, int8, dequantized)


def _int8_weights(graph: bytes) -> Iterator[tuple[Array, Array, int]]:
    """(weight, scales, axis) of every INT8 initializer that a DequantizeLinear reads."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(graph).graph
    constants = {t.name: t for t in model.initializer}
    for node in model.node:
        if node.op_type == "DequantizeLinear" and set(node.input[:1]) <= set(constants):
            weight = numpy_helper.to_array(constants[node.input[0]])
            if weight.dtype == np.int8 and weight.size >= SHORTEST_BYTES:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
                scales = constants.get(node.input[1])
                yield weight, np.ones(()) if scales is None else numpy_helper.to_array(scales), axis


def _layouts(weight: Array) -> Iterator[bytes]:
    """The bytes of a weight [C_out, C_in, ...] in the layouts that plans were seen to use."""
    yield weight.tobytes()
    if weight.ndim == 2:
        yield weight.T.tobytes()
        return
    last = np.moveaxis(weight, 1, -1)
    yield last.tobytes()
    yield np.moveaxis(last, 0, -1).tobytes()
    for multiple in PADDED_TO:
        missing = -weight.shape[1] % multiple
        if missing:
            yield np.pad(last, [(0, 0)] * (weight.ndim - 1) + [(0, missing)]).tobytes()
