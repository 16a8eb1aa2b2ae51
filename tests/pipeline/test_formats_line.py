"""One calibration table down the whole line to bundles in INT8, FP8 and 4 bits, without a GPU."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import trtpipe
from trtpipe.api import build, calibrate
from trtpipe.errors import InputError
from trtpipe.job.load import read_job
from trtpipe.pipeline.bench import _ort_modes
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.tune import tune
from trtpipe.progress import Silent
from trtpipe.runtime.compatibility import problems
from trtpipe.runtime.device import Device
from trtpipe.trt.formats import lacking

MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Conv2d(3, 64, 4, 4)
        self.conv = torch.nn.Conv2d(64, 64, 3, padding=1)
        self.q, self.k, self.v = (torch.nn.Linear(64, 64) for _ in range(3))
        self.head = torch.nn.Linear(64, 16, bias=False)

    def forward(self, x):
        x = torch.relu(self.conv(self.stem(x))).flatten(2).transpose(1, 2)
        a = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)
        return self.head(x + a).mean(1)

def net():
    return Net().eval()
"""
JOB = """
name: {name}
model: {{factory: "formatnet:net"}}
inputs: {{image: {{shape: [N, 3, 32, 32], N: {{min: 1, opt: 4, max: 8}}}}}}
outputs: {{logits: {{}}}}
precision: {precision}
calibration: {calibration}
build: {build}
check: {{arrays: check.npy, limits: {{cosine_min: {cosine_min}}}}}
"""
SAMPLES = "{arrays: calib.npy, batch_size: 4, algorithm: percentile}"
TABLE = "{table: calibration.json, algorithm: percentile}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("formats")
    rng = np.random.default_rng(0)
    np.save(path / "calib.npy", rng.random((8, 3, 32, 32), np.float32))
    np.save(path / "check.npy", rng.random((4, 3, 32, 32), np.float32))
    (path / "formatnet.py").write_text(MODULE)
    write(path, "table", "{int8_mode: true}", calibration=SAMPLES)
    calibrate(path / "table.yaml").save(path / "calibration.json")
    return path


def write(folder, name, precision, *, calibration=TABLE, build="{}", cosine_min=0.9):
    path = folder / f"{name}.yaml"
    path.write_text(
        JOB.format(name=name, precision=precision, calibration=calibration, build=build, cosine_min=cosine_min)
    )
    return path


FAKED = """

def fq():
    from tests.support.quantized_nets import Quantized, fake

    torch.manual_seed(0)
    network = Quantized(torch.nn.Linear(64, 48), fake(), fake(channels=True))
    network(torch.randn(8, 8, 64))
    return network.eval()
"""
FAKED_JOB = """
name: {name}
model: {{factory: "formatnet:fq", quantized: true}}
inputs: {{x: {{shape: [N, 8, 64], N: {{min: 1, opt: 4, max: 8}}}}}}
outputs: {{y: {{}}}}
precision: {precision}
{calibration}
build: {{compute_capability: ["12.0"]}}
check: {{arrays: x.npy, limits: {{sqnr_db_min: 10}}}}
"""


def test_the_scales_that_a_model_came_with_serve_every_format(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((8, 8, 64), np.float32))
    (tmp_path / "formatnet.py").write_text(MODULE + FAKED)
    monkeypatch.delitem(sys.modules, "formatnet", raising=False)

    def job(name, precision, calibration=""):
        path = tmp_path / f"{name}.yaml"
        path.write_text(FAKED_JOB.format(name=name, precision=precision, calibration=calibration))
        return path

    calibrate(job("given", "{int8_mode: true}")).save(tmp_path / "given.json")
    for name, modes in (("i", "int8_mode"), ("f", "fp8_mode"), ("b", "int8_mode: true, fp8_mode"), ("n", "nvfp4_mode")):
        path = job(name, f"{{{modes}: true}}", "calibration: {table: given.json, recalibrate: true}")
        built = build(path, tmp_path / "out")
        formats = {layer.precision for layer in built.bundle.manifest.layers} - {"fp16", "fp32"}
        assert formats == {{"i": "int8", "n": "nvfp4"}.get(name, "fp8")}
        assert [m.passed for m in built.report.metrics if m.limit is not None] == [True]


def device(compute_capability):
    return Device("linux", "x86_64", {"tensorrt_rtx": "1.7.1.116"}, compute_capability, "a GPU")


@pytest.mark.parametrize(
    ("name", "precision", "floor", "formats"),
    [
        ("int8", "{int8_mode: true}", None, {"int8"}),
        ("fp8", "{fp16_mode: true, fp8_mode: true}", "8.9", {"fp8"}),
        ("mixed", "{fp8_mode: true, int8_mode: true, formats: {stem: int8, q: int8}}", "8.9", {"fp8", "int8"}),
        # FP8 was asked for and nothing got it: an Ampere GPU runs the engine.
        ("asked", "{fp8_mode: true, int8_mode: true, formats: {'*': int8}}", None, {"int8"}),
        ("named", "{fp16_mode: true, fp8_mode: true, formats: {q: fp8}}", "8.9", {"fp8"}),
        ("int4", "{fp16_mode: true, weights: int4}", None, {"int4"}),
        ("nvfp4", "{nvfp4_mode: true, fp8_mode: true}", "12.0", {"nvfp4", "fp8"}),
    ],
)
def test_a_portable_engine_from_one_table(folder, tmp_path, name, precision, floor, formats):
    calibration = SAMPLES if name == "int4" else TABLE
    # The mean over 64 positions hides most of what coarse INT8 numbers lose: a control can fail a tight limit alone.
    limit = 0.995 if formats == {"int8"} else 0.9
    built = build(write(folder, name, precision, calibration=calibration, cosine_min=limit), tmp_path)
    manifest = built.bundle.manifest
    assert built.report.passed, built.report.problems
    assert built.report.executed == "graph"
    assert manifest.engine.compute_capabilities == ()
    assert manifest.engine.minimum_compute_capability == floor
    assert {layer.precision for layer in manifest.layers} - {"fp16", "fp32"} == formats
    assert ("NVFP4 dequantized to the same numbers" in built.report.runner) == (name == "nvfp4")
    with trtpipe.load(built.bundle.path, graph=True) as opened:
        said = f"executed by {built.report.runner}"
        assert (said in opened.notes) == (name == "nvfp4")
    note = f"portable engine: its number formats need compute capability {floor} or later, not Ampere's 8.0"
    assert (note in manifest.notes) == (floor is not None)
    report = built.bundle.read("report.html").decode()
    assert all(re.search(rf"\b{f}\b", report) for f in formats)
    assert (f"portable, compute capability {floor} and later" in report) == (floor is not None)
    least = floor or "8.0"
    below = {"8.0": "7.5", "8.9": "8.6", "12.0": "8.9"}[least]
    refused = [p for p in problems(manifest, device(below)) if p.startswith("compute capability")]
    what = "8.0 (Ampere)" if floor is None else f"{floor}, whose number formats it needs,"
    absent = lacking(formats, below)
    assert absent == (
        () if formats == {"int8"} else ("NVFP4",) if floor == "12.0" else ("FP8",) if floor else ("INT4",)
    )
    without = f", without {absent[0]}, which {below} does not have" if absent else ""
    step = f"Build the bundle for this device{without}."
    assert refused == [f"compute capability: the engine runs on {what} and later (got {below}). {step}"]
    assert not [p for p in problems(manifest, device(least)) if p.startswith("compute capability")]


def test_bench_has_a_row_for_the_formats_of_the_job_and_none_for_int8_without_it(folder):
    job = read_job(write(folder, "bench", "{fp8_mode: true}"))
    prepared = PreparedJob(job, Stages(Silent()))
    table = calibrate(folder / "bench.yaml")
    images = {"image": np.load(folder / "check.npy")}
    rows = {m.name: m for m in _ort_modes(job, prepared, table, images)}
    assert {name: m.cannot for name, m in rows.items()} == {
        "ONNX Runtime FP32": "",
        "ONNX Runtime Q/DQ INT8": "the job has no INT8 mode",
        "ONNX Runtime Q/DQ FP8": "",
    }
    wide, fp8 = (rows[f"ONNX Runtime {n}"].prepare().infer(images)["logits"] for n in ("FP32", "Q/DQ FP8"))
    assert 1e-3 < np.linalg.norm(fp8 - wide) / np.linalg.norm(wide) < 0.3


def test_named_gpus_are_in_the_plan_and_need_no_floor(folder, tmp_path):
    path = write(folder, "named", "{fp8_mode: true}", build='{compute_capability: ["8.9", "12.0"]}')
    engine = build(path, tmp_path).bundle.manifest.engine
    assert (engine.compute_capabilities, engine.minimum_compute_capability) == (("8.9", "12.0"), None)


@pytest.mark.parametrize(
    ("precision", "build_section", "message"),
    [
        ("{fp8_mode: true}", "{route: torch2trt, target: tensorrt}",
         "precision.fp8_mode: must be left out for route torch2trt (got true). It has FP16 and INT8 alone: use route "
         "onnx."),
        ("{weights: int4}", "{route: torch2trt, target: tensorrt}",
         "precision.weights: must be left out for route torch2trt (got int4). It has FP16 and INT8 alone: use route "
         "onnx."),
        ("{fp8_mode: true}", "{target: onnxruntime}",
         "precision.fp8_mode: must be false for target onnxruntime (got true). ONNX Runtime optimizes FP8 graphs "
         "wrongly on a CPU and has no FP4: use int8_mode."),
        ("{weights: nvfp4}", "{target: onnxruntime}",
         "precision.weights: must not be nvfp4 for target onnxruntime (got nvfp4). ONNX Runtime has no FP4 on a CPU: "
         "use int4."),
        ("{nvfp4_mode: true, weights: int4}", "{}",
         "precision.weights: must not be given with nvfp4_mode (got int4). NVFP4 holds weights and activations of "
         "linears: choose one."),
        ("{int8_mode: true, formats: {stem: fp8}}", "{}",
         "precision.formats.stem: must be a number format that is on (got fp8). Add precision.fp8_mode: true."),
        ("{int8_mode: true, formats: {stem: int4}}", "{}",
         "precision.formats.stem: must be a number format that is on (got int4). Add precision.weights: int4."),
        ("{nvfp4_mode: true, formats: {stem: int4}}", "{}",
         "precision.formats.stem: must be a number format that is on (got int4). It cannot be beside "
         "precision.nvfp4_mode: choose one."),
        ("{weights: int3}", "{}", "precision.weights: must be int4 or nvfp4 (got 'int3'). Did you mean int4?"),
    ],
)  # fmt: skip
def test_the_words_of_a_job_that_cannot_be(folder, precision, build_section, message):
    with pytest.raises(InputError) as raised:
        read_job(write(folder, "bad", precision, build=build_section))
    lines = [re.sub(r"^.*bad.yaml:\d+: ", "", line) for line in str(raised.value).splitlines()]
    assert message in lines


def test_calibration_is_needed_by_what_quantizes_activations(folder):
    for mode in ("fp8_mode", "nvfp4_mode"):
        path = write(folder, "bad", f"{{{mode}: true}}")
        path.write_text("\n".join(x for x in path.read_text().splitlines() if not x.startswith("calibration")))
        with pytest.raises(
            InputError, match=rf"calibration: must be given when precision\.{mode} is true \(got none\)"
        ):
            read_job(path)
    path = write(folder, "alone", "{weights: int4}")
    path.write_text("\n".join(x for x in path.read_text().splitlines() if not x.startswith("calibration")))
    assert read_job(path).calibration is None


def test_weights_that_nothing_could_be_fitted_to_and_a_table_that_is_not_used_are_said(folder, tmp_path):
    told = (
        "weights in 4 bits are rounded to the nearest: the job names no calibration samples to fit them to, and a "
        "table holds none"
    )
    unused = "calibration.table: not used, since precision has none of int8_mode, fp8_mode and nvfp4_mode"
    target = "{target: onnxruntime}"
    by_table = build(read_job(write(folder, "by-table", "{weights: int4}", build=target, cosine_min=0.1)), tmp_path)
    assert {told, unused} <= {*by_table.report.notes}
    fitted = write(folder, "fitted", "{weights: int4}", calibration=SAMPLES, build=target, cosine_min=0.1)
    assert not {told, unused} & {*build(read_job(fitted), tmp_path).report.notes}


QUANTIZED = ("{fp8_mode: true}", "{weights: int4}", "{fp16_mode: true, fp8_mode: true, int8_mode: true}")


@pytest.mark.parametrize("precision", QUANTIZED)
def test_what_a_format_costs_is_measured_by_module_whatever_the_format(folder, tmp_path, precision):
    """Sensitivities that the job asks for, and the modules to blame where its check fails, without an INT8 mode."""
    path = write(folder, "felt", precision, calibration=SAMPLES, cosine_min=0.9999999)
    built = build(read_job(path, ["check.sensitivity=true", "build.target=tensorrt_rtx"]), tmp_path)
    assert not built.report.passed
    assert any(re.match(r"worst quantized modules: [\w ]+ \(formatnet.py:\d+\) \d", p) for p in built.report.problems)
    report = built.bundle.read("report.html").decode()
    assert len(re.findall(r'\d+\.\d dB<span class="bar">', report)) >= 2


@pytest.mark.parametrize("precision", ["{fp8_mode: true}", "{fp16_mode: true, weights: int4}"])
def test_tune_takes_modules_out_of_any_format(folder, tmp_path, precision):
    """A budget that nothing but leaving some modules wide can meet; INT8's thresholds are no part of the search."""
    path = write(folder, "tuned", precision, calibration=SAMPLES, cosine_min=0.99999)
    found = tune(read_job(path), tmp_path, Silent()).tuned
    assert found.met
    assert not found.trials[0].passed
    assert found.best.candidate.kept
    assert {t.candidate.algorithm for t in found.trials} == {"percentile"}
    assert 0 < found.best.int8_share < found.trials[0].int8_share


@pytest.mark.parametrize(("precision", "warned"), [("{fp8_mode: true}", False), ("{int8_mode: true}", True)])
def test_int8_thresholds_are_doubted_where_int8_has_them(folder, tmp_path, precision, warned):
    """A percentile of 50 clips half of all values in INT8, and nothing in FP8, which ends at the largest."""
    halves = SAMPLES.replace("percentile}", "percentile, percentile: 50.0, corrections: false}")
    built = build(write(folder, "halved", precision, calibration=halves, cosine_min=0.99), tmp_path)
    for said in (built.report.warnings, built.bundle.manifest.notes):
        assert any("clips 50 % of the values" in w for w in said) is warned
    assert built.report.passed is not warned
