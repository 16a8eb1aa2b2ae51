"""A bundle held once more against its golden data, where it is to run: in NumPy, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trtpipe.job import Limits
from trtpipe.runner import Model
from trtpipe.values import CheckReport, Control, Metric

Array = np.ndarray[Any, Any]


def recheck(model: Model) -> CheckReport:
    """What `model` answers on the bundle's golden inputs against the baseline's answers, within the job's limits.

    The control compares every sample with the answer to another one; the same limits have to refuse that.
    """
    golden, limits = model.bundle.golden(), model.manifest.limits
    outputs = model.run_arrays(golden.inputs)
    problems = [f"{name}: the baseline has it and the outputs do not" for name in golden.outputs if name not in outputs]
    pairs = {n: (outputs[n], golden.outputs[n]) for n in golden.outputs if n in outputs}
    metrics = tuple(_metrics(pairs, golden.labels, limits))
    problems += [f"{m.output}.{m.name}: {m.value:.6g} is not within {m.limit:g}" for m in metrics if m.passed is False]
    crossed = {n: (got, np.roll(want, 1, axis=0) if golden.samples > 1 else -want) for n, (got, want) in pairs.items()}
    control = Control(
        damaged="golden outputs",
        how="every sample against the answer to another" if golden.samples > 1 else "the answer negated",
        failed=any(m.passed is False for m in _metrics(crossed, golden.labels, limits)),
        samples=golden.samples,
    )
    if not any(m.passed is not None for m in metrics):
        problems.append("limits: the job sets none that golden data can be held against")
    elif not control.failed:
        problems.append("control: answers to other samples are within the limits too; this check proves nothing")
    return CheckReport(
        executed=model.executed,
        runner=model.runner_title,
        samples=golden.samples,
        metrics=metrics,
        control=control,
        passed=not problems,
        problems=tuple(problems),
    )


def _metrics(pairs: Mapping[str, tuple[Array, Array]], labels: Array | None, limits: Limits) -> Iterator[Metric]:
    """Every figure of every output; NaN anywhere is a failure of each limit."""
    for name, (got_raw, want_raw) in pairs.items():
        if got_raw.shape != want_raw.shape:
            yield Metric("shape", name, float("nan"), 0.0, False)
            continue
        got, want = got_raw.astype(np.float64), want_raw.astype(np.float64)
        flat_got, flat_want = got.reshape(len(got), -1), want.reshape(len(want), -1)
        with np.errstate(all="ignore"):
            error, norm = np.linalg.norm(got - want), np.linalg.norm(want)
            lengths = np.linalg.norm(flat_got, axis=1) * np.linalg.norm(flat_want, axis=1)
            cosines = np.where(lengths > 0, (flat_got * flat_want).sum(1) / lengths, (flat_got == flat_want).all(1))
            relative = float(error / norm) if norm > 0 else (0.0 if error == 0 else float("inf"))
            yield _at_least("cosine", name, float(cosines.min()), limits.cosine_min)
            yield _at_most("max_abs", name, float(np.abs(got - want).max()), limits.max_abs_max)
            yield _at_most("relative_l2", name, relative, limits.relative_l2_max)
            sqnr = float("inf") if relative == 0 else float(-20 * np.log10(relative))
            yield _at_least("sqnr_db", name, sqnr, limits.sqnr_db_min)
        if want.ndim != 2:
            continue
        best_got, best_want = got.argmax(1), want.argmax(1)
        valid = np.isfinite(got).all(1)
        yield _at_least(
            "top1_agreement", name, float(((best_got == best_want) & valid).mean()), limits.top1_agreement_min
        )
        known = labels is not None and labels >= 0
        if labels is not None and np.any(known):
            before = (best_want == labels)[known].mean()
            after = ((best_got == labels) & valid)[known].mean()
            # A few samples cannot show a drop of a point: the figure is given and not judged.
            yield Metric("accuracy_drop", name, float(before - after))


def _at_least(name: str, output: str, value: float, limit: float | None) -> Metric:
    return Metric(name, output, value, limit, None if limit is None else bool(value >= limit))


def _at_most(name: str, output: str, value: float, limit: float | None) -> Metric:
    return Metric(name, output, value, limit, None if limit is None else bool(value <= limit))
