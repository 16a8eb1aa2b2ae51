"""The segmentation example's model and data: made-up pictures of discs, squares and triangles, and a small U-Net.

python -m trtpipe.examples.shapes make data/shapes
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from calib.types import Array
from trtpipe.examples.digits import fit, save, share_right

if TYPE_CHECKING:
    import torch

_SIZE = 48
#: In the order of the model's outputs.
CLASSES = ("background", "disc", "square", "triangle")
#: Pictures of each split.
_SPLITS = {"train": 320, "calib": 48, "val": 80}
#: Ends the program with an error when the trained network is worse than this on val.
_REQUIRED_ACCURACY = 0.93


def unet(width: int = 8) -> torch.nn.Module:
    """A U-Net of two levels; float32 [N, 3, H, W] to [N, 4, H, W], H and W multiples of 4."""
    import torch
    from torch import nn

    def block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        )  # fmt: skip

    class UNet(nn.Module):
        classes = CLASSES

        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = block(3, width), block(width, 2 * width)
            self.middle = block(2 * width, 4 * width)
            self.pool = nn.MaxPool2d(2)
            self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
            self.up2 = block(4 * width, 2 * width)
            self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
            self.up1 = block(2 * width, width)
            self.head = nn.Conv2d(width, len(CLASSES), 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            fine = self.down1(image)
            coarse = self.down2(self.pool(fine))
            x = self.rise2(self.middle(self.pool(coarse)))
            x = self.rise1(self.up2(torch.cat([x, coarse], 1)))
            return self.head(self.up1(torch.cat([x, fine], 1)))  # type: ignore[no-any-return]

    return UNet()


def picture(seed: int) -> tuple[Array, Array, list[tuple[int, tuple[int, int, int, int]]]]:
    """One picture uint8 [H, W, 3], its mask uint8 [H, W], and its shapes: class, (x, y, width, height)."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:_SIZE, 0:_SIZE]
    waves = np.sin(x * random.uniform(0.05, 0.4) + random.uniform(0, 6)) * np.cos(y * random.uniform(0.05, 0.4))
    pixels = random.uniform(60, 140, 3) + 12 * waves[..., None] + random.normal(0, 6, (_SIZE, _SIZE, 3))
    mask, boxes = np.zeros((_SIZE, _SIZE), np.uint8), []
    for _ in range(int(random.integers(1, 3))):
        kind, radius = int(random.integers(1, 4)), int(random.integers(7, 13))
        cx, cy = (int(v) for v in random.integers(radius, _SIZE - radius, 2))
        across, down = np.abs(x - cx), y - cy
        inside = (
            across**2 + down**2 <= radius**2,
            np.maximum(across, np.abs(down)) <= radius * 0.85,
            (down <= radius * 0.7) & (across <= (down + radius) * 0.55),
        )[kind - 1]
        colour = random.choice((0, 255), 3) + random.uniform(-40, 40, 3)
        pixels[inside] = colour + random.normal(0, 6, (int(inside.sum()), 3))
        mask[inside] = kind
        rows, columns = np.nonzero(inside)
        left, top = int(columns.min()), int(rows.min())
        boxes.append((kind, (left, top, int(columns.max()) - left + 1, int(rows.max()) - top + 1)))
    return np.clip(pixels, 0, 255).astype(np.uint8), mask, boxes


def write_pictures(folder: Path) -> None:
    """Write `folder/<split>/<number>.png`, their masks `folder/masks/<split>/<number>.png`, and the boxes of each split
    as COCO has them, `folder/<split>.json`."""
    seed = 0
    for split, count in _SPLITS.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for path in (folder / split, folder / "masks" / split):
            path.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            pixels, mask, boxes = picture(seed)
            name = f"{seed:04d}.png"
            Image.fromarray(pixels).save(folder / split / name)
            Image.fromarray(mask).save(folder / "masks" / split / name)
            images.append({"id": seed, "file_name": name, "width": _SIZE, "height": _SIZE})
            annotations += [
                {"id": len(annotations) + k, "image_id": seed, "category_id": kind, "bbox": box, "iscrowd": 0,
                 "area": box[2] * box[3]}
                for k, (kind, box) in enumerate(boxes, 1)
            ]  # fmt: skip
            seed += 1
        categories = [{"id": k, "name": name} for k, name in enumerate(CLASSES) if k]
        text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
        (folder / f"{split}.json").write_text(text)


def train(folder: Path, epochs: int = 12) -> tuple[torch.nn.Module, float]:
    """The network trained on `folder/train`, and the share of pixels of `folder/val` that it gets right; seeded."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in another order train another network
    x, y = _tensors(folder, "train")
    model = unet().train()
    fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), x, y, epochs=epochs, batch=8)
    return model, share_right(model, *_tensors(folder, "val"))


def _tensors(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    paths = sorted((folder / split).glob("*.png"))
    pixels = np.stack([np.asarray(Image.open(p), np.float32) for p in paths]).transpose(0, 3, 1, 2)
    masks = np.stack([np.asarray(Image.open(folder / "masks" / split / p.name), np.int64) for p in paths])
    return torch.from_numpy((pixels / 255 - 0.5) / 0.25), torch.from_numpy(masks)


def make(folder: Path) -> None:
    """Write the pictures and the trained weights below `folder`; what is there already is kept."""
    weights = folder / "unet.safetensors"
    if weights.is_file():
        print(f"{weights} is there already")  # noqa: T201  (a program, run by the Makefile)
        return
    write_pictures(folder)
    save(*train(folder), _REQUIRED_ACCURACY, weights)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "make":
        raise SystemExit("usage: python -m trtpipe.examples.shapes make FOLDER")
    make(Path(sys.argv[2]))
