"""What must hold between the fields of a job: each rule looks at whole sections and yields what is broken.

A rule is run when every section it names could be read, so that one mistyped key does not hide other problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trtpipe.job.broken import (
    IMAGE_DTYPES,
    SPEEDUP,
    Broken,
    changed,
    given,
    joined_names,
    listed,
    named_callable,
    normalization,
    suffixed,
)
from trtpipe.job.build_options import FORMAT_DIMENSIONS, TENSOR_FORMATS
from trtpipe.job.data_rules import (
    calibrated,
    calibrated_by_tensorrt,
    calibration_fits,
    calibration_section,
    check_fits,
    check_section,
    metrics_fit,
)
from trtpipe.job.problems import shown
from trtpipe.job.sections import FROM_TORCHSCRIPT, Build, Check, Input, ModelSource, Output, Precision, Range
from trtpipe.job.yamlfile import KeyPath
from trtpipe.outputs import is_plain
from trtpipe.values import DimRange


def broken(sections: Mapping[str, Any]) -> Iterator[Broken]:
    """Every rule that `sections` break. A section that is missing from the mapping could not be read."""
    for names, rule in RULES:
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _one_source(model: ModelSource) -> Iterator[Broken]:
    sources = given(model, "factory", "program", "onnx")
    if len(sources) != 1:
        alone = not sources and model.torchscript is not None
        hint = f"torch.export takes no TorchScript file. {FROM_TORCHSCRIPT}" if alone else ""
        got = "torchscript alone" if alone else joined_names(sources)
        yield Broken(("model",), "have exactly one of factory, program and onnx", got, hint)
    yield from named_callable(model.factory, ("model", "factory"))
    if len(sources) == 1 and model.factory is None:
        own = "baseline" in changed(model) and model.torchscript is None
        only = (("args", model.args), ("weights", model.weights), ("baseline", own), ("quantized", model.quantized))
        for key, value in only:
            if value:
                yield Broken(("model", key), "be given only with factory", f"{key} with {sources[0]}", f"Remove {key}.")
    if model.torchscript is not None and "baseline" in changed(model):
        got = f"{model.baseline} with torchscript"
        yield Broken(("model", "baseline"), "not be given when torchscript is the baseline", got, "Remove baseline.")
    legal = {"weights": (".safetensors", ".pt", ".pth"), "program": (".pt2",), "onnx": (".onnx",)}
    for key, suffixes in legal.items():
        yield from suffixed(getattr(model, key), ("model", key), suffixes)


def _bindings(inputs: Mapping[str, Input]) -> Iterator[Broken]:
    ranges: dict[str, tuple[str, tuple[int, int, int]]] = {}
    first = next(iter(inputs))
    for name, spec in inputs.items():
        at: KeyPath = ("inputs", name)
        names = [d for d in spec.shape if isinstance(d, str)]
        for reserved in sorted(set(names) & set(type(spec).model_fields)):
            yield Broken(
                (*at, "shape"), "name dimensions other than its own keys", reserved, "Rename it, for example N."
            )
        for dim in dict.fromkeys(names):
            if dim not in spec.dims and dim not in type(spec).model_fields:
                yield Broken(
                    (*at, "shape"), f"have a range for {dim}", "none", f"Add {dim}: {{min: 1, opt: 8, max: 32}}."
                )
        for dim, r in spec.dims.items():
            if dim not in names:
                yield Broken((*at, dim), "be a dimension named in shape", f"shape {listed(spec.shape)}")
            yield from _in_order(r, (*at, dim))
            known = ranges.setdefault(dim, (name, (r.min, r.opt, r.max)))
            if known[1] != (r.min, r.opt, r.max):
                got = f"{r.min}, {r.opt}, {r.max} and {', '.join(map(str, known[1]))}"
                yield Broken((*at, dim), f"have the same range as in inputs.{known[0]}", got, "Or use another name.")
        if names.count(str(spec.shape[0])) > 1:
            yield Broken((*at, "shape"), "use the batch dimension once, first", listed(spec.shape))
        if spec.shape[0] != inputs[first].shape[0]:
            must = f"begin with the batch dimension of inputs.{first}, {inputs[first].shape[0]}"
            hint = "Put it first, and transpose in the model's forward."
            if inputs[first].shape[0] not in names:
                hint = (
                    "Each sample has a row of every input: give it that dimension too. What is one for the whole batch "
                    "(a table, a scale) becomes a constant of the model, or is given to each sample and taken as x[0]."
                )
            yield Broken((*at, "shape"), must, listed(spec.shape), hint)
        if spec.normalize is not None:
            channels = spec.shape[1] if len(spec.shape) > 1 else 1
            yield from normalization(spec.normalize, (*at, "normalize"), channels)
            if spec.dtype not in IMAGE_DTYPES:
                yield Broken((*at, "normalize"), "be given only for float32, float16 and uint8", spec.dtype)


def _in_order(r: Range | DimRange, path: KeyPath) -> Iterator[Broken]:
    if not r.min <= r.opt <= r.max:
        yield Broken(path, "have min <= opt <= max", f"{r.min}, {r.opt}, {r.max}")


def _paths(model: ModelSource, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    """Names with dots are paths in the arguments of a factory's network: no tensor has parts of its own."""
    for name in inputs if model.factory is not None else ():
        parts = name.split(".")
        above = [".".join(parts[:k]) for k in range(1, len(parts))]
        if whole := next((a for a in above if a in inputs), None):
            yield Broken(
                ("inputs", name), f"not be a part of inputs.{whole}, a tensor", repr(name), "Rename one of them."
            )
        if not all(parts):
            yield Broken(("inputs", name), "have a name on each side of a dot", repr(name))


def _names(inputs: Mapping[str, Input], outputs: Mapping[str, Output]) -> Iterator[Broken]:
    for name in outputs:
        if not name:
            yield Broken(("outputs", name), "have a name", repr(name))
        if name in inputs:
            hint = (
                "Name the input otherwise: where the model names its outputs itself (a dict), theirs are given. Of "
                "model.onnx, whose names are the file's, leave that output out: it is what goes in."
            )
            yield Broken(("outputs", name), "have a name that no input has", repr(name), hint)


def _precision(precision: Precision) -> Iterator[Broken]:
    if precision.fp16_mode and precision.bf16_mode:
        yield Broken(("precision", "bf16_mode"), "not be set with fp16_mode", "both true", "Choose one.")
    judged = (precision.int8_mode or precision.fp8_mode) and (precision.fp16_mode or precision.bf16_mode)
    if precision.placement == "all" and not judged:
        must, hint = (
            "be auto unless one of int8_mode and fp8_mode and one of fp16_mode and bf16_mode are true",
            "It is about which operations take INT8 or FP8 rather than FP16 or BF16.",
        )
        yield Broken(("precision", "placement"), must, "all", hint)
    if precision.keep.fp32 and not (precision.fp16_mode or precision.bf16_mode or precision.quantized):
        yield Broken(("precision", "keep", "fp32"), "be empty when everything is FP32", listed(precision.keep.fp32))
    for half, mode in (("fp16", precision.fp16_mode), ("bf16", precision.bf16_mode)):
        kept = getattr(precision.keep, half)
        if kept and not (mode and precision.quantized):
            must = f"be empty unless {half}_mode and int8_mode (or another number format) are on"
            yield Broken(("precision", "keep", half), must, listed(kept))
    if precision.weights is not None and precision.nvfp4_mode:
        hint = "NVFP4 holds weights and activations of linears: choose one."
        yield Broken(("precision", "weights"), "not be given with nvfp4_mode", precision.weights, hint)
    yield from _formats(precision)


def _formats(precision: Precision) -> Iterator[Broken]:
    """What `precision.formats` names must be on."""
    on = {*precision.modes, *filter(None, [precision.weights])}
    for glob, name in precision.formats.items():
        if name not in on:
            key = f"{name}_mode: true" if f"{name}_mode" in type(precision).model_fields else f"weights: {name}"
            four = (
                f"weights: {precision.weights}" if precision.weights else "nvfp4_mode" if precision.nvfp4_mode else ""
            )
            beside = not four or (key.endswith("true") and name != "nvfp4")  # a job has one format of 4 bits
            hint = f"Add precision.{key}." if beside else f"It cannot be beside precision.{four}: choose one."
            yield Broken(("precision", "formats", glob), "be a number format that is on", name, hint)


def _route(build: Build, precision: Precision, model: ModelSource) -> Iterator[Broken]:
    if build.use_onnx and build.route != "torch2trt":
        hint = "Route onnx is the way through ONNX for every target."
        yield Broken(("build", "use_onnx"), "be given only for route torch2trt", build.route, hint)
    if build.allow_torch_fallback and build.route != "torch_tensorrt":
        hint = "Remove it: other routes make a whole engine or none. Or use route torch_tensorrt."
        yield Broken(("build", "allow_torch_fallback"), "be given only for route torch_tensorrt", build.route, hint)
    if build.route == "torch2trt":
        if build.target != "tensorrt":
            yield Broken(("build", "target"), "be tensorrt for route torch2trt", build.target)
        if precision.bf16_mode:
            yield Broken(
                ("precision", "bf16_mode"), "be false for route torch2trt", "true", "It has FP16 and INT8 alone."
            )
        for key in ("fp8_mode", "nvfp4_mode", "weights"):
            if value := getattr(precision, key):
                must, hint = "be left out for route torch2trt", "It has FP16 and INT8 alone: use route onnx."
                yield Broken(("precision", key), must, _word(value), hint)
        for key in ("program", "onnx"):
            if value := getattr(model, key):
                hint = "torch2trt converts an eager module: use model.factory."
                yield Broken(("model", key), "not be given for route torch2trt", repr(value), hint)
    if build.route == "torch_tensorrt" and build.target == "onnxruntime":
        yield Broken(("build", "target"), "be tensorrt or tensorrt_rtx for route torch_tensorrt", build.target)
    if build.target == "onnxruntime" and precision.bf16_mode:
        hint = "Its operators take no BF16. Use fp16_mode or int8_mode."
        yield Broken(("precision", "bf16_mode"), "be false for target onnxruntime", "true", hint)
    if build.target == "onnxruntime":
        for key in ("fp8_mode", "nvfp4_mode"):
            if getattr(precision, key):
                hint = "ONNX Runtime optimizes FP8 graphs wrongly on a CPU and has no FP4: use int8_mode."
                yield Broken(("precision", key), "be false for target onnxruntime", "true", hint)
        if precision.weights == "nvfp4":
            hint = "ONNX Runtime has no FP4 on a CPU: use int4."
            yield Broken(("precision", "weights"), "not be nvfp4 for target onnxruntime", "nvfp4", hint)
        for name in changed(build):
            if name not in ("route", "target"):
                got = shown(getattr(build, name))
                yield Broken(("build", name), "be left out for target onnxruntime", got, "It steers TensorRT.")


def _plugins(build: Build, model: ModelSource) -> Iterator[Broken]:
    """Plugins are for operations of torch.library, which have numbers that an engine can be checked by."""
    path: KeyPath = ("build", "plugins")
    if build.plugins and model.onnx is not None:
        hint = "Nothing says what an operator of another domain computes: give the network as model.factory."
        yield Broken(path, "not be given with model.onnx", "both", hint)
    names = [name.rpartition("/")[2] for name in build.plugins]
    for name in names:
        if not is_plain(name) or not re.search(r"\.so(\.\d+)*$", name):
            hint = "Letters, digits, dots, dashes and underscores: the bundle keeps it under this name."
            yield Broken(path, "be shared libraries, like libtwice.so", repr(name), hint)
    if len({n.lower() for n in names}) < len(names):
        yield Broken(path, "have names of their own, which do not differ in case alone", listed(tuple(names)))


#: TensorRT's MemoryPoolType: of a DLA "at least 4 KiB and must be a power of 2".
_LEAST_DLA_POOL = 4096


def _pools_of_a_dla(build: Build) -> Iterator[Broken]:
    for pool, size in build.memory_pools.items():
        if pool.startswith("dla_") and (size < _LEAST_DLA_POOL or size & (size - 1)):
            yield Broken(("build", "memory_pools", pool), f"be a power of 2, {_LEAST_DLA_POOL} or more", str(size))


def _formats_of(build: Build, inputs: Mapping[str, Input], outputs: Mapping[str, Output]) -> Iterator[Broken]:
    for name in sorted({*build.tensor_formats} - {*inputs, *outputs}):
        yield Broken(("build", "tensor_formats", name), f"be {', '.join((*inputs, *outputs))}", name)
    dtypes = {n: i.dtype for n, i in inputs.items()} | {n: o.dtype for n, o in outputs.items()}
    for name in sorted(n for n, wanted in build.tensor_formats.items() if not wanted):
        yield Broken(("build", "tensor_formats", name), "name a format or more", "[]", "Leave it out for any.")
    for name, dtype in dtypes.items():
        legal = TENSOR_FORMATS.get(dtype, ("linear",))
        rank = len(inputs[name].shape) if name in inputs else None  # what outputs have, the model alone says
        fitting = tuple(f for f in legal if rank is None or FORMAT_DIMENSIONS.get(f, 3) <= rank)
        for wanted in build.tensor_formats.get(name, ()):
            path: KeyPath = ("build", "tensor_formats", name)
            if wanted not in legal:
                hint = "Or give the binding another dtype."
                yield Broken(path, f"be a format that {dtype} may have here: {', '.join(legal)}", wanted, hint)
            elif wanted not in fitting:
                must = f"be a format of {dtype} with {rank} dimensions: {', '.join(fitting)}"
                yield Broken(path, must, wanted, "It needs more of them.")


def _word(value: bool | str) -> str:
    """A value as YAML writes it."""
    return "true" if value is True else str(value)


def _engine(build: Build, check: Check) -> Iterator[Broken]:
    """No GPU executes an ONNX file, and a hybrid module is no engine that could be timed as one."""
    if build.target == "onnxruntime" and check.require == "engine":
        must, hint = "be graph for target onnxruntime", "No GPU executes an ONNX file: remove check.require."
        yield Broken(("check", "require"), must, "engine", hint)
    if build.allow_torch_fallback and (limit := check.limits.speedup_over_fp16_min) is not None:
        path, hint = SPEEDUP, "It times whole engines: remove one of the two."
        yield Broken(path, "be left out with build.allow_torch_fallback", str(limit), hint)


def _profiles(build: Build, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    """Profiles are parts of the inputs' ranges, and together take every size that these declare."""
    path: KeyPath = ("build", "profiles")
    own = {d: r for spec in inputs.values() for d, r in spec.dims.items() if r.min < r.max}
    if build.profiles and not own:
        hint = "Leave it out, or give a dimension of the inputs a range."
        yield Broken(path, "be given only for inputs with dynamic dimensions", f"{len(build.profiles)}", hint)
        return
    for number, profile in enumerate(build.profiles):
        for name, r in profile.items():
            yield from _in_order(r, (*path, number, name))
            if name not in own:
                hint = "Give it a range under inputs first."
                yield Broken(
                    (*path, number, name), f"be a dynamic dimension of the inputs, {', '.join(own)}", name, hint
                )
            elif r.min < own[name].min or r.max > own[name].max:
                must = f"lie within the input's range {own[name].min} to {own[name].max}"
                hint = "Widen the input's range or narrow the profile."
                yield Broken((*path, number, name), must, f"{r.min} to {r.max}", hint)
    for name, whole in own.items() if build.profiles else ():
        reached = whole.min - 1
        for least, most in sorted((p.get(name, whole).min, p.get(name, whole).max) for p in build.profiles):
            reached = max(reached, most) if least <= reached + 1 else reached
        if reached < whole.max:
            must = f"together take every size that inputs declares for {name}, {whole.min} to {whole.max}"
            hint = "Add a profile, or declare only what the profiles take."
            yield Broken(path, must, f"none for {reached + 1}", hint)


def _measured_by_module(precision: Precision, build: Build, check: Check) -> Iterator[Broken]:
    """Sensitivity and tuning compare modules with and without Q/DQ, which explicit quantization alone places."""
    if precision.quantized and build.quantization == "explicit":
        return
    got = "build.quantization: implicit" if precision.quantized else "no number format that quantizes"
    for name, value, default in (("sensitivity", check.sensitivity, False), ("on_fail", check.on_fail, "error")):
        if value != default:
            hint = f"It measures what Q/DQ cost module by module: remove check.{name}, or quantize explicitly."
            yield Broken(("check", name), f"be {str(default).lower()} without explicit quantization", got, hint)


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Broken]]], ...] = (
    (("model",), _one_source),
    (("inputs",), _bindings),
    (("model", "inputs"), _paths),
    (("inputs", "outputs"), _names),
    (("precision",), _precision),
    (("build", "precision", "model"), _route),
    (("build", "check"), _engine),
    (("build", "model"), _plugins),
    (("build", "inputs"), _profiles),
    (("build",), _pools_of_a_dla),
    (("build", "inputs", "outputs"), _formats_of),
    (("precision", "build", "check"), _measured_by_module),
    (("precision", "calibration", "model"), calibrated),
    (("build", "calibration"), calibrated_by_tensorrt),
    (("calibration",), calibration_section),
    (("calibration", "inputs"), calibration_fits),
    (("check",), check_section),
    (("check", "inputs", "calibration"), check_fits),
    (("check", "outputs"), metrics_fit),
)
