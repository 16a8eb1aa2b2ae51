"""TensorRT-RTX compiles no matrix product of FP32 tensors for compute capability 7.5: said before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from trtpipe.errors import BuildError, InputError
from trtpipe.job.load import read_job
from trtpipe.job.sections import Build
from trtpipe.pipeline.deep import deep_problems
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import calibrate, quantize
from trtpipe.pipeline.tune import _Bench
from trtpipe.progress import Silent
from trtpipe.quantization.search import Candidate
from trtpipe.routes.onnx import to_onnx
from trtpipe.trt.builder import build_engine
from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES, RTX_WITHOUT_FP32_PRODUCTS

NETWORK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, product, times):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3)
        self.product = nn.Linear(16, 16) if product else nn.Identity()
        self.times = times

    def forward(self, x):
        return self.product(self.conv(x).mean((2, 3)) * self.times)


def samples():
    for x in torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0)):
        yield {"x": x.numpy()}


def make(product=True, times=1.0):
    return Net(product, times)
"""


def job(
    folder: Path, precision: dict[str, Any], target: str = "tensorrt_rtx", named: Any = ("7.5",), **args: Any
) -> Any:
    (folder / "turing_net.py").write_text(NETWORK)
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((6, 4, 8, 8)).astype(np.float32))
    build = {"target": target} | ({"compute_capability": list(named)} if named else {})
    calibration = {"calibration": {"factory": "turing_net:no_such_samples"}} if "int8_mode" in precision else {}
    text = {
        "name": "turing",
        "model": {"factory": "turing_net:make", "args": args},
        "inputs": {"x": {"shape": ["N", 4, 8, 8], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"y": {}},
        "precision": precision,
        "build": build,
        "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.99}},
        **calibration,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(text))
    return read_job(folder / "job.yaml")


SAID = (
    "build.compute_capability: TensorRT-RTX compiles no matrix product of FP32 tensors for 7.5 (got product). Set "
    "precision.fp16_mode and keep none of them in FP32, or leave 7.5 out."
)


@pytest.mark.parametrize(
    "precision",
    [{}, {"int8_mode": True}, {"fp16_mode": True, "keep": {"fp32": ["product"]}}],
    ids=["FP32", "INT8 between FP32", "kept"],
)
def test_it_is_said_by_validate_and_before_calibration(tmp_path: Path, precision: dict[str, Any]) -> None:
    asked = job(tmp_path, precision, named=("7.5", "8.6"))
    assert [str(p) for p in deep_problems(asked)] == [SAID]
    with pytest.raises(InputError) as caught:
        _ = PreparedJob(asked, Stages(Silent())).captured
    assert str(caught.value) == SAID


def test_a_product_that_stays_in_fp32_for_its_range_is_said_before_the_compile(tmp_path: Path) -> None:
    asked = job(tmp_path, {"fp16_mode": True}, times=1e6)
    prepared = PreparedJob(asked, Stages(Silent()))
    with pytest.raises(InputError) as caught:
        quantize(asked, prepared, None, prepared._stages)
    assert str(caught.value) == SAID


def test_a_trial_that_a_build_refuses_does_not_meet_the_budget(tmp_path: Path) -> None:
    asked = job(tmp_path, {"fp16_mode": True, "int8_mode": True, "placement": "all"})
    asked = asked.model_copy(
        update={"calibration": asked.calibration.model_copy(update={"factory": "turing_net:samples"})}
    )
    stages = Stages(Silent())
    prepared = PreparedJob(asked, stages)
    bench = _Bench(asked, prepared, calibrate(asked, prepared, stages), stages)
    algorithm = asked.calibration.algorithm
    assert bench.evaluate(Candidate(algorithm)).metrics
    refused = bench.evaluate(Candidate(algorithm, fp32=("product",)))
    assert (refused.passed, refused.enough, refused.problems, refused.size_bytes) == (False, False, (SAID,), None)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ({"fp16_mode": True}, {}),
        ({}, {"product": False}),
        ({}, {"named": ("8.6",)}),
        ({}, {"named": ()}),
        ({}, {"target": "onnxruntime", "named": ()}),
    ],
    ids=["FP16", "convolutions", "another GPU", "portable", "ONNX Runtime"],
)
def test_what_is_compiled_is_not_refused(tmp_path: Path, precision: dict[str, Any], changes: dict[str, Any]) -> None:
    assert deep_problems(job(tmp_path, precision, **changes)) == ()


@pytest.mark.parametrize("capability", RTX_COMPUTE_CAPABILITIES)
@pytest.mark.parametrize("product", [True, False])
def test_the_table_says_what_tensorrt_rtx_does(tmp_path: Path, capability: str, product: bool) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    prepared = PreparedJob(job(tmp_path, {}, named=(), product=product), Stages(Silent()))
    graph = to_onnx(quantize(prepared.job, prepared, None, prepared._stages))
    build = Build(target="tensorrt_rtx", compute_capability=(capability,))
    if product and capability in RTX_WITHOUT_FP32_PRODUCTS:
        with pytest.raises(BuildError, match="FP32 GEMM is not supported"):
            build_engine(graph, build, progress=Silent())
    else:
        assert build_engine(graph, build, progress=Silent()).compute_capabilities == (capability,)
