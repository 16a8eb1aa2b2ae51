"""Which operations a weakly typed TensorRT computes in INT8 kernels: what lies between Q/DQ.

On 8.6, Q and DQ are float32 on their other side, and Q/DQ fuse with what stands directly beside them. So an operation
fed by a DQ, and whatever follows it up to the next Q, is float32 in the graph and under no precision constraint: an
INT8 kernel does it whole. The graph is written so (`routes.release`), and constraints are set so (`lowering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OperationKind = Literal["quantize", "dequantize", "constant", "other"]


@dataclass(frozen=True)
class Operation:
    """One operation of a graph by the names of its tensors; `constant` has no data flowing through it."""

    kind: OperationKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def int8_regions(operations: Sequence[Operation]) -> frozenset[int]:
    """Indices of the operations that are fed by a DQ, or lie wholly between Q/DQ.

    The largest set whose members take nothing but DQ outputs, constants and each other, and give to nothing but Q and
    each other; and all that read a DQ directly, wherever their output goes.
    """
    maker = {name: k for k, o in enumerate(operations) for name in o.outputs}
    readers: dict[str, list[int]] = {}
    for k, operation in enumerate(operations):
        for name in operation.inputs:
            readers.setdefault(name, []).append(k)

    def kind(name: str) -> str:
        return operations[maker[name]].kind if name in maker else "input"

    others = [k for k, o in enumerate(operations) if o.kind == "other"]
    fed = {k for k in others if any(kind(n) == "dequantize" for n in operations[k].inputs)}
    inside = set(others) - fed

    def enclosed(k: int) -> bool:
        """Whether everything around operation `k` is Q, DQ, a constant, or in the region."""
        before = (n for n in operations[k].inputs if kind(n) not in ("dequantize", "constant"))
        after = [r for n in operations[k].outputs for r in readers.get(n, ())]
        taken = fed | inside
        return (
            all(maker.get(n) in taken for n in before)
            and bool(after)
            and all(operations[r].kind == "quantize" or r in taken for r in after)
        )

    while outside := {k for k in inside if not enclosed(k)}:
        inside -= outside
    return frozenset(fed | inside)
