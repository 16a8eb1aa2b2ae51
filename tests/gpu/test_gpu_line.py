"""The whole line with the engine executed, and calibration on the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def quickstart(gpu, tmp_path_factory):
    """The quickstart built here with check.require: engine."""
    from trtpipe.job.load import read_job
    from trtpipe.pipeline import build as pipeline
    from trtpipe.progress import Silent
    from trtpipe.trt import flavour
    from trtpipe.trt.platforms import rtx_support

    if not (ROOT / "data" / "digits" / "resnet.safetensors").exists():
        pytest.skip("data/digits is not made: run make quickstart")
    target = "tensorrt" if "tensorrt" in flavour.installed() else "tensorrt_rtx"
    if target == "tensorrt_rtx" and (support := rtx_support(gpu.compute_capability)).runs is False:
        pytest.skip(f"{gpu.name}: {support.why}")
    overrides = (f"build.target={target}", "build.compute_capability=[]", "check.require=engine")
    job = read_job(ROOT / "configs" / "quickstart.yaml", overrides)
    return pipeline.build(job, tmp_path_factory.mktemp("out"), Silent())


def test_the_quickstart_executes_its_engine(quickstart):
    assert quickstart.report.executed == "engine"
    assert quickstart.report.passed
    assert (quickstart.report.control.executed, quickstart.report.control.failed) == ("engine", True)


def test_where_no_engine_runs_the_graph_is_checked_and_the_report_says_why(gpu, tmp_path):
    """PyTorch computes on the GPU all the same: baseline, calibration, ranges."""
    pytest.importorskip("tensorrt_rtx")
    from trtpipe.job.load import read_job
    from trtpipe.pipeline import build as pipeline
    from trtpipe.progress import Silent
    from trtpipe.trt.platforms import rtx_support

    support = rtx_support(gpu.compute_capability)
    if support.runs is not False:
        pytest.skip(f"{gpu.name}: {support.why}")
    if not (ROOT / "data" / "digits" / "resnet.safetensors").exists():
        pytest.skip("data/digits is not made: run make quickstart")
    job = read_job(ROOT / "configs" / "quickstart.yaml", ("build.target=tensorrt_rtx", "build.compute_capability=[]"))
    report = pipeline.build(job, tmp_path, Silent()).report
    assert (report.executed, report.passed) == ("graph", True)
    assert any(support.why in note for note in report.notes), report.notes


def test_golden_inputs_give_golden_outputs(quickstart):
    import trtpipe
    from trtpipe.bundle import golden
    from trtpipe.values import GOLDEN

    bundle = quickstart.bundle
    manifest = bundle.manifest
    kept = golden.from_bytes(bundle.read(GOLDEN), manifest.inputs, manifest.outputs, GOLDEN)
    with trtpipe.load(bundle.path) as model:
        assert model.executed == "engine"
        outputs = model.run_arrays(dict(kept.inputs))
    for name, wanted in kept.outputs.items():
        got, wanted = outputs[name].astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
        assert got @ wanted / (np.linalg.norm(got) * np.linalg.norm(wanted)) > 0.99


def test_observers_on_cuda_agree_with_the_cpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is built without CUDA")
    from calib.algorithms import threshold
    from calib.observers import HistogramObserver

    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 128, generator=generator) * (i + 1) for i in range(8)]
    here, there = HistogramObserver(), HistogramObserver()
    for batch in batches:
        here.observe(batch)
        there.observe(batch.cuda())
    for algorithm in ("entropy_2", "minmax", "percentile", "mse"):
        one, other = threshold(here.histogram, algorithm), threshold(there.histogram, algorithm)
        assert other == pytest.approx(one, rel=1e-5)


def test_observing_on_cuda_does_not_wait_for_the_gpu(nothing_waits):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is built without CUDA")
    from calib.observers import HistogramObserver

    observer, batch = HistogramObserver(), torch.randn(64, 1024, device="cuda")
    observer.observe(batch)  # the first call may compile and allocate
    torch.cuda.synchronize()
    with nothing_waits():
        for _ in range(4):
            observer.observe(batch)
    assert observer.histogram is not None
