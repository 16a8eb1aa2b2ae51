"""A build's values for the report, made by hand: no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from calib.histogram import Histogram
from calib.table import make_table
from trtpipe.bundle.manifest import EngineInfo, FileEntry, Manifest
from trtpipe.evaluation.bench import Bench, Row
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build
from trtpipe.report.content import ComparedOutputs, ReportContent
from trtpipe.values import CheckReport, Control, DimRange, LayerPrecision, Metric, TensorSpec

CLASSES = ("cat", "dog", "a rather long class name, horse")
#: Eight samples of three classes: the third is given another class than the baseline's.
REFERENCE = np.eye(3, dtype=np.float32)[[0, 0, 0, 1, 1, 1, 2, 2]] * 4
FOUND = REFERENCE.copy()
FOUND[2] = (1.0, 2.5, 0.0)
FOUND[7] = (0.0, 3.0, 3.25)
LABELS = np.array([0, 0, 0, 1, 1, 2, 2, -1])


def table() -> Any:
    """A calibration table of three tensors, one of them unstable and clipped."""
    random = np.random.default_rng(0)
    counted = {
        "stem:input": (Histogram.of(random.uniform(0, 1, 4000)), Histogram.of(random.uniform(0, 1, 4000))),
        "block.conv:input": (Histogram.of(random.normal(0, 1, 4000)), Histogram.of(random.normal(0, 3, 4000))),
        "head:input": (Histogram.of(np.zeros(100)), Histogram.of(np.zeros(100))),
    }
    digests = {"weights": "ab" * 32, "graph": "cd" * 32}
    return make_table(
        counted, "percentile", 99.0, digests, {"0/a.png": "12" * 32}, "{}", 2, 4, {"cat": 4, "dog": 3, "horse": 0}, ("x.png: broken",)
    )  # fmt: skip


def manifest(**changed: Any) -> Manifest:
    """Of a passed check that executed the graph."""
    dims = {"N": DimRange(1, 8, 32)}
    metrics = (
        Metric("cosine", "logits", 0.9989, 0.99, True, (0.9981, 0.9993)),
        Metric("sqnr_db", "logits", 26.0, 20.0, True),
        Metric("top1_agreement", "logits", 0.875, 0.98, False, (0.53, 0.978)),
        Metric("accuracy_baseline", "logits", 1.0),
        Metric("accuracy_engine", "logits", 0.75),
        Metric("max_abs", "logits", 3.0),
    )
    check = CheckReport(
        "graph", "onnxruntime 1.31.1", 8, metrics, Control("head/QuantizeLinear", "scale x 127", True, 8), False
    )
    layers = (
        LayerPrecision("stem", "conv2d", "int8", "", "net.py:7"),
        LayerPrecision("block.conv", "conv2d", "int8", "", "net.py:9"),
        LayerPrecision("block", "add", "fp16", "", "net.py:10"),
        LayerPrecision("head", "linear", "fp32", "kept by precision.keep.fp32", "net.py:12"),
        LayerPrecision("head2", "linear", "int8", "", "net.py:13"),
    )
    values: dict[str, Any] = {
        "name": "sample",
        "engine": EngineInfo(
            file="model.engine", target="tensorrt_rtx", version="1.7.1.116", compute_capabilities=("8.6",), os="linux", machine="x86_64"
        ),
        "inputs": (TensorSpec("image", "float32", ("N", 3, 8, 8), dims),),
        "outputs": (TensorSpec("logits", "float32", ("N", 3), dims),),
        "build": Build(),
        "opset": 20,
        "layers": layers,
        "class_names": CLASSES,
        "calibration_digest": "ef" * 32,
        "weights_digest": "ab" * 32,
        "check": check,
        "limits": Limits(cosine_min=0.99),
        "job": '{\n "name": "sample"\n}',
        "environment": {"trtpipe": "0.1.0", "torch": "2.14.1"},
        "fingerprint": "09" * 32,
        "notes": ("head stays in FP32: asked for",),
        "files": {"model.engine": FileEntry(size=10, sha256="77" * 32)},
    }  # fmt: skip
    return Manifest(**(values | changed))


def bench(*rows: Row) -> Bench:
    """A mode table."""
    return Bench("sample", 8, 64, 50, 5, "eager FP32", 2, rows)


def content(folder: Path, **changed: Any) -> ReportContent:
    """Everything a report can show."""
    images = folder / "images"
    names = [f"{CLASSES[max(label, 0)][:3]}/{i}.png" for i, label in enumerate(LABELS.tolist())]
    for i, name in enumerate(names):
        path = images / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200) if i else (16, 12), (20 * i, 90, 200 - 20 * i)).save(path)
    values: dict[str, Any] = {
        "manifest": manifest(),
        "sizes": {"model.engine": 1_380_844, "golden.safetensors": 33_376},
        "compared": ComparedOutputs({"logits": REFERENCE}, {"logits": FOUND}, names, LABELS, images),
        "table": table(),
        "scales": {"stem:input": "stem:input", "block.conv:input": "block.conv:input", "head2:input": "stem:input"},
        "sensitivity": {"stem": 31.5, "block.conv": 24.25},
        "latencies_ms": [1.0 + 0.01 * i for i in range(200)],
        "bench": bench(
            Row("int8", "cuda", "", 1.2, 1.3, 1.4, 6666.0, size_bytes=1_380_844, accuracy=0.75, sqnr_db=26.0),
            Row("fp32", "cpu", "not measured here"),
        ),
        "measured_on": "NVIDIA RTX A2000, clocks locked",
    }
    return ReportContent(**(values | changed))


def undecided(folder: Path) -> ReportContent:
    """A loss within its limit on samples that are too few to tell."""
    check = manifest().check
    assert check is not None
    drop = Metric("accuracy_drop", "logits", 0.0, 0.01, True, (-0.0106, 0.0106))
    return content(folder, manifest=manifest(check=dataclasses.replace(check, metrics=(*check.metrics, drop))))


HOSTILE = "\"><script>window.taken=1</script><img src=x onerror=window.taken=1>'{{7*7}}</style>&amp;" + "W" * 120


def hostile(folder: Path) -> ReportContent:
    """The same, with names that try to become markup."""
    good = content(folder)
    check = good.manifest.check
    assert check is not None
    bad_check = dataclasses.replace(
        check,
        runner=HOSTILE,
        problems=(HOSTILE,),
        control=Control(HOSTILE, HOSTILE, False, 8),
        metrics=(*check.metrics, Metric(HOSTILE, HOSTILE, float("nan"), 1.0, False)),
    )
    random = np.random.default_rng(1)
    key = HOSTILE + ":input"
    counted = {key: (Histogram.of(random.normal(0, 1, 500)), Histogram.of(random.normal(0, 1, 500)))}
    bad_table = make_table(
        counted, "minmax", 99.99, {}, {HOSTILE: "12" * 32}, "{}", 2, 4, {HOSTILE: 4, "b": 1}, (HOSTILE,)
    )
    spec = TensorSpec(HOSTILE, "float32", ("N", 3), {"N": DimRange(1, 8, 32)})
    bad_manifest = manifest(
        check=bad_check,
        layers=(LayerPrecision(HOSTILE, HOSTILE, "int8", HOSTILE, HOSTILE),),
        outputs=(spec,),
        class_names=(HOSTILE, "b", "c"),
        environment={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        job=HOSTILE,
    )
    compared = ComparedOutputs(
        {HOSTILE: REFERENCE}, {HOSTILE: FOUND}, [HOSTILE + str(i) for i in range(8)], LABELS, folder
    )
    return dataclasses.replace(
        good, manifest=bad_manifest, compared=compared, table=bad_table, scales={}, sensitivity={HOSTILE: 3.0},
        bench=bench(Row(HOSTILE, "cpu", notes=(HOSTILE,)), Row(HOSTILE, "cpu", HOSTILE)), measured_on=HOSTILE, sizes={HOSTILE: 3},
    )  # fmt: skip
