"""nn.EmbeddingBag of rows of equal length: an embedding and a sum, mean or maximum over each row.

PyTorch writes the rows one after another, with an offset for each; its ONNX exporter makes a loop of that, which no
engine takes, and torch.export a formula of sizes in the place of the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Modes of aten.embedding_bag, in the order of its numbers.
_MODES = ("sum", "mean", "max")


def spell_out_embedding_bags(graph: torch.fx.GraphModule) -> None:
    """Replace each embedding bag of a matrix of indices by `bag`, which the next export takes apart; one of lists of
    several lengths stays."""
    from trtpipe.model.nodes import calls, op_name

    names = ("weight", "indices", "offsets", "scale", "mode", "sparse", "weights", "last", "padding")
    for node in [n for n in calls(graph.graph) if op_name(n) == "embedding_bag"]:
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        rows, weights = _rows(given["indices"]), given.get("weights")
        regular = rows is not None and _steps(given["offsets"], rows) and not given.get("last")
        weights = None if weights is None else _rows(weights)
        if regular and (weights is None) == (given.get("weights") is None):
            mode = _MODES[given.get("mode") or 0]
            node.target, node.args, node.kwargs = bag, (given["weight"], rows, mode, weights, given.get("padding")), {}


def _rows(flat: torch.fx.Node) -> torch.fx.Node | None:
    """The matrix that was flattened."""
    from trtpipe.model.graph_digest import MOVES
    from trtpipe.model.nodes import op_name

    source = flat.args[0] if op_name(flat) in MOVES else None
    return source if source is not None and source.meta["val"].dim() == 2 else None  # type: ignore[union-attr, return-value]


def _steps(offsets: torch.fx.Node, rows: torch.fx.Node) -> bool:
    """Whether the offsets are those of a matrix' rows: 0, T, 2 T, ..."""
    from trtpipe.model.nodes import op_name, shape_of

    if op_name(offsets) != "arange" or len(offsets.args) != 3 or offsets.args[0] != 0:
        return False
    step: Any = offsets.args[2]
    return bool((step if isinstance(step, int) else step.meta["val"].node.expr) == shape_of(rows)[1])


def bag(
    weight: torch.Tensor, rows: torch.Tensor, mode: str, weights: torch.Tensor | None, padding: int | None
) -> tuple[torch.Tensor, ...]:
    """What torch.nn.functional.embedding_bag gives for a matrix of indices.

    Args:
        weight: floating-point [V, D].
        rows: indices, int64 or int32 [N, T].
        mode: sum, mean or max.
        weights: of each index, weight's dtype [N, T]; for a sum only.
        padding: the index that counts as absent.

    Returns:
        [N, D], zeros for a row of absent ones, as the first of a tuple, as the operator gives it beside what its
        gradient needs.
    """
    import torch

    found = torch.nn.functional.embedding(rows, weight)
    if weights is not None:
        found = found * weights.unsqueeze(2)
    if padding is None:
        return (found.amax(1) if mode == "max" else found.mean(1) if mode == "mean" else found.sum(1),)
    there = (rows != padding % len(weight)).unsqueeze(2)
    if mode == "max":
        largest = found.masked_fill(~there, -torch.inf).amax(1)
        return (torch.where(there.any(1), largest, 0.0),)
    total = (found * there).sum(1)
    return (total if mode == "sum" else total / there.sum(1).clamp(min=1),)
