"""The baseline in FP32, what every engine is compared with: TorchScript, a program itself, or ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calib.errors import some_of, text_of
from calib.types import Array
from calib.user_code import user_code
from trtpipe.batching import Batching, joined, require_one_size
from trtpipe.errors import InputError, first_line
from trtpipe.model.computing import CPU, Computation, apart, placed, plain_float32, reach, sent
from trtpipe.model.export import example_inputs, export
from trtpipe.model.output_specs import whole_value
from trtpipe.model.repeating import (
    EAGER_TOLERANCE,
    changed_by_calls,
    fresh,
    plain_attributes,
    require_no_draws,
    require_repeatable,
    require_unchanged,
)
from trtpipe.model.torch_versions import scripted
from trtpipe.progress import Progress
from trtpipe.values import BASELINES, Baseline, BaselineKind, LoadedModel, RecordedBy

if TYPE_CHECKING:
    import torch

    from calib.samples import Batch
    from trtpipe.values import TensorSpec

#: What the outputs of each kind of baseline have to be those of.
_BESIDE: Mapping[BaselineKind, str] = {
    "trace": "the eager model",
    "script": "the eager model",
    "torchscript": "the eager model",
    "program": "the same program, run again",
    "onnxruntime": "the network that it was converted to",
}
#: The kinds whose module holds the bindings; what is scripted, or a file, is the network alone.
HOLDING_BINDINGS: tuple[BaselineKind, ...] = ("trace", "program")
#: ONNX Runtime has other kernels than PyTorch; a larger difference means that a file was not converted truly.
ONNX_TOLERANCE = 1e-3


def record_baseline(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    samples: int,
    *,
    batch_size: int,
    kind: RecordedBy,
    torchscript: str | None = None,
    progress: Progress,
    device: str = CPU,
) -> Baseline:
    """The model's outputs on every check sample: as TorchScript, of a .pt2 program itself, of an ONNX file by ONNX
    Runtime.

    Args:
        loaded: the model behind its bindings.
        batches: the check data, in binding dtypes.
        samples: how many they hold.
        batch_size: samples of each batch but the last.
        kind: how TorchScript is made of the model; not used for a program or an ONNX file.
        torchscript: path of a TorchScript file to take instead; it sees the inputs as the network does.
        progress: receives the number of samples done.
        device: where PyTorch computes (`computing_device`).

    Raises:
        InputError: the model cannot be traced or scripted, TorchScript (or ONNX Runtime) and the network that is built
            from differ on the check data, the model does not repeat its outputs, or they cannot be compared: a shape
            that depends on the data, NaN or infinity, values that their binding's dtype cannot hold.
        BuildError: a trace differs from the model as the model decides by values, which torch.export cannot capture.
    """
    with placed(loaded.module, device):
        return _recorded(loaded, batches, samples, batch_size, kind, torchscript, progress, device)


def _recorded(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    samples: int,
    batch_size: int,
    kind: RecordedBy,
    torchscript: str | None,
    progress: Progress,
    device: str,
) -> Baseline:
    import torch

    module, name = script(loaded, kind, torchscript, device)
    batching = Batching(loaded.inputs, loaded.outputs, batch_size)
    parts: list[dict[str, Array]] = []
    labels: list[NDArray[np.int64]] = []
    ids: list[str] = []
    worst, largest, labelled = 0.0, 0.0, False
    first: dict[str, Array] = {}
    first_count = 0
    at_first: tuple[torch.Tensor, ...] = ()
    attributes: dict[str, object] = {}
    for batch in batches:
        for piece, count in batching.pieces(batch.arrays):
            first, first_count = (first, first_count) if first else (piece, count)
            require_one_size(first, piece, _named(batch.ids))
            args = sent([torch.from_numpy(piece[s.name]) for s in loaded.inputs], device)
            with torch.inference_mode(), user_code(f"the model, on {_named(batch.ids)}", InputError):
                try:
                    outputs, failed = _run(loaded, module, name, fresh(args)), ""
                except Exception as error:
                    if name != "trace":
                        raise
                    outputs, failed = (), [first_line(error), *text_of(error).splitlines()][-1]
                # A program is its own baseline: run again once, to see that it repeats itself.
                eager = outputs if name == "program" and parts else loaded.module(*fresh(args))
            if not at_first:
                at_first, attributes = tuple(eager), plain_attributes(loaded.module)
            shapes, own = ([list(t.shape) for t in some] for some in (outputs, eager))
            if name == "trace" and (failed or shapes != own):
                require_repeatable(loaded, args, args, eager)  # a state may be of one size
                raise _of_one_size(loaded, failed or f"it gives {shapes} where the model gives {own}")
            if shapes != own:
                raise InputError(
                    f"baseline: outputs of {name} must have the shapes that {_BESIDE[name]} gives, {own} (got "
                    f"{shapes}). Check that both are the same model."
                )
            arrays = {}
            for spec, output, plain in zip(loaded.outputs, outputs, eager, strict=True):
                arrays[spec.name] = output.cpu().numpy().copy()
                largest, worst = reach(largest, plain), reach(worst, apart(plain, output))
            parts.append(batching.rows(arrays, count))
        labels.append(batch.labels if batch.labels is not None else np.full(len(batch.ids), -1, np.int64))
        labelled |= batch.labels is not None
        ids += batch.ids
        progress.step(len(ids), samples, "samples")
    if not ids:
        raise InputError("check: the data must hold one sample or more (got none). Check its path.")
    outputs_of_all = joined(parts)
    for spec in loaded.outputs:
        _require_held(spec, outputs_of_all[spec.name], loaded.module)
    earlier = sent([torch.from_numpy(first[s.name]) for s in loaded.inputs], device), at_first
    if name in ("script", "torchscript"):  # which may keep a state too, and change with the model
        require_unchanged(loaded, *earlier)
    repeats = partial(require_repeatable, loaded, args, *earlier)
    _require_agreement(loaded, name, outputs_of_all, worst, largest, repeats)
    every = np.concatenate(labels)
    mixed = _mixed(loaded, batching, first, first_count, outputs_of_all, device)
    notes = (*mixed.values(), *changed_by_calls(loaded.module, attributes))
    if device != CPU:
        notes = (f"baseline: computed by PyTorch on {device}", *notes)
    padded = len(ids) % batch_size if batching.whole else 0
    return Baseline(
        name,
        outputs_of_all,
        every if labelled else None,
        tuple(ids),
        (*notes, *([_FILLED_UP.format(", ".join(batching.whole), padded, batch_size)] if padded else ())),
        tuple(mixed),
    )


def _require_agreement(
    loaded: LoadedModel,
    name: BaselineKind,
    outputs: Mapping[str, Array],
    worst: float,
    largest: float,
    require_repeats: Callable[[], None],
) -> None:
    """Refuse a baseline that differs from the network by `worst` where outputs reach `largest`."""
    if name == "onnxruntime" and not worst <= ONNX_TOLERANCE * max(1.0, largest):
        raise InputError(
            "baseline: the converted network gives other outputs than ONNX Runtime on the check data (a largest "
            f"difference of {worst:.3g}, outputs up to {largest:.3g}). {_why_converted_differs(outputs)}"
        )
    if name != "onnxruntime" and not worst <= EAGER_TOLERANCE * max(1.0, largest):
        require_repeats()
        if name == "trace":
            # What decides by values or draws random numbers is no better off with a script.
            require_no_draws(export(loaded.module, loaded.inputs).graph_module)
        fix = "Set model.baseline to script." if name == "trace" else "Check that both hold the same weights."
        raise InputError(
            f"baseline: {BASELINES[name]} ({name}) computes something else than {_BESIDE[name]} on the check data "
            f"(a largest difference of {worst:.3g}, outputs up to {largest:.3g}). {fix}"
        )


def _why_converted_differs(outputs: Mapping[str, Array]) -> str:
    bug = "a bug of the conversion: report it, or build from PyTorch with model.factory."
    whole = [name for name, values in outputs.items() if np.array_equal(values, np.rint(values))]
    if not whole:
        return f"This is {bug}"
    return (
        f"Where {', '.join(whole)} gives places (of TopK, say), equal values may come in another order: take it out of "
        f"`outputs`. Anything else is {bug}"
    )


def _require_held(spec: TensorSpec, values: Array, module: torch.nn.Module) -> None:
    """Refuse outputs that could not be compared: not finite, or beyond the dtype of their binding.

    Raises:
        InputError: there are some.
    """
    if not values.size:
        return
    if not np.isfinite(values).all():
        held = {n: not bool(p.isfinite().all()) for n, p in module.named_parameters()}
        held |= {n: bool((b.isnan() | b.isposinf()).any()) for n, b in module.named_buffers()}  # masks hold -inf
        broken = next((name for name, is_broken in held.items() if is_broken), None)
        step = "Leave out masking with -inf and log(0), or return the tensor before it."
        if broken is not None:
            from trtpipe.model.bindings import INNER

            step = (
                f"The weight {broken.removeprefix(f'{INNER}.')} holds NaN or infinity: take weights of another epoch."
            )
        raise InputError(
            f"baseline: the model's outputs must be finite to be compared (got {int((~np.isfinite(values)).sum())} of "
            f"{values.size} values of output {spec.name} NaN or infinite). {step}"
        )
    dtype, largest = np.dtype(spec.dtype), max(-float(values.min()), float(values.max()))
    most = float(np.finfo(dtype).max) if dtype.kind == "f" else float(np.iinfo(dtype).max) if dtype.kind == "i" else 1.0
    if largest > most:
        wide = "float32" if dtype.kind == "f" else "int64"
        raise InputError(
            f"outputs.{spec.name}.dtype: must hold the model's outputs on the check data (got {spec.dtype}, and they "
            f"reach {largest:.4g}). Set {wide}."
        )


def _mixed(
    loaded: LoadedModel,
    batching: Batching,
    first: Mapping[str, Array],
    count: int,
    outputs: Mapping[str, Array],
    device: str,
) -> dict[str, str]:
    """A line for each output with a batch axis that is another one for a sample of `first`, `count` samples and copies
    that fill it up, among other samples or at another place: in the least batch, of copies of the sample alone. Where
    there is but one, whose copies show nothing, it stands before and behind mirrored ones."""
    import torch

    (low, high), there = (batching.inputs[0].at(k)[0] for k in ("min", "max")), len(next(iter(first.values())))
    if high == 1:
        return {}
    size = max(low, 2) if count == 1 else low
    others = f"of {size} with it mirrored" if count == 1 else f"of {size} copies of it" if size > 1 else "of 1"
    # Either end shows what a neighbour, the first or the last sample do; more are run where they are cheap.
    ends = np.unique(np.linspace(0, count - 1, min(_MOST_ALONE, max(2, there // size))).astype(int))
    most: dict[str, float] = {}
    every = list(range(size))
    for at, places in [(0, every[:1]), (0, every[-1:])] if count == 1 else [(at, every) for at in ends]:
        args = []
        for spec in loaded.inputs:
            one = torch.from_numpy(first[spec.name][at : at + 1])
            batch = (one.flip(*range(1, one.dim())) if count == 1 else one).repeat(size, *[1] * (one.dim() - 1))
            batch[places] = one
            args.append(batch)
        with torch.inference_mode(), user_code("the model, on the first check samples", InputError):
            found = loaded.module(*sent(args, device))
        arrays = {s.name: o.cpu().numpy() for s, o in zip(loaded.outputs, found, strict=True)}
        for name, rows in batching.rows(arrays, size).items():
            wanted = outputs[name][at : at + 1]
            if name in batching.whole or rows.shape[1:] != wanted.shape[1:] or not wanted.size:
                continue
            for row in places:
                off = apart(torch.from_numpy(wanted), torch.from_numpy(rows[row : row + 1]))
                most[name] = reach(most.get(name, 0.0), off)
    return {
        name: f"check: output {name} of a sample depends on the others in its batch: it differs by up to {off:.3g} "
        f"between a batch of {there}, as checked, and one {others}"
        for name, off in most.items()
        if not off <= EAGER_TOLERANCE * max(1.0, float(np.abs(outputs[name][:count]).max()))
    }


def _named(ids: tuple[str, ...]) -> str:
    return f"sample{'s' * (len(ids) > 1)} {some_of(ids, 3)}"


#: Samples that are run without the others of their batch.
_MOST_ALONE = 8
#: An output without a batch axis, unless it is a constant, sees the copies that fill up the last one.
_FILLED_UP = (
    "check: {} has no batch axis; the last batch, of {} samples, was filled up to {} with copies of its last "
    "sample, for the baseline and for what was executed alike"
)


def script(
    loaded: LoadedModel, kind: RecordedBy, torchscript: str | None, device: str = CPU
) -> tuple[Any, BaselineKind]:
    """The module that the baseline's outputs come from, and what it is; arguments as `record_baseline` has them.

    The model is `placed` on the device.

    Raises:
        InputError: TorchScript cannot be made of the model, or read from its file.
    """
    import torch

    from trtpipe.model.onnx.reference import Reference

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if torchscript is not None:
                loaded_file: torch.jit.ScriptModule = torch.jit.load(torchscript, map_location=device)  # type: ignore[no-untyped-call]
                plain_float32(loaded_file)
                return loaded_file.eval(), "torchscript"
            if loaded.kind == "program":
                return loaded.module, "program"
            if loaded.kind == "onnx":
                return Reference(loaded.module.network.file), "onnxruntime"  # type: ignore[union-attr, arg-type]
            return _scripted(loaded, kind, device), kind
        except (InputError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if torchscript is not None:
                raise InputError(
                    f"model.torchscript: must be a TorchScript file (got {first_line(error)}). "
                    "Save it with torch.jit.save."
                ) from error
            other: RecordedBy = "script" if kind == "trace" else "trace"
            message = f"model.baseline: TorchScript cannot {kind} the model ({first_line(error)}). "
            try:
                _scripted(loaded, other, device)
            except KeyboardInterrupt:
                raise
            except BaseException as second:
                raise InputError(
                    f"{message}Nor can it {other} the model ({first_line(second)}). Change that line of the model, or "
                    "give what torch.export.save wrote of it as model.program, which is its own baseline."
                ) from second
            raise InputError(f"{message}Set model.baseline to {other}.") from error


def compiled(loaded: LoadedModel, kind: RecordedBy, torchscript: str | None) -> tuple[Computation, ...]:
    """What runs in the model's place, if it is TorchScript that was not recorded by running the model on the device: it
    makes new tensors where its code says, and not where the model is placed.

    Arguments as `record_baseline` has them.
    """
    if torchscript is None and (kind != "script" or loaded.kind in ("program", "onnx")):
        return ()

    def run(args: tuple[torch.Tensor, ...], device: str) -> tuple[torch.Tensor, ...]:
        module, name = script(loaded, kind, torchscript, device)
        return _run(loaded, module, name, args)

    return (run,)


def _whole(loaded: LoadedModel) -> int:
    module: Any = loaded.module
    return whole_value(module, loaded.inputs)


def _scripted(loaded: LoadedModel, kind: RecordedBy, device: str) -> torch.nn.Module:
    """The network as TorchScript; what torch.jit raises where it cannot make it."""
    import torch

    from trtpipe.model.caught import require_no_caught_errors

    if kind == "script":
        return scripted(loaded.module.network)  # type: ignore[arg-type]
    example = example_inputs(loaded.inputs, whole=_whole(loaded))
    require_no_caught_errors(loaded.module, sent(example, device))
    with torch.inference_mode():
        traced: torch.jit.ScriptModule = torch.jit.trace(loaded.module, sent(example, device), check_trace=False)  # type: ignore[no-untyped-call]
        plain_float32(traced)
        return traced


def _of_one_size(loaded: LoadedModel, got: str) -> InputError:
    """The error of a trace that another batch shows to hold for one size alone; BuildError where a graph cannot be
    captured either, which says more."""
    export(loaded.module, loaded.inputs)
    return InputError(
        f"baseline: TorchScript (trace) must hold for every size declared in inputs (got: {got}). The model decides by "
        "a size, as a loop over its batch does: compute all of it at once, or set model.baseline to script."
    )


def _run(loaded: LoadedModel, module: Any, name: str, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs, whether the module holds the bindings or not."""
    if name in HOLDING_BINDINGS:
        return tuple(module(*args))
    bound: Any = loaded.module
    return tuple(bound.outputs(module(*bound.prepared(args))))
