"""Running a bundle on a device, without torch (hybrid engines aside)."""

__all__ = [
    "compatibility",
    "device",
    "device_memory",
    "doctor",
    "executor",
    "inputs",
    "onnxruntime",
    "recheck",
    "session",
]
