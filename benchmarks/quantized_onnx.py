"""NVIDIA ModelOpt's INT8 ONNX of a trained MobileNetV2, built by trtpipe as it is: are its scales the engine's?

Two environments: ModelOpt needs its own (`pip install nvidia-modelopt[onnx]`).

    python benchmarks/quantized_onnx.py quantize FLOAT.onnx IMAGES.npy QUANTIZED.onnx    # where nvidia-modelopt is
    trtpipe build job.yaml                                                               # model.onnx: QUANTIZED.onnx
    python benchmarks/quantized_onnx.py compare QUANTIZED.onnx BUNDLE/model.onnx         # prints what differs

IMAGES.npy is float32 [S, 3, 224, 224], normalised as the network wants it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def quantize(source: Path, images: Path, out: Path) -> None:
    """ModelOpt's INT8 (its defaults, FP32 elsewhere) on the images."""
    from modelopt.onnx.quantization import quantize as modelopt

    modelopt(
        str(source),
        quantize_mode="int8",
        calibration_data=np.load(images),
        calibration_method="entropy",
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=str(out),
    )


def scales(path: Path) -> tuple[Counter[float], list[bytes]]:
    """How often each activation's scale is used by a QuantizeLinear, and the INT8 weights by size."""
    model = onnx.load(path)
    known = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    known |= {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"}
    found: Counter[float] = Counter()
    weights = [a.tobytes() for a in known.values() if a.dtype == np.int8 and a.ndim > 1]
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in known:
            found[float(known[node.input[1]])] += 1
        elif node.op_type == "QuantizeLinear":  # ModelOpt keeps weights in float before their Q/DQ
            weight, scale = known[node.input[0]], known[node.input[1]]
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % weight.ndim
            shape = [-1 if k == axis and scale.ndim else 1 for k in range(weight.ndim)]
            weights.append(np.clip(np.round(weight / scale.reshape(shape)), -128, 127).astype(np.int8).tobytes())
    return found, sorted(weights, key=len)


def compare(theirs: Path, ours: Path) -> None:
    """Print how many scales and weights of the file the engine's graph has."""
    (wanted, weights), (found, stored) = scales(theirs), scales(ours)
    same = len(wanted.keys() & found)
    print(f"scales of activations: {len(wanted)} in the file, {len(found)} in the graph, {same} equal")
    same = len(set(weights) & set(stored))
    print(f"INT8 weights: {len(weights)} in the file, {len(stored)} in the graph, {same} equal")


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    ways: dict[str, Callable[..., None]] = {"quantize": quantize, "compare": compare}
    ways[what](*(Path(p) for p in paths))
