"""Small data sets on disk."""

import numpy as np
import pytest
from PIL import Image

from calib.samples import InputSpec

IMAGE = InputSpec("image", "float32", (3, 16, 16))


@pytest.fixture
def image_folder(tmp_path):
    """Three classes of 12, 6 and 2 RGB images of 20 x 24 pixels, every one different."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    for name, count in (("cat", 12), ("dog", 6), ("emu", 2)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / name / f"{i:02}.png")
    return folder
