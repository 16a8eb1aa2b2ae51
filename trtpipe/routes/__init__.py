"""Frontends that take a quantized graph to an engine: onnx, torch_tensorrt and torch2trt."""

__all__ = ["compiled_precision", "native", "onnx", "options", "registry", "release"]
