"""Models of other shapes than images to classes: random, tiny, each with a job's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


class Of(nn.Module):
    """A network, and what forward does with it."""

    def __init__(self, forward: Any, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._forward = forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self.parts, *inputs)


@dataclass
class ModelOutput:
    """As Hugging Face's: fields that were not asked for are None."""

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


def causal(heads: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Attention to what came before."""
    q, k, v = heads[0](x).reshape(x.shape[0], x.shape[1], 3, 2, 4).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads[1](y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8))


def masked(parts: nn.ModuleList, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """An encoder that does not look at padding."""
    y = parts[1](parts[0](tokens), src_key_padding_mask=padding)
    return y.masked_fill(padding[..., None], 0.0).sum(1)


def backbone(channels: int) -> nn.Module:
    """An eighth of the image's size."""
    made = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, channels, 3, 2, 1), nn.ReLU())
    made.out_channels = channels  # type: ignore[assignment]  # torchvision asks for it
    return made


def detector(name: str) -> nn.Module:
    """torchvision's SSDlite and FCOS on a small backbone; in eval they decode and suppress."""
    from torchvision.models import detection
    from torchvision.models.detection import anchor_utils, ssdlite

    if name == "fcos":
        anchors = anchor_utils.AnchorGenerator(((8,),), ((1.0,),))
        return detection.FCOS(backbone(32), 3, min_size=64, max_size=64, anchor_generator=anchors)
    boxes = anchor_utils.DefaultBoxGenerator([[2, 3]])
    head = ssdlite.SSDLiteHead([16], boxes.num_anchors_per_location(), 4, nn.BatchNorm2d)
    with torch.no_grad():  # scores so far apart that no last bit decides which boxes are kept
        for parameter in head.classification_head.parameters():
            parameter.mul_(10)
    return detection.ssd.SSD(backbone(16), boxes, (64, 64), 4, head=head)


def detections(name: str) -> nn.Module:
    """With NMS: the number of boxes depends on the image."""
    return Of(lambda parts, image: parts[0](list(image))[0], detector(name))


def heads(name: str) -> nn.Module:
    """Without: a fixed number of rows an image."""
    return Of(lambda parts, x: {"detections": [parts[0].head([parts[0].backbone(x)])]}, detector(name))


def deeplab() -> nn.Module:
    """torchvision's DeepLabV3 on a small backbone; it returns a dict."""
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = backbone(8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.inner(x)
            return {"out": y, "aux": y}

    return DeepLabV3(Named(), DeepLabHead(8, 3), nn.Conv2d(8, 3, 1))


class Resizing(nn.Module):
    """A U-Net of one level that takes any size."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.fine(image).relu()
        coarse = self.coarse(fine).relu()
        coarse = nn.functional.interpolate(coarse, size=fine.shape[-2:], mode="bilinear")
        return self.head(torch.cat([fine, coarse], 1))  # type: ignore[no-any-return]


@torch.library.custom_op("other_shapes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operation that PyTorch does not have."""
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def embedder(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, 4))


def towers(parts: nn.ModuleList, text: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both embeddings, normalised."""
    a, b = (nn.functional.normalize(p(x), dim=1) for p, x in zip(parts, (text, image.flatten(1)), strict=True))
    return {"text_embedding": a, "image_embedding": b}


def unet() -> nn.Module:
    from trtpipe.examples.shapes import unet as made

    return made(4)


def gated(parts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = parts[0](x)
    return y if y.sum() > -1e3 else -y


def gated_both_ways(parts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = parts[0](x)
    return y if y.sum() > 0 else -y


def last_state(parts: nn.ModuleList, x: torch.Tensor) -> Any:
    y, state = parts[0](x)
    return {"sequence": y, "state": state}


def make(name: str) -> nn.Module:
    """The network of this name, its weights drawn from seed 0."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    makers: dict[str, Any] = {
        "lstm": lambda: Of(last_state, nn.LSTM(5, 6, 2, batch_first=True)),
        "gru": lambda: Of(lambda p, x: p[0](x)[0], nn.GRU(5, 6, batch_first=True, bidirectional=True)),
        "encoder with a mask": lambda: Of(
            masked, nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        ),
        "causal attention": lambda: Of(causal, nn.Linear(8, 24), nn.Linear(8, 8)),
        "dataclass": lambda: Of(
            lambda p, x: ModelOutput(p[1](p[0](x)), (x, p[0](x))), nn.Linear(4, 6), nn.Linear(6, 3)
        ),
        "two towers": lambda: Of(towers, embedder(6), embedder(48)),
        "towers of two batches": lambda: Of(towers, embedder(6), embedder(48)),
        "u-net": unet,
        "resizing u-net": Resizing,
        "deeplab": deeplab,
        "control flow": lambda: Of(gated, nn.Linear(4, 4)),
        "control flow both ways": lambda: Of(gated_both_ways, nn.Linear(4, 4)),
        "custom op": lambda: Of(lambda p, x: torch.ops.other_shapes.twice(p[0](x)), nn.Linear(4, 4)),
        "nested output": lambda: Of(
            lambda p, x: {"detections": [{"boxes": p[0](x), "scores": p[1](x)}, {"boxes": x, "scores": x}]},
            nn.Linear(4, 8), nn.Linear(4, 2),
        ),
        "tuple in a tuple": lambda: Of(lambda p, x: (p[0](x), (p[0](x).tanh(), x.sum(1))), nn.Linear(4, 3)),
        "nested input": lambda: Of(
            lambda p, batch, scale: p[0](batch["image"]) * batch["weights"][0] + scale, nn.Linear(4, 3)
        ),
        "scalar": lambda: Of(lambda p, x: p[0](x).abs().mean(), nn.Linear(4, 3)),
        "no batch": lambda: Of(lambda p, x: {"y": p[0](x), "table": p[0].weight * x.mean()}, nn.Linear(4, 3)),
        "integers and booleans": lambda: Of(
            lambda p, ids, keep: (p[0](ids) * keep[..., None]).mean(1), nn.Embedding(10, 4)
        ),
        "classes": lambda: Of(lambda p, x: p[0](x).argmax(1), nn.Linear(4, 3)),
        "booleans": lambda: Of(lambda p, x: p[0](x) > 0, nn.Linear(4, 3)),
        "3d": lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d(2)),
        "no translation": lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(3)),
        "1d": lambda: nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.GELU(), nn.ConvTranspose1d(4, 2, 4, 2, 1)),
        "unique": lambda: Of(lambda p, x: p[0](x)[p[0](x)[:, 0] > 0], nn.Linear(4, 3)),
        "ssdlite heads": lambda: heads("ssdlite"),
        "fcos heads": lambda: heads("fcos"),
        "ssdlite with NMS": lambda: detections("ssdlite"),
        "fcos with NMS": lambda: detections("fcos"),
    }  # fmt: skip
    made: nn.Module = makers[name]()
    return made


N = {"N": {"min": 1, "opt": 2, "max": 3}}
HW = {"H": {"min": 16, "opt": 24, "max": 32}, "W": {"min": 16, "opt": 32, "max": 32}}
X = {"x": {"shape": ["N", 4], **N}}
SEQUENCE = {"x": {"shape": ["N", 7, 5], **N}}
TOWERS = {"text": {"shape": ["N", 6], **N}, "image": {"shape": ["N", 3, 4, 4], **N}}
IMAGE_64 = {"image": {"shape": [1, 3, 64, 64]}}
FOUND = {"boxes": {}, "scores": {}, "labels": {"dtype": "int64"}}
NMS = ("capture: the model decides by the values of a tensor at ", "return all candidates with their scores")

#: name -> (inputs, outputs, None or parts of the message that refuses it)
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]] = {
    "lstm": (SEQUENCE, {"sequence": {}, "state.0": {}, "state.1": {}}, None),
    "gru": (SEQUENCE, {"y": {}}, None),
    "encoder with a mask": (
        {"tokens": {"dtype": "int64", "shape": ["N", 7], **N}, "padding": {"dtype": "bool", "shape": ["N", 7], **N}},
        {"y": {}}, None,
    ),
    "causal attention": ({"x": {"shape": ["N", 6, 8], **N}}, {"y": {}}, None),
    "dataclass": (X, {"logits": {}, "hidden_states.1": {}}, None),
    "two towers": (TOWERS, {"text_embedding": {}, "image_embedding": {}}, None),
    "towers of two batches": (
        {"text": {"shape": ["N", 6], **N}, "image": {"shape": ["M", 3, 4, 4], "M": {"min": 1, "opt": 2, "max": 3}}},
        {"text_embedding": {}, "image_embedding": {}},
        ("inputs.image.shape: must begin with the batch dimension of inputs.text, N", "is given to each sample and"),
    ),
    "u-net": ({"image": {"shape": ["N", 3, 16, 32], **N}}, {"scores": {}}, None),
    "resizing u-net of several sizes": ({"image": {"shape": ["N", 3, "H", "W"], **N, **HW}}, {"scores": {}}, None),
    "u-net of several sizes": (
        {"image": {"shape": ["N", 3, "H", "W"], **N, **HW}}, {"scores": {}},
        ("it fails on zeros of the declared inputs (image float32 [2, 3, 25, 32])", "A range means every size in it"),
    ),
    "deeplab": (IMAGE_64, {"out": {}, "aux": {}}, None),
    "control flow": (X, {"y": {}}, ("capture: the model decides by the values of a tensor at ", "torch.where")),
    "control flow both ways": (
        X, {"y": {}}, ("capture: the model decides by the values of a tensor at ", "torch.where"),
    ),
    "custom op": (X, {"y": {}}, ("torch.onnx has no translation of other_shapes.twice.default.", "torch_tensorrt")),
    "nested output": (X, {"detections.0.boxes": {}, "detections.0.scores": {}}, None),
    "tuple in a tuple": (X, {"0": {}, "1.0": {}, "1.1": {}}, None),
    "nested input": (
        {"batch.image": {"shape": ["N", 4], **N}, "batch.weights.0": {"shape": ["N", 3], **N},
         "scale": {"shape": ["N", 1], **N}},
        {"y": {}}, None,
    ),
    "scalar": (X, {"y": {}}, None),
    "no batch": (X, {"y": {}, "table": {}}, None),
    "integers and booleans": (
        {"ids": {"dtype": "int32", "shape": ["N", 5], **N}, "keep": {"dtype": "bool", "shape": ["N", 5], **N}},
        {"y": {}}, None,
    ),
    "classes": (X, {"y": {"dtype": "int64"}}, None),
    "booleans": (X, {"y": {"dtype": "bool"}}, None),
    "3d": ({"x": {"shape": ["N", 1, 6, 6, 6], **N}}, {"y": {}}, None),
    "no translation": (
        {"x": {"shape": ["N", 1, 6, 6, 6], **N}}, {"y": {}},
        ("onnx: torch.onnx has no translation of aten._adaptive_avg_pool3d.default.",),
    ),
    "1d": ({"x": {"shape": ["N", 2, "L"], **N, "L": {"min": 8, "opt": 16, "max": 32}}}, {"y": {}}, None),
    "unique": (
        X, {"y": {}}, ("outputs.y: must have one shape for all samples", "return a fixed number of rows and a mask."),
    ),
    "ssdlite heads": (
        IMAGE_64, {"detections.0.bbox_regression": {}, "detections.0.cls_logits": {}}, None,
    ),
    "fcos heads": (
        IMAGE_64, {f"detections.0.{n}": {} for n in ("cls_logits", "bbox_regression", "bbox_ctrness")}, None,
    ),
    "ssdlite with NMS": (IMAGE_64, FOUND, NMS),
    "fcos with NMS": (IMAGE_64, FOUND, NMS),
}  # fmt: skip


def samples(inputs: dict[str, Any], count: int = 8) -> dict[str, np.ndarray]:
    """Rows of each input by name, dynamic sizes at their best."""
    random, made = np.random.default_rng(0), {}
    for name, spec in inputs.items():
        row = [d if isinstance(d, int) else spec[d]["opt"] for d in spec["shape"][1:]]
        dtype = spec.get("dtype", "float32")
        if dtype == "float32":
            made[name] = random.standard_normal((count, *row)).astype(np.float32)
        else:
            made[name] = random.integers(0, 2 if dtype == "bool" else 10, (count, *row)).astype(dtype)
            made[name][:, 0] = 0
    return made
