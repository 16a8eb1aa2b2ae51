"""Where Q/DQ pairs go: what TensorRT fuses, and nothing else.

Rules, from NVIDIA's TensorRT developer guide, "Working with Quantized Types", section "Q/DQ Layer-Placement
Recommendations", with the numbers used in reports:

    Q1  quantize the inputs of convolutions, transposed convolutions, linears and matmuls, attention's included
    Q2  activations per tensor, weights per output channel (axis 0; axis 1 of a transposed convolution), symmetric
    Q3  do not quantize the outputs of these operations: what follows (bias, ReLU, add) is fused with them
    Q4  quantize the skip branch of a residual add whose other branch is a quantized convolution, where that branch is
        INT8 anyway: it feeds another quantized operation, or is itself a quantized convolution's output
    Q5  tensors around concat and max-pool share one scale, so that Q and DQ move across them; not around a pool whose
        input is padded with infinity, which no scale holds, a concat with a constant, as of pixel coordinates, whose
        range would be that of the features, nor where an operation that is kept in float reads them too
    Q6  biases stay in float (TensorRT-RTX refuses INT32 biases)
    Q7  an operation that is kept in float has none of its inputs quantized, whatever else reads them
    Q8  of a model that is quantized already: its own Q/DQ elsewhere than at Q1 and Q2, but around what an operation
        that is kept in float reads or gives

The functions here only read the graph. Sites do not depend on what a job keeps out of INT8, so one calibration table
serves every choice of `precision.keep`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from networkx.utils import UnionFind

from trtpipe.model.keys import input_key, operand_key, weight_key
from trtpipe.model.marks import is_marked, marks_of
from trtpipe.model.nodes import calls, groups_of, is_constant, is_float, module_path, op_name, shape_of
from trtpipe.model.products import MATMULS, OTHER_PRODUCTS, WEIGHTED
from trtpipe.values import Site, SiteRule, Skipped

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    #: What a `Site` is made of: its consumer, producer, key, axis and rule.
    _Candidate = tuple[Node, Node, str, int | None, SiteRule]

ADDS = ("add",)
SHARED = ("cat", "max_pool2d")

#: An operation's module, its name, and how many of that name the module has before it.
Role = tuple[str, str, int]


def find_sites(graph: GraphModule) -> tuple[tuple[Site, ...], tuple[Skipped, ...]]:
    """Every input that TensorRT would want quantized, in execution order, and the operations left out, with why.

    A captured graph has them in `Captured.sites` and `Captured.skipped`. Of a model that is quantized already
    (`model.marks`), they are the inputs that it quantizes itself.
    """
    if is_marked(graph):
        return _own_sites(graph)
    candidates: list[_Candidate] = []
    skipped: list[Skipped] = []
    ordinals: Counter[tuple[str, str]] = Counter()
    role: dict[Node, Role] = {}
    quantized: set[Node] = set()
    for node in calls(graph.graph):
        name = op_name(node)
        if name in OTHER_PRODUCTS and is_float(node):
            skipped.append(Skipped(node, OTHER_PRODUCTS[name]))
        if name not in WEIGHTED and name not in MATMULS + ADDS + SHARED:
            continue
        path = module_path(node)
        k = ordinals[path, name]
        ordinals[path, name] += 1
        role[node] = (path, name, k)
        if name in WEIGHTED:
            x, weight = node.args[:2]
            before = _weighted_before(ordinals, path)
            if not is_float(x) or not isinstance(weight, torch.fx.Node):
                continue
            if (other := _not_float32(node)) is not None:
                skipped.append(Skipped(node, f"it computes in {other}"))
                continue
            if not is_constant(weight):
                skipped.append(Skipped(node, "its weight is computed at run time"))
                continue
            axis = _axis(node, name)
            if axis is None:
                skipped.append(Skipped(node, "the weight of a grouped transposed convolution has no axis of outputs"))
                continue
            candidates.append((node, x, input_key(path, before), None, "Q1"))
            candidates.append((node, weight, weight_key(path, before), axis, "Q2"))
            quantized.add(node)
        elif name in MATMULS:
            pair = [x for x in node.args[:2] if is_float(x)]
            if len(pair) != 2:
                continue
            if (other := _not_float32(node)) is not None:
                skipped.append(Skipped(node, f"it computes in {other}"))
                continue
            candidates += [(node, x, operand_key(*role[node], i), None, "Q1") for i, x in enumerate(pair)]
            quantized.add(node)
    fed = {x for _, x, _, _, _ in candidates}
    candidates += _residual(graph, role, quantized, fed)
    groups = UnionFind()  # of tensors that must share one scale
    shared_keys = _shared(graph, role, fed, groups)
    candidates += shared_keys
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    candidates.sort(key=lambda f: (order[f[0]], f[2]))
    first_key: dict[Node, str] = {}
    for _, x, key, axis, _ in candidates:
        if axis is None:
            first_key.setdefault(groups[x], key)
    return (
        tuple(
            Site(c, x, key, first_key[groups[x]] if axis is None else key, axis, rule)
            for c, x, key, axis, rule in candidates
        ),
        tuple(skipped),
    )


def _not_float32(node: Node) -> str | None:
    """The dtype, where the model itself computes the operation in another one than float32, which scales are of."""
    dtypes = [n.meta["val"].dtype for n in (*node.all_input_nodes, node) if is_float(n)]
    return next((str(d).removeprefix("torch.") for d in dtypes if d != torch.float32), None)


def _own_sites(graph: GraphModule) -> tuple[tuple[Site, ...], tuple[Skipped, ...]]:
    """The inputs that a quantized model has marked, under the keys that they have in any other model."""
    sites: list[Site] = []
    skipped: list[Skipped] = []
    ordinals: Counter[tuple[str, str]] = Counter()
    group: dict[Node, str] = {}
    for node in calls(graph.graph):
        name, path, marks = op_name(node), module_path(node), marks_of(node)
        k = ordinals[path, name]
        ordinals[path, name] += 1
        before = _weighted_before(ordinals, path) if name in WEIGHTED else 0
        if name in (*WEIGHTED, *MATMULS) and is_float(node):
            bare = [isinstance(x, torch.fx.Node) and x.name not in marks for x in node.args[:2]]
            of_weight = "its input" if bare[0] else "its weight"
            left = "it" if all(bare) else of_weight if name in WEIGHTED else "one of its factors"
            if any(bare):
                skipped.append(Skipped(node, f"the model's own Q/DQ leave {left} out"))
        for i, x in enumerate(node.all_input_nodes):
            if x.name not in marks:
                continue
            axis = None
            rule: SiteRule = "Q1" if name in (*WEIGHTED, *MATMULS) else "Q8"
            key = operand_key(path, name, k, i)
            if name in WEIGHTED and x is node.args[0]:
                key = input_key(path, before)
            elif name in WEIGHTED and x is node.args[1] and is_constant(x):
                key, axis, rule = weight_key(path, before), WEIGHTED[name], "Q2"
            sites.append(Site(node, x, key, key if axis is not None else group.setdefault(x, key), axis, rule))
    return tuple(sites), tuple(skipped)


def _weighted_before(ordinals: Counter[tuple[str, str]], path: str) -> int:
    """How many operations with a weight, whichever, the module has before its next."""
    ordinals[path, "weighted"] += 1
    return ordinals[path, "weighted"] - 1


def computes_with(reader: Node, argument: Node) -> bool:
    """Whether an operation computes with the integers of a quantized argument: a weight, a factor, a concat's part."""
    name = op_name(reader)
    return name in SHARED or (name in (*WEIGHTED, *MATMULS) and argument in reader.args[:2])


def of_product(site: Site) -> bool:
    """Whether it is an input or a weight of a convolution, a linear or a matmul: rules Q1 and Q2."""
    return site.rule in ("Q1", "Q2")


def kept_sites(sites: Collection[Site], keep: Callable[[Node], bool]) -> tuple[Site, ...]:
    """The sites that remain when operations for which `keep` holds stay in float: rules Q4, Q5, Q7 and Q8 once more."""
    alive = [s for s in sites if not keep(s.consumer)]
    compute = {s.consumer for s in alive if of_product(s)}
    wanted = {s.producer for s in alive if s.rule == "Q1"}

    alive = [
        s
        for s in alive
        if s.rule != "Q4" or (fused_with(s, compute) is not None and (s.producer in wanted or s.producer in compute))
    ]
    #: Read by an operation that computes with the integers, as an add does that is fused with a product.
    read = {(s.consumer, s.producer) for s in alive if of_product(s) or fused_with(s, compute) is not None}

    def passed(site: Site) -> bool:
        if site.rule == "Q8" and _made_by_kept(site.producer, compute, keep):
            return False
        return (site.rule == "Q8" or _feeds(site.consumer, wanted)) and not _read_by_kept(site.consumer, read, keep)

    return tuple(s for s in alive if (s.consumer, s.producer) in read or passed(s))


def fused_with(site: Site, products: Collection[Node]) -> Node | None:
    """The one of `products` that the add of a skip branch (Q4, or the model's own Q/DQ) is fused with, or None."""
    if op_name(site.consumer) not in ADDS:
        return None
    return next((a for a in site.consumer.args[:2] if a is not site.producer and a in products), None)  # type: ignore[return-value]


def _made_by_kept(node: Node, compute: Collection[Node], keep: Callable[[Node], bool]) -> bool:
    """Whether a value comes from an operation that is kept in float, at once or through float operations: rounding what
    that gives is not left to it."""
    seen, todo = {node}, [node]
    while todo:
        value = todo.pop()
        if keep(value):
            return True
        if value not in compute:
            new = {x for x in value.all_input_nodes if x.op == "call_function"} - seen
            seen |= new
            todo += new
    return False


def _read_by_kept(node: Node, read: Collection[tuple[Node, Node]], keep: Callable[[Node], bool]) -> bool:
    """Whether an operation that is kept in float reads the node's value, or what float operations make of it: it would
    read rounded numbers. `read` are the (reader, tensor) whose reader computes in INT8 with a Q/DQ pair of its own."""
    seen, todo = {node}, [node]
    while todo:
        value = todo.pop()
        for reader in value.users:
            if reader.op != "call_function" or reader in seen:
                continue
            if keep(reader):
                return True
            if (reader, value) not in read:
                seen.add(reader)
                todo.append(reader)
    return False


def _axis(node: Node, name: str) -> int | None:
    """The axis of output channels of the weight; a transposed convolution's is [C_in, C_out / groups, ...]."""
    grouped = name.startswith("conv_transpose") and groups_of(node) != 1
    return None if grouped else WEIGHTED[name]


def _feeds(node: Node, wanted: Collection[Node]) -> bool:
    """Whether the node's value, perhaps through further concats and max-pools that Q5 is for, is a quantized input."""
    return node in wanted or any(_parts(u) and _feeds(u, wanted) for u in node.users)


def _parts(node: Node) -> list[Node]:
    """The tensors that share one scale with a concat's or a max-pool's value by Q5; none where it cannot be."""
    if op_name(node) not in SHARED or not is_float(node):
        return []
    given: Any = node.args[0] if op_name(node) == "cat" else [node.args[0]]
    parts = [x for x in given if is_float(x) and not _of_constants(x)]
    if len(parts) != len(given) or _not_float32(node) is not None or any(map(_bounded_by_infinity, parts)):
        return []
    return parts


def _residual(
    graph: GraphModule, role: Mapping[Node, Role], quantized: Collection[Node], fed: Collection[Node]
) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    order = {n: i for i, n in enumerate(graph.graph.nodes)}

    def is_convolution(node: object) -> bool:
        return node in quantized and op_name(node).startswith("conv")  # type: ignore[arg-type]

    for node in calls(graph.graph):
        if op_name(node) not in ADDS or node.target is not torch.ops.aten.add.Tensor:
            continue
        a, b = node.args[:2]
        if not is_float(a) or not is_float(b) or is_constant(a) or is_constant(b) or _not_float32(node) is not None:
            continue
        if shape_of(a) != shape_of(b):
            continue
        main = [x for x in (a, b) if is_convolution(x) and len(x.users) == 1]
        if not main:
            continue
        # Two convolutions meet: the one that runs last is fused with the add, the other one is the skip branch.
        longer = _longer(a, b) if len(main) == 2 else None
        last = longer or max(main, key=lambda x: order[x])
        skip = b if last is a else a
        if skip in fed or is_convolution(skip):
            index = 1 if skip is b else 0
            candidates.append((node, skip, operand_key(*role[node], index), None, "Q4"))
    return candidates


def _longer(a: Node, b: Node) -> Node | None:
    """Of two branches, the one with more operations since they parted; None when equally long."""

    def ancestors(node: Node) -> set[Node]:
        seen, todo = {node}, [node]
        while todo:
            for parent in todo.pop().all_input_nodes:
                if parent.op == "call_function" and parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    left, right = ancestors(a), ancestors(b)
    only_left, only_right = len(left - right), len(right - left)
    if only_left == only_right:
        return None
    return a if only_left > only_right else b


def _shared(
    graph: GraphModule,
    role: Mapping[Node, Role],
    fed: Collection[Node],
    groups: UnionFind,
) -> list[_Candidate]:
    extra: list[_Candidate] = []
    for node in calls(graph.graph):
        parts = _parts(node) if _feeds(node, fed) else []
        for i, x in enumerate(parts):
            key = operand_key(*role[node], i if op_name(node) == "cat" else None)
            extra.append((node, x, key, None, "Q5"))
            groups.union(node, x)
    return extra


def _of_constants(node: Node) -> bool:
    """Whether a tensor is a constant, or made of constants for each sample of a batch whatever is in it, as pixel
    coordinates are. Of inputs it may take sizes alone."""
    seen, todo = {node}, [node]
    while todo:
        one = todo.pop()
        if one.op == "placeholder":
            return False
        new = {x for x in one.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor) or is_constant(x)} - seen
        seen |= new
        todo += new
    return True


def _bounded_by_infinity(node: Node) -> bool:
    """Whether a tensor was padded with infinity, as for a max pool of unequal sides: no scale holds that."""
    fills = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, float)]
    return op_name(node) in ("pad", "constant_pad_nd") and any(map(math.isinf, fills))


def shared_scales(sites: Iterable[Site]) -> dict[object, list[Site]]:
    """The inputs by what they share a scale through: a group of activations, or a weight's constant and axis."""
    shared: dict[object, list[Site]] = {}
    for site in sites:
        shared.setdefault(site.shared, []).append(site)
    return shared
