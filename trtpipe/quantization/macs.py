"""Multiply-accumulates of one operation of an ATen graph, from the tensors it ran on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trtpipe.model.products import MATMULS


def macs(name: str, args: Sequence[Any], result: object) -> int:
    """Multiply-accumulates of operation `name` (as `nodes.op_name` gives it), for the whole batch; 0 for all others.

    A convolution needs, for each element of its output, the number of elements of one filter [C/groups, k...]; a
    transposed one needs that for each element of its input; a linear or a matmul needs its inner dimension for each
    element of its output. Additions of a bias are not counted.
    """
    if not isinstance(result, torch.Tensor):
        return 0
    if name.startswith("conv_transpose"):
        return int(args[0].numel() * math.prod(args[1].shape[1:]))
    if name in ("conv1d", "conv2d", "conv3d"):
        return int(result.numel() * math.prod(args[1].shape[1:]))
    if name in ("linear", *MATMULS):
        return int(result.numel() * args[0].shape[-1])
    return 0
