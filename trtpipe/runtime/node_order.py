"""The order of an ONNX graph's nodes: ONNX Runtime executes them one after the other as the file has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


def weights_late(nodes: Sequence[NodeProto], inputs: Iterable[str]) -> list[NodeProto]:
    """The same nodes, with each that depends on no input just before the first that reads it.

    A file that dequantizes its weights before anything else has all of them held in FP32 at once.

    Args:
        nodes: a graph's, each after those whose outputs it reads.
        inputs: names of the graph's inputs.
    """
    fed = set(inputs)  # names that depend on an input
    waiting: dict[str, NodeProto] = {}  # nodes that do not, by the name of each output
    ordered: list[NodeProto] = []

    def place(name: str) -> None:
        """Put the waiting node that makes `name` there, after those that it waits for itself."""
        way = [name] if name in waiting else []
        while way:
            node = waiting.get(way[-1])
            if node is None:
                way.pop()
            elif first := next((i for i in _reads(node) if i in waiting and i not in way), None):
                way.append(first)
            else:  # a damaged file may have a circle: its nodes stay in some order, for ONNX Runtime to refuse
                ordered.append(node)
                for output in node.output:
                    waiting.pop(output, None)

    for node in nodes:
        read = list(_reads(node))
        if fed.isdisjoint(read) and any(node.output):
            waiting.update({output: node for output in node.output if output})
            continue
        for name in read:
            place(name)
        ordered.append(node)
        fed.update(node.output)
    for name in list(waiting):  # outputs that are constants, and what nobody reads
        place(name)
    return ordered


def _reads(node: NodeProto) -> Iterator[str]:
    """What a node reads, the subgraphs of its attributes included; an omitted input is no name."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        graphs: list[GraphProto] = [*attribute.graphs, *([attribute.g] if attribute.g.node else [])]
        for graph in graphs:
            for inner in graph.node:
                yield from _reads(inner)
            yield from (output.name for output in graph.output)
