"""Trained networks as PyTorch modules, and photographs for them; `fetch_zoo.py` fetches the files.

    ZOO=data/zoo python -c "import zoo; print(zoo.accuracy('mobilenet_v2'))"

Weights are read with weights_only, as raw float32 shards or as ONNX initializers. Every network is FP32, in eval mode,
and takes float32 [N, 3, S, S], S = NETWORKS[name].size, normalised by its mean and deviation.

What is known of them: mobilenet_v2 has torchvision's IMAGENET1K_V1 weights (published top-1 71.88 %), resnet50
keras-applications' (74.9 %), efficientnet_lite0, 1 and 2 TensorFlow's (75.1, 76.7 and 77.6 %); vit_s14_saliency is
DINOv2's ViT-S/14 with a convolutional decoder and answers with an importance in 0..1 for every pixel.
Calibration and evaluation never share a photograph: `split` deals them out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from zoo_networks import ROOT, Array, build

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Network:
    """One network's input.

    `size` is the side in pixels, `mean` and `std` hold for RGB in 0..1, `dense` networks answer for every pixel.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Literal["bilinear", "bicubic"]
    dense: bool = False


_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
#: TensorFlow Lite's (x - 127) / 128 on 0..255.
_LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
#: Keras' "caffe" mode: 0..255 less the mean.
_CAFFE = ((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3)
#: With their licences.
NETWORKS: Mapping[str, Network] = {
    "mobilenet_v2": Network(224, *_IMAGENET, "bilinear"),  # MIT; weights of torchvision, BSD-3-Clause
    "efficientnet_lite0": Network(224, *_LITE, "bicubic"),  # Apache-2.0
    "resnet50": Network(224, *_CAFFE, "bilinear"),  # MIT; weights of keras-applications
    "vit_s14_saliency": Network(224, *_IMAGENET, "bilinear", dense=True),  # MIT; backbone DINOv2 ViT-S/14
    "efficientnet_lite1": Network(240, *_LITE, "bicubic"),  # Apache-2.0
    "efficientnet_lite2": Network(260, *_LITE, "bicubic"),  # Apache-2.0
}
#: Photographs that calibration gets; the others are held out.
CALIBRATION_PHOTOS = 128


def create(name: str) -> nn.Module:
    """The trained network of that name in NETWORKS, as job files name it: `zoo:create`."""
    return build(name, NETWORKS[name].size)


@dataclass(frozen=True)
class Photos:
    """Paths of photographs: for calibration, held out, and held out with their ImageNet class."""

    calibration: tuple[Path, ...]
    held_out: tuple[Path, ...]
    labelled: tuple[Path, ...]
    labels: tuple[int, ...]


def split() -> Photos:
    """The photographs dealt out, the same on every machine that fetched the same files."""
    folder = ROOT / "images/photos"
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if len(paths) <= CALIBRATION_PHOTOS:
        raise FileNotFoundError(
            f"{folder}: more than {CALIBRATION_PHOTOS} photographs are needed (got {len(paths)}). "
            f"Run benchmarks/fetch_zoo.py {ROOT}, with Debian's packages."
        )
    order = np.random.default_rng(0).permutation(len(paths))
    dealt = [paths[k] for k in order]
    labelled = sorted((ROOT / "images/labelled").glob("*.jpg"))
    labels = tuple(int(p.stem.rpartition("_")[2]) for p in labelled)
    return Photos(tuple(dealt[:CALIBRATION_PHOTOS]), tuple(dealt[CALIBRATION_PHOTOS:]), tuple(labelled), labels)


def batch(name: str, paths: tuple[Path, ...]) -> Array:
    """float32 [len(paths), 3, S, S]: the middle square of each photograph, resized and normalised for a network."""
    from PIL import Image

    with_alpha = (Image.open(p) for p in paths)
    return np.stack([_tensor(name, image.convert("RGB")) for image in with_alpha])


def _tensor(name: str, image: Image.Image) -> Array:
    from PIL import Image

    network = NETWORKS[name]
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    method = Image.Resampling.BICUBIC if network.interpolation == "bicubic" else Image.Resampling.BILINEAR
    small = image.crop((left, top, left + side, top + side)).resize((network.size, network.size), method)
    return _normalized(name, np.asarray(small, np.float32).transpose(2, 0, 1) / 255)


def _normalized(name: str, x: Array) -> Array:
    network = NETWORKS[name]
    mean, std = (np.asarray(v, np.float32).reshape(3, 1, 1) for v in (network.mean, network.std))
    return np.asarray((x - mean) / std, np.float32)


#: The ImageNet classes that a class of CIFAR-10 stands for (antelopes for deer); its score is the largest of theirs.
CIFAR10_CLASSES: tuple[tuple[int, ...], ...] = (
    (404, 895),
    (436, 468, 511, 609, 627, 656, 661, 751, 817),
    (*range(7, 25), *range(80, 101), *range(127, 147)),
    tuple(range(281, 286)),
    (351, 352, 353),
    tuple(range(151, 269)),
    (30, 31, 32),
    (339,),
    (403, 484, 510, 554, 576, 625, 628, 724, 780, 814, 871, 914),
    (555, 569, 675, 717, 734, 864, 867),
)


def cifar10(name: str, count: int) -> tuple[Array, Array]:
    """The first `count` of CIFAR-10's 10,000 test images for a network, enlarged (bicubic); and their labels 0..9."""
    from PIL import Image

    folder = ROOT / "images/cifar10"
    Image.MAX_IMAGE_PIXELS = None  # one image a row
    pixels = np.asarray(Image.open(folder / "test_batch.png").convert("RGB")).reshape(-1, 32, 32, 3)[:count]
    labels = json.loads((folder / "test_lables.json").read_text())[:count]
    x = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255
    size = NETWORKS[name].size
    enlarged = F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    return _normalized(name, enlarged.numpy()), np.asarray(labels, np.int64)


def cifar10_scores(logits: Array) -> Array:
    """[N, 10] scores of CIFAR-10's classes from [N, 1000] logits."""
    return np.stack([logits[:, list(classes)].max(1) for classes in CIFAR10_CLASSES], 1)


def accuracy(name: str) -> float:
    """Share of the labelled photographs that a classifier gets right: a sign that its weights are read well."""
    photos = split()
    with torch.inference_mode():
        logits = create(name)(torch.from_numpy(batch(name, photos.labelled)))
    return float((logits.argmax(1).numpy() == np.asarray(photos.labels)).mean())
