"""`trtpipe build` on a made-up machine of each row of the platform table: the plan, or the refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import shipping
from jobs import GOOD

from trtpipe import packages
from trtpipe.cli.main import main
from trtpipe.trt import driver, flavour
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.lowering import weakly_typed
from trtpipe.trt.platforms import PLATFORMS, same_capability

#: Settings of each job.
JOBS = {
    "fp16": ("precision.int8_mode=false",),
    "bf16": ("precision.int8_mode=false", "precision.fp16_mode=false", "precision.bf16_mode=true"),
    "int8": (),
    "fp8": ("precision.int8_mode=false", "precision.fp8_mode=true"),
    "fp4": ("precision.int8_mode=false", "precision.nvfp4_mode=true"),
    "dla": (
        "build.default_device_type=dla",
        "build.gpu_fallback=true",
        "build.quantization=implicit",
        "inputs.image={shape: [8, 1, 32, 32]}",
    ),
    "implicit": ("build.quantization=implicit",),
}
#: Device, the name that its driver gives, compute capability and TensorRT there: the jobs that are built, by typing.
AMPERE, ADA, BLACKWELL = "fp16 bf16 int8", "fp16 bf16 int8 fp8", "fp16 bf16 int8 fp8 fp4"
MACHINES = [
    ("jetson_nano", "NVIDIA Tegra X1", "5.3", "8.2.1", "", ""),
    ("jetson_tx2", "NVIDIA Tegra X2", "6.2", "8.2.1", "", ""),
    ("jetson_xavier_nx", "Xavier", "7.2", "8.5.2", "", ""),
    ("jetson_agx_xavier", "Xavier", "7.2", "8.5.2", "", ""),
    ("jetson_orin_nano", "Orin", "8.7", "10.3.0", AMPERE, "implicit"),
    ("jetson_orin_nx", "Orin", "8.7", "10.3.0", AMPERE, "dla implicit"),
    ("jetson_agx_orin", "Orin", "8.7", "8.6.2", "", "fp16 int8 dla implicit"),
    ("jetson_thor", "NVIDIA Thor", "11.0", "10.13.3", BLACKWELL, "implicit"),
    ("t4", "Tesla T4", "7.5", "8.6.1", "", "fp16 int8 implicit"),
    ("a10", "NVIDIA A10", "8.6", "10.3.0", AMPERE, "implicit"),
    ("a100", "NVIDIA A100-SXM4-80GB", "8.0", "11.4.0.106", AMPERE, ""),
    ("l4", "NVIDIA L4", "8.9", "10.16.1.11", ADA, "implicit"),
    ("h100", "NVIDIA H100 80GB HBM3", "9.0", "11.4.0.106", ADA, ""),
    ("h200", "NVIDIA H200", "9.0", "10.3.0", ADA, "implicit"),
    ("b200", "NVIDIA B200", "10.0", "10.16.1.11", BLACKWELL, "implicit"),
    ("b200", "NVIDIA B200", "10.0", "10.3.0", "", ""),
    ("rtx_20", "NVIDIA GeForce RTX 2080", "7.5", "10.16.1.11", "fp16 int8", "implicit"),
    ("rtx_30", "NVIDIA GeForce RTX 3090", "8.6", "11.4.0.106", AMPERE, ""),
    ("rtx_40", "NVIDIA GeForce RTX 4090", "8.9", "10.16.1.11", ADA, "implicit"),
    ("rtx_50", "NVIDIA GeForce RTX 5090", "12.0", "10.3.0", "", ""),
    ("rtx_50", "NVIDIA GeForce RTX 5090", "12.0", "11.4.0.106", BLACKWELL, ""),
]
#: The same devices for target tensorrt_rtx: None where an engine is refused, else the compute capabilities it names.
RTX = {
    "t4": ["7.5"], "a10": ["8.6"], "a100": ["8.0"], "l4": ["8.9"], "rtx_20": ["7.5"], "rtx_30": ["8.6"],
    "rtx_40": ["8.9"], "rtx_50": ["12.0"],
}  # fmt: skip


@dataclass
class Built:
    bundle: object
    report: object


@dataclass
class Bundle:
    path: object
    signature: None = None


@pytest.fixture
def build(monkeypatch, tmp_path, capsys):
    """A function that runs `trtpipe build` on a made-up machine: (exit code, the planned job or None, problems)."""
    for name in ("calib", "val"):
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "0" / "a.png").write_bytes(b"")
    (tmp_path / "w.safetensors").write_bytes(b"")
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    planned = []

    def pipeline(job, out, reporter, **_):
        planned.append(job)
        return Built(Bundle(out / job.name), shipping.manifest().check)

    monkeypatch.setattr("trtpipe.cli.commands.build.build", pipeline)
    monkeypatch.setattr("trtpipe.pipeline.validate.unimportable", lambda module: None)  # it is made up
    monkeypatch.setattr("trtpipe.pipeline.validate.lacking_memory", lambda build, device: "")
    real = packages.package

    def run(name, capability, release, *settings, cuda="12.6"):
        machine = Driver(cuda, (Gpu(0, name, capability, 8 << 30),))
        monkeypatch.setattr(driver, "probe", lambda: machine)
        here = packages.Package("tensorrt", release)
        monkeypatch.setattr(packages, "package", lambda module: here if module == "tensorrt" else real(module))
        planned.clear()
        overrides = [part for setting in settings for part in ("--set", setting)]
        code = main(["build", str(path), "-q", "--json", "-o", str(tmp_path / "out"), *overrides])
        said = json.loads(capsys.readouterr().out)
        problems = [p["message"] for p in said["problems"]] if "problems" in said else []
        return code, (planned[0] if planned else None), problems

    return run


def test_every_row_is_here():
    assert {row[0] for row in MACHINES} == set(PLATFORMS)
    for name, _, capability, *_ in MACHINES:
        assert same_capability(PLATFORMS[name].compute_capability, capability)


@pytest.mark.parametrize(("platform", "gpu", "capability", "release", "strong", "weak"), MACHINES)
@pytest.mark.parametrize("job", JOBS)
def test_a_job_for_tensorrt(build, platform, gpu, capability, release, strong, weak, job):
    settings = ("build.target=tensorrt", "build.compute_capability=[]", f"build.platform={platform}", *JOBS[job])
    code, planned, problems = build(gpu, capability, release, *settings)
    if job not in f"{strong} {weak}".split():
        only_old = [p.startswith("build.target: must be TensorRT 8.6 or later") for p in problems]
        assert problems
        assert (code, planned) == (3 if all(only_old) else 2, None)
        return
    assert (code, problems) == (0, [])
    tensorrt = Flavour("tensorrt", None, release, flavour.expected("tensorrt", release))
    assert weakly_typed(tensorrt, planned.build) == (job in weak.split())


def test_a_job_for_another_machine_is_refused_before_anything_runs(build):
    settings = ("build.target=tensorrt", "build.compute_capability=[]", "build.platform=jetson_agx_orin")
    code, planned, problems = build("NVIDIA L4", "8.9", "10.3.0", *settings, *JOBS["fp16"])
    assert (code, planned, problems) == (2, None, [
        "build.platform: Jetson AGX Orin, of compute capability 8.7, must be where the engine is built (got NVIDIA L4, "
        "8.9). Build it there.",
    ])  # fmt: skip


def test_a_tensorrt_for_a_later_driver_is_refused_before_anything_runs(build, monkeypatch):
    monkeypatch.setattr("trtpipe.pipeline.validate.cuda_major", lambda module: 13)
    settings = ("build.target=tensorrt", "build.compute_capability=[]", *JOBS["fp16"])
    code, planned, problems = build("NVIDIA L4", "8.9", "10.16.1.11", *settings)
    assert (code, planned, problems) == (3, None, [
        "build.target: what is installed of tensorrt must have a driver of CUDA 13 (got CUDA 12.6). Update the driver, "
        "or install what trtpipe doctor names.",
    ])  # fmt: skip
    assert build("NVIDIA L4", "8.9", "10.16.1.11", *settings, cuda="13.0")[0] == 0


@pytest.mark.parametrize(("platform", "gpu", "capability"), sorted({row[:3] for row in MACHINES}))
def test_a_job_for_tensorrt_rtx(build, platform, gpu, capability):
    named = RTX.get(platform)
    settings = (f"build.platform={platform}", f"build.compute_capability={json.dumps(named or [])}")
    code, planned, problems = build(gpu, capability, "10.3.0", *settings, "precision.int8_mode=false")
    if named is None:
        assert (code, planned) == (2, None)
        assert any(p.startswith("build.platform: ") for p in problems)
    else:
        assert (code, problems) == (0, [])
        assert list(planned.build.compute_capability) == named


#: What is refused on which machine, in whole.
REFUSALS = [
    (MACHINES[0], "fp16",
     "build.target: must be TensorRT 8.6 or later (got 8.2.1). Run: pip install 'trtpipe[trt11]' (or [trt10]; on a "
     "Jetson: apt install python3-libnvinfer)"),
    (MACHINES[4], "dla",
     "build.default_device_type: Jetson Orin Nano has no DLA (got dla). Leave it out."),
    (MACHINES[10], "implicit",
     "build.quantization: TensorRT 11.4.0.106 does not support calibrators and implicit quantization (got implicit). "
     "Use explicit: Q/DQ in the graph. TensorRT before 11 has it."),
    (MACHINES[15], "fp16",
     "build.target: B200 (compute capability 10.0) must have TensorRT 10.8 or later (got 10.3.0). "
     "Build with such a release."),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "job", "message"), REFUSALS)
def test_what_is_said(build, machine, job, message):
    platform, gpu, capability, release, *_ = machine
    settings = ("build.target=tensorrt", "build.compute_capability=[]", f"build.platform={platform}", *JOBS[job])
    _, _, problems = build(gpu, capability, release, *settings)
    assert message in problems


def test_the_gpu_is_judged_where_no_platform_is_named(build):
    settings = ("build.target=tensorrt", "build.compute_capability=[]", "precision.int8_mode=false")
    code, _, problems = build("Tesla V100", "7.0", "10.16.1.11", *settings)
    assert (code, problems) == (2, [
        "build.target: Tesla V100 (compute capability 7.0) must have TensorRT before 10.5 (got 10.16.1.11). "
        "Build with such a release."
    ])  # fmt: skip
    assert build("Tesla V100", "7.0", "10.3.0", *settings)[0] == 0
