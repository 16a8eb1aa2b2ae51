"""A graph against its model: on samples of the check, and at the corners of what a job declares, the least and the
largest dynamic dimensions.

The check samples are all of a few sizes. A model that decides by a shape (`if x.shape[0] == 1`, `squeeze()`) may do
another thing at the others, and a captured graph holds one way alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.batching import Profiles, by_profile
from trtpipe.errors import BuildError, InputError
from trtpipe.model.failures import typed_line
from trtpipe.values import Captured, LoadedModel, TensorSpec

if TYPE_CHECKING:
    import torch

#: Float32 sums in another order differ by less than this, of the largest output, in all but this share of the values.
_TOLERANCE, _FEW = 1e-3, 0.1
#: How many rounding errors of FP16 or BF16 a model that computes in that may be away from its graph in FP32.
ROUNDINGS = 16
#: Values of all inputs of one execution at a corner, for memory's sake: 111 images of 3 x 224 x 224.
MOST_VALUES = 2**24


def corners(
    inputs: Sequence[TensorSpec], samples: Mapping[str, Array], profiles: Profiles
) -> Iterator[dict[str, Array]]:
    """Inputs with every dynamic dimension at its least, and with every one at its largest, in each profile; the
    latter's batch is no larger than `largest_batch`. Sizes that `samples` have themselves are left out.

    Args:
        inputs: the input bindings.
        samples: a batch of them, [B, ...] by name; it is repeated or cut to the sizes.
        profiles: of the engine.
    """
    done = [[samples[spec.name].shape for spec in inputs]]
    for shapes in (shapes for specs in by_profile(inputs, profiles) for shapes in _extremes(specs)):
        if shapes in done:
            continue
        done.append(shapes)
        arrays = {}
        for spec, shape in zip(inputs, shapes, strict=True):
            value = samples[spec.name]
            for axis, extent in enumerate(shape):
                value = np.take(value, np.arange(extent) % value.shape[axis], axis)
            arrays[spec.name] = np.ascontiguousarray(value)
        yield arrays


def _extremes(inputs: Sequence[TensorSpec]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The inputs' shapes at the least and at the largest sizes."""
    batch = largest_batch(inputs)
    most = (zip(s.shape, s.at("max"), strict=True) for s in inputs)
    largest = [tuple(batch if d == s.shape[0] else n for d, n in of) for s, of in zip(inputs, most, strict=True)]
    return [s.at("min") for s in inputs], largest


def largest_batch(inputs: Sequence[TensorSpec]) -> int:
    """The largest declared batch, or the largest of which all inputs at their largest hold `MOST_VALUES` at most."""
    least, most = inputs[0].at("min")[0], inputs[0].at("max")[0]
    values = sum(math.prod(spec.at("max")) for spec in inputs) // most
    return max(least, min(most, MOST_VALUES // max(1, values)))


def described(arrays: Mapping[str, Array]) -> str:
    """The inputs by name and shape, as `image [1, 3, 224, 224]`."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def corner_outputs(
    loaded: LoadedModel, samples: Mapping[str, Array], profiles: Profiles
) -> tuple[dict[str, Array], ...]:
    """The model's outputs at each of `corners`, by name, in the model's own dtypes and shapes.

    Raises:
        InputError: the model does not run there, or gives NaN or infinity.
    """
    names = [spec.name for spec in loaded.outputs]
    outputs = []
    for arrays in corners(loaded.inputs, samples, profiles):
        failing = f"the model fails on {described(arrays)}, which the job declares"
        given = _run(loaded.module, loaded, arrays, failing, InputError)
        outputs.append({n: o.numpy().copy() for n, o in zip(names, given, strict=True)})
        if odd := [n for n, a in outputs[-1].items() if not np.isfinite(a).all()]:
            raise InputError(
                f"capture: output {odd[0]} of the model itself holds NaN or infinity for {described(arrays)}, which "
                "the job declares. Narrow the range in inputs, or make the model take it."
            )
    return tuple(outputs)


def require_same(loaded: LoadedModel, captured: Captured, samples: Mapping[str, Array]) -> None:
    """Hold the captured graph, in float32, against the model on samples of the check, [B, ...] by name, as they are.

    A lax limit of the check would take what differs here for what precision costs. Samples of sizes that the job does
    not declare (fewer than its one batch) are left to `require_corners`.

    Raises:
        BuildError: the graph does not run on them, or differs from the model in shape or in its values.
        InputError: the model itself does not run on them.
    """
    for spec in loaded.inputs:
        shape, least, most = samples[spec.name].shape, spec.at("min"), spec.at("max")
        if any(not low <= extent <= high for low, extent, high in zip(least, shape, most, strict=True)):
            return
    where = described(samples)
    given = _run(loaded.module, loaded, samples, f"the model fails on {where}", InputError)
    outputs = {s.name: o.numpy().copy() for s, o in zip(loaded.outputs, given, strict=True)}
    if found := _differing(loaded, captured, samples, outputs, f"the graph of the model fails on {where}"):
        raise BuildError(
            f"capture: the graph gives other outputs than the model for {where}, samples of the check ({found}). No "
            "job can mend that: either the model computes something else where it is exported (by "
            "torch.compiler.is_exporting or its like), or it is a fault of trtpipe or of torch.export. Report it with "
            "the model."
        )


def require_corners(
    loaded: LoadedModel,
    captured: Captured,
    samples: Mapping[str, Array],
    expected: Sequence[Mapping[str, Array]],
    profiles: Profiles,
) -> None:
    """Hold the captured graph, in float32, against the model at the corners, and on the samples as they are.

    A corner that has the samples themselves, among copies of them, shows that too; where it differs, they say whether
    its size is why.

    Args:
        loaded: the model behind its bindings.
        captured: its graph.
        samples: one batch of check samples.
        expected: the model's `corner_outputs` on them.
        profiles: of the engine, as for `corner_outputs`.

    Raises:
        BuildError: at a corner or on the samples the graph does not run, or differs from the model in shape or in its
            values.
        InputError: the model itself does not run on the samples.
    """
    shown = False
    for arrays, wanted in zip(corners(loaded.inputs, samples, profiles), expected, strict=True):
        where = described(arrays)
        failing = f"the graph of the model fails on {where}, which the job declares"
        shown |= all(len(arrays[n]) >= len(a) and arrays[n].shape[1:] == a.shape[1:] for n, a in samples.items())
        if found := _differing(loaded, captured, arrays, wanted, failing):
            require_same(loaded, captured, samples)
            raise BuildError(
                f"capture: the graph gives other outputs than the model for {where} ({found}). The model decides by a "
                "shape (an if, squeeze(), a number taken from x.shape): make it compute the same for every size, or "
                "declare in inputs only sizes that it treats alike."
            )
    if not shown:
        require_same(loaded, captured, samples)


def _differing(
    loaded: LoadedModel, captured: Captured, arrays: Mapping[str, Array], wanted: Mapping[str, Array], failing: str
) -> str:
    """In what the graph differs from what the model gave, in a few words; empty where it does not."""
    tolerance = max(_TOLERANCE, ROUNDINGS * captured.rounding)
    for spec, output in zip(loaded.outputs, _run(captured.graph, loaded, arrays, failing, BuildError), strict=True):
        if difference := _difference(wanted[spec.name], output.numpy(), tolerance):
            return f"{difference} in output {spec.name}"
    return ""


def _run(
    module: torch.nn.Module,
    loaded: LoadedModel,
    arrays: Mapping[str, Array],
    failing: str,
    kind: type[InputError] | type[BuildError],
) -> tuple[torch.Tensor, ...]:
    import torch

    try:
        with torch.inference_mode():  # a model may write to its inputs
            return tuple(module(*(torch.from_numpy(arrays[s.name].copy()) for s in loaded.inputs)))
    except Exception as error:
        raise kind(
            f"capture: {failing}: {typed_line(error)}. Narrow the range in inputs, or make the model take it."
        ) from error


def _difference(wanted: Array, output: Array, tolerance: float) -> str:
    """What is different, in a few words; empty where nothing is. A few values may: a decision that is nearly a tie."""
    if wanted.shape != output.shape:
        return f"the shape {list(output.shape)} instead of {list(wanted.shape)}"
    if not wanted.size:
        return ""
    a, b = np.asarray(wanted, np.float64), np.asarray(output, np.float64)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    off = ~np.isclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)
    return f"{off.mean():.0%} other values" if off.mean() > _FEW else ""
