"""What the tests of bundles share: a tiny real ONNX classifier, and a bundle around it."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.bundle import golden
from trtpipe.bundle.format import Bundle, write_bundle
from trtpipe.bundle.manifest import CALIBRATION, GRAPH, Manifest, describe_engine
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build, Normalize, Transform
from trtpipe.values import GOLDEN, CheckReport, Control, DimRange, Engine, LayerPrecision, Metric, TensorSpec

BATCH = {"N": DimRange(1, 4, 8)}
INPUT = TensorSpec("image", "float32", ("N", 3, 8, 8), BATCH)
OUTPUT = TensorSpec("logits", "float32", ("N", 3), BATCH)
TRANSFORM = Transform(resize=8, center_crop=8, normalize=Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))


def weights() -> np.ndarray[Any, Any]:
    """Each logit is the mean of one colour channel."""
    w = np.zeros((3, 8, 8, 3), np.float32)
    for c in range(3):
        w[c, :, :, c] = 1 / 64
    return w.reshape(192, 3)


@cache
def graph() -> bytes:
    """A colour classifier as ONNX: red, green or blue."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("Flatten", ["image"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["logits"])]
    made = helper.make_graph(
        nodes,
        "colour",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(weights(), "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def golden_data() -> golden.Golden:
    """Four samples and what the classifier has to say, computed in NumPy."""
    images = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    return golden.Golden({"image": images}, {"logits": images.mean((2, 3))}, np.arange(4) % 3, None)


def manifest(**changes: Any) -> Manifest:
    """A manifest of the classifier with every section filled."""
    engine = Engine(graph(), "onnxruntime", "1.20.0", (), (INPUT,), (OUTPUT,), None, {"opset": 18})
    fields: dict[str, Any] = {
        "name": "colour",
        "engine": describe_engine(engine, Build(target="onnxruntime")),
        "inputs": (INPUT,),
        "outputs": (OUTPUT,),
        "build": Build(target="onnxruntime"),
        "layers": (LayerPrecision("head", "linear", "int8", "quantized", "model.py:3"),),
        "preprocessing": TRANSFORM,
        "class_names": ("red", "green", "blue"),
        "calibration_digest": "ab" * 32,
        "check": CheckReport(
            executed="graph",
            runner="onnxruntime 1.20.0",
            samples=4,
            metrics=(
                Metric("cosine", "logits", 0.999, 0.99, True),
                Metric("cosine_worst", "logits", 0.99999),
                Metric("max_abs", "logits", 1e-4),
                Metric("relative_l2", "logits", 1e-4),
                Metric("sqnr_db", "logits", float("inf")),
            ),
            control=Control("head:weight", "zeroed", True, 4),
            passed=True,
        ),
        "limits": Limits(cosine_min=0.99),
        "job": "name: colour\n",
        "environment": {"onnx": "1.18"},
        "fingerprint": "cd" * 32,
        "notes": ("layer head kept in int8",),
    }
    return Manifest(**{**fields, **changes})


def files() -> dict[str, bytes]:
    """The files beside the manifest."""
    return {GRAPH: graph(), GOLDEN: golden.to_bytes(golden_data()), CALIBRATION: b'{"amax": {}}\n'}


def bundle(path: Path, *, sign: Any = None, extra: dict[str, bytes] | None = None, **changes: Any) -> Bundle:
    """The classifier's bundle, written to `path`."""
    return write_bundle(path, manifest(**changes), files() | (extra or {}), sign=sign)


def replaced(spec: TensorSpec, **changes: Any) -> TensorSpec:
    """`spec` with fields changed."""
    return dataclasses.replace(spec, **changes)
