"""Metrics, the check of an engine against its baseline, and timed modes."""

__all__ = [
    "bench",
    "check",
    "control",
    "corners",
    "damaged_end",
    "gpu_modes",
    "judgement",
    "judges",
    "limits",
    "metrics",
    "speedup",
    "standard",
    "torch_modes",
]
