"""torch.export with the job's named dynamic dimensions; `capture` and `quantize` both end in it."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING

from calib.errors import text_of
from calib.user_code import described
from trtpipe.errors import BuildError, InputError, TrtpipeError
from trtpipe.model.failures import (
    branches_on_data,
    deciding_lines,
    place_of,
    quantizes_in_forward,
    raised_by_the_model,
    typed_line,
)
from trtpipe.model.torch_versions import SHOWS_MORE, dotted, release
from trtpipe.values import TensorSpec

if TYPE_CHECKING:
    import torch


def example_sizes(inputs: Sequence[TensorSpec], *, largest: bool = False) -> dict[str, int]:
    """What dynamic dimensions are made up as, by name: one that is the first of an input is 2 where its range allows,
    so that export keeps it, others are at their opt, or at their `largest`."""
    first = {spec.shape[0] for spec in inputs if spec.shape}
    ranges = {name: r for spec in inputs for name, r in spec.dims.items()}
    return {
        name: min(max(2, r.min), r.max) if name in first else r.max if largest else r.opt for name, r in ranges.items()
    }


def example_inputs(inputs: Sequence[TensorSpec], whole: int = 0, *, largest: bool = False) -> tuple[torch.Tensor, ...]:
    """Zeros of each input's dtype and shape at `example_sizes`, `whole` in integer and boolean ones."""
    sizes = example_sizes(inputs, largest=largest)
    shapes = [[d if isinstance(d, int) else sizes[d] for d in spec.shape] for spec in inputs]
    return tuple(filled(shape, spec.dtype, whole) for shape, spec in zip(shapes, inputs, strict=True))


def filled(shape: Sequence[int], dtype: str, whole: int) -> torch.Tensor:
    """Zeros of a floating-point dtype; of another one, `whole` in every element."""
    import torch

    kind = getattr(torch, dtype)
    return torch.full(tuple(shape), 0 if kind.is_floating_point else whole, dtype=kind)


def export(module: torch.nn.Module, inputs: tuple[TensorSpec, ...]) -> torch.export.ExportedProgram:
    """`module` exported for `inputs`, each dynamic dimension under its own name and range.

    Raises:
        BuildError: torch.export refuses; the message is its own first lines.
        InputError: the model's own code raised.
    """
    import torch

    from trtpipe.model.bindings import Bound
    from trtpipe.model.resizing import ToWholeSizes
    from trtpipe.model.splits import InSlices

    shared: dict[str, torch.export.Dim] = {}
    for spec in inputs:
        for name, r in spec.dims.items():
            if r.min < r.max:
                shared[name] = torch.export.Dim(name, min=r.min, max=r.max)
    shapes = tuple(
        {axis: shared[d] for axis, d in enumerate(spec.shape) if isinstance(d, str) and d in shared} for spec in inputs
    )
    star = isinstance(module, Bound)  # whose forward takes *inputs
    equal = module.register_forward_pre_hook(lambda module, given: _require_equal(inputs, given))
    try:
        with warnings.catch_warnings(), without_its_log(), ToWholeSizes(), InSlices():
            warnings.simplefilter("ignore")
            dynamic = (shapes,) if star else shapes
            try:
                return torch.export.export(module, example_inputs(inputs), dynamic_shapes=dynamic, strict=False)
            except torch._dynamo.exc.UserError as error:
                if "specialized" not in text_of(error) or _recurrent(module):  # whose steps would each be exported
                    raise
                # A size that is 1 at the example's is special: an export at the largest gives the condition.
                largest = example_inputs(inputs, largest=True)
                try:
                    return torch.export.export(module, largest, dynamic_shapes=dynamic, strict=False)
                except torch._dynamo.exc.UserError as again:
                    raise (again if "generated guard" in str(again) else error) from None
    except (KeyboardInterrupt, TrtpipeError):  # an ONNX file's node that is refused is one of ours
        raise
    except BaseException as error:
        if raised_by_the_model(error):
            raise InputError(f"capture: the model, run by torch.export, raised {described(error)}") from error
        raise BuildError(_reason(error, module)) from error
    finally:
        equal.remove()


def _require_equal(inputs: Sequence[TensorSpec], given: Sequence[torch.Tensor]) -> None:
    """Say of the sizes of one name that they are equal before the model runs: torch.export would find it at its end."""
    import torch

    named: dict[str, int] = {}
    for spec, tensor in zip(inputs, given, strict=True):
        for name, size in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(name, str):
                torch._check(named.setdefault(name, size) == size)


@contextmanager
def without_its_log() -> Iterator[None]:
    """A failed export or load logs how far it came, an export on stderr too: messages say what a user can do."""
    before, printed = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())


#: A line of torch.export: the dimension, its expression, its range, and what has to hold.
_GUARD = r"- Not all values of (\w+) = (.+) in the specified range (.+) satisfy the generated guard (.+?)\.?"


def _reason(error: BaseException, module: torch.nn.Module) -> str:
    """The message for an error of torch.export: the reason, the line of the model, and the next step."""
    where, text = place_of(error), text_of(error)
    at = f" at {where}" if where else ""
    if "fake_quantize_" in text:  # PyTorch has no such operation of a dynamic shape
        return f"capture: the model {quantizes_in_forward(where)}"
    if unknown := re.search(r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)>", text):
        return (
            f"capture: the operation {unknown[1]}{at} does not say what shape it gives, which torch.export needs. "
            f'Register a function that does: @torch.library.register_fake("{unknown[1]}").'
        )
    if branches_on_data(error):
        return (
            f"capture: the model decides by the values of a tensor{at}, and a graph holds one way alone. Compute both "
            "ways and choose:\n    y = torch.where(condition, a, b)\n"
            "For a decision by a shape, use Python numbers of x.shape; for int(x), a constant. For a number of rows, "
            "as after\nnon-maximum suppression, return all candidates with their scores, and choose among the outputs."
        )
    # An inequality, which the solver of torch.export does not take.
    if unsolved := re.match(r"Expected op to be '==', got \S+ for (.+)", text):
        return _only_where(unsolved[1], deciding_lines(error))
    if "Cannot create Dim" in text:
        return (
            f"capture: torch.export cannot follow a size that the model computes of dynamic ones{at} "
            f"({typed_line(error)}), as one rounded up to a multiple, by -H % 8. Declare numbers in inputs.*.shape, or "
            "pad before the model."
        )
    if "onstraint" in type(error).__name__ + text[:400] or "specialized" in text:
        lines = [line.strip() for line in text.splitlines()]
        specialized = [line for line in lines if "pecializ" in line]
        if guards := [g for line in lines if (g := re.fullmatch(_GUARD, line.partition("Specializations ")[0]))]:
            named = [(g[1], g[4].replace(g[2], g[1]), g[3]) for g in guards]
            if begins := {name: least for name, guard, between in named if (least := _begins(name, guard, between))}:
                ones = ", ".join(f"{name} below {least}" for name, least in begins.items())
                return (
                    "capture: torch.export takes a size of 1 for special, and within the model one is 1 for some of "
                    f"those declared in inputs ({ones}). Begin the range there: "
                    f"{', '.join(f'{name} at {least}' for name, least in begins.items())}; or declare a number."
                )
            asked = "; ".join(f"{guard} for {between}" for _, guard, between in named[:_MOST_GUARDS])
            if (layer := _recurrent(module)) and any(re.search(r" == \d+$", guard) for _, guard, _ in named):
                return _of_one_length(asked, layer)
            asked += f"; and {len(named) - _MOST_GUARDS} more" if len(named) > _MOST_GUARDS else ""
            fits = "; ".join(
                line for line in lines if re.fullmatch(r"\w+ = [-+*/\d\s\w()]+", line) and "Dim(" not in line
            )
            return _only_where(asked + (f"; {fits} would do" if fits else ""), deciding_lines(error))
        fixed = re.search(r"marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", text)
        got = f"{fixed[1]}, {fixed[2]} in its graph" if fixed else (*specialized, typed_line(error))[0]
        if layer := _recurrent(module):
            return _of_one_length(got, layer)
        got += _by(deciding_lines(error))
        return (
            f"capture: the model fixes a dimension that the job declares as dynamic ({got}). "
            "Declare it as a number in inputs.*.shape, or take it from x.shape in the model:\n"
            "    x = x.reshape(x.shape[0], -1)\n"
            "torch.linspace of x.shape fixes it too: torch.arange does not."
        )
    return (
        f"capture: torch.export cannot capture the model{at}: {typed_line(error)}. Write that line in operations on "
        "tensors alone, or keep it out of forward."
    )


def _of_one_length(got: str, layer: str) -> str:
    return (
        f"capture: the model fixes a dimension that the job declares as dynamic ({got}). PyTorch exports a "
        f"recurrent layer ({layer}) for one length: declare that as a number in inputs.*.shape, and pad or cut "
        "samples to it."
    )


def _recurrent(module: torch.nn.Module) -> str:
    """The path of the first recurrent layer in the user's network; empty where there is none."""
    import torch

    from trtpipe.model.bindings import INNER

    layers = (name for name, m in module.named_modules() if isinstance(m, torch.nn.RNNBase))
    return next(layers, "").removeprefix(f"{INNER}.")


#: What is wrong where some of the sizes that are declared go another way through the model.
_SHOWN = "what the model needs of sizes must hold, and torch.export show that it does, for all that inputs declare"
#: Conditions of torch.export that are shown, and lines that ask for them.
_MOST_GUARDS = 2


def _begins(name: str, guard: str, between: str) -> int | None:
    """The size from which on a guard `expression != 1` holds in a range like `32 <= W <= 64`; None where it is another
    guard, or holds nowhere or everywhere in it."""
    import sympy

    expression, _, one = guard.rpartition(" != ")
    ends = re.fullmatch(rf"(\d+) <= {re.escape(name)} <= (\d+)", between)
    if one != "1" or ends is None or not re.fullmatch(r"[\w\s+*/()-]+", expression):
        return None
    size = sympy.Symbol(name, integer=True)
    formula = sympy.sympify(expression, locals={name: size})
    held = [value for value in range(int(ends[1]), int(ends[2]) + 1) if formula.subs(size, value) != 1]
    if not held or held[0] == int(ends[1]) or held != list(range(held[0], int(ends[2]) + 1)):
        return None
    return held[0]


def _by(lines: Sequence[str]) -> str:
    """The first of the lines, as the end of what they ask for; empty without any."""
    return f", by {' and '.join(lines[:_MOST_GUARDS])}" if lines else ""


def _only_where(asked: str, lines: Sequence[str]) -> str:
    """The message where torch.export needs something of the sizes that not all of the declared ones have, with the
    lines of the model that ask for it where they are known."""
    import torch

    if lines:
        many = "one of these lines" if len(lines) > 1 else "that line"
        step = f"Declare a number in inputs.*.shape, or sizes that all go one way there; or change {many}."
        return f"capture: {_SHOWN} (got {asked}{_by(lines)}). {step}"
    newer = "" if release(torch.__version__) >= SHOWS_MORE else f" PyTorch {dotted(SHOWS_MORE)} and later show more."
    return (
        f"capture: {_SHOWN} (got {asked}). Declare a number in inputs.*.shape, or change what asks for that in the "
        f"model, like ceil_mode.{newer}"
    )
