"""Calls of a CUDA network recorded as CUDA graphs: small batches wait for the host, which launches each kernel."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trtpipe.errors import first_line

if TYPE_CHECKING:
    import torch

#: One run, whose results stay in device memory that the function knows.
Run = Callable[["tuple[torch.Tensor, ...]"], object]


def record(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> tuple[Callable[[], None], Any]:
    """What launches all that `run(*inputs)` launches, for the same memory; and what it returned, filled by each launch.

    The inputs are CUDA tensors of any shape and dtype, which each launch reads again.

    The host's part of `run` is done once, here, and nothing is computed. Libraries must have loaded their kernels, so
    `run` was called before.
    """
    import torch

    cuda: Any = torch.cuda
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        outputs = run(*inputs)
    return graph.replay, outputs


@contextmanager
def replayed(run: Run, device: str) -> Iterator[Run]:
    """`run` itself on a CPU; on a GPU what gives the same, of shapes that it has seen by replaying them.

    Args:
        run: takes the inputs; what it returns is dropped. Its tensors must be the same ones in every call, and nothing
            else may differ between calls than what is in them and the inputs.
        device: "cpu" or "cuda:0".
    """
    if not device.startswith("cuda"):
        yield run
        return
    recordings = Recordings(run)
    try:
        yield recordings
    finally:
        recordings.clear()


class Recordings:
    """The first call of a kind runs as it is, the second is recorded, and later ones are replayed.

    Where one cannot be recorded (it waits for the GPU, or there is no memory for it) all run as they are.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: Counter[Hashable] = Counter()
        self._made: dict[Hashable, tuple[tuple[torch.Tensor, ...], Callable[[], None]]] = {}
        self._off = False

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Run on these inputs."""
        kind = tuple((x.shape, x.dtype) for x in inputs)
        self._seen[kind] += 1
        if kind not in self._made and (self._off or self._seen[kind] < 2 or not self._record(kind, inputs)):
            self._run(inputs)
            return
        own, replay = self._made[kind]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        replay()

    def clear(self) -> None:
        """Give the recordings' memory back."""
        self._made.clear()

    def _record(self, kind: Hashable, inputs: tuple[torch.Tensor, ...]) -> bool:
        own = tuple(x.clone() for x in inputs)
        try:
            replay, _ = record(lambda *given: self._run(given), own)
        except Exception as error:  # noqa: BLE001  # whatever cannot be recorded can be run
            logging.getLogger("trtpipe").debug("calibration is not replayed as a CUDA graph: %s", first_line(error))
            self._off = True
            return False
        self._made[kind] = (own, replay)
        return True
