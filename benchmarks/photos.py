"""Photographs for benchmarks and tests: crops of scikit-learn's two sample photos, as an ImageFolder or as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def write_photos(folder: Path, count: int, size: int, seed: int = 0) -> Path:
    """`count` random square crops of 200 to 427 pixels, scaled to `size`, in one folder a photo; returns `folder`."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    random = np.random.default_rng(seed)
    for k in range(count):
        which = k % 2
        photo = found.images[which]
        side = int(random.integers(200, 428))
        top, left = (int(random.integers(0, extent - side + 1)) for extent in photo.shape[:2])
        crop = Image.fromarray(photo[top : top + side, left : left + side]).resize((size, size))
        path = folder / Path(found.filenames[which]).stem / f"{k:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        crop.save(path)
    return folder


def crops(count: int, size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """float32 [count, 3, size, size] in [-1, 1]: the same crops in memory, normalised by mean and deviation 0.5."""
    import tempfile

    import numpy as np
    from PIL import Image

    with tempfile.TemporaryDirectory() as name:
        paths = sorted(write_photos(Path(name), count, size, seed).rglob("*.png"), key=lambda p: p.name)
        images = [np.asarray(Image.open(p), np.float32) for p in paths]
    return np.ascontiguousarray((np.stack(images) / 255 - 0.5).transpose(0, 3, 1, 2) / 0.5, np.float32)
