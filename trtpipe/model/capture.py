"""Capture: the model as one functional ATen graph, with conv+bn and constants folded and attention spelt out."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import TYPE_CHECKING, Any

from trtpipe.errors import BuildError
from trtpipe.model.export import export
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

if TYPE_CHECKING:
    import torch


def capture(loaded: LoadedModel) -> Captured:
    """The graph that every precision, route and target starts from.

    torch.export, made functional, conv+bn folded (torchao's own pass), subgraphs of constants folded (the standardised
    weights of BiT, say), and scaled_dot_product_attention spelt out as matmul, softmax, matmul so that its matmuls can
    be quantized and its softmax kept in FP32.

    Raises:
        BuildError: torch.export cannot capture the model, or the declared dynamic dimensions do not hold.
    """
    import torch

    from trtpipe.model.pt2e import constant_fold, fuse_conv_bn

    notes: list[str] = []
    program = export(loaded.module, loaded.inputs)
    with warnings.catch_warnings():  # torch 2.11 announces a deprecation of its own
        warnings.simplefilter("ignore")
        graph = program.run_decompositions({}).module(check_guards=False)
    assert isinstance(graph, torch.fx.GraphModule)
    fuse_conv_bn(graph)
    constant_fold(graph)
    notes += _spell_out_attention(graph)
    _tidy(graph)
    graph.recompile()
    graph = export(graph, loaded.inputs).module(check_guards=False)
    assert isinstance(graph, torch.fx.GraphModule)
    outputs = _output_specs(graph, loaded)
    return Captured(graph, loaded.inputs, outputs, _digest(graph, loaded.weights_digest), tuple(notes))


def _output_specs(graph: torch.fx.GraphModule, loaded: LoadedModel) -> tuple[TensorSpec, ...]:
    """The outputs' bindings with the graph's own extents: a number, a dimension of the inputs, or a formula of them.

    A formula such as `2*N` is the name of a dimension whose range is its values at the inputs' min, opt and max.

    Raises:
        BuildError: an extent depends on the data, or the eager model's batch axis is not the graph's.
    """
    import torch

    nodes = list(graph.graph.nodes)
    symbols: dict[Any, str] = {}
    for spec, node in zip(loaded.inputs, (n for n in nodes if n.op == "placeholder"), strict=True):
        for extent, name in zip(node.meta["val"].shape, spec.shape, strict=True):
            if isinstance(extent, torch.SymInt) and isinstance(name, str):
                symbols[extent.node.expr] = name
    dims = {n: r for s in loaded.inputs for n, r in s.dims.items()}
    batch = loaded.inputs[0].shape[0]

    def named(where: str, extent: int | torch.SymInt) -> tuple[int | str, DimRange | None, bool]:
        """The extent, its range where it has one, and whether it varies with the batch."""
        expression = None if isinstance(extent, int) else extent.node.expr
        if expression is None or expression.is_number:
            return int(extent), None, False
        if unknown := expression.free_symbols - set(symbols):
            raise BuildError(
                f"{where}: its shape depends on the data ({len(unknown)} extents are known only at run time). "
                "Return a fixed number of rows and a mask: topk(k) instead of a threshold, no nonzero()."
            )
        used = {symbols[s] for s in expression.free_symbols}
        if expression in symbols:
            return symbols[expression], dims[symbols[expression]], batch in used
        text = str(expression.xreplace({s: _symbol(name) for s, name in symbols.items()}))
        ends = [
            int(expression.xreplace({s: getattr(dims[name], which) for s, name in symbols.items()}))
            for which in ("min", "opt", "max")
        ]
        return text, DimRange(*sorted(ends)), batch in used

    specs = []
    for spec, node in zip(loaded.outputs, nodes[-1].args[0], strict=True):
        extents = [named(f"outputs.{spec.name}", e) for e in node.meta["val"].shape]
        shape = tuple(e for e, _, _ in extents)
        varying = [axis for axis, (_, _, varies) in enumerate(extents) if varies]
        axis = varying[0] if len(varying) == 1 and shape[varying[0]] == batch else None
        if isinstance(batch, int) or dims[batch].min == dims[batch].max:
            axis = spec.batch_axis
        if axis != spec.batch_axis:
            raise BuildError(
                f"outputs.{spec.name}: torch.export gives the shape {list(shape)}, and the model itself returns "
                f"{list(spec.shape)}. It computes another thing for other batch sizes: make it independent of them."
            )
        ranges = {str(e): r for e, r, _ in extents if r is not None}
        specs.append(TensorSpec(spec.name, spec.dtype, shape, ranges, axis))
    return tuple(specs)


def _symbol(name: str) -> Any:
    """The dimension as sympy writes it in a formula."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def _digest(graph: torch.fx.GraphModule, weights: str) -> str:
    lines = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.graph.nodes]
    return hashlib.sha256("\n".join([weights, *lines]).encode()).hexdigest()


def _tidy(graph: torch.fx.GraphModule) -> None:
    """Drop export's assertions, and let views copy where a changed producer changed the strides."""
    import torch

    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.graph.eliminate_dead_code()


def _spell_out_attention(graph: torch.fx.GraphModule) -> list[str]:
    """Replace scaled_dot_product_attention by matmul(q*scale, k^T) + mask, softmax, matmul(., v).

    The scale is 1/sqrt(E) unless given (Vaswani et al. 2017, equation 1), applied to q so that FP16 holds the product.
    """
    import torch

    from trtpipe.model.nodes import calls, module_path

    aten = torch.ops.aten
    notes = []
    for node in [n for n in calls(graph.graph) if n.target is aten.scaled_dot_product_attention.default]:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        q, k, v, mask = (given.get(n) for n in names[:4])
        assert isinstance(q, torch.fx.Node)
        assert isinstance(k, torch.fx.Node)
        assert isinstance(v, torch.fx.Node)
        boolean = isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype == torch.bool
        if given.get("is_causal") or given.get("enable_gqa") or boolean:
            notes.append(
                f"{module_path(node) or 'the model'}: causal, grouped or boolean-masked attention is left whole, "
                "in FP32 and not quantized"
            )
            continue
        scale = given.get("scale") or 1.0 / math.sqrt(q.meta["val"].shape[-1])
        new: list[torch.fx.Node] = []

        def add(target: Any, *args: Any, new: list[torch.fx.Node] = new, node: torch.fx.Node = node) -> torch.fx.Node:
            made = graph.graph.call_function(target, args)
            made.meta = {key: m for key, m in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
            new.append(made)
            return made

        with graph.graph.inserting_before(node):
            scores = add(aten.matmul.default, add(aten.mul.Tensor, q, scale), add(aten.transpose.int, k, -2, -1))
            if mask is not None:
                scores = add(aten.add.Tensor, scores, mask)
            node.replace_all_uses_with(add(aten.matmul.default, add(aten.softmax.int, scores, -1), v))
        graph.graph.erase_node(node)
    return notes
