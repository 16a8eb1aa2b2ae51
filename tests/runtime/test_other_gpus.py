"""What `verify` says of a GPU that the engine is not for: another compute capability, or another model of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shipping

from trtpipe.bundle.format import write_bundle
from trtpipe.bundle.kit import bundle_contents, kit_contents
from trtpipe.bundle.manifest import EngineInfo, Manifest
from trtpipe.cli.commands import verify
from trtpipe.cli.main import main
from trtpipe.job.sections import Build
from trtpipe.runtime.compatibility import placement_problems, problems
from trtpipe.runtime.device import Device
from trtpipe.trt import driver
from trtpipe.values import Engine, LayerPrecision, OnnxModel

RTX = {"target": "tensorrt_rtx", "version": "1.7.1.116"}


def manifest(**changes: Any) -> Manifest:
    """A bundle of an engine of TensorRT 10.3.0.26 on x86-64 Linux."""
    fields: dict[str, Any] = {"file": "model.engine", "target": "tensorrt", "version": "10.3.0.26", "os": "linux"}
    info = EngineInfo(**fields | {"machine": "x86_64"} | changes)
    return shipping.manifest(engine=info, build=Build(target=info.target))


def device(here: str, gpu: str = "NVIDIA L4") -> Device:
    releases = {"tensorrt": "10.3.0.26", "tensorrt_rtx": "1.7.1.116"}
    return Device("linux", "x86_64", releases, here, gpu, memory_bytes=24 << 30)


@pytest.mark.parametrize(
    ("engine", "precisions", "here", "advice"),
    [
        (RTX | {"compute_capabilities": ("8.9",)}, ("fp8", "fp16"), "8.6",
         "Build the bundle with 8.6 in build.compute_capability, without FP8, which 8.6 does not have."),
        (RTX | {"compute_capabilities": ("12.0",)}, ("nvfp4", "fp8", "bf16"), "7.5",
         "Build the bundle with 7.5 in build.compute_capability, without BF16 and FP8 and NVFP4, which 7.5 does not "
         "have."),
        (RTX | {"compute_capabilities": (), "minimum_compute_capability": "8.9"}, ("fp8",), "8.6",
         "Build the bundle for this device, without FP8, which 8.6 does not have."),
        ({"compute_capabilities": ("8.9",)}, ("fp8",), "8.7",
         "Build the bundle for this device, without FP8, which 8.7 does not have."),
        # ampere_plus is for Ampere too, which has no FP8
        ({"compute_capabilities": ("8.9",)}, ("fp8",), "12.0", "Build the bundle for this device."),
        (RTX | {"compute_capabilities": ("12.0",)}, ("nvfp4",), "9.0",
         "Build the bundle for target tensorrt on this device, without NVFP4, which 9.0 does not have."),
        (RTX | {"compute_capabilities": ("8.9",)}, ("fp8",), "12.0",
         "Build the bundle with 12.0 in build.compute_capability."),
    ],
)  # fmt: skip
def test_no_gpu_is_named_for_number_formats_that_it_lacks(
    engine: dict[str, Any], precisions: tuple[Any, ...], here: str, advice: str
) -> None:
    layers = tuple(LayerPrecision("", "linear", p, "asked for") for p in precisions)
    bundle = manifest(**engine).model_copy(update={"layers": layers})
    (problem,) = problems(bundle, device(here))
    assert problem.endswith(f"). {advice}")
    assert placement_problems(bundle.engine, device(here), precisions) == (problem,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "here", "fits"),
    [
        (Build(target="tensorrt"), "NVIDIA L4", True),
        (Build(target="tensorrt"), "NVIDIA L40S", False),
        (Build(target="tensorrt", hardware_compatibility="same_compute_capability"), "NVIDIA L40S", True),
        (Build(target="tensorrt", hardware_compatibility="ampere_plus"), "NVIDIA L40S", True),
    ],
)
def test_an_engine_for_one_model_of_gpu_is_not_said_to_fit_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: Build,
    here: str,
    fits: bool,
) -> None:
    """Both are of compute capability 8.9; TensorRT loads the engine on the other with a warning."""
    built_on = driver.Driver("13.0", (driver.Gpu(0, "NVIDIA L4", "8.9", 24 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: built_on)
    graph = OnnxModel(shipping.graph(), 18, (shipping.INPUT,), (shipping.OUTPUT,))
    made = shipping.manifest(build=build, kind="kit", engine=None)
    kit = write_bundle(tmp_path / "kit", *kit_contents(made, graph, shipping.golden_data(), b"{}\n", {}))
    capabilities = () if build.hardware_compatibility == "ampere_plus" else ("8.9",)
    plan = b"ftrt" + bytes(20) + bytes((10, 3, 0, 26)) + bytes(10)
    engine = Engine(plan, "tensorrt", "10.3.0.26", capabilities, graph.inputs, graph.outputs, graph)
    write_bundle(tmp_path / "b", *bundle_contents(kit, engine, check=made.check, fingerprint="", environment={}))
    monkeypatch.setattr(verify, "device_of", lambda target: device("8.9", here))
    assert main(["verify", str(tmp_path / "b"), "--no-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ("fits this device" in lines) is fits
    assert ("loads on this device, and is built for another model of GPU" in lines) is not fits
    note = (
        "note: The engine was built on NVIDIA L4, for that model alone, and this is NVIDIA L40S: TensorRT advises "
        "against it, as it may be slower, or fail. Build the bundle for this device, or with "
        "build.hardware_compatibility."
    )
    assert (note in lines) is not fits
