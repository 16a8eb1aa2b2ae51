"""TensorRT in disguise: a plan is a header and the graph that it was compiled from, which ONNX Runtime executes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import pytest
from trt_double import VERSIONS, plan

from calib.types import Array
from trtpipe.job.sections import Build, Precision
from trtpipe.progress import Progress
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt import driver
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.values import Engine, OnnxModel

GPU = driver.Driver("13.0", (driver.Gpu(0, "NVIDIA L4", "8.9", 24 << 30),))
#: The time of an execution by how its engine is launched; that of FP16 is what it is measured against.
MILLISECONDS, TRANSFERS_MS = 0.5, 0.25


def compiled(
    model: OnnxModel,
    build: Build,
    *,
    progress: Progress,
    precision: Precision | None = None,
    calibration: NativeCalibration | None = None,
    judged: bool = True,
) -> Engine:
    """As `trt.builder.build_engine`."""
    header, version = plan(build.target), VERSIONS[build.target]
    return Engine(header + model.data, build.target, version, ("8.9",), model.inputs, model.outputs, model)


class Executed:
    """As `TimedEngine`, and so as an `EngineRunner`: each node is executed as it stands."""

    notes: tuple[str, ...] = ()
    device_memory_bytes = bindings_bytes = 4096

    def __init__(self, engine: bytes, **settings: Any) -> None:
        self._held = contextlib.ExitStack()
        self._graph, self.name = engine[len(plan("tensorrt")) :], "double of TensorRT"

    def __enter__(self) -> Executed:
        self._runner = self._held.enter_context(OrtRunner(self._graph, as_written=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Outputs of the graph."""
        return self._runner.run(inputs)

    def milliseconds(self, inputs: Mapping[str, Array], *, transfers: bool) -> float:
        """A time that is the same for every engine."""
        return MILLISECONDS + transfers * TRANSFERS_MS

    def layer_ms(self, inputs: Mapping[str, Array]) -> Sequence[tuple[str, float]]:
        """One layer that only converts."""
        return (("Reformat", 0.125), ("conv", 0.375))


@contextlib.contextmanager
def as_tensorrt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compile and execute engines so, on a machine that has `GPU`."""
    with monkeypatch.context() as patch:
        patch.setattr(driver, "probe", lambda: GPU)
        patch.setattr("trtpipe.routes.onnx.build_engine", compiled)
        for user in ("runtime.executor.EngineRunner", "pipeline.measure.TimedEngine", "pipeline.bench.TimedEngine"):
            patch.setattr(f"trtpipe.{user}", Executed)
        yield
