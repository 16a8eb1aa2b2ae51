"""The stages of a job composed: build, tune, bench, kit, and the cache of their results."""

__all__ = [
    "apart",
    "bench",
    "build",
    "cache",
    "cached",
    "calibrate",
    "collector",
    "deep",
    "kit",
    "own_modules",
    "refit",
    "replay",
    "tune",
    "validate",
]
