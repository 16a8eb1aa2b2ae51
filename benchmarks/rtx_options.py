"""Which builder options does TensorRT-RTX honour? Each is built with and without, and the plans are compared.

    python benchmarks/rtx_options.py [--results docs/rtx-options.json] [--only sparse_weights]

No GPU is needed. Every value below is given to TensorRT-RTX itself, past trtpipe's own tables, on each network of
`networks`; two builds of the same graph give the same plan but for the numbers of internal variables, which is measured
first. The answer for a value is one of

    plan          at least one network's plan differs; `networks` names which, `bytes` gives the sizes
    messages      the plans are the same, and TensorRT-RTX says something else while it builds
    refused       TensorRT-RTX ends with an error, which is kept
    nothing       every network's plan and messages are the same as without the option

docs/versions.md is written from the result, and a test holds `trtpipe.trt.options` to it: what does nothing is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtpipe.errors import TrtpipeError
from trtpipe.job.sections import Build
from trtpipe.model.bindings import Bound
from trtpipe.model.capture import capture
from trtpipe.model.export import example_inputs
from trtpipe.progress import Silent
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.trt import flavour
from trtpipe.trt.isolated import build_isolated
from trtpipe.values import DimRange, Engine, LoadedModel, OnnxModel, TensorSpec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "rtx-options.json"
BATCH = DimRange(1, 4, 8)
#: TensorRT-RTX numbers its variables in the order of memory addresses, which the length of a request moves.
INTERNAL_NAME = re.compile(rb"__mye\d+")
#: Option to (value, options that it needs beside it) of each measurement. `log_level` and `platform` are trtpipe's.
VALUES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "compute_capability": [(["8.6"], {}), (["8.9", "12.0"], {})],
    "profiles": [([{"N": {"min": 1, "opt": 1, "max": 1}}, {"N": {"min": 2, "opt": 8, "max": 8}}], {})],
    "workspace": [(1, {}), (1 << 16, {}), (1 << 34, {})],
    "memory_pools": [({"tactic_dram": 1 << 20}, {}), ({"tactic_shared_memory": 1 << 10}, {})],
    "optimization_level": [(0, {}), (1, {}), (2, {}), (4, {}), (5, {})],
    "tiling_optimization_level": [("fast", {}), ("moderate", {}), ("full", {})],
    "l2_limit_for_tiling": [(1 << 16, {"tiling_optimization_level": "full"})],
    "max_num_tactics": [(1, {}), (100, {})],
    "avg_timing_iterations": [(1, {}), (16, {})],
    "max_aux_streams": [(0, {}), (4, {})],
    "tactic_sources": [([], {}), (["jit_convolutions"], {}), (["edge_mask_convolutions"], {})],
    "timing_cache": [("timing", {})],
    "profiling_verbosity": [("none", {}), ("layer_names_only", {})],
    "tf32": [(False, {})],
    "sparse_weights": [(True, {})],
    "strict_nans": [(True, {}), (True, {"sparse_weights": True})],
    "direct_io": [(True, {}), (True, {"tensor_formats": {"image": ["hwc"]}})],
    "tensor_formats": [({"image": ["hwc"]}, {}), ({"image": ["chw32"]}, {}), ({"image": ["linear"]}, {})],
    "hardware_compatibility": [("ampere_plus", {}), ("same_compute_capability", {})],
    "version_compatible": [(True, {}), (True, {"exclude_lean_runtime": True})],
    "runtime_platform": [("windows_amd64", {})],
    "strip_plan": [(True, {})],
    "refit": [("all", {}), ("identical", {}), ("individual", {})],
    "weight_streaming": [(True, {})],
    "default_device_type": [("dla", {})],
    "dla_core": [(0, {"default_device_type": "dla"})],
    "gpu_fallback": [(True, {"default_device_type": "dla", "dla_core": 0})],
}


def main() -> int:
    """Measure, write the result, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", action="append", choices=VALUES, metavar="OPTION",
        help="an option of `VALUES`; may be repeated, and the file keeps the others",
    )  # fmt: skip
    args = parser.parse_args()
    if "tensorrt_rtx" not in flavour.installed():
        print("rtx_options: tensorrt-rtx is not installed, so there is nothing to measure.", file=sys.stderr)
        return 3
    models = {name: make() for name, make in networks().items()}
    plain = {name: outcome(model, {}) for name, model in models.items()}
    for name, model in models.items():
        if outcome(model, {}) != plain[name]:
            print(f"rtx_options: {name} built twice gives two plans: differences would say nothing.", file=sys.stderr)
            return 1
        print(f"{name:20} {plain[name]['bytes']:>10} bytes", flush=True)
    chosen = {k: v for k, v in VALUES.items() if args.only is None or k in args.only}
    kept = json.loads(args.results.read_text())["options"] if args.only and args.results.exists() else {}
    for option, values in chosen.items():
        kept[option] = [measured(option, value, others, models, plain) for value, others in values]
        for row in kept[option]:
            detail = ", ".join(row["networks"]) or row.get("message", "")
            print(f"{option:26} {json.dumps(row['value']):34} {row['effect']:9} {detail[:90]}", flush=True)
    written = {
        "tensorrt_rtx": flavour.installed()["tensorrt_rtx"][1],
        "networks": {name: {"bytes": plain[name]["bytes"]} for name in models},
        "options": {name: kept[name] for name in VALUES if name in kept},
    }
    args.results.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def measured(
    option: str, value: Any, others: dict[str, Any], models: dict[str, OnnxModel], plain: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What one value of one option does, beside the same build with `others` alone."""
    row: dict[str, Any] = {"value": value, "with": others, "effect": "nothing", "networks": [], "bytes": {}}
    errors, said = [], []
    for name, model in models.items():
        if option == "profiles" and not model.inputs[0].dynamic:
            continue
        before = outcome(model, others) if others else plain[name]
        after = outcome(model, {option: value, **others})
        if "error" in after:
            errors.append(after["error"])
        elif "error" in before or after["sha256"] != before["sha256"]:
            row["networks"].append(name)
            row["bytes"][name] = after["bytes"]
        elif after["messages"] != before["messages"]:
            said += sorted(set(after["messages"]) - set(before["messages"]))
    if row["networks"]:
        row["effect"] = "plan"
    elif errors:
        row |= {"effect": "refused", "message": errors[0]}
    elif said:
        row |= {"effect": "messages", "message": said[0]}
    if errors and row["effect"] == "plan":
        row["message"] = errors[0]
    return row


def outcome(model: OnnxModel, options: dict[str, Any]) -> dict[str, Any]:
    """Size, digest and messages of one build, or its error."""
    try:
        build = Build.model_validate({"target": "tensorrt_rtx", **options})
        engine: Engine = build_isolated(model, build, progress=Silent(), judged=False)
    except TrtpipeError as error:
        return {"error": re.sub(r"\s+", " ", str(error))[:300]}
    return {
        "bytes": len(engine.data),
        "sha256": hashlib.sha256(INTERNAL_NAME.sub(b"", engine.data)).hexdigest(),
        "messages": list(engine.notes),
    }


def networks() -> dict[str, Callable[[], OnnxModel]]:
    """Networks whose plans an option has a chance to change."""
    image = TensorSpec("image", "float32", ("N", 3, 32, 32), {"N": BATCH})
    photo = TensorSpec("image", "float32", ("N", 3, 64, 64), {"N": BATCH})
    tokens = TensorSpec("image", "float32", ("N", 16, 64), {"N": BATCH})
    return {
        "conv fp32": lambda: exported(convolutions(), image),
        "conv fp16 2:4 static": lambda: exported(convolutions(), fixed(image), half=True, sparse=True),
        "conv int8": lambda: exported(convolutions(), image, int8=True),
        "attention fp16": lambda: exported(Attention(), tokens, half=True),
        "resnet18 fp16 2:4": lambda: exported(resnet18(), photo, half=True, sparse=True),
    }


def fixed(spec: TensorSpec) -> TensorSpec:
    """The input at its opt shape."""
    return TensorSpec(spec.name, spec.dtype, spec.at("opt"), {})


def convolutions() -> torch.nn.Module:
    """Two convolutions with 64 channels and a pooled linear."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 16),
    )  # fmt: skip


class Attention(torch.nn.Module):
    """One transformer layer of width 64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.norm = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 16, 64] in and out."""
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) * 0.25).softmax(-1)
        found: torch.Tensor = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return found


def resnet18() -> torch.nn.Module:
    """torchvision's, with random weights."""
    import torchvision

    torch.manual_seed(0)
    made: torch.nn.Module = torchvision.models.resnet18()
    return made


def exported(
    module: torch.nn.Module, spec: TensorSpec, *, half: bool = False, sparse: bool = False, int8: bool = False
) -> OnnxModel:
    """The module as trtpipe captures, quantizes and exports it; `sparse` zeroes 2 of 4 along the input channels."""
    module.eval()
    if sparse:
        for parameter in module.parameters():
            if parameter.dim() > 1 and parameter.shape[1] % 4 == 0:
                parameter.data.view(parameter.shape[0], -1, 4, *parameter.shape[2:])[:, :, 2:] = 0
    with torch.inference_mode():
        shape = module(*example_inputs((spec,))).shape
    out = TensorSpec("y", "float32", (spec.shape[0], *shape[1:]), dict(spec.dims))
    loaded = LoadedModel(Bound(module, (spec,), {}, ("y",)).eval(), (spec,), (out,), "weights", "benchmark")
    captured = capture(loaded)
    amax = {s.group: 2.0 for s in captured.sites if s.axis is None} if int8 else {}
    return to_onnx(
        quantize(captured, int8=int8, half=torch.float16 if half else None, keep=Keep(), amax=amax, ranges={})
    )


if __name__ == "__main__":
    sys.exit(main())
