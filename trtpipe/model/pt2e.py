"""What trtpipe takes of torchao's PT2E quantization, imported once and quietly."""

from __future__ import annotations

import logging

_pytree = logging.getLogger("torch.utils._pytree")
_level = _pytree.level
_pytree.setLevel(logging.ERROR)  # torchao 0.18 on torch 2.14 announces a deprecation of its own at import
try:
    from torchao.quantization.pt2e.constant_fold import constant_fold
    from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_ as fuse_conv_bn
finally:
    _pytree.setLevel(_level)

__all__ = [
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "UniformQuantizationObserverBase",
    "constant_fold",
    "convert_pt2e",
    "fuse_conv_bn",
    "prepare_pt2e",
]
