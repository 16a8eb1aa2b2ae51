"""A job judged for what is to be done with it: built here, prepared for another machine, or only calibrated."""

from __future__ import annotations

import itertools
import json
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from jobs import GOOD, good_folder
from PIL import Image

from calib.table import CalibrationTable
from trtpipe import calibrate
from trtpipe.cli.main import main
from trtpipe.job.build_options import TENSOR_FORMATS, BuildOptions, MemoryPool, TacticSource
from trtpipe.job.load import JobErrors, read_job
from trtpipe.job.sections import Build
from trtpipe.pipeline.validate import Purpose, kit_refusals, plan
from trtpipe.trt.flavour import CAPABILITIES
from trtpipe.trt.options import refusals
from trtpipe.trt.versions import RELEASES
from trtpipe.version_numbers import parse_version


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good_folder(tmp_path)


def refused(folder: Path, build: str, purpose: Purpose, *edits: tuple[str, str]) -> list[str]:
    text = GOOD.replace("  compute_capability: [8.6, 12.0]\n", build)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / "job.yaml").write_text(text)
    try:
        plan(folder / "job.yaml", purpose=purpose)
    except JobErrors as error:
        return [p.message for p in error.problems]
    return []


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if "tensorrt" in name or name == "torch2trt":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_prepare_refuses_implicit_quantization_at_plan_time(folder: Path, no_tensorrt: None) -> None:
    edits = (("build:\n", "build: {target: tensorrt, quantization: implicit}\n"),)
    (said,) = refused(folder, "", "prepare", *edits)
    assert said == (
        "build.quantization: must be explicit to prepare a kit (got implicit): TensorRT would calibrate on the device, "
        "and a kit holds no calibration samples. Use explicit, or build where its GPU is."
    )


def test_the_command_says_so_before_any_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(
        GOOD.replace(
            "build:\n  compute_capability: [8.6, 12.0]\n", "build: {target: tensorrt, quantization: implicit}\n"
        )
    )
    assert main(["prepare", str(folder / "job.yaml"), "-o", str(folder / "kits")]) == 2
    assert "build.quantization: must be explicit to prepare a kit" in capsys.readouterr().err
    assert not list(folder.glob("kits/*"))


@pytest.mark.parametrize(
    ("build", "edits", "message"),
    [
        ("build: {target: tensorrt, route: torch_tensorrt}\n", (),
         "build.route: must be onnx to prepare a kit (got torch"),
        ("build: {target: tensorrt, route: torch2trt}\n", (), "build.route: must be onnx to prepare a kit (got torch2"),
        (
            "build: {target: tensorrt, plugins: [libtwice.so]}\n",
            (),
            "build.plugins: must be left out to prepare a kit (got libtwice.so): ONNX Runtime, which checks a kit's "
            "graph, has no plugins. Build where its GPU is.",
        ),
        ("build: {target: tensorrt_rtx, plugins: [libtwice.so]}\n", (), "build.plugins: "),
        ("build: {target: tensorrt_rtx, timing_cache: c}\n", (), "build.timing_cache: "),
        (
            "build: {target: tensorrt, timing_cache: c, error_on_timing_cache_miss: true}\n",
            (),
            "build.error_on_timing_cache_miss: must be left out to prepare a kit (got true): a kit takes no timing "
            "cache to its device. Build the job where its GPU is.",
        ),
        ("build: {target: tensorrt_rtx, hardware_compatibility: ampere_plus}\n", (), "build.hardware_compatibility: "),
        ("build: {target: tensorrt, platform: jetson_nano}\n", (), "precision.int8_mode: "),
        (
            "build: {target: tensorrt}\n",
            (("limits: {cosine_min: 0.99}", "require: engine\n  limits: {speedup_over_fp16_min: 1.5}"),),
            "check.limits.speedup_over_fp16_min: must be left out to prepare a kit (got 1.5)",
        ),
    ],
)  # fmt: skip
def test_prepare_refuses_what_no_device_can_finish(
    folder: Path, no_tensorrt: None, build: str, edits: tuple[tuple[str, str], ...], message: str
) -> None:
    edits = (("build:\n", build), *edits)
    assert any(said.startswith(message) for said in refused(folder, "", "prepare", *edits))


#: Values of the options that are neither yes or no nor one of a few words.
VALUES: dict[str, list[Any]] = {
    "compute_capability": [["8.6"], ["7.5", "12.0"]],
    "calibration_cache": ["ranges.cache"],
    "profiles": [[{"N": {"min": 1, "opt": 1, "max": 1}}, {"N": {"min": 2, "opt": 8, "max": 32}}]],
    "workspace": [1 << 22],
    "memory_pools": [{pool: 1 << 20} for pool in get_args(MemoryPool)],
    "optimization_level": [0, 5],
    "l2_limit_for_tiling": [4096],
    "max_num_tactics": [3],
    "avg_timing_iterations": [4],
    "max_aux_streams": [0],
    "tactic_sources": [[source] for source in get_args(TacticSource)],
    "timing_cache": ["cache"],
    "tensor_formats": [{"image": [name]} for name in TENSOR_FORMATS["float32"]],
    "dla_core": [0],
    "device_types": [{"layer": "gpu"}, {"layer": "dla"}],
    "plugins": [["libtwice.so"]],
}
#: What has to stand beside an option.
BESIDE: dict[str, dict[str, Any]] = {
    "calibration_cache": {"quantization": "implicit"},
    "l2_limit_for_tiling": {"tiling_optimization_level": "full"},
    "editable_timing_cache": {"timing_cache": "cache"},
    "error_on_timing_cache_miss": {"timing_cache": "cache"},
    "exclude_lean_runtime": {"version_compatible": True},
    "dla_core": {"default_device_type": "dla"},
    "gpu_fallback": {"default_device_type": "dla"},
}


def values_of(name: str) -> list[Any]:
    """Every value of an option but its default, or one of each kind."""
    field = BuildOptions.model_fields[name]
    words = [w for t in (field.annotation, *get_args(field.annotation)) for w in get_args(t) if isinstance(w, str)]
    known = [True, False] if field.annotation is bool else words
    return VALUES[name] if name in VALUES else [v for v in known if v != field.default]


OPTIONS = [{**BESIDE.get(name, {}), name: value} for name in BuildOptions.model_fields for value in values_of(name)]
#: One value of each.
EACH = [{**BESIDE.get(name, {}), name: values_of(name)[-1]} for name in BuildOptions.model_fields]


def test_every_option_has_a_value_to_try() -> None:
    assert all(values_of(name) for name in BuildOptions.model_fields)


def not_in_a_kit(build: Build) -> bool:
    return build.quantization == "implicit" or bool(build.plugins) or build.error_on_timing_cache_miss


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("options", EACH, ids=lambda options: [*options][-1])
def test_prepare_refuses_exactly_what_every_release_refuses(
    folder: Path, no_tensorrt: None, target: str, options: dict[str, Any]
) -> None:
    """Property over all options and targets: a release that could finish the kit is enough."""
    (folder / "libtwice.so").write_bytes(b"")
    build = json.dumps({"target": target, **options})
    said = refused(folder, "", "prepare", ("build:\n", f"build: {build}\n"))
    (job,) = plan(folder / "job.yaml", purpose="calibrate")
    by_release = [refusals(job.build, job.precision, name, r) for name, r in RELEASES if name == target]
    assert bool(said) == (not_in_a_kit(job.build) or all(by_release))


@pytest.mark.parametrize("release", [None, *(r for n, r in RELEASES if n == "tensorrt")])
@pytest.mark.parametrize("target", ["tensorrt", "tensorrt_rtx"])
def test_a_kit_is_refused_for_any_values_and_any_two_options_that_no_device_takes(
    folder: Path, target: str, release: str | None
) -> None:
    """None of its releases, or not the one that is named."""
    (folder / "job.yaml").write_text(GOOD)
    job = read_job(folder / "job.yaml")
    releases = [r for name, r in RELEASES if name == target and release in (None, r)]
    wrong = []
    for options in (*OPTIONS, *({**one, **other} for one, other in itertools.combinations(EACH, 2))):
        build = Build.model_validate({"target": target, **options})
        said = list(kit_refusals(job.model_copy(update={"build": build}), release))
        wanted = not_in_a_kit(build) or all(refusals(build, job.precision, target, r) for r in releases)
        wrong += [(options, said)] if releases and bool(said) != wanted else []
    assert wrong == []


def test_every_capability_is_of_a_release_that_is_asked() -> None:
    """Releases that only a capability's table knows would be refused by none that `prepare` asks."""
    for name in ("tensorrt", "tensorrt_rtx"):
        oldest = min(parse_version(r) for n, r in RELEASES if n == name)
        newest = max(parse_version(r) for n, r in RELEASES if n == name)
        for capability in CAPABILITIES:
            for since, _ in capability.spans(name):
                assert not since or oldest <= parse_version(since) <= newest, capability


@pytest.mark.parametrize(
    "build",
    ["{target: tensorrt}", "{target: tensorrt_rtx}", "{target: tensorrt, route: torch_tensorrt}",
     "{target: tensorrt, route: torch2trt}", "{target: tensorrt_rtx, compute_capability: [8.9]}",
     "{target: tensorrt, platform: jetson_agx_orin}", "{target: tensorrt, strip_plan: true}"],
)  # fmt: skip
def test_calibrating_needs_no_tensorrt_whatever_the_target(folder: Path, no_tensorrt: None, build: str) -> None:
    edits = (("build:\n", f"build: {build}\n"),)
    assert refused(folder, "", "calibrate", *edits) == []
    assert refused(folder, "", "build", *edits) != []


NETWORK = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3), torch.nn.Flatten())
"""
JOB = """
name: NAME
model: {factory: small_network_for_purposes:make}
inputs: {x: {shape: [N, 1, 8, 8], N: {min: 1, opt: 2, max: 8}}}
outputs: {y: {}}
precision: {int8_mode: true}
calibration: {arrays: x.npy, batch_size: 4, algorithm: minmax}
build: {target: tensorrt}
check: {arrays: other.npy}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small_network_for_purposes.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    random = np.random.default_rng(0)
    for name in ("x.npy", "other.npy"):
        np.save(tmp_path / name, random.normal(size=(10, 1, 8, 8)).astype(np.float32))
    (tmp_path / "job.yaml").write_text(JOB.replace("NAME", "small"))
    return tmp_path


def test_calibrate_writes_one_table_to_a_file(
    small: Path, no_tensorrt: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / "new" / "table.json"
    assert main(["calibrate", str(small / "job.yaml"), "-o", str(path), "-q"]) == 0
    assert path.is_file()
    assert CalibrationTable.load(path).amax == calibrate(small / "job.yaml").amax
    capsys.readouterr()
    (small / "other.yaml").write_text(JOB.replace("NAME", "other"))
    assert main(["calibrate", str(small / "job.yaml"), str(small / "other.yaml"), "-o", str(path)]) == 2
    assert "--out must be a folder for 2 jobs (got the file " in capsys.readouterr().err


@pytest.mark.parametrize(("name", "is_file"), [("t.json", True), ("T.JSON", True), ("json", False), ("t.d", False)])
def test_only_a_path_that_ends_in_json_is_a_file(small: Path, no_tensorrt: None, name: str, is_file: bool) -> None:
    assert main(["calibrate", str(small / "job.yaml"), "-o", str(small / name), "-q"]) == 0
    assert (small / name).is_file() == is_file
    assert is_file or (small / name / "small.calibration.json").is_file()


def test_what_stands_in_the_way_of_a_table_is_said(small: Path, no_tensorrt: None, capsys: Any) -> None:
    (small / "folder.json").mkdir()
    (small / "file").touch()
    for name in ("folder.json", "file"):
        assert main(["calibrate", str(small / "job.yaml"), "-o", str(small / name)]) != 0
        assert str(small / name) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize(
    "edit",
    [
        ("compute_capability: [8.6, 12.0]", "timing_cache: c"),
        ("compute_capability: [8.6, 12.0]", "hardware_compatibility: ampere_plus"),
        ("compute_capability: [8.6, 12.0]", "route: torch2trt"),
        ("images: calib\n", "images: calib\n  table: table.json\n"),
        ("weights: w.safetensors", "weights: x.safetensors"),
        ("factory: torch.nn:Identity", "factory: no_such_module:net"),
    ],
)
def test_what_build_refuses_is_not_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, edit: tuple[str, str]
) -> None:
    for images in ("calib", "val"):
        Image.new("L", (32, 32)).save(folder / images / "0" / "a.png")
    (folder / "table.json").write_text("{}")
    assert GOOD.count(edit[0]) == 1
    (folder / "job.yaml").write_text(GOOD.replace(*edit))
    said = {}
    for name in ("build", command):
        code = main([name, str(folder / "job.yaml"), "-q", *(("-o", str(folder / "out")) if name != "bench" else ())])
        said[name] = code, capsys.readouterr().err
    assert said[command] == said["build"]
    assert said["build"][0] == 2
    assert "job.yaml:" in said["build"][1]


def test_a_job_is_measured_where_no_tensorrt_is(folder: Path, no_tensorrt: None) -> None:
    edits = (("build:\n", "build: {target: tensorrt}\n"),)
    assert refused(folder, "", "measure", *edits) == []
    assert any(said.startswith("build.target: ") for said in refused(folder, "", "build", *edits))
