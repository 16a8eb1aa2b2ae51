"""Samples of custom-dataset.yaml: any sequence will do, a torch Dataset too."""

from pathlib import Path

import numpy as np
from PIL import Image

DATA = Path(__file__).resolve().parent.parent / "data" / "digits"


class Digits:
    """Sample `i` is float32 [1, 32, 32] in [-1, 1], alone or with its label."""

    def __init__(self, folder: Path, labelled: bool) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int):
        with Image.open(self.files[i]) as image:
            pixels = np.asarray(image.convert("L"), np.float32) / 255
        sample = (pixels[None] - 0.5) / 0.5
        return (sample, int(self.files[i].parent.name)) if self.labelled else sample


def calibration() -> Digits:
    """Samples without labels."""
    return Digits(DATA / "calib", labelled=False)


def validation() -> Digits:
    """Samples with labels, for the accuracy."""
    return Digits(DATA / "val", labelled=True)
