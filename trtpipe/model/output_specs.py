"""The outputs' bindings, found by running the model on made-up inputs at two sizes of every dimension."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calib.errors import some_of, text_of
from trtpipe.errors import InputError
from trtpipe.model.export import example_sizes, filled
from trtpipe.model.failures import place_of, typed_line
from trtpipe.values import DimRange, TensorSpec

#: Outputs that a note names.
_MOST_NAMED = 6

if TYPE_CHECKING:
    import torch

    from trtpipe.model.bindings import Bound


def output_specs(
    module: Bound, inputs: tuple[TensorSpec, ...], dtypes: Mapping[str, str]
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    """The outputs' bindings, from running the model at two sizes of each dynamic dimension, and of the batch; and notes
    on inputs that it takes in another dtype, on what it returns and the job leaves out, and on integers that a binding
    holds in part.

    An extent that is a dynamic dimension at both sizes carries its name; one that varies otherwise is named
    `<output>_<axis>` until the captured graph says what it is. The batch axis is the only axis that varies with the
    batch, and is as long as it.

    Raises:
        InputError: a dtype that the job declares cannot hold what the model returns, or forward makes weights.
    """
    dims, batch = _dynamic(inputs), inputs[0].shape[0]
    first = example_sizes(inputs)
    own = {name for name, _ in module.network.named_parameters()}
    if any(spec.dtype == "uint8" for spec in inputs):
        module.casts_uint8 = False
        module.casts_uint8 = not _runs(_MadeUp(module, inputs, whole_value(module, inputs)), first)
    made_up = _MadeUp(module, inputs, whole_value(module, inputs))
    ran = made_up.run(first, follow=True)
    if made := [name for name, _ in module.network.named_parameters() if name not in own]:
        raise InputError(
            f"model: its weights must be there when it is made (got {made[0]}, which forward makes as it first runs: "
            "others each time). Make its layer in __init__."
        )
    _require_dtypes(ran.outputs, dtypes)
    listed = any(part.isdigit() for name in dtypes for part in name.split("."))  # maybe an element for each sample
    if listed and (more := _outputs_by_batch(module, made_up.args(first))):
        raise InputError(more)
    shapes = [tuple(t.shape) for t in ran.outputs]
    named: list[list[int | str]] = [list(s) for s in shapes]
    ranges: list[dict[str, DimRange]] = [{} for _ in shapes]
    fixed = inputs[0].at("opt")[0]
    sizes = (fixed, fixed + 1)
    with_batch: list[list[tuple[int, int, int]]] | None = None
    for name, r in dims.items():
        size = first[name] + 1 if first[name] < r.max else first[name] - 1
        changes = _changes(shapes, made_up.shapes({**first, name: size}))
        if name == batch:
            with_batch, sizes = changes, (first[name], size)
        for k, changed in enumerate(changes):
            for axis, before, after in changed:
                whole = (before, after) == (first[name], size)
                label = name if whole else f"{list(dtypes)[k]}_{axis}"
                low, high = sorted((before, after))
                named[k][axis] = label
                ranges[k][label] = r if whole else DimRange(low, low, high)
    if batch not in dims:
        try:
            with_batch = _changes(shapes, made_up.shapes(first, batch=fixed + 1))
        except InputError:  # the model takes this one batch alone
            with_batch = None
    if dims:  # a rank of its own at the least sizes, of squeeze() for one sample
        _changes(shapes, made_up.shapes({**first, **{n: r.min for n, r in dims.items()}}))
    specs = []
    for k, (name, dtype) in enumerate(dtypes.items()):
        batch_axis: int | None = None
        if with_batch is None:
            batch_axis = 0 if shapes[k] and shapes[k][0] == sizes[0] else None
        elif len(with_batch[k]) == 1 and with_batch[k][0][1:] == sizes:
            batch_axis = with_batch[k][0][0]
        specs.append(TensorSpec(name, dtype, tuple(named[k]), ranges[k], batch_axis, k not in ran.in_order))
    return tuple(specs), (*_notes(module, ran.left_out), *_narrowed(ran.outputs, dtypes))


def _notes(module: Bound, left_out: Sequence[str]) -> tuple[str, ...]:
    cast = module.cast_bytes()
    notes = [f"inputs.{name}: the model takes no uint8, and is given float32 from 0 to 255" for name in cast]
    if left_out:
        notes.append(f"outputs: the model returns {some_of(left_out, _MOST_NAMED)} too, which the job leaves out")
    return tuple(notes)


def _narrowed(returned: Sequence[torch.Tensor], dtypes: Mapping[str, str]) -> Iterator[str]:
    """A note on each output of integers that its binding does not hold all of."""
    for (name, wanted), tensor in zip(dtypes.items(), returned, strict=True):
        own = str(tensor.dtype).removeprefix("torch.")
        if np.dtype(own).kind in "iu" and np.iinfo(own).max > (most := _largest_whole(wanted)):
            yield (
                f"outputs.{name}: the model returns {own}, and {wanted}, as it is bound, holds whole numbers up to "
                f"{most:,}. Where there may be larger ones, declare dtype: {own}"
            )


def _largest_whole(dtype: str) -> int:
    """Up to which every whole number has a value of its own."""
    kind = np.dtype(dtype)
    return int(np.iinfo(kind).max) if kind.kind in "iu" else int(2 ** (np.finfo(kind).nmant + 1))


def _require_dtypes(returned: Sequence[torch.Tensor], dtypes: Mapping[str, str]) -> None:
    """Bindings are cast within a kind of number, or to a wider kind: a mask to integers or floats, integers to floats.

    Raises:
        InputError: a float output is declared an integer, or an integer one a truth value.
    """
    kinds = "bif"  # NumPy's letters
    for (name, wanted), tensor in zip(dtypes.items(), returned, strict=True):
        own = str(tensor.dtype).removeprefix("torch.")
        if kinds.index(np.dtype(wanted).kind) < kinds.index(np.dtype(own).kind.replace("u", "i")):
            legal = "float32 or float16" if tensor.is_floating_point() else f"{own} or a float type"
            raise InputError(
                f"outputs.{name}.dtype: must be {legal} for what the model returns, {own} (got {wanted}). Change it, "
                "or round in the model."
            )


@dataclass(frozen=True)
class _Ran:
    """What a model gave: its outputs, the places of those that it has sorted, and names of what else it returned."""

    outputs: tuple[torch.Tensor, ...]
    in_order: frozenset[int]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _MadeUp:
    """The model on made-up inputs: zeros, with `whole` in each element of integer and boolean inputs."""

    module: Bound
    inputs: tuple[TensorSpec, ...]
    whole: int = 0

    def args(self, sizes: Mapping[str, int], batch: int | None = None) -> list[torch.Tensor]:
        """The inputs, dynamic dimensions at `sizes` and the first axis at `batch`, if that is given."""
        args = []
        for spec in self.inputs:
            shape = [d if isinstance(d, int) else sizes[d] for d in spec.shape]
            args.append(filled([batch or shape[0], *shape[1:]], spec.dtype, self.whole))
        return args

    def shapes(self, sizes: Mapping[str, int], batch: int | None = None) -> list[tuple[int, ...]]:
        """The outputs' shapes, as `run`."""
        return [tuple(t.shape) for t in self.run(sizes, batch).outputs]

    def run(self, sizes: Mapping[str, int], batch: int | None = None, *, follow: bool = False) -> _Ran:
        """What the model gives for `args`; what it sorts is found where it is to be followed.

        Raises:
            InputError: the model does not run on them.
        """
        import torch

        from trtpipe.model.ranks import returned_in_order

        args, module = self.args(sizes, batch), self.module
        try:
            with torch.inference_mode():
                returned, in_order = returned_in_order(module, args) if follow else (module.returned(args), frozenset())
                ran = _Ran(module.outputs(returned), in_order, module.left_out(returned))
        except KeyboardInterrupt:
            raise
        except InputError as error:
            if not (more := _outputs_by_batch(module, args)):
                raise
            raise InputError(more) from error
        except BaseException as error:
            where = place_of(error)
            tried = ", ".join(f"{s.name} {s.dtype} {list(a.shape)}" for s, a in zip(self.inputs, args, strict=True))
            raise InputError(
                f"model: it fails on zeros of the declared inputs ({tried}){f' at {where}' if where else ''}: "
                f"{typed_line(error)}. {_help(module, self.inputs, sizes, error)}"
            ) from error
        for name, value in zip(module.output_names, ran.outputs, strict=True):
            _require_plain(name, value)
        return ran


#: The dtypes that outputs may have in the model, by name.
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


def _require_plain(name: str, value: torch.Tensor) -> None:
    """Refuse an output that is no plain array of numbers in memory: no engine returns it.

    Raises:
        InputError: it is complex, quantized, sparse, nested or without data, or of another dtype than `_DTYPES`.
    """
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    must, got, step = "", dtype, ""
    if value.is_complex():
        must, step = "real numbers", "Return torch.view_as_real(y), y.abs() or y.real in the model"
    elif value.is_quantized:
        must, got, step = "a plain tensor", f"{dtype}, quantized", "Return dequantize() of it"
    elif value.is_nested:
        must, got, step = "a dense tensor", "a nested one", "Return y.to_padded_tensor(0.0) in the model"
    elif value.layout != torch.strided:
        must, got, step = "a dense tensor", str(value.layout).removeprefix("torch."), "Return y.to_dense() in the model"
    elif value.device.type == "meta":
        must, got, step = "a tensor with values", "one on the meta device", "Compute it where the inputs are"
    elif dtype not in _DTYPES:
        must, step = "floats, integers or truth values of 8 to 64 bits", "Return y.float() in the model"
    if must:
        raise InputError(f"outputs.{name}: must be {must} (got {got}, which no engine returns). {step}.")


def _dynamic(inputs: Sequence[TensorSpec]) -> dict[str, DimRange]:
    return {n: r for s in inputs for n, r in s.dims.items() if r.min < r.max}


def whole_value(module: Bound, inputs: tuple[TensorSpec, ...]) -> int:
    """What the elements of integer and boolean inputs are made up as: 0, or 1 where the model runs on that alone, as a
    mask of nothing but False leaves an encoder no token, and a length of 0 a recurrent network no step."""
    sizes = example_sizes(inputs)
    if all(spec.dtype.startswith("float") for spec in inputs) or _runs(_MadeUp(module, inputs), sizes):
        return 0
    return int(_runs(_MadeUp(module, inputs, 1), sizes))


def _runs(made_up: _MadeUp, sizes: Mapping[str, int]) -> bool:
    try:
        made_up.run(sizes)
    except InputError:
        return False
    return True


def _outputs_by_batch(module: Bound, args: Sequence[torch.Tensor]) -> str:
    """The message for a model that returns more tensors for a larger batch; empty where it does not."""
    import torch

    counts = {}
    for batch in (1, 2):
        try:
            with torch.inference_mode():
                counts[batch] = module.count([a[:1].expand(batch, *a.shape[1:]).clone() for a in args])
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  (it takes another batch alone, or fails for its own reasons)
            return ""
    if counts[1] == counts[2]:
        return ""
    return (
        f"outputs: the model must return as many tensors for any batch (got {counts[1]} for one sample and {counts[2]} "
        "for two, as of a detector that chooses boxes by itself). Return what it chooses from, tensors of a fixed "
        "number of rows, and choose behind the engine."
    )


def _help(module: Bound, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], error: BaseException) -> str:
    """What to do about a model that does not run on the declared inputs, their dynamic dimensions at `sizes`."""
    import torch

    if isinstance(error, ImportError):
        return "Install what it imports, or put that beside the job file."
    if isinstance(error, OSError):
        return "It is about a file or device that the model uses, not about its inputs: see the line above."
    if "does not require grad" in text_of(error):
        return "It takes gradients as it runs, which an engine cannot: write out what they come to."
    try:
        inspect.signature(module.network.forward).bind(*inputs)
    except TypeError:
        taken = inspect.signature(module.network.forward)
        parameters = taken.parameters.values()
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        if any(p.kind is p.VAR_KEYWORD for p in parameters) and not by_name:
            by_name = [spec.name for spec in inputs]
        step = "name each in inputs, or wrap the model."
        if any("." in spec.name for spec in inputs):
            step = (
                "what paths name is given as dicts, lists and tuples, so wrap the model where it takes another class."
            )
        if by_name:
            step = f"it is given them in order, so wrap the model in one that takes {', '.join(by_name)} in order."
        return f"forward takes {taken}, and the job has {len(inputs)} inputs: {step}"
    except ValueError:
        pass
    weights = (*module.network.named_parameters(), *module.network.named_buffers())
    other = next(((n, w.dtype) for n, w in weights if w.is_floating_point() and w.dtype != torch.float32), None)
    if other is not None and re.search(r"dtype|scalar type|type \(", text_of(error)):
        dtype = str(other[1]).removeprefix("torch.")
        return (
            f"It is run in float32, and its weight {other[0]} is {dtype}: return the model in float32 (.float()). What "
            "the engine computes in is precision's, and the dtype of a binding is that of inputs and outputs."
        )
    between = [
        (name, size)
        for s in inputs
        for name, r in s.dims.items()
        if all(name != i.shape[0] for i in inputs if i.shape)
        and (size := sizes.get(name)) is not None
        and size not in (r.min, r.opt, r.max)
    ]
    if between:
        name, size = between[0]
        return (
            f"A range means every size in it, {name} {size} too. Make the model take them (pad or resize to the skip's "
            "size, x.shape[-2:], before a concat), or give each size a job of its own, as numbers in inputs.*.shape."
        )
    return "Change inputs.*.shape or dtype in the job, or that line of the model."


def _changes(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> list[list[tuple[int, int, int]]]:
    """For each output, (axis, extent before, extent after) where the two differ.

    Raises:
        InputError: the rank of an output depends on the size.
    """
    for one, other in zip(before, after, strict=True):
        if len(one) != len(other):
            raise InputError(
                f"outputs: each must have one rank whatever the batch and the dynamic dimensions are (got shapes "
                f"{list(one)} and {list(other)}). Replace squeeze() by squeeze(dim) or flatten(1) in the model."
            )
    return [
        [(axis, b, a) for axis, (b, a) in enumerate(zip(one, other, strict=True)) if a != b]
        for one, other in zip(before, after, strict=True)
    ]
