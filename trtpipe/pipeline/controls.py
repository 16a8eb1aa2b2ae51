"""What is executed beside what is checked: a damaged copy, which has to fail, and the graph as it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.batching import KEPT_SAMPLES
from trtpipe.errors import BuildError, InputError, MissingError, first_line
from trtpipe.evaluation.check import CONTROL_SAMPLES, CheckData, Damaged, Executor, Runner, run_all
from trtpipe.evaluation.control import damaged_copy, damaged_program
from trtpipe.evaluation.damaged_end import DamagedEnd, damaged_end
from trtpipe.evaluation.metrics import relative_l2
from trtpipe.machine import Heap
from trtpipe.routes.onnx import compile_graph, to_onnx
from trtpipe.routes.registry import route
from trtpipe.runtime.executor import graph_as_checked, is_exact, open_engine
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import Engine, Executed, LoadedModel, OnnxModel, Quantized, Target

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.progress import Progress
    from trtpipe.trt.implicit import NativeCalibration


def control(
    job: Job,
    engine: Engine,
    executed: Executed,
    made_of: Callable[[], tuple[LoadedModel, Quantized]],
    progress: Progress,
    calibration: NativeCalibration | None = None,
) -> Damaged:
    """The control, executed as the check is: where an engine is, an engine is built of the damaged copy by the same
    route, and where that cannot be built its graph stands in, with a note. `made_of` gives the model and its quantized
    program, which may have to be computed again; TensorRT calibrated by `calibration`, if it did."""
    own = calibration and replace(calibration, file=None)  # the ranges that are kept are not the damaged copy's
    if engine.graph is not None and (job.build.route == "onnx" or executed == "graph"):
        copy, tensor, how = damaged_copy(engine.graph)
        if executed == "graph":
            return graph_control(copy, tensor, how, engine.target)
        return engine_control(partial(compile_graph, job, copy, progress, own), copy, tensor, how)
    program, loaded, tensor, how = damaged_program(*made_of())
    graph = None if engine.graph is None else to_onnx(program)
    build = partial(route(job.build.route), job, loaded, program, progress, own)
    return engine_control(build, graph, tensor, how)


def engine_control(build: Callable[[], Engine], graph: OnnxModel | None, tensor: str, how: str) -> Damaged:
    """A damaged copy as an engine; `graph` is what stands in for an engine that cannot be built."""

    @contextmanager
    def opened() -> Iterator[Executor]:
        try:
            engine = build()
        except (BuildError, InputError, MissingError) as error:
            if graph is None:
                raise
            why = f"no engine could be built of the control: {first_line(error)}"
            with OrtRunner(graph.data, as_written=True) as stand_in:
                yield Executor(stand_in, "graph", why)
            return
        runner, executed = open_engine(engine)
        with runner:
            yield Executor(runner, executed)

    return Damaged(opened, tensor, how)


def graph_control(graph: OnnxModel, tensor: str, how: str, target: Target) -> Damaged:
    """A damaged graph, executed as the graph of an engine of `target` is; that is open while its control runs."""

    @contextmanager
    def opened() -> Iterator[Executor]:
        with graph_as_checked(graph.data, target, tried=True) as runner:
            yield Executor(runner, "graph")

    return Damaged(opened, tensor, how)


@contextmanager
def graph_and_control(graph: OnnxModel, target: Target) -> Iterator[tuple[Runner, Damaged]]:
    """The graph of an engine of `target`, open as a check executes it, and its control.

    Where each node is executed as it stands, only what the damage changes is executed once more.
    """
    heap = Heap()
    end = damaged_end(graph) if is_exact(target) else None
    with ExitStack() as opened:
        opened.callback(heap.settle)  # once the sessions are closed
        if end is None:
            yield opened.enter_context(graph_as_checked(graph.data, target)), _whole(graph, target)
            return
        whole, part = (opened.enter_context(graph_as_checked(data, target)) for data in (end.graph, end.end))
        heap.settle()
        runner = _WithEnd(whole, part, end, [s.name for s in graph.outputs])
        yield runner, Damaged(lambda: nullcontext(Executor(_EndOf(runner), "graph")), end.tensor, end.how)


def _whole(graph: OnnxModel, target: Target) -> Damaged:
    """The whole damaged graph, another session as large as the graph's own."""
    copy, tensor, how = damaged_copy(graph)
    return graph_control(copy, tensor, how, target)


class _WithEnd:
    """A graph whose runs give what its damaged end reads too.

    That may be larger than all outputs. So the end follows at once, on as many samples as a control has, and what it
    gives is kept by the digest of the inputs.
    """

    def __init__(self, graph: OrtRunner, end: OrtRunner, how: DamagedEnd, outputs: Sequence[str]) -> None:
        self.name = graph.name
        self._graph, self._end, self._how, self._outputs = graph, end, how, outputs
        self._given, self._left = dict[str, Mapping[str, Array]](), CONTROL_SAMPLES

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """The outputs of the graph."""
        if self._left <= 0:
            return self._graph.run(inputs, self._outputs)
        outputs, damaged = self._both(inputs)
        self._left -= len(next(iter(inputs.values())))
        self._given[_digest(inputs)] = damaged
        return outputs

    def damaged(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs of the damaged copy."""
        known = self._given.get(_digest(inputs))
        return self._both(inputs)[1] if known is None else known

    def _both(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        found = self._graph.run(inputs, list(dict.fromkeys((*self._outputs, *self._how.reads))))
        outputs = {name: found[name] for name in self._outputs}
        read = {name: found[name] for name in self._how.reads} | {name: inputs[name] for name in self._how.given}
        return outputs, outputs | self._end.run(read)


class _EndOf:
    """The damaged copy of a graph, as a runner."""

    def __init__(self, graph: _WithEnd) -> None:
        self.name, self.run = graph.name, graph.damaged


def _digest(inputs: Mapping[str, Array]) -> str:
    """Of the inputs of one batch, by name."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        digest.update(f"{name} {inputs[name].shape} {inputs[name].dtype.str};".encode())
        digest.update(np.ascontiguousarray(inputs[name]).data)
    return digest.hexdigest()


#: How many times the error of its graph a runtime's may be, and the relative L2 error below which it does not count.
_MOST_TIMES, _LEAST_ERROR = 2.0, 0.01


def departures(graph: OnnxModel, data: CheckData, errors: Mapping[str, float]) -> tuple[str, ...]:
    """Warnings on outputs whose error is ONNX Runtime's own and not its graph's.

    Args:
        graph: in INT8.
        data: of the check.
        errors: the relative L2 error of each output on the first samples (`CheckReport.golden`).
    """
    few, said = data.first(KEPT_SAMPLES), []
    with OrtRunner(graph.data, as_written=True) as exact:
        outputs, _ = run_all(exact, few, None)
    for name, error in errors.items():
        own = relative_l2(few.reference[name], outputs[name])
        if error > max(_MOST_TIMES * own, _LEAST_ERROR):
            said.append(
                f"{name}: ONNX Runtime's kernels on this CPU are further from the baseline than the graph is, a "
                f"relative L2 error of {error:.3g} beside {own:.3g} where each node is executed as it stands. On x86 "
                "without VNNI they add products of INT8 with saturation. For such CPUs set precision.fp16_mode, which "
                "computes in FP16 what INT8 rounds, or leave int8_mode out"
            )
    return tuple(said)
