"""trtpipe: a PyTorch model, a folder of images and a target in; a TensorRT engine with its proof out.

    job = trtpipe.load_job("job.yaml")
    built = trtpipe.build(job, "out")
    with trtpipe.load(built.bundle.path) as model:
        model.classify(["digit.png"])

Importing this package loads none of its parts; `trtpipe.api` has the five functions and what they raise.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtpipe.api import build, calibrate, check, load, load_job

__version__ = "0.1.0"

__all__ = ["__version__", "build", "calibrate", "check", "load", "load_job"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trtpipe' has no attribute {name!r}")
    from trtpipe import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`trtpipe.check` stays the function: importing the module of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
