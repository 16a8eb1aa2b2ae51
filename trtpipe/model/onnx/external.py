"""The files that an ONNX file keeps its large tensors in, found without reading these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from calib.files import FETCH, LFS_POINTER, is_lfs_pointer
from trtpipe.errors import InputError

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto


def data_files(path: Path) -> tuple[Path, ...]:
    """The external data of an ONNX file, in the order of their names; none where it is no ONNX file."""
    return tuple(path.parent / name for name in data_names(path))


def data_names(path: Path) -> tuple[str, ...]:
    """As `data_files`, relative to the folder of the file, as it has them."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # noqa: BLE001  # whatever protobuf raises: loading the model will say what is wrong with it
        return ()
    nodes = (node for function in model.functions for node in function.node)
    names = {
        entry.value
        for tensor in (*_of_graph(model.graph), *_of_nodes(nodes))
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(sorted(names))


def _of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    """All tensors of a graph, and of those in it."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for attribute in (a for node in nodes for a in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for graph in (attribute.g, *attribute.graphs):
            yield from _of_graph(graph)


def require_inside(folder: Path, location: str) -> None:
    """Refuse external data outside the folder of the file, or that is not there."""
    inside = Path(location)
    if inside.is_absolute() or ".." in inside.parts:
        raise InputError(
            f"model.onnx: external data must be in the folder of the file (got {location}). Save the file again with "
            "its data beside it."
        )
    if not (folder / inside).is_file():
        raise InputError(
            f"model.onnx: its external data must be beside it (got no file {location} in {folder}). Copy it there."
        )
    if is_lfs_pointer(folder / inside):
        raise InputError(f"model.onnx: its external data must be the file itself (got {LFS_POINTER}). {FETCH}")
    if not (real := (folder / inside).resolve()).is_relative_to(folder.resolve()):  # no reader of ONNX files takes that
        raise InputError(
            f"model.onnx: its external data must be a file beside it (got {location}, a link to {real}). Copy both "
            "files without links: cp -L."
        )
