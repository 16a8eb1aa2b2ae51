"""What trtpipe takes of PT2E quantization, imported once and quietly: torchao's, or PyTorch's own before 2.7."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from trtpipe.errors import MissingError
from trtpipe.model.torch_versions import misfit, needs_torchao
from trtpipe.packages import version

_pytree = logging.getLogger("torch.utils._pytree")
_level = _pytree.level
_pytree.setLevel(logging.ERROR)  # torchao 0.18 on torch 2.14 announces a deprecation of its own at import
try:
    if TYPE_CHECKING or needs_torchao(torch.__version__):
        from torchao.quantization.pt2e.constant_fold import constant_fold
        from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import (
            QuantizationAnnotation,
            QuantizationSpec,
            Quantizer,
            SharedQuantizationSpec,
        )
        from torchao.quantization.pt2e.utils import _fuse_conv_bn_
    else:
        from torch._inductor.constant_folding import constant_fold
        from torch.ao.quantization.observer import UniformQuantizationObserverBase
        from torch.ao.quantization.pt2e.utils import _fuse_conv_bn_
        from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torch.ao.quantization.quantizer import (
            QuantizationAnnotation,
            QuantizationSpec,
            Quantizer,
            SharedQuantizationSpec,
        )
except (ImportError, AttributeError) as _error:
    _torchao = version("torchao")
    if _torchao is None:
        raise
    raise MissingError(
        misfit(torch.__version__, _torchao)
        or f"torchao {_torchao} cannot be imported with torch {torch.__version__} (got: {_error}). "
        "docs/support.md lists releases that fit each other."
    ) from _error
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


def fuse_conv_bn(module: torch.fx.GraphModule) -> None:
    """Batch norms behind convolutions go into their weights; the module is changed.

    torchao looks for dead nodes in the whole graph behind each of them: a third of the capture of 500 of them. Here it
    does so once.
    """
    graph = module.graph
    graph.eliminate_dead_code = bool  # type: ignore[method-assign, assignment]  # called without arguments: nothing was removed
    try:
        _fuse_conv_bn_(module)
    finally:
        del graph.eliminate_dead_code
    graph.eliminate_dead_code()
    module.recompile()
