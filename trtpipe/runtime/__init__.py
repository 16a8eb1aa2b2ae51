"""Running a bundle on a device, without torch (hybrid engines aside)."""

__all__ = ["compatibility", "device", "doctor", "hybrid", "inputs", "onnxruntime", "recheck", "session"]
