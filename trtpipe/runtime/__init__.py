"""Running a bundle on a device, without torch (hybrid engines aside)."""

__all__ = [
    "compatibility",
    "device",
    "doctor",
    "executor",
    "inputs",
    "onnxruntime",
    "recheck",
    "session",
]
