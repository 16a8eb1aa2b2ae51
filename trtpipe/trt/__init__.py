"""TensorRT, its releases and the GPUs it runs on; the only room that imports a TensorRT."""

__all__ = [
    "builder",
    "config",
    "driver",
    "flavour",
    "implicit",
    "isolated",
    "memory",
    "monitor",
    "options",
    "plan",
    "platforms",
    "runtime",
    "timing",
    "timing_cache",
    "weights",
]
