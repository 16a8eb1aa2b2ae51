"""The place in the user's own model where an error was raised, and its reason."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from calib.errors import text_of
from calib.user_code import is_ours
from trtpipe.errors import first_line

#: Packages whose frames are not the model's, beside trtpipe's own; those of timm, say, are.
_NOT_THE_MODELS = ("torch", "torchao", "onnx", "onnxscript", "sympy")


def place_of(error: BaseException) -> str:
    """`net.py:14 (y = self.head(x))`, the innermost line of the user's own code, or of what the error was raised from,
    as a StopIteration within a generator; empty when there is none."""
    place = _place(traceback.extract_tb(error.__traceback__))
    return place or (place_of(error.__cause__) if error.__cause__ is not None else "")


def place_here() -> str:
    """`place_of` what is running."""
    return _place(traceback.extract_stack())


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    for frame in reversed(frames):
        if is_the_models(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return ""


def deciding_lines(error: BaseException) -> tuple[str, ...]:
    """The user's own lines, as `place_of` has them, that decide by a dynamic size of which not all values go one way;
    none where an operation does. They are in what torch.export keeps of its guards."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    raised: BaseException | None = error
    while raised is not None:
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            kept = next((v for v in frame.f_locals.values() if isinstance(v, ShapeEnv)), None)
            if kept is not None:
                places = (getattr(getattr(g, "sloc", None), "framework_loc", None) for g in kept.guards)
                at = (_place([p]) for p in places if isinstance(p, traceback.FrameSummary))
                return tuple(dict.fromkeys(filter(None, at)))
        raised = raised.__cause__ or raised.__context__
    return ()


def raised_by_the_model(error: BaseException) -> bool:
    """Whether a `raise` or an `assert` of the user's own code made this error, and not what that code called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_the_models(trace.tb_frame.f_code.co_filename):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def typed_line(error: BaseException) -> str:
    """The type and the first line of a message, without the advice for developers of torch that follows it."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if text_of(error) else name


def is_the_models(file: str) -> bool:
    """Whether a file of code is the model's, and not trtpipe's or of what runs the model, whatever its folders are
    called. Code that torch writes, and what is evaluated, has no file."""
    return file.endswith(".py") and not is_ours(file) and not file.startswith(_folders())


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where the packages are whose frames are not the model's."""
    specs = filter(None, map(importlib.util.find_spec, _NOT_THE_MODELS))
    return tuple(folder + os.sep for spec in specs for folder in spec.submodule_search_locations or ())


def branches_on_data(error: BaseException) -> bool:
    """Whether torch.export stopped at a decision that depends on the values of a tensor."""
    return "data-dependent" in text_of(error) or "DataDependent" in type(error).__name__


def quantizes_in_forward(where: str) -> str:
    """What is said of a network that calls torch.fake_quantize_* itself, at a line of its code."""
    return (
        f"quantizes in its forward{f' at {where}' if where else ''}, and a network's own scales are taken from fake "
        "quantizers that are modules. Make them modules (FakeQuantize of torchao, TensorQuantizer of ModelOpt), or "
        "quantize by PT2E (convert_pt2e) and give the exported file as model.program."
    )
