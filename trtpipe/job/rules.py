"""What must hold between the fields of a job: each rule looks at whole sections and yields what is broken.

A rule is run when every section it names could be read, so that one mistyped key does not hide other problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from calib.samples import ARRAY_SUFFIXES, SOURCES
from trtpipe.job.sections import Build, Calibration, Check, Data, Input, Model, Normalize, Output, Precision, Transform

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Broken:
    """`path` must `must` (got `got`). `hint` is the next step."""

    path: Path
    must: str
    got: str
    hint: str = ""


class BrokenRules(ValueError):
    """Raised inside pydantic's validation of a whole Job; carries what is broken."""

    def __init__(self, problems: tuple[Broken, ...]) -> None:
        lines = (f"{'.'.join(map(str, p.path))}: must {p.must} (got {p.got}). {p.hint}".rstrip() for p in problems)
        super().__init__("\n".join(lines))
        self.problems = problems


def broken(sections: Mapping[str, Any]) -> Iterator[Broken]:
    """Every rule that `sections` break. A section that is missing from the mapping could not be read."""
    for names, rule in RULES:
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _given(section: object, *fields: str) -> tuple[str, ...]:
    return tuple(f for f in fields if getattr(section, f) is not None)


def _changed(section: BaseModel) -> tuple[str, ...]:
    """Fields that differ from their default; a job that was written out in full and read again keeps its meaning."""
    fields = type(section).model_fields
    return tuple(f for f, i in fields.items() if getattr(section, f) != i.get_default(call_default_factory=True))


def _count(names: tuple[str, ...]) -> str:
    return " and ".join(names) if names else "none"


def _one_source(model: Model) -> Iterator[Broken]:
    sources = _given(model, "factory", "program", "onnx")
    if len(sources) != 1:
        alone = not sources and model.torchscript is not None
        hint = "torch.export cannot take a TorchScript file; beside one it is the baseline." if alone else ""
        got = "torchscript alone" if alone else _count(sources)
        yield Broken(("model",), "have exactly one of factory, program and onnx", got, hint)
    yield from _callable(model.factory, ("model", "factory"))
    if len(sources) == 1 and model.factory is None:
        own = "baseline" in _changed(model) and model.torchscript is None
        for key, value in (("args", model.args), ("weights", model.weights), ("baseline", own)):
            if value:
                yield Broken(("model", key), "be given only with factory", f"{key} with {sources[0]}", f"Remove {key}.")
    if model.torchscript is not None and "baseline" in _changed(model):
        got = f"{model.baseline} with torchscript"
        yield Broken(("model", "baseline"), "not be given when torchscript is the baseline", got, "Remove baseline.")
    legal = {"weights": (".safetensors", ".pt", ".pth"), "program": (".pt2",), "onnx": (".onnx",)}
    for key, suffixes in legal.items():
        yield from _suffix(getattr(model, key), ("model", key), suffixes)


def _callable(value: str | None, path: Path) -> Iterator[Broken]:
    if value is None:
        return
    module, colon, name = value.partition(":")
    if not colon or not all(p.isidentifier() for p in (*module.split("."), *name.split("."))):
        hint = ""
        if not colon and all(p.isidentifier() for p in value.split(".")) and "." in value:
            hint = f"Did you mean {':'.join(value.rsplit('.', 1))}?"
        yield Broken(path, "be package.module:callable", repr(value), hint)


def _suffix(value: str | None, path: Path, legal: tuple[str, ...]) -> Iterator[Broken]:
    if value is not None and PurePath(value).suffix not in legal:
        yield Broken(path, f"end in {' or '.join(legal)}", repr(value))


def _bindings(inputs: Mapping[str, Input]) -> Iterator[Broken]:
    ranges: dict[str, tuple[str, tuple[int, int, int]]] = {}
    first = next(iter(inputs))
    for name, spec in inputs.items():
        at: Path = ("inputs", name)
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
                yield Broken((*at, dim), "be a dimension named in shape", f"shape {_list(spec.shape)}")
            if not r.min <= r.opt <= r.max:
                yield Broken((*at, dim), "have min <= opt <= max", f"{r.min}, {r.opt}, {r.max}")
            known = ranges.setdefault(dim, (name, (r.min, r.opt, r.max)))
            if known[1] != (r.min, r.opt, r.max):
                got = f"{r.min}, {r.opt}, {r.max} and {', '.join(map(str, known[1]))}"
                yield Broken((*at, dim), f"have the same range as in inputs.{known[0]}", got, "Or use another name.")
        if names.count(str(spec.shape[0])) > 1:
            yield Broken((*at, "shape"), "use the batch dimension once, first", _list(spec.shape))
        if spec.shape[0] != inputs[first].shape[0]:
            must = f"begin with the batch dimension of inputs.{first}, {inputs[first].shape[0]}"
            yield Broken((*at, "shape"), must, _list(spec.shape))
        if spec.normalize is not None:
            channels = spec.shape[1] if len(spec.shape) > 1 else 1
            yield from _normalize(spec.normalize, (*at, "normalize"), channels)
            if spec.dtype not in ("float32", "float16", "uint8"):
                yield Broken((*at, "normalize"), "be given only for float32, float16 and uint8", spec.dtype)


def _list(items: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, items))}]"


def _normalize(value: Normalize, path: Path, channels: int | str | None) -> Iterator[Broken]:
    if len(value.mean) != len(value.std):
        yield Broken(path, "have as many std as mean", f"{len(value.mean)} mean, {len(value.std)} std")
    elif isinstance(channels, int) and len(value.mean) not in (1, channels):
        yield Broken(path, f"have one mean and std, or {channels} (one a channel)", str(len(value.mean)))
    for i, std in enumerate(value.std):
        if not std > 0:
            yield Broken((*path, "std", i), "be greater than 0", str(std))


def _names(inputs: Mapping[str, Input], outputs: Mapping[str, Output]) -> Iterator[Broken]:
    for name in outputs:
        if name in inputs:
            yield Broken(("outputs", name), "have a name that no input has", repr(name))


def _precision(precision: Precision) -> Iterator[Broken]:
    if precision.fp16_mode and precision.bf16_mode:
        yield Broken(("precision", "bf16_mode"), "not be set with fp16_mode", "both true", "Choose one.")
    judged = (precision.int8_mode or precision.fp8_mode) and (precision.fp16_mode or precision.bf16_mode)
    if precision.placement == "all" and not judged:
        must, hint = (
            "be auto unless one of int8_mode and fp8_mode and one of fp16_mode and bf16_mode are true",
            "INT8 or FP8 alone leaves out nothing.",
        )
        yield Broken(("precision", "placement"), must, "all", hint)
    if precision.keep.fp32 and not (precision.fp16_mode or precision.bf16_mode or precision.quantized):
        yield Broken(("precision", "keep", "fp32"), "be empty when everything is FP32", _list(precision.keep.fp32))
    for half, mode in (("fp16", precision.fp16_mode), ("bf16", precision.bf16_mode)):
        kept = getattr(precision.keep, half)
        if kept and not (mode and precision.quantized):
            must = f"be empty unless {half}_mode and int8_mode (or another number format) are on"
            yield Broken(("precision", "keep", half), must, _list(kept))
    if precision.weights is not None and precision.nvfp4_mode:
        hint = "NVFP4 holds weights and activations of linears: choose one."
        yield Broken(("precision", "weights"), "not be given with nvfp4_mode", precision.weights, hint)
    yield from _formats(precision)


def _formats(precision: Precision) -> Iterator[Broken]:
    """What `precision.formats` names must be on, and there must be a choice."""
    on = {"int8": precision.int8_mode, "fp8": precision.fp8_mode, "nvfp4": precision.nvfp4_mode, "int4": False}
    if precision.weights is not None:
        on[precision.weights] = True
    for glob, name in precision.formats.items():
        if not on[name]:
            key = f"{name}_mode: true" if f"{name}_mode" in type(precision).model_fields else f"weights: {name}"
            path = ("precision", "formats", glob)
            yield Broken(path, "be a number format that is on", name, f"Add precision.{key}.")
    if precision.formats and sum(on.values()) == 1 and all(on[n] for n in precision.formats.values()):
        only = next(n for n, chosen in on.items() if chosen)
        hint = "Add another format, or use precision.keep."
        yield Broken(("precision", "formats"), "choose among several formats that are on", only, hint)


def _route(build: Build, precision: Precision, model: Model) -> Iterator[Broken]:
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
        for name in _changed(build):
            if name not in ("route", "target"):
                yield Broken(("build", name), "be left out for target onnxruntime", "a value", "It steers TensorRT.")


def _formats_of(build: Build, inputs: Mapping[str, Input], outputs: Mapping[str, Output]) -> Iterator[Broken]:
    for name in sorted({*build.tensor_formats} - {*inputs, *outputs}):
        yield Broken(("build", "tensor_formats", name), f"be {', '.join((*inputs, *outputs))}", name)


def _word(value: bool | str) -> str:
    """A value as YAML writes it."""
    return "true" if value is True else str(value)


def _engine(build: Build, check: Check) -> Iterator[Broken]:
    """No GPU executes an ONNX file, and a hybrid module is no engine that could be timed as one."""
    if build.target == "onnxruntime" and check.require == "engine":
        must, hint = "be graph for target onnxruntime", "No GPU executes an ONNX file: remove check.require."
        yield Broken(("check", "require"), must, "engine", hint)
    if build.allow_torch_fallback and (limit := check.limits.speedup_over_fp16_min) is not None:
        path, hint = ("check", "limits", "speedup_over_fp16_min"), "It times whole engines: remove one of the two."
        yield Broken(path, "be left out with build.allow_torch_fallback", str(limit), hint)


def _measured_in_int8(precision: Precision, build: Build, check: Check) -> Iterator[Broken]:
    """Sensitivity and tuning compare modules with and without Q/DQ, which only explicit INT8 has."""
    if precision.int8_mode and build.quantization == "explicit":
        return
    got = "build.quantization: implicit" if precision.int8_mode else "precision.int8_mode: false"
    for name, value, default in (("sensitivity", check.sensitivity, False), ("on_fail", check.on_fail, "error")):
        if value != default:
            hint = f"It measures what Q/DQ cost module by module: remove check.{name}, or quantize explicitly."
            yield Broken(("check", name), f"be {str(default).lower()} without explicit INT8", got, hint)


def _calibrated(precision: Precision, calibration: Calibration | None, model: Model) -> Iterator[Broken]:
    if precision.calibrated and calibration is None and model.onnx is None:  # the file may be quantized already
        hint = "Add calibration.images, or calibration.table."
        yield Broken(("calibration",), f"be given when precision.{precision.quantizing_key} is true", "none", hint)


def _calibration(calibration: Calibration | None) -> Iterator[Broken]:
    if calibration is None:
        return
    yield from _data("calibration", calibration, (*SOURCES, "table"))
    if "percentile" in _changed(calibration) and calibration.algorithm != "percentile":
        must, got = "be given only with algorithm: percentile", f"algorithm: {calibration.algorithm}"
        yield Broken(("calibration", "percentile"), must, got)
    yield from _suffix(calibration.table, ("calibration", "table"), (".json",))
    if calibration.table is not None:
        for name in ("samples", "batch_size", "seed", "workers", "on_bad_sample"):
            if name in _changed(calibration):
                got = f"{getattr(calibration, name)} with table"
                yield Broken(("calibration", name), "be left out with calibration.table", got, "No sample is read.")


def _calibration_fits(calibration: Calibration | None, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    if calibration is not None:
        yield from _fits("calibration", calibration, calibration.transform, inputs)


def _check(check: Check) -> Iterator[Broken]:
    yield from _data("check", check, SOURCES)
    if check.labels is not None and check.images is None:
        yield Broken(("check", "labels"), "be given only with check.images", "no images", "It names class folders.")
    limits = check.limits
    if not limits.given:
        hint = "A check without a limit cannot fail; start with cosine_min: 0.99."
        yield Broken(("check", "limits"), "set at least one limit", "none", hint)
    if limits.confident and not {"top1_agreement_min", "accuracy_drop_max"} & set(limits.given):
        must, hint = "be given only with top1_agreement_min or accuracy_drop_max", "Other figures have no interval."
        yield Broken(("check", "limits", "confident"), must, "neither", hint)
    if limits.speedup_over_fp16_min is not None and check.require != "engine":
        path, hint = ("check", "limits", "speedup_over_fp16_min"), "Speed is measured on the engine itself."
        yield Broken(path, "be given only with check.require: engine", f"require: {check.require}", hint)


def _check_fits(check: Check, inputs: Mapping[str, Input], calibration: Calibration | None) -> Iterator[Broken]:
    if check.transform is not None or calibration is None or calibration.images is None:
        inherited = None if calibration is None else calibration.transform
        yield from _fits("check", check, check.transform or inherited, inputs)
    elif check.images is not None and len(inputs) != 1:
        yield _one_input("check", inputs)  # the rest was reported for calibration.images, transformed alike


def _data(section: str, data: Data, sources: tuple[str, ...]) -> Iterator[Broken]:
    given = _given(data, *sources)
    if len(given) != 1:
        yield Broken((section,), f"have exactly one of {', '.join(sources[:-1])} and {sources[-1]}", _count(given))
    yield from _callable(data.factory, (section, "factory"))
    yield from _suffix(data.arrays, (section, "arrays"), ARRAY_SUFFIXES)
    transform = data.transform
    if transform is None:
        return
    path: Path = (section, "transform")
    if data.images is None and given:
        yield Broken(path, "be given only with images", f"transform with {given[0]}", "Remove transform.")
    if "interpolation" in _changed(transform) and transform.resize is None and transform.callable is None:
        yield Broken((*path, "interpolation"), "be given only with resize", "no resize", "It steers resize alone.")
    yield from _callable(transform.callable, (*path, "callable"))
    others = tuple(f for f in _changed(transform) if f != "callable")
    if transform.callable is not None and others:
        yield Broken((*path, "callable"), "stand alone", f"it with {_count(others)}", "It does the whole transform.")
    elif transform.normalize is not None:
        yield from _normalize(transform.normalize, (*path, "normalize"), 1 if transform.grayscale else 3)


def _one_input(section: str, inputs: Mapping[str, Input]) -> Broken:
    hint = f"Use {section}.arrays or {section}.factory."
    return Broken((section, "images"), "feed exactly one input", ", ".join(inputs), hint)


def _fits(section: str, data: Data, transform: Transform | None, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    """Whether what `data` gives can be what the inputs take."""
    if data.arrays is not None and PurePath(data.arrays).suffix == ".npy" and len(inputs) != 1:
        got = f"inputs {', '.join(inputs)}"
        yield Broken((section, "arrays"), "be .npz or .safetensors for more than one input", got)
    if data.images is None:
        return
    if len(inputs) != 1:
        yield _one_input(section, inputs)
        return
    name, spec = next(iter(inputs.items()))
    if transform is not None and transform.normalize is not None and spec.dtype == "uint8":
        hint = f"Move it to inputs.{name}.normalize, which the engine does itself."
        path = (section, "transform", "normalize")
        yield Broken(path, f"not be given when inputs.{name} is uint8", "normalize", hint)
    if transform is None or transform.callable is None:
        yield from _image_shape(section, transform, name, spec)


def _image_shape(section: str, transform: Transform | None, name: str, spec: Input) -> Iterator[Broken]:
    """Images become [N, C, H, W] with C and, after a crop or an exact resize, H and W known beforehand."""
    path: Path = ("inputs", name, "shape")
    channels = 1 if transform is not None and transform.grayscale else 3
    if spec.dtype not in ("float32", "float16", "uint8"):
        yield Broken(("inputs", name, "dtype"), "be float32, float16 or uint8 to take images", spec.dtype)
    if len(spec.shape) != 4:
        yield Broken(path, f"be [N, {channels}, height, width] for {section}.images", _list(spec.shape))
        return
    if isinstance(spec.shape[1], int) and spec.shape[1] != channels:
        hint = f"{section}.transform.grayscale gives 1 channel, without it there are 3."
        yield Broken(path, f"have {channels} channels for {section}.images", _list(spec.shape), hint)
    exact = None if transform is None else transform.center_crop
    if exact is None and transform is not None and isinstance(transform.resize, tuple):
        exact = transform.resize
    if exact is not None:
        wanted = (exact, exact) if isinstance(exact, int) else exact
        if any(isinstance(s, int) and s != w for s, w in zip(spec.shape[2:], wanted, strict=True)):
            must = f"end in {wanted[0]}, {wanted[1]}, the size {section}.transform gives"
            yield Broken(path, must, _list(spec.shape))


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Broken]]], ...] = (
    (("model",), _one_source),
    (("inputs",), _bindings),
    (("inputs", "outputs"), _names),
    (("precision",), _precision),
    (("build", "precision", "model"), _route),
    (("build", "check"), _engine),
    (("build", "inputs", "outputs"), _formats_of),
    (("precision", "build", "check"), _measured_in_int8),
    (("precision", "calibration", "model"), _calibrated),
    (("calibration",), _calibration),
    (("calibration", "inputs"), _calibration_fits),
    (("check",), _check),
    (("check", "inputs", "calibration"), _check_fits),
)
