"""Running a bundle on a device, without torch (hybrid engines aside)."""

__all__ = ["compatibility", "device", "doctor", "executor", "hybrid", "inputs", "onnxruntime", "recheck", "session"]
