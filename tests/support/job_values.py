"""A value to try of every key of a job, the kinds of job, and a small job that they are laid over."""

from __future__ import annotations

from typing import Any

#: A value of each key that differs from that of `BASE`, and what else has to change with it. One row for every key but
#: those of BuildOptions, which `trt.options` and `routes.support` have a row for each.
CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "model.factory": {"model.factory": "net:other"},
    "model.args": {"model.args": {"extra": 1}},
    "model.weights": {"model.weights": None},
    "model.torchscript": {"model.torchscript": "net.ts"},
    "model.quantized": {"model.quantized": True},
    "model.program": {"model.factory": None, "model.weights": None, "model.program": "net.pt2"},
    "model.onnx": {"model.factory": None, "model.weights": None, "model.onnx": "net.onnx"},
    "model.baseline": {"model.baseline": "script"},
    "inputs.dtype": {"inputs.image.dtype": "float16"},
    "inputs.shape": {"inputs.image.shape": ["N", 1, "H", 16], "inputs.image.H": {"min": 16, "opt": 16, "max": 16}},
    "inputs.normalize": {"inputs.image.normalize": None},
    "inputs.normalize.mean": {"inputs.image.normalize": {"mean": [0.5], "std": [1.0]}},
    "inputs.normalize.std": {"inputs.image.normalize": {"mean": [0.0], "std": [0.5]}},
    "inputs.dims": {"inputs.image.N": {"min": 1, "opt": 2, "max": 2}},
    "inputs.dims.min": {"inputs.image.N": {"min": 2, "opt": 4, "max": 8}},
    "inputs.dims.opt": {"inputs.image.N": {"min": 1, "opt": 3, "max": 8}},
    "inputs.dims.max": {"inputs.image.N": {"min": 1, "opt": 4, "max": 6}},
    "outputs.dtype": {"outputs.logits.dtype": "float16"},
    "precision.fp16_mode": {"precision.fp16_mode": True},
    "precision.bf16_mode": {"precision.bf16_mode": True},
    "precision.int8_mode": {"precision.int8_mode": True},
    "precision.fp8_mode": {"precision.fp8_mode": True},
    "precision.nvfp4_mode": {"precision.nvfp4_mode": True},
    "precision.weights": {"precision.weights": "int4"},
    "precision.formats": {"precision.weights": "int4", "precision.formats": {"0": "int4"}},
    "precision.placement": {"precision.placement": "all"},
    "precision.keep": {"precision.keep": {"fp32": ["0"]}},
    "precision.keep.fp32": {"precision.keep": {"fp32": ["0"]}},
    "precision.keep.fp16": {"precision.keep": {"fp16": ["0"]}},
    "precision.keep.bf16": {"precision.keep": {"bf16": ["0"]}},
    "build.route": {"build.route": "torch_tensorrt"},
    "build.target": {"build.target": "tensorrt_rtx"},
    "build.use_onnx": {"build.use_onnx": True},
    "build.allow_torch_fallback": {"build.allow_torch_fallback": True},
    "check.limits": {"check.limits": {"max_abs_max": 1.0}},
    "check.limits.cosine_min": {"check.limits": {"cosine_min": 0.5}},
    "check.limits.cosine_worst_min": {"check.limits": {"cosine_worst_min": 0.5}},
    "check.limits.max_abs_max": {"check.limits": {"max_abs_max": 1.0}},
    "check.limits.relative_l2_max": {"check.limits": {"relative_l2_max": 1.0}},
    "check.limits.sqnr_db_min": {"check.limits": {"sqnr_db_min": 1.0}},
    "check.limits.top1_agreement_min": {"check.limits": {"top1_agreement_min": 0.5}},
    "check.limits.accuracy_drop_max": {"check.limits": {"accuracy_drop_max": 0.5}},
    "check.limits.confident": {"check.limits": {"top1_agreement_min": 0.5, "confident": True}},
    "check.limits.metrics": {"check.metrics": {"off": "mae"}, "check.limits": {"metrics": {"off": {"max": 1.0}}}},
    "check.limits.metrics.min": {"check.metrics": {"off": "mae"}, "check.limits": {"metrics": {"off": {"min": 0.0}}}},
    "check.limits.metrics.max": {"check.metrics": {"off": "mae"}, "check.limits": {"metrics": {"off": {"max": 1.0}}}},
    "check.limits.metrics.drop_max": {
        "check.metrics": {"off": "net:figure"}, "check.limits": {"metrics": {"off": {"drop_max": 1.0}}},
    },
    "check.metrics": {"check.metrics": {}},
    "check.metrics.function": {"check.metrics": {"off": "mae"}},
    "check.metrics.args": {"check.metrics": {"off": {"function": "mae", "args": {"output": "logits"}}}},
    "check.metrics.better": {"check.metrics": {"off": {"function": "net:figure", "better": "lower"}}},
    "check.limits.speedup_over_fp16_min": {
        "check.limits": {"speedup_over_fp16_min": 1.0}, "check.require": "engine",
    },
    "check.require": {"check.require": "engine"},
    "check.sensitivity": {"check.sensitivity": True},
    "check.bench": {"check.bench": True},
    "check.on_fail": {"check.on_fail": "tune"},
    "calibration.corrections": {"calibration.corrections": []},
    "check.labels": {"check.labels": "labels.txt"},
    "calibration.algorithm": {"calibration.algorithm": "mse"},
    "calibration.percentile": {"calibration.algorithm": "percentile", "calibration.percentile": 99.0},
    "calibration.table": {"calibration": {"table": "table.json"}},
    "calibration.recalibrate": {"calibration.recalibrate": True},
    "worker": {"worker": ["sm87"]},
}  # fmt: skip
for _section in ("calibration", "check"):
    CHANGES |= {
        f"{_section}.images": {f"{_section}.images": f"{_section}-more"},
        f"{_section}.arrays": {f"{_section}.images": None, f"{_section}.transform": None,
                               f"{_section}.arrays": "val.npz"},
        f"{_section}.factory": {f"{_section}.images": None, f"{_section}.transform": None,
                                f"{_section}.factory": "net:samples"},
        f"{_section}.samples": {f"{_section}.samples": 6},
        f"{_section}.batch_size": {f"{_section}.batch_size": 2},
        f"{_section}.seed": {f"{_section}.samples": 6, f"{_section}.seed": 1},
        f"{_section}.workers": {f"{_section}.workers": 1},
        f"{_section}.on_bad_sample": {f"{_section}.on_bad_sample": "skip"},
        f"{_section}.transform": {f"{_section}.transform": {"grayscale": True}},
        f"{_section}.transform.resize": {f"{_section}.transform.resize": [16, 16]},
        f"{_section}.transform.center_crop": {f"{_section}.transform.center_crop": 16},
        f"{_section}.transform.grayscale": {f"{_section}.transform.grayscale": True},
        f"{_section}.transform.interpolation": {f"{_section}.transform.interpolation": "nearest"},
        f"{_section}.transform.normalize": {f"{_section}.transform.normalize": {"mean": [0.1], "std": [1.0]}},
        f"{_section}.transform.normalize.mean": {f"{_section}.transform.normalize": {"mean": [0.1], "std": [1.0]}},
        f"{_section}.transform.normalize.std": {f"{_section}.transform.normalize": {"mean": [0.0], "std": [2.0]}},
        f"{_section}.transform.callable": {f"{_section}.transform": {"callable": "net:transform"}},
    }  # fmt: skip
#: What makes of `BASE` a job of each kind. Target onnxruntime runs anywhere; bf16 ends at a TensorRT that takes what it
#: is given, like implicit quantization.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": {"fp16_mode": True}},
    "bf16": {"precision": {"bf16_mode": True}, "build": {"target": "tensorrt_rtx"}},
    "int8": {"precision": {"int8_mode": True}},
    "int8+fp16": {"precision": {"int8_mode": True, "fp16_mode": True}},
    "implicit": {
        "precision": {"int8_mode": True},
        "build": {"target": "tensorrt", "quantization": "implicit"},
    },
    "int8 from a table": {
        "precision": {"int8_mode": True},
        "calibration": {"table": "table.json", "algorithm": "minmax"},
        "check.transform": {"grayscale": True, "normalize": {"mean": [0.0], "std": [1.0]}},
    },
    **{
        name: {
            "model": {"factory": "net:wide"},  # wide enough for every block of scales
            "precision": {"fp16_mode": True, **mode},
            "build": {"target": "tensorrt_rtx", "compute_capability": ["12.0"]},
        }
        for name, mode in {
            "fp8": {"fp8_mode": True},
            "int4": {"weights": "int4"},
            "nvfp4": {"nvfp4_mode": True},
            "nvfp4 weights": {"weights": "nvfp4"},
        }.items()
    },
}
CALLABLES = """
def other(**_):
    return net()

def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128))

def samples():
    return []

def transform(image):
    return image

def figure(outputs, labels, ids):
    return 1.0
"""
GRAY = {"grayscale": True, "normalize": {"mean": [0.0], "std": [1.0]}}
BASE: dict[str, Any] = {
    "name": "m",
    "model": {"factory": "net:net", "weights": "w0.safetensors"},
    "inputs": {
        "image": {
            "dtype": "float32",
            "shape": ["N", 1, 16, 16],
            "N": {"min": 1, "opt": 4, "max": 8},
            "normalize": {"mean": [0.0], "std": [1.0]},
        }
    },
    "outputs": {"logits": {"dtype": "float32"}},
    "calibration": {"images": "images", "transform": GRAY, "batch_size": 4, "algorithm": "minmax"},
    "build": {"target": "onnxruntime"},
    "check": {
        "images": "images",
        "transform": GRAY,
        "batch_size": 4,
        "limits": {"cosine_min": 0.5},
        "metrics": {"off": {"function": "mae", "args": {"against": "baseline"}}},
    },
}
#: Keys that say nothing to a command, by what it is for; a build of the same job honours them.
ELSEWHERE: dict[str, dict[str, str]] = {
    "bf16": {
        "check.limits*": "no CPU executes it",
        "check.require": "no CPU executes it",
        "check.bench": "no CPU executes it",
        "name": "no CPU executes it, so there is no bundle",
    },
    "build": {"worker": "for a fleet"},
    "prepare": {
        "worker": "for a fleet",
        "check.require": "kept in the kit for the device",
        "check.bench": "noted in the kit",
        "check.sensitivity": "noted in the kit",
    },
    "nightly": {},
    "calibrate": {
        "worker": "for a fleet",
        "name": "the command names its file by it",
        "model.baseline": "nothing is compared",
        "model.torchscript": "nothing is compared",
        "precision.fp16_mode": "of the engine alone",
        "build*": "nothing is compiled",
        "check*": "nothing is checked",
    },
    "tune": {
        "worker": "for a fleet",
        "build.route": "engines are built where a GPU executes them",
        "check.limits.speedup_over_fp16_min": "a trial is not timed against another engine",
        "check.require": "a trial runs the graph",
        "check.sensitivity": "always measured",
        "check.bench": "for a build's report",
        "check.on_fail": "it is what this command does",
    },
    "bench": {
        "worker": "for a fleet",
        "build.route": "engines are built where a GPU executes them",
        "precision.fp16_mode": "of the engines alone",
        "precision.bf16_mode": "of the engines alone",
        "precision.fp8_mode": "of the engines alone",
        "precision.nvfp4_mode": "of the engines alone",
        "precision.weights": "of the engines alone",
        "precision.formats": "of the engines alone",
        "check.limits*": "nothing is judged",
        "check.metrics*": "nothing is judged",
        "check.require": "nothing is judged",
        "check.sensitivity": "nothing is judged",
        "check.bench": "it is what this command does",
        "check.on_fail": "nothing is judged",
    },
}
KINDS = [("build", p) for p in PRECISIONS] + [
    ("prepare", "int8"), ("prepare", "fp16"),
    ("tune", "int8"),
    ("nightly", "int8"), ("nightly", "fp16"), ("nightly", "implicit"),
    ("calibrate", "int8"), ("calibrate", "fp16"), ("calibrate", "implicit"),
    ("bench", "int8"),
]  # fmt: skip
