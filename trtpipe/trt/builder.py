"""An ONNX graph to an engine, on whichever TensorRT the job's target names."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from calib.files import read_regular
from trtpipe.errors import BuildError, InputError
from trtpipe.job.sections import Build, Precision
from trtpipe.progress import Progress
from trtpipe.trt import config as configuration
from trtpipe.trt import (
    driver,
    flavour,
    formats,
    implicit,
    lowering,
    network,
    placement,
    plan,
    plugins,
    refit,
    timing_cache,
)
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.trt.monitor import PERCENT, Watch, create, interruptible, make_logger, make_monitor
from trtpipe.trt.options import asked, in_words, needs_driver, refusals, without_driver
from trtpipe.trt.parser import too_new_an_opset
from trtpipe.values import Engine, OnnxModel


def build_engine(
    model: OnnxModel,
    build: Build,
    *,
    progress: Progress,
    precision: Precision | None = None,
    calibration: NativeCalibration | None = None,
    judged: bool = True,
) -> Engine:
    """The engine of a graph, checked against its bindings and its own plan header.

    The same graph, options and TensorRT-RTX give the same bytes.

    Args:
        model: a checked ONNX file whose input and output dtypes are those of its specs.
        build: target `tensorrt`, which needs the GPU it builds for, or `tensorrt_rtx`, which builds anywhere.
        progress: receives the percentage built; polled for cancellation wherever TensorRT has a progress monitor
            (from 10 on).
        precision: the job's, which implicit quantization takes its FP16 flag from.
        calibration: samples for implicit quantization.
        judged: False gives TensorRT every option as it is, also those that `options.refusals` would refuse: how the
            tables of what it honours are measured.

    Raises:
        InputError: when the job asks for something this TensorRT cannot honour.
        MissingError: without the TensorRT, without a GPU where one is needed, or where CUDA does not start.
        BuildError: when TensorRT refuses the graph, changes a binding, or fails.
        Cancelled: when the user stops it; nothing is left behind.
    """
    tensorrt = flavour.load(build.target)
    gpu = None
    for path in needs_driver(build, tensorrt.name) if judged else ():
        gpu = driver.require(f"{path} with {tensorrt.title}", without_driver(path))
    refused = refusals(build, precision, tensorrt.name, tensorrt.version, tensorrt.capabilities) + _unfit(
        gpu, tensorrt.version, build, precision
    )
    if refused and judged:
        raise InputError("\n".join(message for _, message in refused))
    if why := too_new_an_opset(tensorrt.name, tensorrt.version, model.opset):
        raise InputError(why)
    watch = Watch(progress, build.log_level)
    libraries = {Path(p).name: read_regular(Path(p)) for p in build.plugins}
    try:
        data, notes, cache = _serialize(tensorrt, gpu, model, build, precision, calibration, watch, libraries)
    except BaseException as error:
        # TensorRT has one logger for the process while any of its objects lives, and a traceback keeps them alive.
        traceback.clear_frames(error.__traceback__)
        raise
    progress.step(100, 100, PERCENT)
    header = plan.own_header(data, tensorrt.name, tensorrt.version, build.compute_capability)
    if not tensorrt.has("progress_monitor"):
        notes += (f"{tensorrt.title} has no progress monitor: neither progress nor cancelling while it built",)
    least = formats.floor(model.precisions, tensorrt.name, header.compute_capabilities)
    notes += formats.portable_notes(least)
    return Engine(
        data=data,
        target=tensorrt.name,
        version=tensorrt.version,
        compute_capabilities=header.compute_capabilities or _built_on(gpu, build),
        minimum_compute_capability=least,
        inputs=model.inputs,
        outputs=model.outputs,
        graph=model,
        options=build.model_dump(mode="json", include=set(asked(build)) - {"plugins"}),
        notes=notes + watch.notes,
        timing_cache=cache,
        plugins=libraries,
    )


def _serialize(
    tensorrt: Flavour,
    gpu: driver.Driver | None,
    model: OnnxModel,
    build: Build,
    precision: Precision | None,
    calibration: NativeCalibration | None,
    watch: Watch,
    libraries: Mapping[str, bytes],
) -> tuple[bytes, tuple[str, ...], bytes]:
    """The plan's bytes, notes, and the timing cache where one is used.

    Every object made here is kept until TensorRT has returned: it holds none.
    """
    watch.check()
    logger = make_logger(tensorrt, watch)
    notes: tuple[str, ...] = ()
    kept: list[object] = []
    builder = create(tensorrt, "Builder", watch, logger)
    plugins.load(tensorrt, libraries, watch)
    weak = lowering.weakly_typed(tensorrt, build)
    graph = network.create_network(tensorrt, builder, weakly_typed=weak)
    kept.append(network.parse(tensorrt, graph, logger, model, watch))
    network.check_bindings(tensorrt, graph, model)
    if build.refit == "individual":
        notes += refit.mark_weights(graph, model.data)
    config = builder.create_builder_config()
    since = watch.mark()  # a parser that falls back may have logged errors and yet succeeded
    configuration.apply(tensorrt, config, graph, build)
    kept.append(configuration.add_profiles(tensorrt, builder, config, model.inputs, build))
    if weak:
        notes += lowering.allow_precisions(tensorrt, config, graph, build, precision)
    if build.uses_dla:
        notes += configuration.dla_fallback(tensorrt, config, graph, build)
    calibrator = None
    if build.quantization == "implicit":
        calibrator = implicit.make_calibrator(tensorrt, calibration)
        batch = calibration.batch_size if calibration else 1
        kept.append(implicit.attach(tensorrt, builder, config, calibrator, model.inputs, batch))
    cache_file = None
    if build.timing_cache is not None and gpu is not None:
        cache_file = timing_cache.file_of(Path(build.timing_cache), tensorrt, gpu, gpu.devices[0])
        cache, cache_notes = timing_cache.attach(config, cache_file)
        kept.append(cache)
        notes += cache_notes
    if tensorrt.has("progress_monitor"):
        kept.append(make_monitor(tensorrt, watch))
        config.progress_monitor = kept[-1]
    if watch.errors(since):
        raise BuildError(
            f"build: {tensorrt.title} does not accept every option ({watch.reasons(since)}). "
            "Correct the option, or leave it out."
        )
    since = watch.mark()
    with interruptible(watch):
        plan_memory = builder.build_serialized_network(graph, config)
    if calibrator is not None:
        calibrator.finish()
        notes += tuple(calibrator.notes)
    watch.check()
    if plan_memory is None:
        formats_of = {name: allowed for name, allowed in build.tensor_formats.items() if set(allowed) != {"linear"}}
        narrow = {"tensor_formats": formats_of, "memory_pools": build.memory_pools, "workspace": build.workspace}
        given = " and ".join(f"build.{key} ({in_words(value)})" for key, value in narrow.items() if value)
        without = f"Try it without {given}. " if given else ""
        raise BuildError(
            f"build: {tensorrt.title} cannot compile the graph ({watch.reason(since)}). {without}"
            "Set build.log_level to verbose to see what it was doing."
        )
    used, unsaved = (b"", ()) if cache_file is None else timing_cache.save(config, cache_file)
    data = bytes(plan_memory)
    del plan_memory, kept  # only now: config, network and parser point into what it holds
    return data, notes + unsaved, used


def _unfit(
    gpu: driver.Driver | None, version: str, build: Build, precision: Precision | None
) -> tuple[tuple[str, str], ...]:
    """(option path, message) of what the GPU here, which TensorRT proper builds for, cannot do, or is not."""
    if build.target != "tensorrt" or gpu is None:
        return ()
    device = gpu.devices[0]
    found = device.name, device.compute_capability, driver.is_jetson()
    return placement.refused_here(*found, build, precision, version)


def _built_on(gpu: driver.Driver | None, build: Build) -> tuple[str, ...]:
    """The compute capability an engine of TensorRT proper is for, which its plan does not name; () when portable."""
    if build.target != "tensorrt" or gpu is None or build.hardware_compatibility == "ampere_plus":
        return ()
    return (gpu.devices[0].compute_capability,)
