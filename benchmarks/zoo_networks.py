"""The networks of `zoo` as PyTorch modules, with their trained weights read from the files that were fetched."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(os.environ.get("ZOO", "data/zoo"))
Array = np.ndarray[Any, Any]


def build(name: str, size: int) -> nn.Module:
    """The trained network of that name in `zoo.NETWORKS`, for images of `size` x `size` pixels."""
    if name.startswith("efficientnet_lite"):
        return _lite(name, size)
    builders = {"mobilenet_v2": _mobilenet_v2, "resnet50": _resnet50, "vit_s14_saliency": _vit_s14_saliency}
    return builders[name]()


def _state(pattern: str) -> dict[str, torch.Tensor]:
    paths = sorted((ROOT / "weights").glob(pattern))
    if not paths:
        raise FileNotFoundError(f"{ROOT / 'weights' / pattern} is not there. Run benchmarks/fetch_zoo.py {ROOT}.")
    state: dict[str, torch.Tensor] = torch.load(paths[0], map_location="cpu", weights_only=True)
    return state


def _loaded(network: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def _mobilenet_v2() -> nn.Module:
    from torchvision.models import mobilenet_v2

    return _loaded(mobilenet_v2(weights=None), _state("mobilenet_v2-*.pth"))


def _keras_weights(folder: Path) -> dict[str, Array]:
    """TensorFlow.js' layers format: float32 tensors one after another in the files that model.json lists."""
    arrays = {}
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        data = b"".join((folder / path).read_bytes() for path in group["paths"])
        offset = 0
        for weight in group["weights"]:
            count = math.prod(weight["shape"])
            arrays[weight["name"]] = np.frombuffer(data, "<f4", count, offset).reshape(weight["shape"])
            offset += 4 * count
        assert offset == len(data), folder
    return arrays


def _resnet50() -> nn.Module:
    """Keras' ResNet-50 v1 as torchvision's.

    Keras has the stride on the first 1x1 convolution of a stage and a bias in every convolution, which is folded into
    the running mean of the batch norm behind it. The first convolution's input channels are BGR: they are reversed.
    """
    from torchvision.models import resnet50

    network = resnet50(weights=None)
    for stage in (network.layer2, network.layer3, network.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    arrays = _keras_weights(ROOT / "weights/keras_resnet50")
    state: dict[str, torch.Tensor] = {}

    def tensor(array: Array) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float32, order="C"))

    def put(conv: str, norm: str, keras_conv: str, keras_norm: str) -> None:
        kernel = arrays[f"{keras_conv}/kernel"].transpose(3, 2, 0, 1)
        state[f"{conv}.weight"] = tensor(kernel[:, ::-1] if conv == "conv1" else kernel)
        state[f"{norm}.weight"] = tensor(arrays[f"{keras_norm}/gamma"])
        state[f"{norm}.bias"] = tensor(arrays[f"{keras_norm}/beta"])
        state[f"{norm}.running_mean"] = tensor(arrays[f"{keras_norm}/moving_mean"] - arrays[f"{keras_conv}/bias"])
        state[f"{norm}.running_var"] = tensor(arrays[f"{keras_norm}/moving_variance"])
        state[f"{norm}.num_batches_tracked"] = torch.tensor(0)

    put("conv1", "bn1", "conv1", "bn_conv1")
    for stage, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for block in range(blocks):
            keras, path = f"{stage}{'abcdef'[block]}_branch", f"layer{stage - 1}.{block}."
            for number, letter in enumerate("abc", 1):
                put(f"{path}conv{number}", f"{path}bn{number}", f"res{keras}2{letter}", f"bn{keras}2{letter}")
            if block == 0:
                put(f"{path}downsample.0", f"{path}downsample.1", f"res{keras}1", f"bn{keras}1")
    state["fc.weight"], state["fc.bias"] = tensor(arrays["fc1000/kernel"].T), tensor(arrays["fc1000/bias"])
    return _loaded(network, state)


def _same_conv(inputs: int, outputs: int, kernel: int, stride: int, size: int, groups: int = 1) -> nn.Sequential:
    """TensorFlow's SAME convolution for inputs of `size` pixels: padded by a layer only where it is asymmetric."""
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    low, high = total // 2, total - total // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, low if low == high else 0, groups=groups, bias=False)
    return nn.Sequential(*([conv] if low == high else [nn.ZeroPad2d((low, high, low, high)), conv]))


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, size: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[tuple[str, nn.Module]] = []
        if expansion != 1:
            layers += [
                ("expand_conv", nn.Conv2d(inputs, hidden, 1, bias=False)),
                ("bn0", nn.BatchNorm2d(hidden, eps=1e-3)),
                ("act0", nn.ReLU6()),
            ]
        layers += [
            ("depthwise_conv", _same_conv(hidden, hidden, kernel, stride, size, hidden)),
            ("bn1", nn.BatchNorm2d(hidden, eps=1e-3)),
            ("act1", nn.ReLU6()),
            ("project_conv", nn.Conv2d(hidden, outputs, 1, bias=False)),
            ("bn2", nn.BatchNorm2d(outputs, eps=1e-3)),
        ]
        for name, layer in layers:
            self.add_module(name, layer)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.children():
            y = layer(y)
        return x + y if self.residual else y


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite of the given multipliers for images of `size` pixels (TensorFlow's, 2020)."""

    #: repeats, kernel, stride, expansion, output channels
    STAGES = (
        (1, 3, 1, 1, 16),
        (2, 3, 2, 6, 24),
        (2, 5, 2, 6, 40),
        (3, 3, 2, 6, 80),
        (3, 5, 1, 6, 112),
        (4, 5, 2, 6, 192),
        (1, 3, 1, 6, 320),
    )

    def __init__(self, width: float, depth: float, size: int) -> None:
        super().__init__()

        def filters(count: int) -> int:
            """Scaled and rounded to a multiple of 8 that is at least 90 % of it."""
            scaled = count * width
            rounded = max(8, int(scaled + 4) // 8 * 8)
            return int(rounded + 8 if rounded < 0.9 * scaled else rounded)

        self.stem = _same_conv(3, 32, 3, 2, size)
        self.bn0, self.act0 = nn.BatchNorm2d(32, eps=1e-3), nn.ReLU6()
        size, inputs, blocks = math.ceil(size / 2), 32, []
        for number, (repeats, kernel, stride, expansion, outputs) in enumerate(self.STAGES):
            ends = number in (0, len(self.STAGES) - 1)  # their repeats are not scaled
            for k in range(repeats if ends else math.ceil(depth * repeats)):
                step = stride if k == 0 else 1
                blocks.append(_InvertedResidual(inputs, filters(outputs), kernel, step, expansion, size))
                inputs, size = filters(outputs), math.ceil(size / step)
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(inputs, 1280, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(1280, eps=1e-3), nn.ReLU6()
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 1000]."""
        x = self.blocks(self.act0(self.bn0(self.stem(x))))
        return self.fc(torch.flatten(self.pool(self.act1(self.bn1(self.conv_head(x)))), 1))  # type: ignore[no-any-return]


def _lite(name: str, size: int) -> nn.Module:
    width, depth = {"0": (1.0, 1.0), "1": (1.0, 1.1), "2": (1.1, 1.2)}[name[-1]]
    network = EfficientNetLite(width, depth, size)
    own, state = set(network.state_dict()), {}
    for key, value in _state(f"efficientnet-lite{name[-1]}-*.pth").items():
        path = re.sub(r"(^|\.)_", r"\1", key).replace("conv_stem", "stem")
        stem, _, last = path.rpartition(".")
        state[next(p for p in (path, f"{stem}.0.{last}", f"{stem}.1.{last}") if p in own)] = value
    return _loaded(network, state)


class _Block(nn.Module):
    def __init__(self, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.scale1 * self.out(y)
        return x + self.scale2 * self.fc2(self.act(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class ViTSaliency(nn.Module):
    """ViT-S/14 and a decoder of transposed convolutions: [N, 3, 224, 224] -> importance [N, 1, 224, 224] in 0..1."""

    GRID, WIDTH = 16, 384

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, self.WIDTH, 14, 14)
        self.cls = nn.Parameter(torch.zeros(1, 1, self.WIDTH))
        self.pos = nn.Parameter(torch.zeros(1, self.GRID**2 + 1, self.WIDTH))
        self.blocks = nn.Sequential(*(_Block() for _ in range(12)))
        self.norm = nn.LayerNorm(self.WIDTH, eps=1e-6)
        layers: list[nn.Module] = []
        for i, o in ((self.WIDTH, 256), (256, 128), (128, 64)):
            layers += [nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU()]
        self.decoder = nn.Sequential(*layers, nn.Conv2d(64, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Importance [N, 1, 224, 224]."""
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls.expand(x.shape[0], -1, -1), tokens), 1) + self.pos
        tokens = self.norm(self.blocks(tokens))[:, 1:].transpose(1, 2)
        maps = self.decoder(tokens.reshape(x.shape[0], self.WIDTH, self.GRID, self.GRID))
        return torch.sigmoid(F.interpolate(maps, size=(224, 224), mode="bilinear", align_corners=False))


def _vit_s14_saliency() -> nn.Module:
    """The ONNX file's initializers; the position embedding is resized to 16 by 16 patches as the file does itself."""
    import onnx
    from onnx import numpy_helper

    path = ROOT / "weights/vit_s_focus.onnx"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there. Run benchmarks/fetch_zoo.py {ROOT}.")
    graph = onnx.load(str(path)).graph
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    inputs = {n.name: list(n.input) for n in graph.node}
    old = "backbone.embeddings."
    position = weights[next(i for i in inputs["/backbone/embeddings/Reshape_1"] if i in weights)]
    side = math.isqrt(position.shape[1])
    grid = position.view(1, side, side, ViTSaliency.WIDTH).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(ViTSaliency.GRID,) * 2, mode="bicubic", align_corners=False)
    first = weights[next(i for i in inputs["/backbone/embeddings/Concat_6"] if i in weights)]
    state = {
        "patch.weight": weights[old + "patch_embeddings.projection.weight"],
        "patch.bias": weights[old + "patch_embeddings.projection.bias"],
        "cls": weights[old + "cls_token"],
        "pos": torch.cat((first, grid.permute(0, 2, 3, 1).flatten(1, 2)), 1),
        "norm.weight": weights["backbone.layernorm.weight"],
        "norm.bias": weights["backbone.layernorm.bias"],
    }
    linears = {
        "query": "attention.attention.query",
        "key": "attention.attention.key",
        "value": "attention.attention.value",
        "out": "attention.output.dense",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
    for k in range(12):
        layer, block = f"backbone.encoder.layer.{k}.", f"blocks.{k}."
        for norm in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                state[f"{block}{norm}.{kind}"] = weights[f"{layer}{norm}.{kind}"]
        for own, theirs in linears.items():
            node = f"/backbone/encoder/layer.{k}/{theirs.replace('.', '/')}/MatMul"
            state[f"{block}{own}.weight"] = weights[inputs[node][1]].T.contiguous()
            state[f"{block}{own}.bias"] = weights[f"{layer}{theirs}.bias"]
        state[f"{block}scale1"] = weights[f"{layer}layer_scale1.lambda1"]
        state[f"{block}scale2"] = weights[f"{layer}layer_scale2.lambda1"]
    for k in range(3):
        for kind in ("weight", "bias"):
            state[f"decoder.{3 * k}.{kind}"] = weights[f"decoder.upconv{k + 1}.{kind}"]
        for kind in ("weight", "bias", "running_mean", "running_var"):
            state[f"decoder.{3 * k + 1}.{kind}"] = weights[f"decoder.bn{k + 1}.{kind}"]
        state[f"decoder.{3 * k + 1}.num_batches_tracked"] = torch.tensor(0)
    for kind in ("weight", "bias"):
        state[f"decoder.9.{kind}"] = weights[f"decoder.final_conv.{kind}"]
    return _loaded(ViTSaliency(), state)
