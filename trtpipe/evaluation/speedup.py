"""Whether INT8 is worth it: an INT8 engine timed against the FP16 engine of the same model. No torch, no TensorRT."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from calib.types import Array
from trtpipe.evaluation.bench import WARM_UP
from trtpipe.figures import beside, exact
from trtpipe.values import CheckReport, Metric

#: Timed executions of each engine, after the warm-up runs of a bench; and how many layers a report names.
_ROUNDS, _NAMED = 50, 5
#: Why a hybrid engine has no latency.
HYBRID_UNTIMED = "PyTorch runs between the engines of a hybrid module, which cannot be timed as one"
#: A note where its latency was wanted.
HYBRID_LATENCY = f"latency_ms: not measured: {HYBRID_UNTIMED}"
_QDQ = re.compile(r"(de)?quantizelinear", re.IGNORECASE)


class Timed(Protocol):
    """What `trt.timing.TimedEngine` is."""

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """One execution, whole: the outputs for inputs [B, ...], both in the bindings' dtypes."""

    def milliseconds(self, inputs: Mapping[str, Array], *, transfers: bool) -> float:
        """One execution by the GPU's own clock, for inputs [B, ...]; with `transfers`, copies are in it."""

    def layer_ms(self, inputs: Mapping[str, Array]) -> Sequence[tuple[str, float]]:
        """Milliseconds of each layer of one execution, by the engine's own profile, for inputs [B, ...]."""


@dataclass(frozen=True)
class Speedup:
    """Median milliseconds of both engines, and the INT8 engine's layers that only convert: name, milliseconds."""

    int8_ms: float
    fp16_ms: float
    overhead: tuple[tuple[str, float], ...]

    @property
    def ratio(self) -> float:
        """How many times as fast INT8 is."""
        return self.fp16_ms / self.int8_ms


def measure_speedup(int8: Timed, fp16: Timed, inputs: Mapping[str, Array]) -> Speedup:
    """Both engines in turns on one batch, data on the GPU; then the INT8 engine's layers once by its profile.

    Args:
        int8: open.
        fp16: open.
        inputs: one batch, [B, ...] in the bindings' dtypes.
    """
    for engine in (int8, fp16):
        for _ in range(WARM_UP):
            engine.run(inputs)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for engine, engine_times in zip((int8, fp16), times, strict=True):
            engine_times.append(engine.milliseconds(inputs, transfers=False))
    overhead = [(name, ms) for name, ms in int8.layer_ms(inputs) if converts(name)]
    overhead.sort(key=lambda layer: -layer[1])
    return Speedup(statistics.median(times[0]), statistics.median(times[1]), tuple(overhead))


def converts(layer: str) -> bool:
    """Whether a layer of an engine only reformats, quantizes or dequantizes; a fused one does other work as well."""
    return layer.lower().startswith("reformat") or all(_QDQ.match(p.rpartition("/")[2]) for p in layer.split(" + "))


def judge_speedup(report: CheckReport, speedup: Speedup | None, limit: float) -> CheckReport:
    """The report with the speedup judged; a failure names the layers that cost the time.

    `speedup` is None where no engine was executed: the limit then counts as missed, since nothing has met it.
    """
    if speedup is None:
        line = "check.limits.speedup_over_fp16_min was not judged: it needs an engine executed on its GPU"
        return replace(report, passed=False, problems=(*report.problems, line))
    passed = speedup.ratio >= limit
    output = report.metrics[0].output if report.metrics else ""
    metrics = (*report.metrics, Metric("speedup_over_fp16", output, speedup.ratio, limit, passed))
    if passed:
        return replace(report, metrics=metrics)
    total = sum(ms for _, ms in speedup.overhead)
    layers = ", ".join(f"{name} {ms:.3f} ms" for name, ms in speedup.overhead[:_NAMED]) or "none"
    line = (
        f"the engine takes {speedup.int8_ms:.3f} ms and its FP16 twin {speedup.fp16_ms:.3f} ms, "
        f"{beside(speedup.ratio, limit, 3)} times as fast (limit {exact(limit)}); layers that only convert take "
        f"{total:.3f} ms: {layers}. Use precision.fp16_mode alone, or keep the modules beside those layers in FP16"
    )
    return replace(report, metrics=metrics, passed=False, problems=(*report.problems, line))
