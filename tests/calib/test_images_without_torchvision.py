"""Images are opened where torchvision is not installed; it is needed when the first of them is transformed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calib.images import ImageTransform
from calib.samples import InputSpec, TransformSpec


def test_a_transform_is_made_without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    transform = ImageTransform(TransformSpec(resize=(8, 8)), InputSpec("x", "float32", (3, 8, 8)))
    picture = Image.new("RGB", (4, 4))
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        transform("a.png", picture)
    monkeypatch.undo()
    assert np.array_equal(transform("a.png", picture), np.zeros((3, 8, 8), np.float32))
