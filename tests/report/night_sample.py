"""A night to render: every way a job can end, once."""

from __future__ import annotations

from trtpipe.nightly.outcome import Comparison, Drift, JobOutcome, NightlyReport
from trtpipe.values import Metric

_METRICS = (
    Metric("cosine", "logits", 0.9989, 0.99, True),
    Metric("sqnr_db", "logits", 25.9),
    Metric("top1_agreement", "logits", 0.997, 0.98, True, (0.985, 0.999)),
    Metric("accuracy_engine", "logits", 0.9972),
)
_SECONDS = {"model": 0.8, "baseline": 1.2, "capture": 1.5, "calibrate": 2.1, "compile": 2.2, "check": 0.5}


def built(name: str, **changed: object) -> JobOutcome:
    values: dict[str, object] = {
        "name": name, "file": f"jobs/{name}.yaml", "outcome": "built", "reasons": ("weights changed",),
        "fingerprint": "ab" * 32, "bundle": f"out/{name}", "engine_sha256": "cd" * 32, "size_bytes": 1_380_852,
        "target": "tensorrt_rtx", "executed": "graph", "runner": "onnxruntime 1.31.1", "samples": 360,
        "metrics": _METRICS, "seconds": _SECONDS,
    }  # fmt: skip
    return JobOutcome(**(values | changed))  # type: ignore[arg-type]


REGRESSION = "accuracy_engine 0.9611, 3.61 points under the last green run (allowed 1)"

NIGHT = NightlyReport(
    run=41,
    began="2026-11-21T02:00:00Z",
    seconds=754.0,
    outcomes=(
        built("mobilenet-fp16"),
        built("vit-int8", outcome="reused", reasons=(), stages_reused=("calibrate", "compile", "check")),
        built(
            "resnet50-int8-for-the-warehouse-cameras",
            exit_code=1,
            regressions=(REGRESSION,),
            comparisons=(
                Comparison("accuracy_engine", "logits", 0.9972, 0.997, 0.9611, 0.0361, 0.01, False, True),
                Comparison("size_bytes", "", 1_380_844.0, 1_380_844.0, 1_380_852.0, 5.8e-6, 0.05, True, False),
            ),
        ),
        built(
            "bit-m-int8", exit_code=1, problems=("output logits holds NaN or infinity in what was executed",),
            metrics=(Metric("cosine", "logits", 0.71, 0.99, False),),
        ),
        JobOutcome("broken.yaml", "jobs/broken.yaml", "error", 2, "jobs/broken.yaml:3:1: modle: must be a key of a job (got 'modle'). Did you mean model?"),
        built("detector", drift=Drift(("aa" * 32, "bb" * 32, "aa" * 32), 0.002), attempts=("worker tcp://10.0.0.7 died; tried again",), where="orin-3"),
        JobOutcome("two-inputs", "jobs/two-inputs.yaml", "cancelled"),
    ),
    environment={"trtpipe": "0.1.0", "tensorrt_rtx": "1.7.1", "torch": "2.14.1"},
    workers=("orin-1", "orin-2", "orin-3"),
    cache_bytes=31_400_000,
    cache_entries=96,
    notes=("orin-2 left at the 3rd job and came back",),
)  # fmt: skip

HISTORY = {
    "resnet50-int8-for-the-warehouse-cameras": {
        "accuracy_engine": [0.996, 0.9965, 0.9972, None, 0.997, 0.9972, 0.9611],
        "size_bytes": [1_380_844.0] * 6 + [1_380_852.0],
        "seconds": [9.1, 9.0, 9.3, None, 8.8, 9.2, 9.4],
    },
    "mobilenet-fp16": {"accuracy_engine": [0.9972] * 7, "sqnr_db": [25.0, 25.2, 25.1, 25.9, 25.8, 25.9, 25.9]},
    "vit-int8": {"accuracy_engine": [0.99, 0.992, 0.9972]},
}
LINKS = {"resnet50-int8-for-the-warehouse-cameras": "out/resnet50-int8-for-the-warehouse-cameras/report.html"}
