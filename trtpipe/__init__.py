"""trtpipe: a PyTorch model, a folder of images and a target in; a TensorRT engine with its proof out.

    job = trtpipe.load_job("job.yaml")
    built = trtpipe.build(job, "out")
    with trtpipe.load(built.bundle.path) as model:
        model.classify(["digit.png"])

Importing this package loads none of its parts; `trtpipe.api` has the five functions and what they raise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtpipe.api import build, calibrate, check, load, load_job

__version__ = "0.1.0"

__all__ = ["__version__", "build", "calibrate", "check", "load", "load_job"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trtpipe' has no attribute {name!r}")
    return getattr(importlib.import_module("trtpipe.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
