"""One Q/DQ graph by another tool, from the FP32 ONNX file and the calibration images that trtpipe gets.

    python benchmarks/peers.py {modelopt,onnxruntime} METHOD fp32.onnx calibration.npy out.onnx

A program of its own, since ModelOpt wants packages beside which trtpipe's cannot stay: it is run with the Python of
PEER_PYTHON and imports nothing of trtpipe. Prints {"version", "seconds"} as JSON. Quantized as each tool says for
TensorRT: symmetric INT8, activations by tensor, weights by output channel, biases in float.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

METHODS = {"modelopt": ("entropy", "max"), "onnxruntime": ("entropy", "percentile")}
BATCH = 8


def modelopt(method: str, model: str, images: Any, out: str) -> str:
    """Quantize with ModelOpt, its other operations in FP32; its version."""
    import modelopt as package
    from modelopt.onnx.quantization import quantize

    name = _input(model)
    quantize(
        model,
        calibration_data={name: images},
        calibration_method=method,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=out,
        log_level="ERROR",
    )
    return str(package.__version__)


def onnxruntime(method: str, model: str, images: Any, out: str) -> str:
    """Quantize with ONNX Runtime's static quantization; its version."""
    import onnxruntime as package
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize

    name = _input(model)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Batches in pieces: ONNX Runtime holds all activations of a piece, and of 128 images they are 15 GB."""

        def __init__(self) -> None:
            self.set_range(0, len(images))

        def __len__(self) -> int:
            return len(images)

        def set_range(self, start_index: int, end_index: int) -> None:
            starts = range(start_index, end_index, BATCH)
            self.batches: Iterator[Any] = iter([{name: images[k : k + BATCH]} for k in starts])

        def get_next(self) -> Any:
            return next(self.batches, None)

    quantize(
        model,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "ConvTranspose", "Gemm", "MatMul"],
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method={"entropy": CalibrationMethod.Entropy, "percentile": CalibrationMethod.Percentile}[method],
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,
            "CalibStridedMinMax": BATCH,
        },
    )
    return str(package.__version__)


def _input(model: str) -> str:
    import onnx

    return str(onnx.load(model, load_external_data=False).graph.input[0].name)


def main() -> None:
    """Quantize, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=METHODS)
    parser.add_argument("method")
    parser.add_argument("model")
    parser.add_argument("images")
    parser.add_argument("out")
    args = parser.parse_args()
    images = np.load(args.images)
    began = time.perf_counter()
    run = {"modelopt": modelopt, "onnxruntime": onnxruntime}[args.tool]
    sys.stdout, kept = sys.stderr, sys.stdout
    version = run(args.method, args.model, images, args.out)
    print(json.dumps({"version": version, "seconds": time.perf_counter() - began}), file=kept)


if __name__ == "__main__":
    main()
