"""Running a bundle on a device, without torch (hybrid engines aside)."""

__all__ = [
    "compatibility",
    "device",
    "doctor",
    "executor",
    "hybrid_runner",
    "inputs",
    "onnxruntime",
    "recheck",
    "session",
]
