"""Sizes of TensorRT-RTX engines in FP16 and INT8, and what they are made of. No GPU, no calibration, a few minutes.

    python benchmarks/sizes.py [--only resnet50 ...] [--results benchmarks/results]

Weights are random and ranges made up: neither changes a size. Four engines each: FP16; INT8 alone; INT8 beside FP16
with every operation quantized that can be (`precision.placement: all`, as before that key); and with what gains from it
(`auto`). Kernels are those that TensorRT-RTX generates and keeps as CUDA source. sizes.json and docs/engine-sizes.md.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: timm name -> side of the input in pixels
MODELS = {
    "densenet121": 224,
    "regnety_016": 224,
    "tf_efficientnet_b4": 320,
    "mobilenetv3_large_100": 224,
    "resnet50": 224,
    "convnext_tiny": 224,
    "swin_tiny_patch4_window7_224": 224,
    "vit_base_patch16_224": 224,
    "resnetv2_101x1_bit": 224,
    "mobilenetv2_100": 224,
}
WAYS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16_mode": True},
    "int8": {"int8_mode": True},
    "int8+fp16, all": {"int8_mode": True, "fp16_mode": True, "placement": "all"},
    "int8+fp16, auto": {"int8_mode": True, "fp16_mode": True},
}
#: A line that stands once in the source of every kernel that TensorRT-RTX 1.7.1 generates.
KERNEL = b"__myln_sqrt___myln_bf16___myln_bf16(__myln_bf16 x) {"
PAGE = """\
# Sizes of INT8 engines

TensorRT-RTX {version}, engines for batches of 1 to 16, portable across Ampere and later; written by
`benchmarks/sizes.py` on a machine without a GPU. Sizes are in MB. `kernels` are the CUDA sources that TensorRT-RTX
generated into the engine, `INT8` the operations in INT8 of those that can be, and `in the plan` the INT8 weights that
were found in the plan byte by byte, of all INT8 weights of the graph.

Why an INT8 engine can be larger than the FP16 engine: `trtpipe/quantization/engine_size.py`.

| network | FP16 | kernels | INT8 | kernels | INT8+FP16, all | kernels | **INT8+FP16** | kernels | INT8 | in the plan |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def captured(name: str) -> Any:
    """The hub graph of a timm network with random weights."""
    import timm
    import torch

    from trtpipe.model.bindings import bind
    from trtpipe.model.capture import capture
    from trtpipe.values import DimRange, LoadedModel, TensorSpec

    torch.manual_seed(0)
    network = timm.create_model(name).eval().requires_grad_(False)
    sizes = {"N": DimRange(1, 8, 16)}
    inputs = (TensorSpec("image", "float32", ("N", 3, MODELS[name], MODELS[name]), sizes),)
    outputs = (TensorSpec("logits", "float32", ("N", 1000), sizes),)
    return capture(LoadedModel(bind(network, inputs, {}, ("logits",)), inputs, outputs, name, name))


def job(name: str, precision: dict[str, Any]) -> Any:
    """A job of that precision for TensorRT-RTX, built in Python."""
    from trtpipe.job.job import Job

    size = MODELS[name]
    return Job.model_validate(
        {
            "name": name,
            "model": {"factory": "timm:create_model", "args": {"model_name": name}},
            "inputs": {"image": {"shape": ("N", 3, size, size), "N": {"min": 1, "opt": 8, "max": 16}}},
            "outputs": {"logits": {}},
            "precision": precision,
            "calibration": {"arrays": "none.npy"} if precision.get("int8_mode") else None,
            "build": {"target": "tensorrt_rtx"},
            "check": {"arrays": "none.npy"},
        }
    )


def measure(graph: Any, name: str, precision: dict[str, Any]) -> dict[str, Any]:
    """One engine: bytes, generated kernels, operations in INT8, and the INT8 weights found in the plan."""
    from trtpipe.progress import Silent
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.precision import half_dtype
    from trtpipe.quantization.quantize import prepare, quantize
    from trtpipe.routes.onnx import to_onnx
    from trtpipe.trt.isolated import build_isolated
    from trtpipe.trt.weights import stored_weights

    asked = job(name, precision)
    quantized = quantize(
        graph,
        int8=asked.precision.int8_mode,
        half=half_dtype(asked.precision.half),
        keep=keep_of(asked, graph),
        amax={key: 1 + zlib.crc32(key.encode()) % 1000 / 300 for key in prepare(graph).observers},
        ranges={},
    )
    model = to_onnx(quantized)
    engine = build_isolated(model, asked.build, progress=Silent(), precision=asked.precision)
    weights = stored_weights(engine.data, model.data)
    return {
        "bytes": len(engine.data),
        "kernels": engine.data.count(KERNEL),
        "int8_operations": sum(layer.precision == "int8" for layer in quantized.layers),
        "int8_weight_bytes": [weights.int8, weights.dequantized, weights.total],
        "version": engine.version,
    }


def document(rows: dict[str, dict[str, Any]]) -> str:
    """The page."""
    version = next(iter(rows.values()))["fp16"]["version"]
    text = PAGE.format(version=version)
    for name, found in rows.items():
        cells = [f"{name}"]
        for way in WAYS:
            size = f"{found[way]['bytes'] / 1e6:.2f}"
            cells += [f"**{size}**" if way.endswith("auto") else size, str(found[way]["kernels"])]
        last, most = found["int8+fp16, auto"], found["int8"]
        int8, _, total = last["int8_weight_bytes"]
        cells += [f"{last['int8_operations']} of {most['int8_operations']}", f"{int8 / 1e6:.2f} of {total / 1e6:.2f}"]
        text += "| " + " | ".join(cells) + " |\n"
    return text


def main() -> None:
    """Print a row an engine, and write the results and their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/engine-sizes.md")
    args = parser.parse_args()
    path = args.results / "sizes.json"
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.only:
        graph = captured(name)
        rows[name] = {}
        for way, precision in WAYS.items():
            rows[name][way] = row = measure(graph, name, precision)
            int8, wide, total = (n / 1e6 for n in row["int8_weight_bytes"])
            print(
                f"{name:<30} {way:<16} {row['bytes'] / 1e6:8.2f} MB {row['kernels']:4d} kernels "
                f"{row['int8_operations']:4d} operations in INT8, {int8:.2f} of {total:.2f} MB of INT8 weights in the "
                f"plan, {wide:.2f} dequantized",
                flush=True,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(sorted(rows.items(), key=lambda r: list(MODELS).index(r[0]))), indent=1) + "\n")
    if set(rows) >= set(MODELS):
        args.page.write_text(document({name: rows[name] for name in MODELS}))


if __name__ == "__main__":
    main()
