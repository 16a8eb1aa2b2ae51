"""What executes an engine, or its graph, at the sizes that the job declares and no check sample may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calib.types import Array
from trtpipe.batching import Batching, by_profile
from trtpipe.errors import TrtpipeError, first_line
from trtpipe.evaluation import metrics
from trtpipe.evaluation.check import Runner
from trtpipe.evaluation.limits import HOLDS_NAN
from trtpipe.model.corners import corners, described, largest_batch
from trtpipe.values import CheckReport

#: The same samples in another batch may be this much further from the baseline than the check's were: other kernels
#: round otherwise. Less than the floors, of a cosine and of the largest output, is rounding in any case.
SLACK, COSINE_FLOOR, VALUE_FLOOR = 2.0, 1e-3, 1e-2


@dataclass(frozen=True)
class _Corner:
    """What is wrong at one corner: `problems` fail the check, `warnings` do not."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class AtCorner:
    """The inputs at one corner, and what they gave by output name, or how they failed."""

    inputs: Mapping[str, Array]
    given: Mapping[str, Array] | TrtpipeError


def run_corners(runner: Runner, check: Batching, samples: Mapping[str, Array]) -> tuple[AtCorner, ...]:
    """What `runner` gives at each corner that the profiles of `check` have; `samples` are one batch of check samples,
    [B, ...] by name in the dtypes of their bindings."""
    return tuple(_run(runner, arrays) for arrays in corners(check.inputs, samples, check.profiles))


def _run(runner: Runner, arrays: Mapping[str, Array]) -> AtCorner:
    try:
        return AtCorner(arrays, runner.run(arrays))
    except TrtpipeError as error:
        return AtCorner(arrays, error)


def with_corners(
    report: CheckReport,
    ran: Sequence[AtCorner],
    check: Batching,
    samples: Mapping[str, Array],
    expected: Sequence[Mapping[str, Array]],
) -> CheckReport:
    """`report` with what the least and the largest dynamic dimensions give.

    A failure, another shape than declared and a value that is not finite are problems. Of the samples as they are, in
    another batch alone, outputs have to be within `SLACK` of the check's own distance from the baseline. Of samples cut
    or repeated to other sizes they may be further off, which is a warning; as far off as the outputs are large, a
    problem.

    Args:
        report: of the check, on the samples as they are.
        ran: what the engine, or its graph, gave at each (`run_corners`).
        check: the bindings, and the profiles whose corners these are.
        samples: one batch of check samples, [B, ...] by name.
        expected: the model's outputs at each corner by name (`model.corners.corner_outputs`).
    """
    inputs, results, sizes = check.inputs, [], []
    how = Batching(inputs, check.outputs, 1)
    for at, baseline in zip(ran, expected, strict=True):
        sizes.append(described(at.inputs))
        results.append(_at_corner(report, how, samples, at, baseline))
    problems = tuple(p for r in results for p in r.problems)
    most, batch = inputs[0].at("max")[0], max(map(largest_batch, by_profile(inputs, check.profiles)))
    notes = [f"declared sizes beyond the check's batches were executed too: {' and '.join(sizes)}"] if sizes else []
    if batch < most:
        notes.append(f"batches of {batch + 1} to {most} were not executed: their inputs are too large for this check")
    return replace(
        report,
        passed=report.passed and not problems,
        problems=(*report.problems, *problems),
        warnings=(*report.warnings, *(w for r in results for w in r.warnings)),
        notes=(*report.notes, *notes),
    )


def _at_corner(
    report: CheckReport,
    how: Batching,
    samples: Mapping[str, Array],
    at: AtCorner,
    baseline: Mapping[str, Array],
) -> _Corner:
    arrays = at.inputs
    where = f"for {described(arrays)}, which the job declares"
    narrow = "Narrow the range in inputs, or build again with another precision.keep, route or TensorRT release."
    sizes: dict[int | str, int] = {d: n for s in how.inputs for d, n in zip(s.shape, arrays[s.name].shape, strict=True)}
    if isinstance(at.given, TrtpipeError):
        return _Corner((f"what was executed fails {where}: {first_line(at.given)} {narrow}",))
    only_batch = all(arrays[s.name].shape[1:] == samples[s.name].shape[1:] for s in how.inputs)
    problems, warnings = [], []
    for spec in how.outputs:
        value = np.asarray(at.given[spec.name])
        fits = value.ndim == len(spec.shape) and all(
            (d if isinstance(d, int) else sizes.get(d, got)) == got
            for d, got in zip(spec.shape, value.shape, strict=True)
        )
        if not fits:
            problems.append(
                f"output {spec.name} has the shape {list(value.shape)} {where}, not {spec.described}. {narrow}"
            )
        elif not np.isfinite(value).all():
            problems.append(f"output {spec.name} {HOLDS_NAN} {where}. {narrow}")
        elif baseline[spec.name].shape != value.shape:
            shape = f"{list(value.shape)} {where}, the baseline's {list(baseline[spec.name].shape)}"
            problems.append(f"output {spec.name} has the shape {shape}. {narrow}")
        else:
            count = arrays[how.inputs[0].name].shape[0]
            a, b = (how.rows({spec.name: v}, count)[spec.name] for v in (baseline[spec.name], value))
            far, unlike = _beyond(report, spec.name, a, b)
            if far and (only_batch or unlike):
                problems.append(f"output {spec.name} has {far} {where}. {narrow}")
            elif far:
                warnings.append(
                    f"output {spec.name} has {far} {where}. Check on samples of that size to judge it, or narrow the "
                    "range in inputs"
                )
    return _Corner(tuple(problems), tuple(warnings))


def _beyond(report: CheckReport, output: str, baseline: Array, got: Array) -> tuple[str, bool]:
    """Which figure is further from the baseline than the check's, "" for none; and whether the error is as large as
    the outputs are. Rows of each, [S, ...]."""
    checked = {m.name: m.value for m in report.metrics if m.output == output}
    if "max_abs" not in checked or not baseline.size:  # the check itself has failed there
        return "", False
    scale = float(np.abs(np.asarray(baseline, np.float64)).max(initial=0.0))
    error, cosine = metrics.max_abs(baseline, got), float(metrics.cosine(baseline, got).min())
    unlike = error > VALUE_FLOOR * scale and metrics.relative_l2(baseline, got) >= 1
    if error > max(SLACK * checked["max_abs"], VALUE_FLOOR * scale):
        return f"a maximum difference of {error:.4g} from the baseline (check: {checked['max_abs']:.4g})", unlike
    directed = baseline[0].size > 1  # one number has but a sign, which any rounding may change near zero
    if directed and 1 - cosine > max(SLACK * (1 - checked["cosine_worst"]), COSINE_FLOOR):
        return f"a worst cosine of {cosine:.4g} with the baseline (check: {checked['cosine_worst']:.4g})", unlike
    return "", False
