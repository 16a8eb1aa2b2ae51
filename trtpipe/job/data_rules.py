"""What must hold of the samples that a job calibrates and checks on, of its metrics, and of the inputs they are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from calib.algorithms import BASES
from calib.files import suffix_of
from calib.samples import ARRAY_SUFFIXES, SOURCES
from trtpipe.errors import either
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
from trtpipe.job.limits import BUILT_IN_METRICS, OF_OUTPUTS, SHARE_LIMITS
from trtpipe.job.sections import (
    INT8_ALONE,
    OR_RECALIBRATE,
    Build,
    Calibration,
    Check,
    Data,
    Input,
    ModelSource,
    Output,
    Precision,
    Transform,
)
from trtpipe.job.yamlfile import KeyPath


def calibrated(precision: Precision, calibration: Calibration | None, model: ModelSource) -> Iterator[Broken]:
    """What is quantized by ranges has them."""
    own = model.quantized or model.factory is None  # a file may be quantized already
    if precision.calibrated and calibration is None and not own:
        hint = "Add calibration.images, or calibration.table."
        yield Broken(("calibration",), f"be given when precision.{precision.quantizing_key} is true", "none", hint)
    kept = model.quantized and not (calibration is not None and calibration.recalibrate)
    if kept and precision.on != ("int8_mode",):
        yield Broken(("precision",), INT8_ALONE, ", ".join(precision.on) or "none", OR_RECALIBRATE)


def calibrated_by_tensorrt(build: Build, calibration: Calibration | None) -> Iterator[Broken]:
    """With implicit quantization TensorRT's own calibrators find the ranges, from samples."""
    if calibration is None or build.quantization != "implicit":
        return
    if calibration.table is not None:
        must = "be left out with build.quantization implicit, where TensorRT calibrates by itself"
        yield Broken(("calibration", "table"), must, calibration.table, "Give samples, or use explicit.")
    if calibration.algorithm not in ("auto", *BASES):
        must = f"be one of {', '.join(BASES)} with build.quantization implicit, as TensorRT has no other"
        yield Broken(("calibration", "algorithm"), must, calibration.algorithm, "Use explicit.")


def calibration_section(calibration: Calibration | None) -> Iterator[Broken]:
    """The calibration section agrees with itself."""
    if calibration is None:
        return
    yield from _data("calibration", calibration, (*SOURCES, "table"))
    if "percentile" in changed(calibration) and calibration.algorithm != "percentile":
        must, got = "be given only with algorithm: percentile", f"algorithm: {calibration.algorithm}"
        yield Broken(("calibration", "percentile"), must, got)
    yield from suffixed(calibration.table, ("calibration", "table"), (".json",))
    if calibration.table is not None:
        for name in ("samples", "batch_size", "seed", "workers", "on_bad_sample"):
            if name in changed(calibration):
                got = f"{getattr(calibration, name)} with table"
                yield Broken(("calibration", name), "be left out with calibration.table", got, "No sample is read.")


def calibration_fits(calibration: Calibration | None, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    """Its samples can be what the inputs take."""
    if calibration is not None:
        yield from _fits("calibration", calibration, calibration.transform, inputs)


def check_section(check: Check) -> Iterator[Broken]:
    """The check section agrees with itself."""
    yield from _data("check", check, SOURCES)
    yield from _labels(check)
    yield from _metrics(check)
    limits = check.limits
    if not limits.given:
        hint = "A check without a limit cannot fail; start with cosine_min: 0.99."
        yield Broken(("check", "limits"), "set at least one limit", "none", hint)
    if limits.confident and not limits.metrics and not {*SHARE_LIMITS} & {*limits.given}:
        must = "be given only with top1_agreement_min, accuracy_drop_max or limits of metrics"
        hint = "Other figures have no interval."
        yield Broken(("check", "limits", "confident"), must, "neither", hint)
    if limits.speedup_over_fp16_min is not None and check.require != "engine":
        path, hint = SPEEDUP, "Speed is measured on the engine itself."
        yield Broken(path, "be given only with check.require: engine", f"require: {check.require}", hint)


def _labels(check: Check) -> Iterator[Broken]:
    """Rows of a .npy are found by the place of a sample in its file, all else by the names of images."""
    if check.labels is None:
        return
    rows = suffix_of(check.labels) == ".npy"
    if rows and check.images is not None:
        hint = "Images have no order: give a folder of masks, a .json of COCO or a .csv."
        yield Broken(("check", "labels"), "be no .npy with check.images", repr(check.labels), hint)
    if not rows and check.images is None:
        must, hint = "be given only with check.images, unless it is a .npy", "It names class folders or images."
        yield Broken(("check", "labels"), must, "no images", hint)


def _metrics(check: Check) -> Iterator[Broken]:
    for name, metric in check.metrics.items():
        path: KeyPath = ("check", "metrics", name)
        if not name.isidentifier() or name == "accuracy":
            yield Broken(path, "have a name of letters, digits and _ other than accuracy", repr(name))
        if metric.built_in:
            if metric.better is not None:
                hint = f"It is known for {metric.function}: remove it."
                yield Broken((*path, "better"), "be given only for a callable", metric.better, hint)
        elif ":" in metric.function or "." in metric.function:
            yield from named_callable(metric.function, (*path, "function"))
        else:
            must = f"be {', '.join(BUILT_IN_METRICS)} or package.module:callable"
            yield Broken((*path, "function"), must, repr(metric.function))
    for name, limits in check.limits.metrics.items():
        path = ("check", "limits", "metrics", name)
        if name not in check.metrics:
            hint = f"Add check.metrics.{name}." if not check.metrics else ""
            yield Broken(path, f"be a metric of check.metrics, {joined_names(tuple(check.metrics))}", name, hint)
        if not limits.given:
            yield Broken(path, "set min, max or drop_max", "none")
        if limits.min is not None and limits.max is not None:
            must, hint = "set one of min and max", "One of them is what better figures are away from."
            yield Broken(path, must, f"min: {limits.min:g}, max: {limits.max:g}", hint)


def metrics_fit(check: Check, outputs: Mapping[str, Output]) -> Iterator[Broken]:
    """Built-in metrics are of outputs that the job has."""
    for name, metric in check.metrics.items():
        for key in OF_OUTPUTS if metric.built_in else ():
            given = metric.args.get(key)
            if isinstance(given, str) and given not in outputs:
                path: KeyPath = ("check", "metrics", name, "args", key)
                yield Broken(path, f"be one of the job's outputs, {either(tuple(outputs) or ('none',))}", repr(given))


def check_fits(check: Check, inputs: Mapping[str, Input], calibration: Calibration | None) -> Iterator[Broken]:
    """Its samples can be what the inputs take."""
    if check.transform is not None or calibration is None or calibration.images is None:
        inherited = None if calibration is None else calibration.transform
        yield from _fits("check", check, check.transform or inherited, inputs)
    elif check.images is not None and len(inputs) != 1:
        yield _one_input("check", inputs)  # the rest was reported for calibration.images, transformed alike


def _data(section: str, data: Data, sources: tuple[str, ...]) -> Iterator[Broken]:
    sources_given = given(data, *sources)
    if len(sources_given) != 1:
        yield Broken(
            (section,), f"have exactly one of {', '.join(sources[:-1])} and {sources[-1]}", joined_names(sources_given)
        )
    yield from named_callable(data.factory, (section, "factory"))
    yield from suffixed(data.arrays, (section, "arrays"), ARRAY_SUFFIXES)
    transform = data.transform
    if transform is None:
        return
    path: KeyPath = (section, "transform")
    if data.images is None and sources_given:
        hint = "Give it as check.transform." if sources_given[0] == "table" else "Remove transform."
        yield Broken(path, "be given only with images", f"transform with {sources_given[0]}", hint)
    if "interpolation" in changed(transform) and transform.resize is None and transform.callable is None:
        yield Broken((*path, "interpolation"), "be given only with resize", "no resize", "It steers resize alone.")
    yield from named_callable(transform.callable, (*path, "callable"))
    others = tuple(f for f in changed(transform) if f != "callable")
    if transform.callable is not None and others:
        yield Broken(
            (*path, "callable"), "stand alone", f"it with {joined_names(others)}", "It does the whole transform."
        )
    elif transform.normalize is not None:
        yield from normalization(transform.normalize, (*path, "normalize"), 1 if transform.grayscale else 3)


def _one_input(section: str, inputs: Mapping[str, Input]) -> Broken:
    hint = f"Use {section}.arrays or {section}.factory."
    return Broken((section, "images"), "feed exactly one input", ", ".join(inputs), hint)


def _fits(section: str, data: Data, transform: Transform | None, inputs: Mapping[str, Input]) -> Iterator[Broken]:
    """Whether what `data` gives can be what the inputs take."""
    if data.arrays is not None and suffix_of(data.arrays) == ".npy" and len(inputs) != 1:
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
    path: KeyPath = ("inputs", name, "shape")
    channels = 1 if transform is not None and transform.grayscale else 3
    if spec.dtype not in IMAGE_DTYPES:
        yield Broken(("inputs", name, "dtype"), "be float32, float16 or uint8 to take images", spec.dtype)
    if len(spec.shape) != 4:
        yield Broken(path, f"be [N, {channels}, height, width] for {section}.images", listed(spec.shape))
        return
    if isinstance(spec.shape[1], int) and spec.shape[1] != channels:
        hint = f"{section}.transform.grayscale gives 1 channel, without it there are 3."
        if spec.shape[3] == channels:
            hint = f"Images become [N, C, H, W]; {section}.transform.callable can return [H, W, C]."
        yield Broken(path, f"have {channels} channels for {section}.images", listed(spec.shape), hint)
    exact = None if transform is None else transform.center_crop
    if exact is None and transform is not None and isinstance(transform.resize, tuple):
        exact = transform.resize
    if exact is not None:
        wanted = (exact, exact) if isinstance(exact, int) else exact
        if any(isinstance(s, int) and s != w for s, w in zip(spec.shape[2:], wanted, strict=True)):
            must = f"end in {wanted[0]}, {wanted[1]}, the size {section}.transform gives"
            yield Broken(path, must, listed(spec.shape))
