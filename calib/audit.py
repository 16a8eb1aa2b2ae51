"""How a table came to be, and how far each of its thresholds can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from calib.algorithms import ALGORITHMS, INT8_MAX, SMALLEST_SCALE, mean_squared_errors, threshold, thresholds
from calib.errors import CalibError, some_of
from calib.frozen import Frozen
from calib.histogram import Histogram, magnitude

Halves = tuple[Histogram, Histogram]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Share = Annotated[float, Field(ge=0, le=1)]

#: Under this an amax has no normal float32 scale (amax / 127): such a tensor counts as zero everywhere.
LEAST_AMAX = SMALLEST_SCALE * INT8_MAX
#: The amax of a tensor that was zero everywhere: any scale represents it exactly, this one harmlessly.
DEAD_AMAX = 1.0
#: A threshold that differs by more than this between two halves of the data gets a warning.
UNSTABLE = 0.10
#: And one that clips more than this share of the values.
CLIPPED = 0.01
#: And one under this SQNR where another algorithm gives so much more, both in dB.
POOR_DB, GAIN_DB = 15.0, 10.0


class TensorAudit(Frozen, strict=True):
    """The statistics of one tensor, and what its threshold does to it.

    Attributes:
        low, high: exact least and greatest value.
        elements: values seen.
        zeros: share of them that were zero.
        clipped: share of them beyond amax, which saturate.
        sqnr_db: estimated signal to quantization noise ratio of the tensor itself in INT8 at this amax; None for a
            dead one.
        stability: |amax of one half of the batches - amax of the other| / amax; None when there was only one batch.
        state: "dead" was zero everywhere, "constant" had one value everywhere.
    """

    low: Finite
    high: Finite
    elements: Count
    zeros: Share
    clipped: Share
    sqnr_db: Finite | None
    stability: Finite | None
    state: Literal["live", "constant", "dead"]

    @property
    def max(self) -> float:
        """The exact maximum of |x|."""
        return magnitude(self.low, self.high)


class Audit(Frozen, strict=True):
    """What a calibration was made from.

    Attributes:
        batches, batch_size: as run; the last batch may be smaller.
        coverage: samples of each class, None without labels. A class of the folder that was not drawn is there with 0.
        skipped: bad samples left out, each with its reason.
        tensors: by table key.
        warnings: what a user should look at, in words.
    """

    batches: Count
    batch_size: Count
    coverage: dict[str, Count] | None
    skipped: tuple[str, ...]
    tensors: dict[str, TensorAudit]
    warnings: tuple[str, ...]


def choose(key: str, halves: Halves, algorithm: str, percentile: float) -> tuple[float, TensorAudit, str | None]:
    """The amax of one tensor as a float32 value, its audit, and a warning about the choice itself if there is one.

    Raises:
        CalibError: the tensor was never seen, or held NaN or infinity.
    """
    whole = halves[0] + halves[1]
    if whole.non_finite:
        total = whole.elements + whole.non_finite
        raise CalibError(
            f"{key}: every value must be finite (got {whole.non_finite} NaN or infinite of {total}). "
            "Check the weights and the data; a half-precision overflow needs the model in float32."
        )
    if not whole.elements:
        raise CalibError(f"{key}: no value was seen during calibration. The model did not run it on this data.")
    if whole.max < LEAST_AMAX:
        return DEAD_AMAX, _audit(whole, DEAD_AMAX, None, "dead"), None
    warning = None
    parts = halves if all(h.elements for h in halves) else ()
    chosen, *of_parts = thresholds(whole, parts, algorithm, percentile)
    amax = _float32(chosen)
    if amax < LEAST_AMAX:
        amax = _float32(whole.max)
        warning = f"{key}: {algorithm} gives 0, since so many values are zero; the exact maximum {amax:.6g} is used."
    stability = None
    if of_parts:
        stability = abs(of_parts[0] - of_parts[1]) / amax
    audit = _audit(whole, amax, stability, "constant" if whole.constant else "live")
    return amax, audit, warning or _poor(key, whole, audit, algorithm, percentile)


def _poor(
    key: str, whole: Histogram, audit: TensorAudit, algorithm: str, percentile: float, *, moved: bool = False
) -> str | None:
    """A warning where the algorithm's SQNR is poor and another algorithm's is much better; or that of a threshold that
    was moved since, where any algorithm's is."""
    if audit.sqnr_db is None or audit.sqnr_db >= POOR_DB:
        return None
    others = {
        a: _sqnr_db(whole, _float32(threshold(whole, a, percentile))) for a in ALGORITHMS if moved or a != algorithm
    }
    best = max(others, key=others.__getitem__)
    if others[best] < audit.sqnr_db + GAIN_DB:
        return None
    whose = "the threshold of the corrections" if moved else algorithm
    step = (
        "It was chosen by what it costs behind the operation that reads it; calibration.corrections without thresholds "
        f"leaves it to {algorithm}."
        if moved
        else f"Calibrate with calibration.algorithm: {best}."
    )
    return (
        f"{key}: {whose} leaves {audit.sqnr_db:.1f} dB of signal to noise and clips {100 * audit.clipped:.3g} % of "
        f"the values; {best} would leave {others[best]:.1f} dB. {step}"
    )


def doubtful_thresholds(audit: Audit) -> tuple[str, ...]:
    """The warnings of an audit that make an engine doubtful: each tensor with a poor or clipping threshold, by name."""
    named = tuple(w for w in audit.warnings if w.partition(": ")[0] in audit.tensors)
    return (*named, *_clipped(audit.tensors))


def data_warnings(audit: Audit) -> tuple[str, ...]:
    """The warnings of an audit that hold for any threshold: of samples, classes, and tensors that saw no two values."""
    return _of_data(audit.tensors, audit.coverage, audit.skipped)


def with_thresholds(
    before: Audit, amax: Mapping[str, float], counted: Mapping[str, Halves], algorithm: str, percentile: float
) -> Audit:
    """An audit whose thresholds in `amax` were changed to those; stability is of the choice before.

    Args:
        before: of the thresholds that `algorithm` (and `percentile`) chose, and its warnings.
        amax: the changed ones by key.
        counted: what was counted, by key.
    """
    own = {w.partition(": ")[0]: w for w in before.warnings}
    tensors, named = {}, list[str | None]()
    for key, seen in before.tensors.items():
        if key not in amax or seen.state == "dead":
            tensors[key], warning = seen, own.get(key)
        else:
            whole = counted[key][0] + counted[key][1]
            tensors[key] = _audit(whole, amax[key], seen.stability, seen.state)
            warning = _poor(key, whole, tensors[key], algorithm, percentile, moved=True)
        named.append(warning)
    warnings = (*filter(None, named), *warnings_of(tensors, before.coverage, before.skipped))
    return before.model_copy(update={"tensors": tensors, "warnings": warnings})


def warnings_of(
    tensors: Mapping[str, TensorAudit], coverage: Mapping[str, int] | None, skipped: tuple[str, ...]
) -> tuple[str, ...]:
    """The warnings of an audit, as text: of the data, then of all thresholds together."""
    return (*_of_data(tensors, coverage, skipped), *threshold_warnings(tensors))


def threshold_warnings(tensors: Mapping[str, TensorAudit]) -> tuple[str, ...]:
    """The warnings of an audit that are of all the thresholds together."""
    return (*_unstable(tensors), *_clipped(tensors))


def _of_data(
    tensors: Mapping[str, TensorAudit], coverage: Mapping[str, int] | None, skipped: tuple[str, ...]
) -> tuple[str, ...]:
    lines = [f"{len(skipped)} bad samples were skipped; first: {skipped[0]}"] if skipped else []
    missing = sorted(name for name, count in (coverage or {}).items() if not count)
    if missing:
        lines.append(
            f"no sample of {len(missing)} classes was drawn: {some_of(missing)}. Ask for more samples, or add some."
        )
    by_state = {s: sorted(k for k, t in tensors.items() if t.state == s) for s in ("dead", "constant")}
    if by_state["dead"]:
        lines.append(
            f"{len(by_state['dead'])} tensors were zero everywhere, so their range is unknown: "
            f"{some_of(by_state['dead'])}."
        )
    if by_state["constant"]:
        lines.append(
            f"{len(by_state['constant'])} tensors had one value everywhere: {some_of(by_state['constant'])}. Is "
            f"the data real?"
        )
    return tuple(lines)


def _unstable(tensors: Mapping[str, TensorAudit]) -> tuple[str, ...]:
    """A warning that names the thresholds that differ between two halves of the data, if there are any."""
    unstable = sorted(
        ((t.stability or 0.0, k) for k, t in tensors.items() if (t.stability or 0.0) > UNSTABLE), reverse=True
    )
    if not unstable:
        return ()
    named = some_of([f"{k} ({100 * s:.0f} %)" for s, k in unstable])
    return (
        f"{len(unstable)} thresholds differ by over {100 * UNSTABLE:.0f} % between two halves of the data "
        f"and need more samples: {named}.",
    )


def _clipped(tensors: Mapping[str, TensorAudit]) -> tuple[str, ...]:
    """A warning that names the tensors with too many values beyond their threshold, if there are any."""
    clipped = sorted(((t.clipped, k) for k, t in tensors.items() if t.clipped > CLIPPED), reverse=True)
    if not clipped:
        return ()
    return (
        f"{len(clipped)} tensors have over {100 * CLIPPED:.0f} % of their values clipped: "
        f"{some_of([f'{k} ({100 * s:.1f} %)' for s, k in clipped])}.",
    )


def _audit(
    whole: Histogram, amax: float, stability: float | None, state: Literal["live", "constant", "dead"]
) -> TensorAudit:
    sqnr = None
    if state != "dead":
        sqnr = _sqnr_db(whole, amax)
    beyond = whole.elements - whole.zeros - float(whole.below(amax))
    return TensorAudit(
        low=nine_digits(whole.low),
        high=nine_digits(whole.high),
        elements=whole.elements,
        zeros=nine_digits(whole.zeros / whole.elements),
        clipped=nine_digits(min(1.0, max(0.0, beyond / whole.elements))),
        sqnr_db=None if sqnr is None else nine_digits(sqnr),
        stability=None if stability is None else nine_digits(stability),
        state=state,
    )


def _sqnr_db(whole: Histogram, amax: float) -> float:
    """Estimated signal to quantization noise ratio of the tensor in INT8 at this amax, dB."""
    values, counts = whole.points()
    noise = float(mean_squared_errors(whole, np.array([max(amax, LEAST_AMAX)]))[0])
    signal = float((values * values) @ counts) / whole.elements
    return 10 * float(np.log10(signal / max(noise, signal * 1e-20)))


def nine_digits(x: float) -> float:
    """`x` as it is after being written with nine significant digits, which distinguish all float32 values."""
    return float(format(x, ".9g"))


def _float32(x: float) -> float:
    return float(np.float32(x))
