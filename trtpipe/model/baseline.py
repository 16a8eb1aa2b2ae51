"""The TorchScript baseline: what every engine is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trtpipe.batching import fitted
from trtpipe.errors import InputError
from trtpipe.model.export import example_inputs
from trtpipe.progress import Progress
from trtpipe.values import Baseline, LoadedModel

if TYPE_CHECKING:
    import torch

    from calib.samples import Batch

#: TorchScript may reorder float32 sums; a larger difference means that tracing lost something of the model.
EAGER_TOLERANCE = 1e-4


def record_baseline(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    samples: int,
    *,
    kind: Literal["trace", "script"],
    torchscript: str | None = None,
    progress: Progress,
) -> Baseline:
    """The model as TorchScript, with its outputs on every check sample.

    Args:
        loaded: the model behind its bindings.
        batches: the check data, in binding dtypes.
        samples: how many they hold.
        kind: how TorchScript is made of the model.
        torchscript: path of a TorchScript file to take instead; it sees the inputs as the network does.
        progress: is told the samples done.

    Raises:
        InputError: the model cannot be traced or scripted, or TorchScript and eager differ on the check data.
    """
    import torch

    module, name = make_torchscript(loaded, kind, torchscript)
    outputs: dict[str, list[np.ndarray[Any, Any]]] = {s.name: [] for s in loaded.outputs}
    labels: list[np.ndarray[Any, Any]] = []
    ids: list[str] = []
    worst = largest = 0.0
    for batch in batches:
        for piece, count in fitted(batch.arrays, loaded.inputs):
            args = tuple(torch.from_numpy(piece[s.name]) for s in loaded.inputs)
            with torch.inference_mode():
                answers = _run(loaded, module, name, args)
                eager = loaded.module(*args)
            for spec, answer, plain in zip(loaded.outputs, answers, eager, strict=True):
                outputs[spec.name].append(answer[:count].numpy().copy())
                if answer.is_floating_point():
                    largest = max(largest, float(plain.abs().max()))
                    worst = max(worst, float((answer - plain).abs().max()))
        labels.append(batch.labels if batch.labels is not None else np.full(len(batch.ids), -1, np.int64))
        ids += batch.ids
        progress.step(len(ids), samples, "images")
    if not ids:
        raise InputError("check: the data must hold at least one sample (got none).")
    if not worst <= EAGER_TOLERANCE * max(1.0, largest):
        fix = "Set model.baseline to script." if name == "trace" else "Check that both hold the same weights."
        raise InputError(
            f"baseline: TorchScript ({name}) must answer as the eager model does on the check data "
            f"(got a largest difference of {worst:.3g}, outputs up to {largest:.3g}). {fix}"
        )
    every = np.concatenate(labels)
    return Baseline(
        name,
        {n: np.concatenate(parts) for n, parts in outputs.items()},
        every if (every >= 0).any() else None,
        tuple(ids),
        worst,
    )


def make_torchscript(
    loaded: LoadedModel, kind: Literal["trace", "script"], torchscript: str | None
) -> tuple[Any, Literal["trace", "script", "torchscript"]]:
    """The model as TorchScript, traced or scripted, or the file at `torchscript`; and which of these it is.

    Raises:
        InputError: the model cannot be traced or scripted, or the file is none of TorchScript.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if torchscript is not None:
                loaded_file: Any = torch.jit.load(torchscript, map_location="cpu")  # type: ignore[no-untyped-call]
                return loaded_file.eval(), "torchscript"
            if kind == "script":
                return torch.jit.script(loaded.module.network).eval(), "script"
            with torch.inference_mode():
                traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                    loaded.module, example_inputs(loaded.inputs), check_trace=False
                )
                return traced, "trace"
        except Exception as error:
            text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if torchscript is not None:
                raise InputError(f"model.torchscript: must be a TorchScript file (got {text}).") from error
            other = "script" if kind == "trace" else "trace"
            raise InputError(
                f"model.baseline: TorchScript must be able to {kind} the model (got {text}). "
                f"Set model.baseline to {other}."
            ) from error


def _run(loaded: LoadedModel, module: Any, name: str, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A traced module holds the bindings; a scripted one or a file is the network alone."""
    if name == "trace":
        return tuple(module(*args))
    bound: Any = loaded.module
    return tuple(bound.outputs(module(*bound.prepared(args))))
