"""Which engine runs on which device: NVIDIA's rules, one line for each mismatch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shipping

from trtpipe.bundle.manifest import EngineInfo, FileEntry, Manifest
from trtpipe.cli.main import main
from trtpipe.errors import MissingError
from trtpipe.job.sections import Build, Precision
from trtpipe.runtime import device as device_module
from trtpipe.runtime.compatibility import problems, remarks, require_fit
from trtpipe.runtime.device import Device, this_device
from trtpipe.trt import driver, platforms
from trtpipe.trt.platforms import machine_name

GPU_86 = Device("linux", "x86_64", {"tensorrt": "10.3.0.26", "tensorrt_rtx": "1.7.1.116"}, "8.6", "RTX A4000")
ORIN = Device("linux", "aarch64", {"tensorrt": "10.3.0.26"}, "8.7", "Orin", jetson=True)
ADA = replace(GPU_86, compute_capability="8.9", gpu="L4")


def manifest(target: str = "tensorrt", build: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    """A bundle of an engine for 8.6, of TensorRT 10.3.0.26 on x86-64 Linux."""
    fields: dict[str, Any] = {
        "file": "model.engine",
        "target": target,
        "version": "10.3.0.26",
        "compute_capabilities": ("8.6",),
        "os": "linux",
        "machine": "x86_64",
        **changes,
    }
    made = Build.model_validate({"target": target, **(build or {})})
    return shipping.manifest(engine=EngineInfo(**fields), build=made)


def with_versions(version: str, target: str = "tensorrt") -> Device:
    return replace(GPU_86, versions={target: version})


FITS: list[tuple[str, Manifest, Device]] = [
    ("same everything", manifest(), GPU_86),
    ("three numbers of a version are enough", manifest(), with_versions("10.3.0")),
    ("a Jetson's own engine", manifest(compute_capabilities=("8.7",), machine="aarch64"), ORIN),
    ("ampere_plus on a later GPU", manifest(hardware_compatibility="ampere_plus"), ADA),
    ("ampere_plus on Hopper", manifest(hardware_compatibility="ampere_plus"), replace(ADA, compute_capability="9.0")),
    (
        "same_compute_capability on another model of that capability",
        manifest(hardware_compatibility="same_compute_capability"),
        replace(GPU_86, gpu="RTX 3090"),
    ),
    ("version compatible, later minor", manifest(version_compatible=True), with_versions("10.16.1.11")),
    ("version compatible, 10 on 11", manifest(version_compatible=True), with_versions("11.4.0.106")),
    ("version compatible, 8.6 on 10", manifest(version="8.6.1.6", version_compatible=True), with_versions("10.3.0.26")),
    (
        "both flags",
        manifest(version_compatible=True, hardware_compatibility="ampere_plus"),
        replace(ADA, versions={"tensorrt": "11.0.0"}),
    ),
    ("rtx for several", manifest("tensorrt_rtx", version="1.7.1.116", compute_capabilities=("8.6", "8.9")), ADA),
    ("rtx portable", manifest("tensorrt_rtx", version="1.7.1.116", compute_capabilities=()), ADA),
    (
        "onnx anywhere",
        shipping.manifest(),
        Device("darwin", "aarch64", {"onnxruntime": "1.20.1"}),
    ),
]


@pytest.mark.parametrize(("bundle", "device"), [f[1:] for f in FITS], ids=[f[0] for f in FITS])
def test_fits(bundle: Manifest, device: Device) -> None:
    assert problems(bundle, device) == ()
    require_fit(bundle, device)


RTX = {"target": "tensorrt_rtx", "version": "1.7.1.116"}
#: A driver of CUDA 12 and a runtime that is built for 13.
OLD_DRIVER = replace(GPU_86, cuda="12.2", built_for={"tensorrt": 13, "tensorrt_rtx": 13})
REFUSED: list[tuple[str, Manifest, Device, str]] = [
    (
        "8.6 on 8.7",
        manifest(machine="aarch64"),
        ORIN,
        "compute capability: the engine must run on 8.6 (got 8.7, Orin). Build the bundle for this device.",
    ),
    (
        "RTX for another GPU",
        manifest(**RTX),
        ADA,
        "compute capability: the engine must run on 8.6 (got 8.9, L4). "
        "Build the bundle with 8.9 in build.compute_capability.",
    ),
    (
        "RTX for another GPU that it does not name",
        manifest(**RTX),
        replace(ADA, compute_capability="9.0", gpu="H100"),
        "compute capability: the engine must run on 8.6 (got 9.0, H100). "
        "Build the bundle for target tensorrt on this device.",
    ),
    (
        "a driver of which there is no other distribution",
        manifest(**RTX),
        replace(OLD_DRIVER, cuda="11.4"),
        "driver: what is installed of tensorrt_rtx must have a driver of CUDA 13 (got CUDA 11.4). Update the driver.",
    ),
    (
        "an old driver",
        manifest(**RTX),
        OLD_DRIVER,
        "driver: what is installed of tensorrt_rtx must have a driver of CUDA 13 (got CUDA 12.2). Update the driver, "
        "or install tensorrt-rtx-cu12 of the same release instead.",
    ),
    (
        "ampere_plus on JetPack",
        manifest(machine="aarch64", hardware_compatibility="ampere_plus"),
        ORIN,
        "compute capability: ampere_plus engines do not run on JetPack (got 8.7 on a Jetson). "
        "Build the bundle for this device.",
    ),
    (
        "ampere_plus on Turing",
        manifest(hardware_compatibility="ampere_plus"),
        replace(GPU_86, compute_capability="7.5"),
        "compute capability: the engine runs on 8.0 (Ampere) and later (got 7.5). Build the bundle for this device.",
    ),
    (
        "same_compute_capability on another",
        manifest(hardware_compatibility="same_compute_capability"),
        ADA,
        "compute capability: the engine must run on 8.6 (got 8.9, L4). "
        "Build the bundle for this device, or with ampere_plus.",
    ),
    (
        "an engine that names no GPU",
        manifest(compute_capabilities=()),
        GPU_86,
        "compute capability: the manifest must say which GPU the engine is for (it does not). "
        "Build the bundle for this device.",
    ),
    (
        "another major",
        manifest(),
        with_versions("11.4.0.106"),
        "version: TensorRT must be 10.3.0.26, as the engine is not version compatible (got 11.4.0.106). "
        "Install that version or build the bundle for this device, with build.version_compatible if the device may be "
        "updated.",
    ),
    (
        "another build",
        manifest(),
        with_versions("10.3.0.27"),
        "version: TensorRT must be 10.3.0.26, the build that the engine is proven with (got 10.3.0.27). "
        "Install that build or build the bundle for this device.",
    ),
    (
        "another minor",
        manifest(),
        with_versions("10.4.0"),
        "version: TensorRT must be 10.3.0.26, as the engine is not version compatible (got 10.4.0). "
        "Install that version or build the bundle for this device, with build.version_compatible if the device may be "
        "updated.",
    ),
    (
        "version compatible, older runtime",
        manifest(version_compatible=True),
        with_versions("10.2.0.19"),
        "version: TensorRT must be 10.3.0.26 or later, and at least 8.6 (got 10.2.0.19). "
        "Update it or build the bundle for this device.",
    ),
    (
        "version compatible, 8 on 11",
        manifest(version="8.6.1.6", version_compatible=True),
        with_versions("11.0.0.114"),
        "version: TensorRT must be 8, or 10 for an engine of 8, or 11 for one of 10 (got 11.0.0.114). "
        "Install such a version or build the bundle for this device.",
    ),
    (
        "rtx of another release",
        manifest(**RTX),
        with_versions("1.6.1.0", "tensorrt_rtx"),
        "version: TensorRT-RTX must be 1.7.1.116, as engines never run on another release (got 1.6.1.0). "
        "Install that release or build the bundle for this device.",
    ),
    (
        "no runtime",
        manifest(**RTX),
        replace(GPU_86, versions={}),
        "runtime: TensorRT-RTX 1.7.1.116 is not installed. Install it: pip install 'trtpipe[rtx]'.",
    ),
    (
        "no runtime for this driver",
        manifest(**RTX),
        replace(GPU_86, versions={}, cuda="11.8"),
        "runtime: TensorRT-RTX 1.7.1.116 is not installed. There is none for this machine and its driver.",
    ),
    (
        "no onnxruntime",
        shipping.manifest(),
        replace(GPU_86, versions={}),
        "runtime: ONNX Runtime 1.20.0 is not installed. Install it: pip install onnxruntime.",
    ),
    (
        "rtx portable on Turing",
        manifest(**RTX, compute_capabilities=()),
        replace(GPU_86, compute_capability="7.5"),
        "compute capability: the engine runs on 8.0 (Ampere) and later (got 7.5). Build the bundle for this device.",
    ),
    (
        "another OS",
        manifest(),
        replace(GPU_86, os="win32"),
        "os: the engine must run on linux, where it was built (got win32). Engines do not move between operating "
        "systems: use a linux device or build the bundle for this device.",
    ),
    (
        "another platform",
        manifest(),
        replace(GPU_86, machine="aarch64"),
        "platform: the engine must run on x86_64 (got aarch64). Engines do not move between platforms: "
        "use a x86_64 device or build the bundle for this device.",
    ),
    (
        "no GPU",
        manifest(),
        replace(GPU_86, compute_capability=None, gpu="no driver"),
        "gpu: there is no usable NVIDIA GPU (no driver). Check its driver, or have its graph executed on the CPU: "
        "trtpipe run --graph.",
    ),
]


@pytest.mark.parametrize(("bundle", "device", "line"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_one_line(bundle: Manifest, device: Device, line: str) -> None:
    assert problems(bundle, device) == (line,)


def test_another_onnxruntime_is_remarked_and_not_refused() -> None:
    bundle = shipping.manifest()  # of 1.20.0
    older = Device("linux", "aarch64", {"onnxruntime": "1.19.2"})
    assert problems(bundle, older) == ()
    assert remarks(bundle, older) == (
        "ONNX Runtime is 1.19.2 here and was 1.20.0 when the bundle was checked: outputs may differ in a few samples. "
        "The golden check measures it.",
    )
    assert remarks(bundle, replace(older, versions={"onnxruntime": "1.20.1"})) == ()
    assert remarks(manifest(), older) == ()


def test_memory() -> None:
    entry = FileEntry(size=100 << 20, sha256="0" * 64)
    tight = manifest(device_memory_bytes=28 << 20).model_copy(update={"files": {"model.engine": entry}})
    assert problems(tight, replace(GPU_86, memory_bytes=128 << 20)) == ()
    assert problems(tight, replace(GPU_86, memory_bytes=127 << 20)) == (
        "memory: weights and activations need 128 MiB (got 127 MiB). Stop "
        "other programs, or build for a smaller batch.",
    )


@pytest.mark.parametrize("lacking", [1, 1 << 10, 1 << 19, (1 << 20) - 1, 1 << 20, 1 << 26])
@pytest.mark.parametrize("needed", [1 << 20, (1 << 20) + 1, 123_456_789, 1 << 27, (1 << 35) + 5])
def test_memory_that_lacks_a_little_is_less_in_the_message_too(needed: int, lacking: int) -> None:
    entry = FileEntry(size=0, sha256="0" * 64)
    tight = manifest(device_memory_bytes=needed).model_copy(update={"files": {"model.engine": entry}})
    (one,) = problems(tight, replace(GPU_86, memory_bytes=max(0, needed - lacking)))
    most, least = map(int, re.findall(r"(\d+) MiB", one))
    assert most > least
    assert most - least <= lacking / 2**20 + 2


def test_weights_that_are_streamed_need_not_fit() -> None:
    entry = FileEntry(size=100 << 20, sha256="0" * 64)
    streamed = manifest(device_memory_bytes=28 << 20, options={"weight_streaming": True})
    streamed = streamed.model_copy(update={"files": {"model.engine": entry}})
    assert problems(streamed, replace(GPU_86, memory_bytes=28 << 20)) == ()
    (one,) = problems(streamed, replace(GPU_86, memory_bytes=28 << 20, jetson=True))
    assert one.startswith("memory: weights and activations need 128 MiB (got 28 MiB).")
    assert problems(streamed, replace(GPU_86, memory_bytes=27 << 20)) == (
        "memory: activations need 28 MiB (got 27 MiB). Stop other programs, or build for a smaller batch.",
    )


def test_every_mismatch_is_said() -> None:
    device = Device("win32", "aarch64", {"tensorrt": "11.0.0"}, "8.9")
    assert [p.split(":")[0] for p in problems(manifest(), device)] == [
        "os",
        "platform",
        "version",
        "compute capability",
    ]
    with pytest.raises(MissingError) as caught:
        require_fit(manifest(), device)
    assert len(str(caught.value).splitlines()) == 4


def test_a_kit_is_held_against_its_compiler() -> None:
    anywhere = shipping.manifest(
        kind="kit", engine=None, build=Build(target="tensorrt", hardware_compatibility="ampere_plus")
    )
    assert problems(anywhere, GPU_86) == ()
    assert problems(anywhere, ORIN) == (
        "build.hardware_compatibility: Orin must have an engine of its own, as none of ampere_plus runs on JetPack "
        "(got ampere_plus). Leave it out.",
    )
    kit = shipping.manifest(kind="kit", engine=None, build=Build(target="tensorrt"))
    assert problems(kit, OLD_DRIVER) == (
        "driver: what is installed of tensorrt must have a driver of CUDA 13 (got CUDA 12.2). Update the driver, or "
        "install tensorrt-cu12 of the same release instead.",
    )
    assert problems(kit, ORIN) == ()
    here = replace(GPU_86, versions={"tensorrt": "8.6.1"})
    assert problems(kit.model_copy(update={"opset": 20}), here) == (
        "onnx: TensorRT 8.6.1 parses opset 17 at most (got 20). Prepare the kit for it: trtpipe prepare --for 8.6.1.",
    )
    without_gpu = replace(here, compute_capability=None, gpu="no driver")
    assert problems(kit.model_copy(update={"opset": 20}), without_gpu) == (
        "gpu: TensorRT builds on the GPU it is for (got: no driver). Check its driver.",
        "onnx: TensorRT 8.6.1 parses opset 17 at most (got 20). Prepare the kit for it: trtpipe prepare --for 8.6.1.",
    )
    elsewhere = kit.model_copy(update={"build": Build(target="tensorrt", platform="l4")})
    assert problems(elsewhere, ORIN) == (
        "build.platform: L4, of compute capability 8.9, must be where the engine is built (got Orin, 8.7). Build it "
        "there.",
    )
    assert problems(kit, replace(ORIN, versions={})) == (
        "runtime: TensorRT is not installed, and this kit is built with it. "
        "Install it (on a Jetson it comes with JetPack).",
    )
    assert problems(kit, replace(ORIN, compute_capability=None, gpu="no driver")) == (
        "gpu: TensorRT builds on the GPU it is for (got: no driver). Check its driver.",
    )


@pytest.mark.parametrize(
    ("precision", "device", "refused"),
    [
        (Precision(fp8_mode=True), ORIN,
         "precision.fp8_mode: Orin (compute capability 8.7) must compute in FP8 (got a platform with FP32, FP16, BF16, "
         "INT8, INT4). Use precision.int8_mode."),
        (Precision(nvfp4_mode=True), ADA,
         "precision.nvfp4_mode: TensorRT 10.3.0.26 does not support FP4. Use TensorRT 10.8 or later or TensorRT-RTX, "
         "or precision.fp8_mode."),
        (Precision(fp8_mode=True), replace(ADA, versions={"tensorrt": "8.6.1"}),
         "precision.fp8_mode: TensorRT 8.6.1 does not support FP8 Q/DQ. Use TensorRT 10.0 or later or TensorRT-RTX, or "
         "precision.int8_mode."),
        (Precision(int8_mode=True), ORIN, None),
        (Precision(fp8_mode=True), ADA, None),
        (Precision(weights="int4"), ORIN, None),
    ],
)  # fmt: skip
def test_a_kit_does_not_fit_a_device_that_would_refuse_to_build_it(
    precision: Precision, device: Device, refused: str | None
) -> None:
    kit = shipping.manifest(kind="kit", engine=None, build=Build(target="tensorrt"), precision=precision)
    found = problems(kit, device)
    assert (refused is None) == (found == ())
    assert refused is None or found[0] == refused


def test_this_device_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if name == "onnxruntime":
            return "1.99.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert this_device().versions == {"onnxruntime": "1.99.0"}


def test_no_driver_is_asked_for_what_computes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver may hang, or end the process; and a GPU's memory is not what a graph on the CPU has."""

    def started() -> driver.Driver:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(driver, "probe", started)
    shipping.bundle(tmp_path / "c")
    assert main(["verify", str(tmp_path / "c"), "--no-run"]) == 0, capsys.readouterr()
    device = device_module.device_of("onnxruntime")
    assert (device.compute_capability, device.gpu) == (None, "not used: onnxruntime computes on the CPU")
    with pytest.raises(AssertionError, match="the driver was asked"):
        device_module.device_of("tensorrt")


def test_jetson_is_told_by_what_jetpack_leaves(tmp_path: Path) -> None:
    assert not driver.is_jetson(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "nv_tegra_release").touch()
    assert driver.is_jetson(tmp_path)
    board = tmp_path / "board" / "proc" / "device-tree"
    board.mkdir(parents=True)
    (board / "model").write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
    assert driver.is_jetson(tmp_path / "board")


def test_machine_names_are_one_spelling() -> None:
    assert [machine_name(m) for m in ("AMD64", "x86_64", "arm64", "aarch64")] == [
        "x86_64",
        "x86_64",
        "aarch64",
        "aarch64",
    ]
    assert device_module.this_device().machine in ("x86_64", "aarch64")


@pytest.mark.parametrize(
    ("seen", "problem", "remark"),
    [
        (None, "", "H100: TensorRT-RTX does not name compute capability 9.0; whether a portable engine runs there is "
         "not known. The golden check says it."),
        ((True, ""), "", "H100: TensorRT-RTX does not name compute capability 9.0; a portable engine runs there."),
        ((False, "INVALID"), "compute capability: TensorRT-RTX does not run its engines on this GPU (H100: "
         "TensorRT-RTX does not name compute capability 9.0; a portable engine does not run there (INVALID)). "
         "Build the bundle for target tensorrt on this device.", ""),
    ],
)  # fmt: skip
def test_a_portable_rtx_engine_on_hopper(
    seen: tuple[bool, str] | None, problem: str, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "RTX_SEEN", {} if seen is None else {"9.0": seen})
    bundle = manifest("tensorrt_rtx", version="1.7.1.116", compute_capabilities=())
    hopper = replace(ADA, compute_capability="9.0", gpu="H100")
    assert problems(bundle, hopper) == ((problem,) if problem else ())
    assert remarks(bundle, hopper) == ((remark,) if remark else ())
    assert remarks(bundle, ADA) == ()
