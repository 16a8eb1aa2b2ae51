"""TensorRT, its releases and the GPUs it runs on; the only room that imports a TensorRT."""

__all__ = [
    "builder",
    "config",
    "driver",
    "flavour",
    "formats",
    "implicit",
    "isolated",
    "memory",
    "monitor",
    "options",
    "parser",
    "plan",
    "platforms",
    "regions",
    "runtime",
    "timing",
    "timing_cache",
    "types",
    "versions",
    "weights",
]
