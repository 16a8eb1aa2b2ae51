"""The quickstart's model and data: scikit-learn's handwritten digits and a small ResNet trained on them.

python -m trtpipe.examples.digits make data/digits
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from calib.files import replacing

if TYPE_CHECKING:
    import torch

SEED = 0
_SIZE = 32
#: The share of the 1,797 scans to train on; calib and val have half of the rest each. Disjoint, stratified by digit.
_TRAIN = 0.6
#: Ends the program with an error when the trained network is worse than this on val.
_REQUIRED_ACCURACY = 0.97


def resnet(num_classes: int = 10, width: int = 16) -> torch.nn.Module:
    """A ResNet of three residual stages for one-channel 32 x 32 images; float32 [N, 1, 32, 32] to [N, num_classes]."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outer)
            self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outer)
            self.relu = nn.ReLU()
            self.downsample: nn.Module = nn.Identity()
            if stride != 1 or inner != outer:
                self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(y + self.downsample(x))  # type: ignore[no-any-return]

    class DigitsResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
            )
            self.layer1 = Block(width, width, 1)
            self.layer2 = Block(width, 2 * width, 2)
            self.layer3 = Block(2 * width, 4 * width, 2)
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.head = nn.Linear(4 * width, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer3(self.layer2(self.layer1(self.stem(x))))
            return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]

    return DigitsResNet()


def write_images(folder: Path) -> dict[str, int]:
    """Write the scans as ImageFolders `folder/<split>/<digit>/<index>.png` and return how many each split has.

    A scan is 8 x 8 with 17 grey levels; it is scaled to 0-255 and enlarged to 32 x 32 (bilinear).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    indices = list(range(len(digits.target)))
    train, rest = train_test_split(indices, train_size=_TRAIN, random_state=SEED, stratify=digits.target)
    calib, val = train_test_split(rest, train_size=0.5, random_state=SEED, stratify=digits.target[rest])
    for split, chosen in (("train", train), ("calib", calib), ("val", val)):
        for index in chosen:
            pixels = (digits.images[index] * (255 / 16)).round().astype("uint8")
            path = folder / split / str(digits.target[index]) / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((_SIZE, _SIZE), Image.Resampling.BILINEAR).save(path)
    return {"train": len(train), "calib": len(calib), "val": len(val)}


def train(folder: Path, epochs: int = 8) -> tuple[torch.nn.Module, float]:
    """The network trained on `folder/train`, and its accuracy on `folder/val`, in [0, 1]; seeded."""
    import torch

    torch.manual_seed(SEED)
    torch.set_num_threads(2)  # sums in another order train another network
    x, y = _tensors(folder / "train")
    model = resnet().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    fit(model, optimizer, x, y, epochs=epochs, batch=64)
    return model, share_right(model, *_tensors(folder / "val"))


def fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epochs: int,
    batch: int,
) -> None:
    """Train on inputs x [S, ...] and classes y [S, ...], in one cycle up to the optimizer's learning rate."""
    import torch

    steps, most = epochs * (len(y) // batch), optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=most, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for start in range(0, len(y) - batch + 1, batch):
            chosen = order[start : start + batch]
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()


def share_right(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of y, in [0, 1], that the model in eval mode gets right."""
    import torch

    model.eval()
    with torch.inference_mode():
        return float((model(x).argmax(1) == y).double().mean())


def _tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps: list[Any] = [transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])]
    samples = list(ImageFolder(str(folder), transforms.Compose(steps)))
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def make(folder: Path) -> None:
    """Write the images and the trained weights below `folder`; what is there already is kept."""
    weights = folder / "resnet.safetensors"
    if weights.is_file():
        print(f"{weights} is there already")  # noqa: T201  (a program, run by the Makefile)
        return
    print("images", write_images(folder))  # noqa: T201
    save(*train(folder), _REQUIRED_ACCURACY, weights)


def write_onnx(folder: Path) -> None:
    """Write the trained network as `folder/resnet.onnx`, with input image [N, 1, 32, 32] and output logits [N, 10]."""
    import torch
    from safetensors.torch import load_file

    model = resnet()
    model.load_state_dict(load_file(folder / "resnet.safetensors"))
    batch = torch.export.Dim("N", min=1, max=1024)
    torch.onnx.export(
        model.eval(),
        (torch.zeros(2, 1, _SIZE, _SIZE),),
        folder / "resnet.onnx",
        dynamic_shapes=({0: batch},),
        input_names=["image"],
        output_names=["logits"],
        external_data=False,
        dynamo=True,
        verbose=False,
    )


def save(model: torch.nn.Module, accuracy: float, required: float, weights: Path) -> None:
    """Write the weights of a trained network that is good enough; end the program where it is not."""
    from safetensors.torch import save_file

    if accuracy < required:
        raise SystemExit(f"the network reached only {accuracy:.4f} on val (wanted {required})")
    with replacing(weights) as sibling:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, str(sibling))
    print(f"{weights}: accuracy {accuracy:.4f} on val")  # noqa: T201


if __name__ == "__main__":
    commands = {"make": make, "onnx": write_onnx}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        raise SystemExit("usage: python -m trtpipe.examples.digits make|onnx FOLDER")
    commands[sys.argv[1]](Path(sys.argv[2]))
