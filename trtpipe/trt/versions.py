"""docs/versions.md, written by `make schema` from the tables that the code uses and from measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from calib.types import JsonObject
from trtpipe.figures import markdown_table
from trtpipe.job.sections import Build
from trtpipe.trt.flavour import CAPABILITIES, FlavourName, expected, title, where
from trtpipe.trt.options import OPTIONS, refusals
from trtpipe.trt.parser import newest_opset
from trtpipe.trt.placement import AMPERE_FORMATS, DLA_FORMATS
from trtpipe.trt.platforms import (
    BY_CAPABILITY,
    OLDEST_PORTABLE,
    PLATFORMS,
    PRECISIONS,
    RTX_COMPUTE_CAPABILITIES,
    RTX_WITHOUT_FP32_PRODUCTS,
    SOURCE_URLS,
    rtx_support,
)

#: The releases that the contract tests drive, and the one of TensorRT-RTX.
RELEASES: tuple[tuple[FlavourName, str], ...] = (
    ("tensorrt", "8.6.1"),
    ("tensorrt", "10.3.0"),
    ("tensorrt", "10.16.1.11"),
    ("tensorrt", "11.4.0.106"),
    ("tensorrt_rtx", "1.7.1.116"),
)
#: Values of the options that not every release honours.
_VALUES: tuple[tuple[str, object], ...] = (
    ("memory_pools", {"tactic_shared_memory": 1024}),
    *{
        "compute_capability": ("8.6",),
        "quantization": "implicit",
        "calibration_cache": "calibration.cache",
        "memory_pools": {"tactic_dram": 1},
        "optimization_level": 5,
        "tiling_optimization_level": "fast",
        "l2_limit_for_tiling": 1,
        "max_num_tactics": 1,
        "avg_timing_iterations": 8,
        "max_aux_streams": 0,
        "tactic_sources": ("cudnn",),
        "timing_cache": "timing",
        "editable_timing_cache": True,
        "error_on_timing_cache_miss": True,
        "sparse_weights": True,
        "strict_nans": True,
        "direct_io": True,
        "tensor_formats": {"image": ("dla_linear",)},
        "hardware_compatibility": "ampere_plus",
        "runtime_platform": "windows_amd64",
        "strip_plan": True,
        "refit": "identical",
        "weight_streaming": True,
        "default_device_type": "dla",
        "dla_core": 0,
        "gpu_fallback": True,
        "device_types": {"*": "dla"},
        "plugins": ("libplugin.so",),
    }.items(),
)


def document(measured: JsonObject) -> str:
    """The text of docs/versions.md.

    Args:
        measured: docs/rtx-options.json, as benchmarks/rtx_options.py writes it.
    """
    parts = (
        "# What each TensorRT can do",
        "This page is written by `trtpipe.trt.versions` from the tables that the code goes by; a test keeps it so. At "
        "build time the imported module decides, by what is found in it; these tables decide for `trtpipe validate`, "
        "and the contract tests hold the two against each other on the real Python bindings of each release below. "
        "TensorRT 9 is judged as 8.6: what came with 10.0 is refused for it.",
        "## Capabilities",
        markdown_table(("capability", *(title(*r) for r in RELEASES), "from"), _capabilities()),
        "## Builder options",
        "Every key of a job's `build` section is honoured or refused with a message. `yes`: honoured. A dash: refused, "
        "here with the value given. Options not listed are honoured by every release, or depend on the route "
        "([routes](routes.md)).",
        markdown_table(("option", *(title(*r) for r in RELEASES)), _options()),
        "TensorRT-RTX builds for the compute capabilities "
        f"{', '.join(RTX_COMPUTE_CAPABILITIES)}; named none, for all from {OLDEST_PORTABLE} on. "
        f"For {', '.join(RTX_WITHOUT_FP32_PRODUCTS)} it compiles no matrix product of FP32 tensors, in INT8 neither, "
        "but FP32 convolutions: a job with one needs `precision.fp16_mode`. Every value of `refit`, "
        "and `strip_plan`, need a GPU there, and `version_compatible` needs `exclude_lean_runtime`.",
        "### What TensorRT-RTX does with each option",
        "TensorRT-RTX accepts nearly every option without a word and carries out some. With "
        f"{measured['tensorrt_rtx']}, each value below was built with and without, on {len(measured['networks'])} "
        f"networks ({', '.join(measured['networks'])}), by `benchmarks/rtx_options.py`, without a GPU. `plan`: the "
        "plan differs on the networks counted; `nothing`: it does not, on any, and trtpipe refuses the value, unless "
        "it says what holds anyway; `refused`: TensorRT-RTX ends with an error, and trtpipe refuses the value, or asks "
        "for a GPU, before it builds.",
        markdown_table(("option", "effect", "networks"), _measured(measured)),
        "## How a graph is lowered",
        markdown_table(("release", "typing", "ONNX", "INT8", "FP16, BF16"), _lowering()),
        "On a weakly typed network the flags follow from the graph, and precision constraints hold its FP32 layers in "
        "FP32, but for what lies between Q/DQ, which INT8 kernels do whole. For 8.6, Q/DQ have zero points and float32 "
        "scales, weights are float32 with a Q of their own, reductions have their axes as attributes, and Gelu, Mish "
        "and the like are spelt out; the graph is then held against the operators that 8.6's parser takes, and what it "
        "does not take is refused by node. `trtpipe prepare --for 8.6.1` writes a kit so.",
        "## What was checked, and what never ran",
        markdown_table(("release", "checked", "never done"), _checked()),
        "## Platforms",
        markdown_table(
            ("`build.platform`", "device", "compute capability", "precisions", "DLA", "TensorRT", "RTX engines", ""),
            _platforms(),
        ),
        "DLA: where there is none, all that is for a DLA alone is refused: `dla` as `default_device_type` or in "
        "`device_types`, `dla_core`, `gpu_fallback`, the `dla_*` pools of `memory_pools`, and "
        f"{_code(DLA_FORMATS)} in `tensor_formats`. Where there is one, all but the first two need one of them. "
        f"Before compute capability {OLDEST_PORTABLE}, `sparse_weights` and {_code(AMPERE_FORMATS)} in "
        "`tensor_formats` are refused for TensorRT; TensorRT-RTX builds `hwc16` for 7.5.",
        "TensorRT: the releases of TensorRT proper that build for it. RTX engines: whether TensorRT-RTX runs its "
        "engines there; `not known` where it does not name the compute capability and nobody has tried.",
        "Sources: " + ", ".join(f"[{name}]({url})" for name, url in SOURCE_URLS.items()) + ".",
    )
    return "\n\n".join(parts) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _capabilities() -> Iterator[list[str]]:
    for capability in CAPABILITIES:
        has = ["yes" if capability.name in expected(*release) else "-" for release in RELEASES]
        yield [capability.title, *has, where(capability)]


def _options() -> Iterator[list[str]]:
    assert {field for field, _ in _VALUES} < {o.field for o in OPTIONS}
    for field, value in _VALUES:
        options: JsonObject = {field: value}
        build = Build.model_construct(**options)
        cells = []
        for name, version in RELEASES:
            unable = f"build.{field}: {title(name, version)} does not support"
            refused = any(message.startswith(unable) for _, message in refusals(build, None, name, version))
            cells.append("-" if refused else "yes")
        yield [f"`{field}: {_as_json(value)}`", *cells]


def _measured(measured: JsonObject) -> Iterator[list[str]]:
    for option, rows in measured["options"].items():
        for row in rows:
            beside = "".join(f", `{name}: {_as_json(value)}`" for name, value in row["with"].items())
            count = f"{len(row['networks'])} of {len(measured['networks'])}" if row["networks"] else ""
            yield [f"`{option}: {_as_json(row['value'])}`{beside}", row["effect"], count]


def _as_json(value: object) -> str:
    return json.dumps(value).replace('"', "")


def _lowering() -> Iterator[list[str]]:
    for name, version in RELEASES:
        able = expected(name, version)
        always = "strong_typing" in able and "weak_typing" not in able
        typing = "strong" if always else "strong, weak on request" if "strong_typing" in able else "weak"
        int8 = "Q/DQ in the graph" + (", or a calibrator (`quantization: implicit`)" if "weak_typing" in able else "")
        half = "in the graph" if "strong_typing" in able else "in the graph, and the FP16 flag; no BF16"
        newest = newest_opset(version) if name == "tensorrt" else None
        form = "as exported" if newest is None else f"opset {newest}, its own form"
        yield [title(name, version), typing, form, int8, half]


def _checked() -> Iterator[list[str]]:
    bindings = "every builder call on its real Python bindings over stub libraries, which compute nothing"
    for name, version in RELEASES:
        if name == "tensorrt_rtx":
            yield [title(name, version), "engines built, without a GPU", "engines executed, unless a report says so"]
        elif newest_opset(version) is not None:
            graphs = "graphs against the table of its parser's operators, and in ONNX Runtime"
            yield [title(name, version), f"{bindings}; {graphs}", "a graph parsed, an engine built or executed"]
        else:
            yield [title(name, version), bindings, "a graph parsed, an engine built or executed"]


def _platforms() -> Iterator[list[str]]:
    for platform in PLATFORMS.values():
        order = [p for p in PRECISIONS if p in platform.precisions]
        assert set(order) == BY_CAPABILITY[platform.compute_capability].precisions
        precisions = ", ".join(p.upper() for p in order)
        dla = "yes" if platform.dla else "-"
        rtx = {True: "yes", False: "no", None: "not known"}[rtx_support(platform.compute_capability).runs]
        since, until = BY_CAPABILITY[platform.compute_capability].releases
        releases = f"{since} or later" if since else f"before {until}" if until else "any"
        if platform.name.startswith("jetson"):
            rtx = "-"  # made for x86-64 alone
        row = [f"`{platform.name}`", platform.title, platform.compute_capability, precisions, dla, releases, rtx]
        yield [*row, platform.note]
