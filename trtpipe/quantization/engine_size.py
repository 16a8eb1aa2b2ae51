"""What 8 bits add to a TensorRT-RTX engine and what they save: rule P4 of `payoff`, measured by building without a GPU
(1.7.1; benchmarks/models.py writes the sizes).

TensorRT-RTX keeps weights as they are given, INT8 in half the bytes of FP16, and beside them the CUDA source of each
element-wise kernel that it generates: about 145 kB each, whatever the kernel does, and nothing is shared between two of
them. A convolution in FP16 does its bias, activation and residual add itself. In INT8 it writes floats, and one such
kernel scales them, adds, activates and rounds to INT8 for what follows; so does the output of an FP16 operation that an
INT8 one reads. 74 kernels of MobileNetV3 were 10.7 of the 16.7 MB of its INT8 engine, 20 kernels 2.9 of the 13.9 MB in
FP16. Each is a pass over memory too. Where a kernel stands anyway (a batch norm that is not folded, a layer norm),
rounding is free; a concat is none.

In FP8 the same networks have as many kernels: 5 in both for four convolutions or linears with a ReLU, GELU or residual
add behind each, 1 to 2 in FP16, and engines within 4 % of INT8's. Matmuls of activations have no weights; in FP8 they
stay all the same, for TensorRT fuses attention in FP8 (its release notes, 10.4 to 10.7)

Which operations to leave in 8 bits is a minimum cut, as `payoff` says: an operation gains the bytes that its weights
save, and needs the kernel behind itself and those behind what it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import networkx
from torch.fx import GraphModule, Node

from trtpipe.model.batch_norms import BATCH_NORMS
from trtpipe.model.nodes import calls, constant_value, op_name
from trtpipe.model.products import MATMULS, WEIGHTED
from trtpipe.values import Site

#: CUDA source that TensorRT-RTX 1.7.1 puts into an engine for each generated kernel: 141 to 165 kB were seen.
KERNEL_BYTES = 145_000
#: Generated kernels of their own in FP16 already, which rounding joins for nothing; but a batch norm that is added to
#: what a later convolution computes.
OWN_KERNEL = (*BATCH_NORMS, "layer_norm", "native_layer_norm")


def makes_larger(
    graph: GraphModule, sites: Collection[Site], nodes: Collection[Node], certain: Collection[Node] = ()
) -> list[Node]:
    """Of `nodes`, the operations whose weights in 8 bits save less than the kernels that 8 bits add (P4).

    Args:
        graph: the hub graph.
        sites: inputs (Q1) and weights (Q2) of at least these operations.
        nodes: those that could be in 8 bits.
        certain: those that are in any case: their kernels stand.
    """
    network = networkx.DiGraph()
    network.add_nodes_from(("weights", "kernels"))
    saves = _saved(graph, sites)
    for node, kernels in _added(graph, sites, nodes, certain).items():
        network.add_edge("weights", node, capacity=saves.get(node, 0))
        for kernel in kernels:
            network.add_edge(node, ("kernel", kernel))  # no capacity: without limit
            network.add_edge(("kernel", kernel), "kernels", capacity=KERNEL_BYTES)
    _, (stays, _) = networkx.minimum_cut(network, "weights", "kernels")
    return [n for n in nodes if n not in stays]


def in_all(graph: GraphModule, sites: Collection[Site], nodes: Collection[Node]) -> tuple[int, int]:
    """Bytes of the kernels that all of `nodes` in 8 bits add to those of FP16, and bytes that their weights save.

    In FP16 a kernel casts each input, and one each output: in 8 bits the same one rounds, or scales.

    Args: as for `makes_larger`.
    """
    behind, _, _ = kernels(graph)
    at_the_ends = (n for n in behind if n.op == "placeholder" or any(u.op == "output" for u in n.users))
    casts = {kernel for n in at_the_ends for kernel in behind[n]}
    added = {k for needed in _added(graph, sites, nodes, ()).values() for k in needed} - casts
    saves = _saved(graph, sites)
    return KERNEL_BYTES * len(added), sum(saves.get(n, 0) for n in nodes)


def _saved(graph: GraphModule, sites: Collection[Site]) -> Mapping[Node, int]:
    """Bytes that each operation's weights in 8 bits are less than in FP16."""
    return {s.consumer: constant_value(graph, s.producer).numel() for s in sites if s.rule == "Q2"}


def _added(
    graph: GraphModule, sites: Collection[Site], nodes: Collection[Node], certain: Collection[Node]
) -> Mapping[Node, set[Node]]:
    """The kernels, by the operations behind which they stand, that each operation in 8 bits needs and FP16 has not."""
    behind, at, free = kernels(graph)
    free |= {
        *(at[n] for n in certain),
        *(k for s in sites if s.consumer in certain for k in behind.get(s.producer, ())),
    }
    reads = {n: {k for s in sites if s.consumer is n for k in behind.get(s.producer, ())} for n in nodes}
    return {n: ({at[n]} | reads[n]) - free for n in nodes}


def kernels(graph: GraphModule) -> tuple[dict[Node, tuple[Node, ...]], dict[Node, Node], set[Node]]:
    """The operations behind which each value's element-wise kernels would stand; the one behind which that of each
    convolution, linear and matmul would; and those where one stands anyway.

    An element-wise operation counts to the last convolution, linear, matmul or input before it in execution order: what
    is behind that one is computed with it in FP16, and in one kernel after it in 8 bits, the sum of several
    convolutions too. A concat is no kernel in either: its parts are written to their places, in 8 bits by a kernel
    behind each.
    """
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    behind: dict[Node, tuple[Node, ...]] = {n: (n,) for n in order if n.op == "placeholder"}
    own = []
    for node in calls(graph.graph):
        if op_name(node) in (*WEIGHTED, *MATMULS):
            behind[node] = (node,)
            continue
        before = {behind[n]: None for n in node.all_input_nodes if n in behind}
        if not before:
            continue
        last = max(before, key=lambda some: max(order[k] for k in some))
        behind[node] = tuple(dict.fromkeys(itertools.chain(*before))) if op_name(node) == "cat" else last
        if op_name(node) in OWN_KERNEL:
            own.append(node)

    def joined(node: Node) -> tuple[Node, ...]:
        """The kernels that a value is computed in whose only way leads into them."""
        while len(ways := [u for u in node.users if u.users or u.op == "output"]) == 1:
            if op_name(ways[0]) in (*WEIGHTED, *MATMULS, *OWN_KERNEL, "cat") or ways[0] not in behind:
                break
            node = ways[0]
        return behind[node]

    at = {n: joined(n)[-1] for n in behind if op_name(n) in (*WEIGHTED, *MATMULS)}
    free = {k for n in own for k in behind[n] if not (op_name(n) in BATCH_NORMS and joined(n) != behind[n])}
    return behind, at, free
