"""trtpipe: a PyTorch model, a folder of images and a target in; a TensorRT engine with its proof out.

    job = trtpipe.load_job("job.yaml")
    built = trtpipe.build(job, "out")
    with trtpipe.load(built.bundle.path) as model:
        model.classify(["digit.png"])

Importing this package loads none of its parts; `trtpipe.api` has four of the five functions and what they raise,
`trtpipe.runtime.session` has `load`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtpipe.api import build, calibrate, check, load_job
    from trtpipe.runtime.session import load

__version__ = "0.1.0"

__all__ = ["__version__", "build", "calibrate", "check", "load", "load_job"]

# ONNX Runtime 1.29 and later tell Microsoft of their use, unless this is set before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

#: Where each name is. `load` is for devices, where little else of trtpipe need be imported.
_HOMES = {
    **dict.fromkeys(("build", "calibrate", "check", "load_job"), "trtpipe.api"),
    "load": "trtpipe.runtime.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trtpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
