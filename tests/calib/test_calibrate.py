"""A calibration from samples to table: what it depends on, what it does not, and what its audit says."""

import warnings

import numpy as np
import pytest
import torch

from calib.algorithms import ALGORITHMS
from calib.calibrate import calibrate
from calib.data import Source, open_source
from calib.errors import CalibCancelled, CalibError
from calib.histogram import Histogram
from calib.observers import HistogramObserver
from calib.samples import DataSpec, InputSpec
from calib.table import CalibrationTable

X = InputSpec("x", "float32", (3, 8, 8))


class Log:
    def __init__(self, stop_after=None):
        self.steps, self.notes, self.stop_after = [], [], stop_after

    def step(self, done, total, unit):
        self.steps.append((done, total, unit))

    def note(self, message):
        self.notes.append(message)

    def cancelled(self):
        return self.stop_after is not None and len(self.steps) >= self.stop_after


def data(tmp_path, count=40, labels=True, values=None, name="s.npz"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3, 8, 8)).astype(np.float32) if values is None else values
    more = {"labels": np.arange(count) % 4} if labels else {}
    np.savez(tmp_path / name, x=x, **more)
    return str(tmp_path / name)


def opened(path, **options) -> Source:
    return open_source(DataSpec(arrays=path, **options), [X])


def relu_net(observers):
    """conv, relu, conv, with an observer before each convolution; one image's results do not depend on the others'."""
    torch.manual_seed(0)
    first, second = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3)

    def run(inputs):
        (x,) = inputs
        for image in x.split(1):  # so that the batch size changes nothing in the model's own arithmetic
            observers["first:input"].observe(image)
            hidden = torch.relu(first(image))
            observers["second:input"].observe(hidden)
            second(hidden)

    return run


def table_of(source, batch_size=8, **options):
    observers = {"first:input": HistogramObserver(), "second:input": HistogramObserver()}
    return calibrate(relu_net(observers), observers, source, batch_size=batch_size, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batch_size_and_order_change_no_threshold(tmp_path, algorithm):
    path = data(tmp_path)
    tables = [
        table_of(opened(path, seed=seed), n, algorithm=algorithm) for seed, n in ((0, 1), (0, 7), (0, 64), (5, 7))
    ]
    assert len({tuple(t.amax.items()) for t in tables}) == 1
    assert len({t.digests["data"] for t in tables}) == 1


def test_workers_change_nothing(tmp_path):
    path = data(tmp_path)
    assert table_of(opened(path, workers=2)) == table_of(opened(path))


def test_shards_merge_to_the_whole(tmp_path):
    whole = opened(data(tmp_path))
    origin, inputs = whole._origin, whole._inputs
    shards = [Source(origin, inputs, whole._drawn[part]) for part in (slice(0, 16), slice(16, 24), slice(24, 40))]
    merged, expected = CalibrationTable.merge([table_of(s) for s in shards]), table_of(whole)
    assert (merged.amax, merged.digests, merged.samples) == (expected.amax, expected.digests, expected.samples)
    assert merged.audit.coverage == expected.audit.coverage
    for key, halves in expected.histograms.items():
        assert sum(halves, Histogram.empty()) == sum(merged.histograms[key], Histogram.empty())


def test_the_audit_says_what_was_seen(tmp_path):
    audit = table_of(opened(data(tmp_path)), 16).audit
    assert (audit.batches, audit.batch_size) == (3, 16)
    assert audit.coverage == {"0": 10, "1": 10, "2": 10, "3": 10}
    seen = audit.tensors["first:input"]
    x = np.load(tmp_path / "s.npz")["x"]
    assert (seen.elements, seen.state) == (x.size, "live")
    assert np.float32(seen.low) == x.min()
    assert np.float32(seen.high) == x.max()
    assert audit.tensors["second:input"].zeros > 0.1


def test_clipping_and_noise_are_those_of_the_tensor(tmp_path):
    table = table_of(opened(data(tmp_path)), algorithm="percentile", percentile=98.0)
    seen, amax = table.audit.tensors["first:input"], table.amax["first:input"]
    x = np.load(tmp_path / "s.npz")["x"].astype(np.float64)
    assert seen.clipped == pytest.approx(np.mean(np.abs(x) > amax), abs=1e-3) == pytest.approx(0.02, abs=1e-3)
    quantized = np.clip(np.rint(x / (amax / 127)), -127, 127) * (amax / 127)
    assert seen.sqnr_db == pytest.approx(10 * np.log10(np.mean(x**2) / np.mean((x - quantized) ** 2)), abs=0.3)
    assert not any("of signal to noise" in w for w in table.audit.warnings)


def test_a_tensor_that_its_threshold_destroys_is_named(tmp_path):
    table = table_of(opened(data(tmp_path)), algorithm="percentile", percentile=50.0)
    seen = table.audit.tensors["first:input"]
    (warning,) = [w for w in table.audit.warnings if w.startswith("first:input: percentile leaves ")]
    assert f"{seen.sqnr_db:.1f} dB of signal to noise and clips {100 * seen.clipped:.3g} % of the values" in warning
    assert warning.endswith("Calibrate with calibration.algorithm: mse.")


def test_a_threshold_that_needs_more_samples_is_named(tmp_path):
    values = np.random.default_rng(1).normal(size=(16, 3, 8, 8)).astype(np.float32)
    values[3, 0, 0, 0] = 40.0  # one outlier in one half
    table = table_of(opened(data(tmp_path, 16, values=values), seed=0), 4, algorithm="minmax")
    assert table.audit.tensors["first:input"].stability > 0.5
    (warning,) = [w for w in table.audit.warnings if "between two halves of the data and need more samples" in w]
    assert "first:input" in warning
    assert table_of(opened(str(tmp_path / "s.npz")), 16).audit.tensors["first:input"].stability is None


def test_stability_is_the_difference_of_the_halves(tmp_path):
    values = np.zeros((2, 3, 8, 8), np.float32)
    values[0, 0, 0, 0], values[1, 0, 0, 0] = 3.0, 4.0
    table = table_of(opened(data(tmp_path, 2, values=values)), 1, algorithm="minmax")
    assert table.audit.tensors["first:input"].stability == 0.25


def test_dead_and_constant_tensors_are_named(tmp_path):
    path = data(tmp_path, 4, values=np.zeros((4, 3, 8, 8), np.float32))
    observers = {"dead:input": HistogramObserver(), "still:input": HistogramObserver()}

    def run(inputs):
        observers["dead:input"].observe(inputs[0])
        observers["still:input"].observe(torch.full((5,), -2.0))

    table = calibrate(run, observers, opened(path), batch_size=2)
    assert table.amax == {"dead:input": 1.0, "still:input": 2.0}
    assert table.audit.tensors["dead:input"].state == "dead"
    assert table.audit.tensors["dead:input"].sqnr_db is None
    assert table.audit.tensors["still:input"].state == "constant"
    assert table.audit.warnings[0] == "1 tensors were zero everywhere, so their range is unknown: dead:input."
    assert "1 tensors had one value everywhere: still:input. Is the data real?" in table.audit.warnings
    table.save(tmp_path / "t.json")
    assert CalibrationTable.load(tmp_path / "t.json") == table


def test_a_percentile_lost_in_zeros_falls_back_to_the_maximum(tmp_path):
    values = np.zeros((4, 3, 8, 8), np.float32)
    values[0, 0, 0, 0] = 5.0
    observers = {"c:input": HistogramObserver()}
    table = calibrate(lambda x: observers["c:input"].observe(x[0]), observers, opened(data(tmp_path, 4, values=values)),
                      batch_size=2, algorithm="percentile", percentile=90.0)  # fmt: skip
    assert table.amax == {"c:input": 5.0}
    assert table.audit.warnings[0] == (
        "c:input: percentile gives 0, since so many values are zero; the exact maximum 5 is used."
    )


def test_progress_and_cancelling(tmp_path):
    log, source = Log(), opened(data(tmp_path))
    table_of(source, 16, progress=log)
    assert log.steps == [(16, 40, "samples"), (32, 40, "samples"), (40, 40, "samples")]
    with pytest.raises(CalibCancelled, match=r"was asked to stop \(got 16 of 40 samples\)"):
        table_of(source, 16, progress=Log(stop_after=1))


def test_skipped_samples_are_in_the_table(tmp_path):
    values = np.ones((4, 3, 8, 8), np.float32)
    values[2] = np.inf
    table = table_of(opened(data(tmp_path, 4, values=values), on_bad_sample="skip"), 2)
    assert len(table.samples) == 3
    assert "s.npz[2]: every value of input 'x' must be finite" in table.audit.skipped[0]
    assert table.audit.warnings[0].startswith("1 bad samples were skipped; first: ")


def test_a_class_nobody_drew_is_named(image_folder):
    source = open_source(DataSpec(images=str(image_folder), samples=2), [InputSpec("image", "float32", (3, 20, 24))])
    observer = HistogramObserver()
    table = calibrate(lambda x: observer.observe(x[0]), {"c:input": observer}, source, batch_size=2)
    assert sum(table.audit.coverage.values()) == 2
    assert set(table.audit.coverage) == {"cat", "dog", "emu"}
    assert any(w.startswith("no sample of 1 classes was drawn: emu.") for w in table.audit.warnings)


def failing(make, **options):
    observers = {"a:input": HistogramObserver(), "b:input": HistogramObserver()}

    def run(inputs):
        observers["a:input"].observe(inputs[0])
        make(observers["b:input"], inputs[0])

    return lambda source: calibrate(run, observers, source, batch_size=8, **options)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (failing(lambda o, x: None), r"b:input: no value was seen during calibration"),
        (
            failing(lambda o, x: o.observe(x / 0)),
            r"b:input: every value must be finite \(got 7680 NaN or infinite of 7680\)",
        ),
        (failing(lambda o, x: o.observe(x), algorithm="kl"), r"algorithm: must be one of auto, entropy_2"),
        (failing(lambda o, x: o.observe(x), percentile=0.0), r"percentile: must be over 0 and at most 100 \(got 0.0\)"),
        (
            lambda s: calibrate(lambda x: None, {}, s, batch_size=8),
            r"there is no tensor to observe",
        ),
        (lambda s: table_of(s, 0), r"batch_size: must be at least 1 \(got 0\)"),
    ],
)
def test_what_stops_a_calibration(tmp_path, start, message):
    with warnings.catch_warnings(), pytest.raises(CalibError, match=message):
        start(opened(data(tmp_path)))
