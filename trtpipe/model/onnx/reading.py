"""Reading an ONNX file: external data, functions inlined, and what cannot be converted refused by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.types import Array
from trtpipe.errors import InputError, first_line
from trtpipe.model.onnx.constants import fold_constants, make_dense, without_constant_outputs, without_copies
from trtpipe.model.onnx.external import require_inside
from trtpipe.model.onnx.linears import with_linears
from trtpipe.model.onnx.names import WEIGHTED_OPERATORS, module_path, unmade
from trtpipe.model.onnx.quantized import Marks, take_qdq_off
from trtpipe.model.onnx.values import Node
from trtpipe.onnx_format import ONNX_DOMAINS, QDQ
from trtpipe.values import BINDING_DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir

#: The opsets whose operators are known.
_OPSETS = (7, 26)


@dataclass(frozen=True)
class OnnxBinding:
    """An input or an output of the file; an extent that is not fixed is a name, or "?", and a shape that the file does
    not give is None."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        """As a message shows it."""
        shape = "of any shape" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.name} {self.dtype} {shape}"


@dataclass(frozen=True)
class OnnxFile:
    """A file that can be converted: its bindings, its nodes in the order of execution and its constants, in FP32.

    `quantized`: it has Q/DQ; nodes that read them have marks. `cut`: this is a part of the file, whose outputs are
    tensors from within it, or which does not need all of its inputs.
    """

    path: Path
    inputs: tuple[OnnxBinding, ...]
    outputs: tuple[OnnxBinding, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    quantized: bool
    cut: bool
    notes: tuple[str, ...]


def read(path: Path, operators: frozenset[str], outputs: Sequence[str] = (), *, recalibrate: bool = False) -> OnnxFile:
    """The file's graph, as far as `outputs` need it.

    Args:
        path: the .onnx file; its external data lie in its folder.
        operators: names of the operators that can be converted.
        outputs: names of tensors of the file; its own outputs where there are none.
        recalibrate: the scales of its Q/DQ are not used, so that any will do.

    Raises:
        InputError: it is no ONNX file, its external data are missing or elsewhere, its tensors are not in FP32, it
            has no tensor of such a name, or has operators that cannot be converted.
    """
    model = opened(path)
    cut = take_outputs(model, outputs)
    _require_known(model.graph, operators | {*QDQ})
    fold_constants(model, operators)
    quantized = any(node.op_type == "DequantizeLinear" for node in model.graph)
    marks, notes = take_qdq_off(model, any_scales=recalibrate)
    graph = model.graph
    version = model.opset_imports.get("", 0)
    if not _OPSETS[0] <= version <= _OPSETS[1]:
        raise InputError(
            f"model.onnx: must be of opset {_OPSETS[0]} to {_OPSETS[1]} (got {version}). Export it again, or run "
            "onnx.version_converter."
        )
    constants = {n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value is not None}
    _require_fp32(graph)
    _require_taken(graph)
    turned = _turned(graph, constants, marks)
    nodes = tuple(_node(n, version, constants, marks, turned) for n in graph if n.outputs[0].name not in turned)
    return OnnxFile(
        path,
        tuple(_binding(v) for v in graph.inputs if v.name not in constants),
        tuple(_binding(v) for v in graph.outputs),
        *with_linears(nodes, constants, {str(v.name) for v in graph.outputs}),
        quantized,
        cut,
        notes,
    )


def opened(path: Path) -> ir.Model:
    """The file with its functions inlined, sparse constants dense, Constant nodes made initializers, and copies of them
    taken out.

    Raises:
        InputError: it is no ONNX file, a node reads what nothing gives, its nodes or functions go in a circle, its
            external data are not in its folder, or the data of a constant do not fit its shape.
    """
    import onnx
    import onnx_ir as ir
    from onnx_ir.passes import common

    with _invalid(path):
        proto = onnx.load(path, load_external_data=False)
        if (name := unmade(proto.graph)) is not None:
            raise ValueError(f"nothing gives {name}, which a node reads")
        make_dense(proto.graph)
        for imported in proto.opset_import:
            imported.domain = "" if imported.domain in ONNX_DOMAINS else imported.domain  # as onnx_ir has that of nodes
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
    if not len(model.graph):
        raise InputError(f"model.onnx: must be an ONNX file (got {path.name}, which has no nodes). Export it again.")
    opset = model.opset_imports.get("")
    for function in model.functions.values():
        if (own := function.opset_imports.get("", opset)) != opset:
            raise InputError(
                f"model.onnx: its functions must be of its own opset, {opset} (got {function.name} of {own}). Run "
                "onnx.inliner.inline_local_functions with convert_version=True."
            )
    for tensor in external_tensors(model):
        require_inside(path.parent, str(tensor.location))
    for step in (
        common.InlinePass(),
        without_constant_outputs,
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveInitializersFromInputsPass(),
        common.TopologicalSortPass(),
        without_copies,
    ):
        with _invalid(path):
            step(model)
    for name, value in model.graph.initializers.items():
        with _invalid(path, f"the data of {name}: "):
            if value.const_value is not None and value.const_value.numpy().shape != tuple(value.const_value.shape):
                raise ValueError(f"{value.const_value.size} values for the shape {value.const_value.shape}")
    return model


@contextmanager
def _invalid(path: Path, of: str = "") -> Iterator[None]:
    """What onnx_ir raises on a file that another program wrote, as what is wrong with the file."""
    try:
        yield
    except Exception as error:
        raise InputError(
            f"model.onnx: must be an ONNX file (got {path.name}: {of}{first_line(error)}). Export it again."
        ) from error


def take_outputs(model: ir.Model, names: Sequence[str]) -> bool:
    """Make named tensors the outputs of a file, and drop the nodes that they do not need, and the inputs where they are
    not the file's own; whether that leaves a part of it, so that what runs it whole needs more than the part does.

    Args:
        model: changed in place.
        names: empty for the file's own.

    Raises:
        InputError: no tensor has such a name.
    """
    from onnx_ir.passes import common

    graph = model.graph
    own = {str(v.name): v for v in graph.outputs}
    made = own | {str(v.name): v for node in graph for v in node.outputs}
    if unknown := [n for n in names if n not in made]:
        raise InputError(
            f"outputs: must be among the tensors of model.onnx (got {', '.join(unknown)}, and the file's outputs are "
            f"{', '.join(str(_binding(v)) for v in graph.outputs)}). Name them as the file does."
        )
    fewer, nodes = bool(names) and set(names) != set(own), len(graph)
    if fewer:
        graph.outputs[:] = [made[n] for n in names]
    _drop_unneeded(graph)
    common.RemoveUnusedNodesPass()(model)
    dropped = len(graph) < nodes
    if fewer:
        needed = [v for v in graph.inputs if v.uses() or v in graph.outputs]
        dropped |= len(needed) < len(graph.inputs)
        graph.inputs[:] = needed
    return dropped or bool(set(names) - set(own))


def _drop_unneeded(graph: ir.Graph) -> None:
    """Remove the nodes that no output needs, with what their branches and bodies read."""
    needed: set[ir.Value | None] = set(graph.outputs)
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(_read_by(node))
            continue
        for part in (node, *_inner(node)):
            for k in range(len(part.inputs)):
                part.replace_input_with(k, None)
        graph.remove(node, safe=True)


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The initializers that lie in files of their own."""
    import onnx_ir as ir

    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value


def _require_known(graph: ir.Graph, operators: frozenset[str]) -> None:
    unknown = Counter(
        n.op_type if n.domain in ONNX_DOMAINS else f"{n.domain}::{n.op_type}"
        for n in graph
        if n.domain not in ONNX_DOMAINS or n.op_type not in operators
    )
    if unknown:
        listed = ", ".join(f"{op} ({count})" if count > 1 else op for op, count in sorted(unknown.items()))
        if any(_IN_INTEGERS.search(op) for op in unknown):
            raise InputError(
                f"model.onnx: must be quantized as Q/DQ with fixed scales (got {listed}). Quantize it again so (ONNX "
                "Runtime: quantize_static with QuantFormat.QDQ and QInt8, without UseQDQContribOps), or give it in "
                "FP32."
            )
        if any(_FOR_ONE_CPU.match(op) for op in unknown):
            raise InputError(
                f"model.onnx: must be a file as it was exported (got {listed}, which ONNX Runtime writes when it "
                "optimizes). Give the file that it was made from."
            )
        before = _before(graph, operators)
        cut = (
            f"Cut it before them: name as the job's outputs what is computed without them ({', '.join(before)}), and "
            "do the rest behind the engine"
            if before
            else "Cut the network before them, or behind those it begins with (onnx.utils.extract_model)"
        )
        raise InputError(
            f"model.onnx: its operators must be among those that trtpipe converts (got {listed}). {cut}; or build from "
            "PyTorch with model.factory."
        )


#: Operators that ONNX Runtime's optimizations put in the place of ONNX's own.
_FOR_ONE_CPU = re.compile(r"com\.microsoft(\.nchwc::|::Fused)")
#: Operators of networks that are quantized otherwise than by ONNX's Q/DQ: in integers, by scales of the data, or by
#: operators of ONNX Runtime's own.
_IN_INTEGERS = re.compile(
    r"^(com\.microsoft::)?(QLinear\w+|\w+Integer\w*|DynamicQuantize\w+|QGemm|(De)?[Qq]uantizeLinear)$"
)
#: Operators whose results are no values of the network: sizes, and codes that a scale belongs to.
_GIVE_NO_VALUES = ("Shape", "Size", "QuantizeLinear", "DynamicQuantizeLinear")
_COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
#: Tensors that a message names.
_MOST_NAMED = 24


def _before(graph: ir.Graph, operators: frozenset[str]) -> list[str]:
    """Names of the tensors where a graph can be cut, so that no operator without a conversion is left: those that are
    computed from inputs by the others alone, and that these operators, or what follows them, read. A comparison of one
    of them can be made behind the engine."""
    computed: set[ir.Value | None] = {v for v in graph.inputs if v.name not in graph.initializers}
    known = {None, *graph.inputs, *graph.initializers.values()}
    values = set(computed)
    readers: dict[ir.Value, bool] = {}
    for node in graph:
        can = node.domain in ONNX_DOMAINS and node.op_type in operators and all(v in known for v in node.inputs)
        if not can:
            readers |= {v: True for v in _read_by(node) if v in computed}
            continue
        known |= set(node.outputs)
        made = set(node.outputs[:1] if node.op_type == "MaxPool" else node.outputs)  # of places there is no conversion
        if any(v in computed for v in node.inputs):
            computed |= made
        if node.op_type not in _GIVE_NO_VALUES and any(v in values for v in node.inputs):
            values |= made
    ends = [v for v in graph.outputs if v in known]
    cuts = {v: v.producer() for v in (*readers, *ends) if v in values and v.producer() is not None}
    found = [
        str(v.name)
        for v, made in cuts.items()
        if made.op_type not in _COMPARISONS or not any(x in cuts for x in made.inputs)
    ]
    return found if len(found) <= _MOST_NAMED else [*found[:_MOST_NAMED], "..."]


def _read_by(node: ir.Node) -> Iterator[ir.Value | None]:
    """What a node reads, its branches and bodies included."""
    yield from node.inputs
    for graph in _graphs(node):
        yield from graph.outputs
    for inner in _inner(node):
        yield from inner.inputs
        for graph in _graphs(inner):
            yield from graph.outputs


def _inner(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes in a node's branches and bodies, and in those of these."""
    for graph in _graphs(node):
        for inner in graph:
            yield inner
            yield from _inner(inner)


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """A node's branches and bodies."""
    import onnx_ir as ir

    for attribute in node.attributes.values():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            yield from [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value


def _require_fp32(graph: ir.Graph) -> None:
    import onnx_ir as ir

    kinds = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    found = sorted({str(v.dtype.name) for v in values if v.dtype in kinds})
    if found:
        raise InputError(
            f"model.onnx: its floating-point tensors must be FP32 (got {' and '.join(found)}). Export it in FP32; "
            "precision.fp16_mode and bf16_mode make it FP16 or BF16."
        )


def _require_taken(graph: ir.Graph) -> None:
    """Refuse inputs and outputs of what no engine takes: text, complex numbers, unsigned or 16-bit integers."""
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype is not None and value.dtype.name.lower() not in (*BINDING_DTYPES, "float"):
            raise InputError(
                f"model.onnx: inputs and outputs must be of {', '.join(BINDING_DTYPES)} (got {value.name}, of "
                f"{value.dtype.name}). Cut it off: name as the job's outputs what is computed without it."
            )


def _binding(value: ir.Value) -> OnnxBinding:
    shape = (
        None if value.shape is None else tuple(d if isinstance(d, int) else str(d.value or "?") for d in value.shape)
    )
    dtype = "float32" if value.dtype is None else str(value.dtype.numpy().name)
    return OnnxBinding(str(value.name), dtype, shape)


def _turned(graph: ir.Graph, constants: dict[str, Array], marks: Marks) -> dict[str, tuple[str, str]]:
    """What nodes make of a constant by passing it on or transposing it, as exporters do with a weight of several
    readers: by name, the constant that it is (transposed ones join `constants`) and the initializer behind it."""
    turned: dict[str, tuple[str, str]] = {}
    outputs = {v.name for v in graph.outputs}
    for node in graph:
        source, name = str(node.inputs[0].name) if node.inputs and node.inputs[0] else "", str(node.outputs[0].name)
        source, origin = turned.get(source, (source, source))
        if source not in constants or name in outputs or (node, 0) in marks:
            continue
        if node.op_type == "Identity":
            turned[name] = source, origin
        elif node.op_type == "Transpose":
            order = node.attributes.get("perm")
            constants[name] = constants[source].transpose(order.as_ints() if order else None)
            turned[name] = name, origin
    return turned


def _node(
    node: ir.Node,
    version: int,
    constants: Mapping[str, Array],
    marks: Marks,
    turned: Mapping[str, tuple[str, str]],
) -> Node:
    named = tuple("" if v is None else str(v.name) for v in node.inputs)
    inputs, origins = ([turned.get(n, (n, n))[k] for n in named] for k in range(2))
    outputs = tuple(str(v.name) if v.name is not None else "" for v in node.outputs)
    weight = origins[1] if node.op_type in WEIGHTED_OPERATORS and len(inputs) > 1 and inputs[1] in constants else None
    attributes = {name: _plain(a.value) for name, a in node.attributes.items()}
    path = module_path(node.name or "", node.op_type, outputs[0], weight, dict(node.metadata_props))
    own = {k: marks[node, k] for k in range(len(inputs)) if (node, k) in marks}
    return Node(node.op_type, node.name or "", path, tuple(inputs), outputs, attributes, version, own)


def _plain(value: Any) -> Any:
    """An attribute as Python has it; a tensor as a NumPy array."""
    return value.numpy() if hasattr(value, "numpy") else list(value) if isinstance(value, tuple) else value
