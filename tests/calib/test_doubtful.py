"""A threshold that serves its tensor badly is a warning that names the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calib.algorithms import ALGORITHMS
from calib.audit import CLIPPED, GAIN_DB, POOR_DB, Audit, choose, data_warnings, doubtful_thresholds, warnings_of
from calib.corrections import Corrections
from calib.observers import HistogramObserver
from calib.table import make_table


def counted(values: np.ndarray) -> HistogramObserver:
    observer = HistogramObserver()
    for k, part in enumerate(np.array_split(values.astype(np.float32), 4)):
        observer.half = k % 2
        observer.observe(torch.from_numpy(part))
    return observer


def audited(values: np.ndarray, algorithm: str) -> tuple[Audit, float]:
    amax, audit, warning = choose("net:input", counted(values).halves, algorithm, 99.99)
    tensors = {"net:input": audit}
    said = ([warning] if warning else []) + list(warnings_of(tensors, None, ()))
    return Audit(batches=4, batch_size=1, coverage=None, skipped=(), tensors=tensors, warnings=tuple(said)), amax


RANDOM = np.random.default_rng(0)
SHAPES = {
    "normal": RANDOM.standard_normal(20000),
    "relu": np.maximum(RANDOM.standard_normal(20000), 0),
    "bright images": RANDOM.uniform(0.4, 1, 20000),
    "sigmoid": 1 / (1 + np.exp(-0.2 * RANDOM.standard_normal(20000))),
    "softmax": RANDOM.dirichlet(np.full(64, 0.05), 400).reshape(-1),
    "heavy tail": RANDOM.standard_t(2, 20000),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_bad_threshold_warns_and_a_good_one_does_not(shape: str, algorithm: str) -> None:
    """Held against NumPy: the values themselves are clipped and rounded at each algorithm's amax."""
    values = SHAPES[shape].astype(np.float32)

    def sqnr_db(amax: float) -> float:
        scale = amax / 127
        rounded = np.clip(np.round(values / scale), -128, 127) * scale
        return float(10 * np.log10((values.astype(np.float64) ** 2).sum() / ((values - rounded) ** 2).sum()))

    audit, amax = audited(values, algorithm)
    got = sqnr_db(amax)
    best = max(sqnr_db(audited(values, a)[1]) for a in ALGORITHMS if a != algorithm)
    lines = doubtful_thresholds(audit)
    if abs(got - POOR_DB) > 1 and abs(best - got - GAIN_DB) > 1:  # the estimate of the histogram is not exact
        assert any(" leaves " in line for line in lines) is (got < POOR_DB and best > got + GAIN_DB)
    clipped = float((np.abs(values) > amax).mean())
    if abs(clipped - CLIPPED) > 0.003:
        assert any("clipped: net:input" in line for line in lines) is (clipped > CLIPPED)


def test_the_warning_names_the_tensor_the_loss_and_what_to_set() -> None:
    values = np.concatenate([RANDOM.uniform(0.0, 0.001, 90000), RANDOM.uniform(0.9, 1.0, 2000)])
    audit, _ = audited(values, "percentile")
    assert doubtful_thresholds(audit) == ()
    amax, _, warning = choose("net:input", counted(values).halves, "percentile", 97.0)
    assert amax < 0.01
    assert warning is not None
    assert warning.startswith("net:input: percentile leaves 0.")
    assert "dB of signal to noise and clips 3 % of the values; " in warning
    assert warning.endswith(". Calibrate with calibration.algorithm: mse.") or warning.endswith("algorithm: minmax.")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_warnings_are_of_the_thresholds_that_a_table_has(algorithm: str, share: float) -> None:
    """A correction moves some of them after they were chosen, up or down."""
    seen = {name: counted(values.astype(np.float32)).halves for name, values in SHAPES.items()}
    seen["dead"] = counted(np.zeros(4000, np.float32)).halves
    table = make_table(seen, algorithm, 99.9, {}, {}, "", 2, 8, {"emu": 0}, ())
    largest = {k: max(abs(t.low), abs(t.high)) for k, t in table.audit.tensors.items()}
    moved = {k: share * largest[k] for k in sorted(SHAPES)[::2]}
    now = table.corrected(moved, Corrections((), {})).audit
    assert table.corrected({}, Corrections((), {})).audit == table.audit
    clipped = [k for k, t in now.tensors.items() if t.clipped > CLIPPED]
    assert bool(clipped) == any(" of their values clipped: " in w for w in now.warnings)
    for key, tensor in now.tensors.items():
        whose = "the threshold of the corrections" if key in moved and tensor.state != "dead" else algorithm
        poor = [w for w in now.warnings if w.startswith(f"{key}: ") and " leaves " in w]
        assert all(w.startswith(f"{key}: {whose} leaves ") for w in poor)
        advice = f"calibration.corrections without thresholds leaves it to {algorithm}."
        assert all(w.endswith(advice) == (whose != algorithm) for w in poor)
        if poor:
            assert f"leaves {tensor.sqnr_db:.1f} dB" in poor[0]
            assert f"clips {100 * tensor.clipped:.3g} % of" in poor[0]
        if key in moved and tensor.sqnr_db is not None and tensor.sqnr_db > POOR_DB:
            assert not poor
    assert [w for w in now.warnings if "emu" in w]


def test_warnings_are_of_the_data_or_of_thresholds() -> None:
    dead, spread = np.zeros(4000), np.concatenate([np.zeros(2000), np.full(1000, 0.01), RANDOM.uniform(5, 9, 1000)])
    chosen = {k: choose(k, counted(v).halves, "percentile", 60.0) for k, v in (("a", dead), ("b", spread))}
    tensors, coverage, skipped = {k: seen for k, (_, seen, _) in chosen.items()}, {"cat": 3, "emu": 0}, ("x.png: bad",)
    said = tuple(w for _, _, w in chosen.values() if w) + warnings_of(tensors, coverage, skipped)
    audit = Audit(batches=4, batch_size=1, coverage=coverage, skipped=skipped, tensors=tensors, warnings=said)
    of_data = data_warnings(audit)
    assert [line.split(":")[0] for line in of_data] == [
        "1 bad samples were skipped; first",
        "no sample of 1 classes was drawn",
        "1 tensors were zero everywhere, so their range is unknown",
    ]
    others = [w for w in said if w not in of_data]
    assert len(others) == 3
    assert others[0].startswith("b: percentile leaves ")
    assert others[1].startswith("1 thresholds differ by over 10 % ")
    assert others[2].startswith("1 tensors have over 1 % of their values clipped: ")
