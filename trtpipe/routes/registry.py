"""The ways from a quantized graph to an engine, by the names a job uses; nothing is loaded until one is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from trtpipe.values import Route

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.progress import Progress
    from trtpipe.trt.implicit import NativeCalibration
    from trtpipe.values import Engine, LoadedModel, Quantized

Compile = Callable[["Job", "LoadedModel", "Quantized", "Progress", "NativeCalibration | None"], "Engine"]

#: route -> module:function(job, loaded, quantized, progress, calibration) -> Engine
ROUTES: Mapping[Route, str] = {
    "onnx": "trtpipe.routes.onnx:compile_engine",
    "torch2trt": "trtpipe.routes.torch2trt.route:compile_engine",
    "torch_tensorrt": "trtpipe.routes.torch_tensorrt.route:compile_engine",
}


def route(name: Route) -> Compile:
    """The function that takes a quantized graph to an engine on this route.

    Its `calibration` is what TensorRT itself calibrates by, with build.quantization implicit; else None.
    """
    module, _, function = ROUTES[name].partition(":")
    compile_engine: Compile = getattr(import_module(module), function)
    return compile_engine
