"""The ways from a quantized graph to an engine, by the names a job uses; nothing is loaded until one is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: route -> module:function(job, loaded, quantized, progress) -> Engine
ROUTES: Mapping[str, str] = {
    "onnx": "trtpipe.routes.onnx:compile_engine",
    "torch2trt": "trtpipe.routes.torch2trt.route:compile_engine",
    "torch_tensorrt": "trtpipe.routes.torch_tensorrt.route:compile_engine",
}


def route(name: str) -> Callable[..., Any]:
    """The function that takes a quantized graph to an engine on this route."""
    module, _, function = ROUTES[name].partition(":")
    compile_engine: Callable[..., Any] = getattr(import_module(module), function)
    return compile_engine
