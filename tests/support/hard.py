"""A ResNet-18-like network that INT8 cannot hold: one channel inside `layer2.0` is a thousand times the others.

Copied beside a job file by the tests, so it imports nothing of them.
"""

import torch
from torch import nn

OUTLIER = 1e3
#: The module whose input has the outlier; its weights divide it away again, so the float network is unharmed.
WORST = "layer2.0.conv2"


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = nn.Identity()
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.downsample(x))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.head(x.mean((2, 3)))


def net(outlier=OUTLIER, width=8, seed=0):
    torch.manual_seed(seed)
    model = Net(width).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.uniform_(-0.2, 0.2)
    block = model.layer2[0]
    with torch.no_grad():
        block.bn1.weight[0] *= outlier
        block.bn1.bias[0] *= outlier
        block.conv2.weight[:, 0] /= outlier
    return model
