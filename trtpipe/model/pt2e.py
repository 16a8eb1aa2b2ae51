"""What trtpipe takes of PT2E quantization, imported once and quietly: torchao's, or PyTorch's own before 2.7."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from trtpipe.errors import MissingError
from trtpipe.model.graph_digest import NAMED
from trtpipe.model.nodes import attribute, calls, free_name, is_constant, op_name
from trtpipe.model.torch_versions import misfit, needs_torchao
from trtpipe.packages import version

_pytree = logging.getLogger("torch.utils._pytree")
_level = _pytree.level
_pytree.setLevel(logging.ERROR)  # torchao 0.18 on torch 2.14 announces a deprecation of its own at import
try:
    from torch.ao.quantization.fx import utils as _fx_utils

    if TYPE_CHECKING or needs_torchao(torch.__version__):
        from torchao import utils as _utils
        from torchao.quantization.pt2e import quantize_pt2e as _pt2e
        from torchao.quantization.pt2e.constant_fold import constant_fold
        from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
        from torchao.quantization.pt2e.quantizer import (
            QuantizationAnnotation,
            QuantizationSpec,
            Quantizer,
            SharedQuantizationSpec,
        )
        from torchao.quantization.pt2e.utils import _fuse_conv_bn_
    else:
        from torch._inductor.constant_folding import constant_fold
        from torch.ao.quantization import quantize_pt2e as _pt2e
        from torch.ao.quantization import utils as _utils
        from torch.ao.quantization.observer import UniformQuantizationObserverBase
        from torch.ao.quantization.pt2e.utils import _fuse_conv_bn_
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
    "convert_pt2e",
    "fold_constants",
    "fuse_conv_bn",
    "prepare_pt2e",
]


#: What constants are called that are folded and no weights.
MADE = "made"


def prepare_pt2e(graph: torch.fx.GraphModule, quantizer: Quantizer) -> torch.fx.GraphModule:
    """The graph with the observers that the quantizer asks for; it is changed."""
    prepared: torch.fx.GraphModule = _forgotten(_pt2e.prepare_pt2e(graph, quantizer))
    return prepared


def convert_pt2e(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with Q/DQ in the places of its observers; it is changed."""
    converted: torch.fx.GraphModule = _forgotten(_pt2e.convert_pt2e(graph))
    return converted


def _forgotten(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph, which the library no longer holds: it keeps every module whose device it asked for, with all weights
    (torchao 0.18 and torch 2.14: `functools.cache`)."""
    for module, name in ((_utils, "_assert_and_get_unique_device"), (_fx_utils, "assert_and_get_unique_device")):
        if (clear := getattr(getattr(module, name, None), "cache_clear", None)) is not None:
            clear()
    return graph


def fold_constants(module: torch.fx.GraphModule) -> None:
    """What is computed from constants alone becomes one; the module is changed.

    Each gets a name of its own: the library counts them anew in every graph, and converting folds again. Weights are
    counted by themselves, since a table calls them by their names: what is folded beside them differs with the batch.
    """
    constant_fold(module)
    for node in module.graph.find_nodes(op="get_attr"):
        if (name := str(node.target)).startswith("_frozen_param"):
            read = {op_name(user) for user in node.users} & NAMED
            node.target = free_name(module, "folded" if read else MADE)
            module.register_buffer(node.target, getattr(module, name))
            delattr(module, name)
    module.recompile()


def fuse_conv_bn(module: torch.fx.GraphModule) -> None:
    """Batch norms behind convolutions go into their weights; the module is changed.

    torchao looks for dead nodes in the whole graph behind each of them: a third of the capture of 500 of them. Here it
    does so once.
    """
    graph = module.graph
    for conv in [n for n in calls(graph) if "conv" in op_name(n)]:
        for held in [n for n in conv.args[1:3] if isinstance(n, torch.fx.Node) and is_constant(n)]:
            value = attribute(module, held)
            # The library can put the norm into parameters alone.
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                held.target = free_name(module, f"{conv.name}_held")
                module.register_parameter(held.target, torch.nn.Parameter(value, requires_grad=False))
    graph.eliminate_dead_code = bool  # type: ignore[method-assign, assignment]  # called without arguments: nothing was removed
    try:
        _fuse_conv_bn_(module)
    finally:
        del graph.eliminate_dead_code
    graph.eliminate_dead_code()
    module.recompile()
