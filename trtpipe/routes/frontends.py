"""What the routes torch_tensorrt and torch2trt share: the GPU that both need, and the graph that they give."""

from __future__ import annotations

from trtpipe.errors import BuildError, MissingError, first_line
from trtpipe.routes import options
from trtpipe.routes.onnx import to_onnx
from trtpipe.trt import driver
from trtpipe.values import OnnxModel, Quantized


def require_gpu(route: str) -> None:
    """Nothing, where this machine has an NVIDIA GPU.

    Raises:
        MissingError: it has none; the message points to the route that needs none.
    """
    if problem := driver.probe().problem:
        raise MissingError(f"build.route: {options.without_gpu(route, problem)}")


def graph_of(quantized: Quantized, note: str) -> tuple[OnnxModel | None, tuple[str, ...]]:
    """The ONNX of the same program, to execute where no engine can; and notes on it."""
    try:
        return to_onnx(quantized), (note,)
    except BuildError as error:
        first = first_line(error)  # torch.onnx ends it with advice for its own developers
        return None, (f"the program has no ONNX form, so only the engine can be checked: {first}",)
