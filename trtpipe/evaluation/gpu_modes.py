"""The ways to run a model with PyTorch that only a GPU has: TF32, tensor-core layouts, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trtpipe.evaluation.bench import Mode
from trtpipe.evaluation.torch_modes import (
    Call,
    InHalf,
    ModeSetup,
    TensorTuple,
    WithWeights,
    compiled,
    not_in_half,
    ready,
    tensors,
)
from trtpipe.model.recorded import record

#: Runs before a CUDA graph is recorded: libraries load their kernels and take their workspaces in the first ones.
BEFORE_RECORDING = 3
_NO_GPU = "it needs a GPU that PyTorch can use"


def gpu_modes(setup: ModeSetup) -> tuple[Mode, ...]:
    """The modes that only a GPU has, beside `torch_modes`; elsewhere each is a row that says so."""
    module, device = setup.loaded.module, setup.device
    half = torch.float16
    cannot = "" if device == "cuda" else _NO_GPU
    in_half = cannot or not_in_half(setup)

    def mode(name: str, make: Callable[[], Call], *notes: str, tf32: bool = False) -> Mode:
        why = cannot if tf32 else in_half
        return Mode(name, "cuda", lambda: ready(setup, make, tf32=tf32, notes=notes), why)

    return (
        mode("eager TF32", lambda: setup.moved(module), tf32=True),
        mode("eager FP16, channels last", lambda: _channels_last(setup.moved(InHalf(module, half)))),
        mode("eager FP16, CUDA graph", lambda: _recorded(setup.moved(InHalf(module, half)), setup), _COPY),
        mode("torch.compile FP16", lambda: compiled(setup.moved(InHalf(module, half)))),
        mode(
            "torch.compile FP16, CUDA graphs",
            lambda: compiled(setup.moved(InHalf(module, half)), cuda_graphs=True),
            _COPY,
        ),
    )


_COPY = "each run copies its inputs into the graph's own"


def _channels_last(module: torch.nn.Module) -> Call:
    """Weights [N, C, H, W] stored with C innermost, as tensor cores read them; so are the outputs of convolutions."""
    whole: Any = module
    whole.network.to(memory_format=torch.channels_last)
    return module


def _recorded(module: torch.nn.Module, setup: ModeSetup) -> Call:
    return WithWeights(RecordedGraph(module, setup), module)


class RecordedGraph:
    """A module whose launches were recorded once, for one shape, and are replayed as one CUDA graph.

    Outputs are in the graph's own memory until the next run.
    """

    def __init__(self, module: torch.nn.Module, setup: ModeSetup) -> None:
        with torch.inference_mode():
            self._inputs = tensors(setup, setup.batch)
            cuda: Any = torch.cuda
            side = cuda.Stream()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                for _ in range(BEFORE_RECORDING):
                    module(*self._inputs)
            cuda.current_stream().wait_stream(side)
            self._replay, self._outputs = record(module, self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> TensorTuple:
        """The outputs of `inputs`, which have the recorded shapes."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._replay()
        outputs: TensorTuple = self._outputs
        return outputs
