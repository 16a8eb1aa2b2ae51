"""trtpipe: a PyTorch model, a folder of images and a target in; a TensorRT engine with its proof out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from trtpipe.runner import Model

__version__ = "0.1.0"


def load(path: str | Path, *, key: str | Path | None = None, graph: bool = False) -> Model:
    """The bundle at `path`, verified and ready to be run here, without torch: see `trtpipe.runner.load`."""
    from trtpipe import runner

    return runner.load(path, key=key, graph=graph)
