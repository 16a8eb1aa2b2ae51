"""The user's PyTorch model up to its captured graph, with its data and its baseline."""

__all__ = [
    "baseline",
    "batch_norms",
    "bindings",
    "capture",
    "computing",
    "corners",
    "data",
    "export",
    "failures",
    "graph_digest",
    "labels",
    "load",
    "marks",
    "nodes",
    "onnx",
    "products",
    "pt2e",
    "recorded",
    "sites",
    "torch_versions",
]
