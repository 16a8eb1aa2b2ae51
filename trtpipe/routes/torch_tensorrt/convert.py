"""A program converted by Torch-TensorRT, and its errors as messages."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from calib.types import JsonObject
from trtpipe.batching import by_profile
from trtpipe.errors import BuildError, first_line, titled
from trtpipe.job.sections import Build
from trtpipe.trt.monitor import Watch
from trtpipe.values import EXTENTS, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch_tensorrt import Input

T = TypeVar("T")


class NoConverter(BuildError):
    """Operations have no converter in Torch-TensorRT, so there can be no whole engine."""


def trt_inputs(
    frontend: ModuleType, inputs: tuple[TensorSpec, ...], build: Build, *, parts: bool = False
) -> list[Input]:
    """Torch-TensorRT's `Input`s in the binding dtypes, with every optimization profile of the job.

    Args:
        frontend: the imported torch_tensorrt.
        inputs: the bindings.
        build: the job's, with its profiles.
        parts: the program will be cut into parts. Their shapes follow exactly only from profiles: else the least of
            4 * N is taken to be 8 where N begins at 1, and the best is that of the export's example.
    """
    import torch

    made = []
    for spec, *narrowed in zip(inputs, *by_profile(inputs, build.profiles), strict=True):
        dtype = getattr(torch, spec.dtype)
        if not spec.dynamic:
            made.append(frontend.Input(shape=spec.at("opt"), dtype=dtype))
            continue
        shapes = [{f"{w}_shape": of.at(w) for w in EXTENTS} for of in narrowed]
        more = shapes[0] if len(shapes) == 1 and not parts else {"profiles": shapes}
        made.append(frontend.Input(dtype=dtype, **more))
    return made


def converted(
    frontend: ModuleType,
    function: Callable[..., T],
    program: torch.export.ExportedProgram,
    arguments: JsonObject,
    watch: Watch,
) -> T:
    """What `function`, one of Torch-TensorRT's, makes of `program`.

    Raises:
        NoConverter: operations have no converter, and the whole program was asked for; they are named.
        BuildError: TensorRT refuses the network, or Torch-TensorRT fails.
    """
    from trtpipe.routes.torch_tensorrt.converters import register_converters

    register_converters()
    watch.check()
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            made = function(program, **arguments)
    except Exception as error:
        watch.check()
        missing = _missing(error, warned)
        reason = _innermost(error)
        if missing:
            reason = f"no converter for {', '.join(_with_modules(n, program) for n in missing)}"
        raise (NoConverter if missing else BuildError)(
            f"build: Torch-TensorRT {frontend.__version__} cannot convert the program ({reason}). "
            "Use build.route onnx, or rewrite the operation named."
        ) from error
    watch.check()
    return made


def _missing(error: BaseException, warned: list[warnings.WarningMessage]) -> list[str]:
    """Every operation without a converter, by name."""
    warnings_text = "\n".join(str(w.message) for w in warned)  # all of them; the error itself names the first
    operators = re.findall(r"^call_function torch\.(?:_?ops\.)?(\S+)$", warnings_text, re.MULTILINE)
    operators = operators or re.findall(
        r"Conversion of function torch\.(?:_?ops\.)?(\S+) not currently supported", _chain(error)
    )
    return list(dict.fromkeys(operators))


def _innermost(error: BaseException) -> str:
    """The first line of the error at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)[:400]


def _with_modules(name: str, program: torch.export.ExportedProgram) -> str:
    """`name`, followed by the paths of the modules whose operation it is, where the program still has it."""
    from trtpipe.model.nodes import calls, module_path

    paths = {module_path(n) for n in calls(program.graph) if str(n.target) == name}
    shown = ", ".join(sorted(titled(p) for p in paths))
    return f"{name} ({shown})" if shown else name


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)
