"""Capture: the model as one functional ATen graph, with conv+bn and constants folded and attention spelt out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from trtpipe.errors import BuildError, titled
from trtpipe.model.adaptive import spell_out_adaptive_pools
from trtpipe.model.bags import spell_out_embedding_bags
from trtpipe.model.einsum import spell_out_einsums
from trtpipe.model.export import export
from trtpipe.model.failures import quantizes_in_forward
from trtpipe.model.products import WEIGHTED
from trtpipe.model.repeating import drop_writes, exported, require_no_draws
from trtpipe.model.torch_versions import graph_module
from trtpipe.model.weights import read_weights_digest
from trtpipe.values import EXTENTS, Captured, DimRange, LoadedModel, TensorSpec

if TYPE_CHECKING:
    import sympy
    import torch


def capture(loaded: LoadedModel) -> Captured:
    """The graph that every precision, route and target starts from.

    torch.export, made functional, conv+bn folded (torchao's own pass), subgraphs of constants folded (the standardised
    weights of BiT, say), and scaled_dot_product_attention spelt out as matmul, softmax, matmul so that its matmuls can
    be quantized and its softmax kept in FP32.

    Raises:
        BuildError: torch.export cannot capture the model, or the declared dynamic dimensions do not hold.
        InputError: the model's own code raised, it draws random numbers, keeps a state, or gives other outputs again.
    """
    import torch

    from trtpipe.model import graph_digest
    from trtpipe.model.attention import spell_out_attention
    from trtpipe.model.batch_norms import fuse_other_bn, require_settled, spell_out_batch_norms, unpaired
    from trtpipe.model.cells import spell_out_cells
    from trtpipe.model.factors import join_factors
    from trtpipe.model.for_each import fold_for_each
    from trtpipe.model.marks import holds_marks, take_off
    from trtpipe.model.nodes import calls
    from trtpipe.model.pt2e import fold_constants, fuse_conv_bn
    from trtpipe.model.sites import computes_with, find_sites
    from trtpipe.model.splits import spell_out_splits
    from trtpipe.model.transposes import join_transposes
    from trtpipe.model.widening import in_float64, widened

    program = exported(loaded)
    with warnings.catch_warnings():  # torch 2.11 announces a deprecation of its own
        warnings.simplefilter("ignore")
        graph = graph_module(program.run_decompositions({}))
    _require_one_graph(graph)
    _require_no_quantizers(graph)
    _require_no_writes(graph)
    _require_no_projections(graph)
    require_no_draws(graph)
    require_settled(graph)
    drop_writes(graph)
    lifted = map(program.constants.get, program.graph_signature.inputs_to_lifted_tensor_constants.values())
    made = [t for t in lifted if isinstance(t, torch.Tensor)]
    of_bindings = loaded.module.buffers(recurse=False)  # what these normalize by is no weight of the network
    literals, before = (graph_digest.literals(graph, [*made, *of_bindings], older=older) for older in (False, True))
    widening, rounding = widened(graph)
    fold_for_each(graph)
    fold_constants(graph)
    widening += in_float64(graph)
    if holds_marks(graph):
        spell_out_batch_norms(graph, calls(graph.graph))
    else:
        spell_out_batch_norms(graph, unpaired(graph))
        fuse_other_bn(graph)
        fuse_conv_bn(graph)
    spell_out_attention(graph)
    _batch_convolutions(graph)
    spell_out_cells(graph)
    _spell_out_bilinears(graph)
    _spell_out_products(graph)
    _spell_out_integer_divisions(graph)
    _spell_out_shifts_of_bytes(graph)
    spell_out_einsums(graph)
    spell_out_adaptive_pools(graph)
    spell_out_embedding_bags(graph)
    spell_out_splits(graph)
    _tidy(graph)
    join_transposes(graph)
    join_factors(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    graph = graph_module(export(graph, loaded.inputs))
    if not any(n.op == "call_function" for n in graph.graph.nodes):
        raise BuildError(
            "capture: the model must compute something from its inputs (got outputs that are inputs or constants). "
            "Check that this is the network that was meant."
        )
    outputs = _output_specs(graph, loaded)
    weights = read_weights_digest(loaded.module, program)
    digest = graph_digest.exact(graph, loaded.weights_digest)
    quantized = holds_marks(graph)
    notes = (*widening, *take_off(graph, [s.name for s in loaded.inputs], computes_with))
    sites = find_sites(graph)
    own = weights, (literals, before)
    return Captured(graph, loaded.inputs, outputs, digest, *sites, notes, {}, rounding, quantized, *own)


def _require_one_graph(graph: torch.fx.GraphModule) -> None:
    """Refuse operations that are given graphs of their own: torch.cond, while_loop, scan, map.

    Every constant of a captured graph is then a tensor.

    Raises:
        BuildError: there is one.
    """
    import torch

    from trtpipe.model.nodes import attribute, calls, is_constant, op_name, source_line

    inner = {n for n in graph.graph.nodes if is_constant(n) and isinstance(attribute(graph, n), torch.nn.Module)}
    for node in calls(graph.graph):
        if inner.intersection(node.all_input_nodes):
            at = source_line(node)
            raise BuildError(
                f"capture: {op_name(node)}{f' at {at}' if at else ''} chooses or repeats graphs of its own, and the "
                "graph of an engine holds none. Compute both ways and choose with torch.where(condition, a, b); write "
                "a loop as a Python loop of a fixed number of rounds."
            )


def _require_no_quantizers(graph: torch.fx.GraphModule) -> None:
    """Refuse what quantizes between other lines of a forward: no module can be taken out in its place.

    Raises:
        BuildError: there is some.
    """
    from trtpipe.model.nodes import module_path, source_line
    from trtpipe.model.quantizers import quantizing

    if (node := next(quantizing(graph), None)) is not None:
        raise BuildError(f"capture: {titled(module_path(node))} {quantizes_in_forward(source_line(node))}")


def _require_no_writes(graph: torch.fx.GraphModule) -> None:
    """Refuse operations of torch.library that write into their arguments, which torch.export wraps up.

    Raises:
        BuildError: there is one.
    """
    from trtpipe.model.nodes import calls, op_name, source_line

    for node in calls(graph.graph):
        if op_name(node).startswith("auto_functionalized"):
            raise BuildError(
                f"capture: {node.args[0]} ({source_line(node)}) writes into its arguments, and no engine does. Return "
                "a new tensor from it: mutates_args=()."
            )


def _require_no_projections(graph: torch.fx.GraphModule) -> None:
    """Refuse an LSTM whose hidden state is projected (Sak et al. 2014): ONNX's LSTM has one size for both its states.

    Raises:
        BuildError: there is one.
    """
    from trtpipe.model.nodes import calls, module_path, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) == "lstm"]:
        states: Any = node.args[1]
        hidden, cell = (state.meta["val"].shape[-1] for state in states)
        if hidden != cell:
            raise BuildError(
                f"capture: {titled(module_path(node))} is an LSTM with proj_size {hidden}, which no engine has. "
                "Train it without proj_size, or write its steps as a Python loop of linears, sigmoids and tanhs."
            )


def _output_specs(graph: torch.fx.GraphModule, loaded: LoadedModel) -> tuple[TensorSpec, ...]:
    """The outputs' bindings with the graph's own extents: a number, a dimension of the inputs, or a formula of them.

    A formula such as `2*N` is the name of a dimension whose range is its values at the inputs' min, opt and max.

    Raises:
        BuildError: an extent depends on the data or is zero, or the eager model's batch axis is not the graph's.
    """
    import torch

    nodes = list(graph.graph.nodes)
    symbols: dict[sympy.Expr, str] = {}
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
            for which in EXTENTS
        ]
        return text, DimRange(*sorted(ends)), batch in used

    specs = []
    for spec, node in zip(loaded.outputs, nodes[-1].args[0], strict=True):
        extents = [named(f"outputs.{spec.name}", e) for e in node.meta["val"].shape]
        shape = tuple(e for e, _, _ in extents)
        if 0 in shape:
            got = f"[{', '.join(map(str, shape))}]"
            raise BuildError(f"outputs.{spec.name}: must have elements (got {got}). Leave it out of what is returned.")
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
        specs.append(TensorSpec(spec.name, spec.dtype, shape, ranges, axis, spec.classes))
    return tuple(specs)


def _symbol(name: str) -> sympy.Symbol:
    """The dimension as sympy writes it in a formula."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def _tidy(graph: torch.fx.GraphModule) -> None:
    """Drop export's assertions, let views copy where a changed producer changed the strides, and give a clamp whose
    bounds are a whole number and another float ones, as torch.onnx has no form of it for both kinds."""
    import torch

    clamps = (torch.ops.aten.clamp.default, torch.ops.aten.clip.default)
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif node.target in clamps and {type(a) for a in node.args[1:]} == {int, float}:
            node.args = (node.args[0], *map(float, node.args[1:]))


def _spell_out_products(graph: torch.fx.GraphModule) -> None:
    """Replace mm, addmm, baddbmm, a matmul by a constant matrix or of a vector, and a linear of integers or of a vector
    by `product`, and bmm by the matmul that it is: linears and matmuls, which every number format knows."""
    import torch

    from trtpipe.model.nodes import add_constant, calls, constant_value, is_constant, is_whole, op_name, shape_of

    def rank(value: object) -> int:
        return len(shape_of(value))  # type: ignore[arg-type]

    transposed: dict[tuple[object, float], torch.fx.Node] = {}  # what several operations read is held once
    for node in [n for n in calls(graph.graph) if op_name(n) == "linear"]:
        if not is_whole(node) and rank(node.args[0]) > 1:
            continue
        x, w, bias = (*node.args, None)[:3]
        node.target, node.args, node.kwargs = product, (x, w, True, bias, 1, 1), {}
    for node in [n for n in calls(graph.graph) if op_name(n) == "bmm"]:
        node.target = torch.ops.aten.matmul.default
    for node in [n for n in calls(graph.graph) if op_name(n) in ("mm", "addmm", "baddbmm", "matmul")]:
        given: list[Any] = list(node.args)
        added, a, b = given if len(given) == 3 else (None, *given)
        beta: Any = node.kwargs.get("beta", 1)
        alpha: Any = node.kwargs.get("alpha", 1)
        weight = op_name(node) != "baddbmm" and is_constant(b) and constant_value(graph, b).dim() == 2
        if op_name(node) == "matmul" and not weight and min(rank(a), rank(b)) > 1:
            continue
        if weight:
            if (again := (b.target, alpha)) not in transposed:
                value = constant_value(graph, b).t().contiguous() * alpha
                transposed[again] = add_constant(graph, f"{str(b.target).replace('.', '_')}_transposed", value, node)
            b, alpha = transposed[again], 1
        if beta == 0:
            added = None
        elif beta != 1 and is_constant(added):
            name = f"{str(added.target).replace('.', '_')}_scaled"
            added, beta = add_constant(graph, name, constant_value(graph, added) * beta, node), 1
        node.target, node.args, node.kwargs = product, (a, b, weight, added, beta, alpha), {}


def _batch_convolutions(graph: torch.fx.GraphModule) -> None:
    """Give convolutions of one sample a batch of one, as `product` does it for vectors: all that comes later knows them
    with a batch alone."""
    from trtpipe.model.nodes import calls, op_name, shape_of

    for node in [n for n in calls(graph.graph) if op_name(n) in WEIGHTED and op_name(n) != "linear"]:
        x, w = (len(shape_of(a)) for a in node.args[:2])  # type: ignore[arg-type]
        if x < w:
            node.target, node.args = of_one_sample, (op_name(node), *node.args)


def of_one_sample(name: str, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """A convolution of torch.ops.aten, of one sample: `x`, floating-point [C, ...] where that takes [N, C, ...], has no
    batch dimension, nor has the result."""
    import torch

    result: torch.Tensor = getattr(torch.ops.aten, name)(x.unsqueeze(0), *others, **named).squeeze(0)
    return result


def _spell_out_bilinears(graph: torch.fx.GraphModule) -> None:
    """Replace each bilinear layer by a linear and the matmul behind it, as PyTorch's exporter writes it into ONNX."""
    from trtpipe.model.nodes import add_constant, calls, constant_value, is_constant, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) == "bilinear" and is_constant(n.args[2])]:
        a, b, w, bias = (*node.args, None)[:4]
        rows = constant_value(graph, w).transpose(1, 2).flatten(0, 1).contiguous()  # type: ignore[arg-type]
        flat = add_constant(graph, f"{str(w.target).replace('.', '_')}_rows", rows, node)  # type: ignore[union-attr]
        node.target, node.args, node.kwargs = bilinear, (a, b, flat, bias), {}


def bilinear(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """sum_ij a[..., i] W[o, i, j] b[..., j] + bias[o]: [..., O]; `rows` is W as [O J, I]."""
    import torch

    products = product(a, rows, True, None, 1, 1)
    summed = torch.matmul(products.reshape(*a.shape[:-1], -1, b.shape[-1]), b.unsqueeze(-1)).squeeze(-1)
    return summed if bias is None else summed + bias


#: PyTorch's names of shifts, and whether they go to the left.
_SHIFTS = {"__lshift__": True, "bitwise_left_shift": True, "__rshift__": False, "bitwise_right_shift": False}


def _spell_out_shifts_of_bytes(graph: torch.fx.GraphModule) -> None:
    """Replace a shift of uint8 by a number: PyTorch's exporter takes its result for int8."""
    import torch

    from trtpipe.model.nodes import calls, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) in _SHIFTS and isinstance(n.args[1], int)]:
        if node.meta["val"].dtype == torch.uint8:
            node.target, node.args = shifted_bytes, (node.args[0], node.args[1], _SHIFTS[op_name(node)])


def shifted_bytes(x: torch.Tensor, by: int, left: bool) -> torch.Tensor:
    """`x`, uint8 of any shape, shifted by 0 bits or more to the left or right, as uint8."""
    import torch

    wide = x.to(torch.int32)
    return (wide << by if left else wide >> by).to(torch.uint8)


def _spell_out_integer_divisions(graph: torch.fx.GraphModule) -> None:
    """Replace a rounded division of integers by `quotient`: PyTorch's exporter divides them in FP32, which holds whole
    numbers up to 2^24 alone."""
    from trtpipe.model.nodes import calls, is_float, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) == "div" and n.kwargs.get("rounding_mode")]:
        if not is_float(node):
            node.target, node.args, node.kwargs = quotient, (*node.args, node.kwargs["rounding_mode"]), {}


def quotient(a: torch.Tensor, b: torch.Tensor | int, rounding_mode: str) -> torch.Tensor:
    """a / b of integers, rounded towards zero ("trunc") or down ("floor"), exactly."""
    down = a // b
    if rounding_mode == "floor":
        return down
    upwards = (a - down * b != 0) & ((a < 0) != (b < 0))
    return down + upwards.to(down.dtype)


def product(
    a: torch.Tensor, b: torch.Tensor, weight: bool, added: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    """beta * added + alpha * (a @ b), of vectors too; a `weight` b is [outputs, inputs]. Of integers there are matmuls
    alone: what a linear becomes in ONNX, Gemm, takes none in ONNX Runtime."""
    import torch

    if b.dim() == 1:
        return product(a, b.unsqueeze(-1), weight, added, beta, alpha).squeeze(-1)
    if a.dim() == 1:
        return product(a.unsqueeze(0), b, weight, added, beta, alpha).squeeze(-2)
    if weight and not (a.is_floating_point() or a.is_complex()):
        b, weight = b.t(), False
    if weight and (added is None or (beta == 1 and added.dim() == 1 and added.shape == b.shape[:1])):
        return torch.nn.functional.linear(a, b, added)
    multiplied = torch.nn.functional.linear(a, b) if weight else torch.matmul(a, b)
    scaled = multiplied if alpha == 1 else multiplied * alpha
    return scaled if added is None else scaled + (added if beta == 1 else added * beta)
