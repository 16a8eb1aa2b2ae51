"""Whether INT8 is worth it, on engines whose times are known."""

import pytest

from trtpipe.evaluation.speedup import Speedup, converts, judge_speedup, measure_speedup
from trtpipe.values import CheckReport, Control, Metric

REPORT = CheckReport(
    "engine", "r", 1, (Metric("cosine", "y", 1.0, 0.9, True),), Control("t", "scale x 127", True, 1), True
)


class Engine:
    """An engine that takes `ms` each time and has these layers; it notes when it was timed."""

    def __init__(self, name, ms, log, layers=()):
        self.name, self.ms, self.log, self.layers = name, ms, log, layers

    def run(self, inputs):
        self.log.append(f"{self.name} run")
        return {}

    def milliseconds(self, inputs, *, transfers):
        assert not transfers
        self.log.append(self.name)
        return self.ms.pop(0)

    def layer_ms(self, inputs):
        return self.layers


def test_both_are_timed_in_turns_and_medians_compared(monkeypatch):
    monkeypatch.setattr("trtpipe.evaluation.speedup._ROUNDS", 3)
    log = []
    layers = (("layer1.conv1/Conv", 1.0), ("Reformatting CopyNode for Input Tensor 0 to head", 0.2),
              ("head/QuantizeLinear", 0.5))  # fmt: skip
    found = measure_speedup(Engine("i", [1.0, 9.0, 2.0], log, layers), Engine("f", [3.0, 4.0, 50.0], log), {})
    assert log == ["i run"] * 5 + ["f run"] * 5 + ["i", "f"] * 3
    assert (found.int8_ms, found.fp16_ms, found.ratio) == (2.0, 4.0, 2.0)
    assert found.overhead == (("head/QuantizeLinear", 0.5), ("Reformatting CopyNode for Input Tensor 0 to head", 0.2))


@pytest.mark.parametrize(
    ("layer", "only"),
    [
        ("Reformatting CopyNode for Output Tensor 0 to layer1.0.conv1/Conv", True),
        ("head/QuantizeLinear", True),
        ("layer1.0.conv1/DequantizeLinear_1", True),
        ("layer1.0.conv1/DequantizeLinear + layer1.0.conv1/Conv", False),
        ("layer1.0.conv1/Conv", False),
        ("pool/MaxPool", False),
    ],
)
def test_a_layer_that_only_converts(layer, only):
    assert converts(layer) is only


def test_a_speedup_within_the_limit_is_a_metric_that_passed():
    report = judge_speedup(REPORT, Speedup(1.0, 1.5, ()), 1.2)
    assert report.passed
    assert report.metrics[-1] == Metric("speedup_over_fp16", "y", 1.5, 1.2, True)


def test_int8_that_is_not_faster_is_refused_with_the_layers_that_cost_the_time():
    report = judge_speedup(REPORT, Speedup(2.0, 1.8, (("head/QuantizeLinear", 0.5), ("Reformat x", 0.25))), 1.2)
    assert not report.passed
    assert report.metrics[-1].passed is False
    assert report.problems == (
        "the engine takes 2.000 ms and its FP16 twin 1.800 ms, 0.9 times as fast (limit 1.2); layers that only convert "
        "take 0.750 ms: head/QuantizeLinear 0.500 ms, Reformat x 0.250 ms. Use precision.fp16_mode alone, or keep the "
        "modules beside those layers in FP16",
    )


def test_without_an_executed_engine_the_limit_is_not_met():
    report = judge_speedup(REPORT, None, 1.2)
    assert not report.passed
    assert report.problems == (
        "check.limits.speedup_over_fp16_min was not judged: it needs an engine executed on its GPU",
    )
