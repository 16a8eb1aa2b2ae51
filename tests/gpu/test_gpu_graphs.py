"""What `executed: graph` is worth: engines that ran, against ONNX Runtime on the very ONNX they were compiled from.

One ResNet-18 goes down the line in each precision. The figures are printed, and kept with the other results: they say
how far a check that executed the graph is from one that executed the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from trtpipe import errors
from trtpipe.evaluation import metrics

#: Precision to the job's section, and the largest relative L2 difference that rounding can explain. In INT8 a value
#: between two levels may fall either way, and random weights carry that on: ONNX Runtime's own INT8 kernels are 0.06
#: from its Q/DQ as written on this network.
PRECISIONS = {
    "FP32": ({}, 1e-4),
    "FP16": ({"fp16_mode": True}, 2e-2),
    "INT8": ({"int8_mode": True}, 0.2),
    "INT8 + FP16": ({"int8_mode": True, "fp16_mode": True}, 0.2),
}
SIZE = 64


@dataclass(frozen=True)
class Line:
    """The parts that every precision shares."""

    job: Any
    prepared: Any
    table: Any
    stages: Any


@pytest.fixture(scope="session")
def line(target, gpu, tmp_path_factory):
    """ResNet-18 with random weights, captured and calibrated on photos."""
    pytest.importorskip("timm")
    from photos import write_photos

    from trtpipe.job.load import read_job
    from trtpipe.pipeline.stages import Stages, calibrate, prepare
    from trtpipe.progress import Silent
    from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES

    folder = tmp_path_factory.mktemp("line")
    write_photos(folder / "photos", 64, SIZE)
    data = {"images": "photos", "transform": {"resize": [SIZE, SIZE]}, "batch_size": 16}
    named = target == "tensorrt_rtx" and gpu.compute_capability in RTX_COMPUTE_CAPABILITIES
    content = {
        "name": "graphs",
        "model": {"factory": "random_models:create", "args": {"name": "resnet18", "size": SIZE}},
        "inputs": {"image": {"shape": ["N", 3, SIZE, SIZE], "N": {"min": 1, "opt": 16, "max": 16}}},
        "outputs": {"logits": {}},
        "precision": {"int8_mode": True},
        "calibration": {**data, "samples": 32},
        "build": {"target": target, "tf32": False, "compute_capability": [gpu.compute_capability] if named else []},
        "check": {**data, "samples": 64, "limits": {"cosine_min": 0.5}},
    }
    (folder / "job.yaml").write_text(json.dumps(content))
    job, stages = read_job(folder / "job.yaml"), Stages(Silent())
    prepared = prepare(job, stages)
    return Line(job, prepared, calibrate(job, prepared, stages), stages)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_engine_answers_as_its_graph(line, target, gpu, precision, results, capsys):
    from trtpipe.job.sections import Precision
    from trtpipe.pipeline.stages import compile_engine, quantize
    from trtpipe.runtime.onnxruntime import OrtRunner
    from trtpipe.trt.runtime import EngineRunner

    asked, most = PRECISIONS[precision]
    job = line.job.model_copy(update={"precision": Precision(**asked)})
    table = line.table if asked.get("int8_mode") else None
    engine = compile_engine(job, line.prepared, quantize(job, line.prepared, table, line.stages), line.stages)
    batches = [b.arrays for b in line.prepared.check_source.batches(16)]
    try:
        with EngineRunner(engine.data) as runner:
            got = np.concatenate([runner.run(b)["logits"] for b in batches])
    except errors.TrtpipeError as error:
        pytest.skip(f"{gpu.name}: {error}")
    with OrtRunner(engine.graph.data, as_written=True) as graph:
        wanted = np.concatenate([graph.run(b)["logits"] for b in batches])
    baseline = line.prepared.baseline.outputs["logits"]
    figures = {
        "samples": len(got),
        "relative_l2": metrics.relative_l2(wanted, got),
        "max_abs": metrics.max_abs(wanted, got),
        "sqnr_db": metrics.sqnr_db(wanted, got),
        "top1_agreement": metrics.top1_agreement(wanted, got),
        "graph_to_baseline_relative_l2": metrics.relative_l2(baseline, wanted),
        "engine_to_baseline_relative_l2": metrics.relative_l2(baseline, got),
    }
    results(f"engine against graph, {target}, {precision}", {"gpu": gpu.name, **figures})
    with capsys.disabled():
        print(f"\n{target}, {precision}: engine against graph {figures}")
    assert np.isfinite(got).all()
    assert figures["relative_l2"] < most
