import re
import shutil
import sys
import types
from importlib import metadata

import numpy as np
import pytest
import shipping
import trt_double
from jobs import good_folder, write
from PIL import Image
from safetensors.numpy import save_file

from calib.user_code import import_callable
from trtpipe import packages
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.importable import find_module, missing, on_path
from trtpipe.job.load import read_job
from trtpipe.job.sections import Build
from trtpipe.packages import install_command
from trtpipe.pipeline.required import required
from trtpipe.pipeline.validate import judge, validate
from trtpipe.runtime import compatibility, doctor
from trtpipe.runtime.device import Device
from trtpipe.trt import driver, flavour


@pytest.fixture
def folder(tmp_path):
    return good_folder(tmp_path)


def messages(path, **options):
    return [problem.message for problem in validate(path, **options)]


def test_a_good_job_has_no_problem(folder):
    assert messages(write(folder)) == []


def test_torchvision_is_asked_for_by_a_key_that_the_job_has(folder):
    assert required(read_job(write(folder)))["torchvision"] == "check.images"
    np.save(folder / "x.npy", np.zeros((4, 1, 32, 32), np.float32))
    assert required(read_job(write(folder, ("images: val", "arrays: x.npy"))))["torchvision"] == "calibration.images"


def test_a_module_beside_the_job_file_is_found_and_not_executed(folder):
    (folder / "mymodel.py").write_text("raise SystemError\ntry:\n    import torch\nexcept ImportError:\n    pass\n"
                                       "if 1:\n    def build():\n        inner = 1\n")  # fmt: skip
    assert messages(write(folder, ("torch.nn:Identity", "mymodel:build"))) == []
    assert messages(write(folder, ("torch.nn:Identity", "mymodel:torch"))) == []
    assert messages(write(folder, ("torch.nn:Identity", "mymodel:biuld"))) == [
        "model.factory: must name something that mymodel defines (got 'biuld'). Did you mean build?"
    ]
    assert messages(write(folder, ("torch.nn:Identity", "mymodel:inner"))) == [
        "model.factory: must name something that mymodel defines (got 'inner')."
    ]


def test_a_module_that_cannot_be_parsed(folder):
    (folder / "mymodel.py").write_text("def build(:\n")
    (message,) = messages(write(folder, ("torch.nn:Identity", "mymodel:build")))
    assert message.startswith(f"model.factory: must name a module that can be parsed (got {folder}/mymodel.py:1:")


def test_finding_a_module_imports_nothing():
    before = set(sys.modules)
    assert find_module("idlelib.idle_test.htest") is not None
    assert find_module("idlelib.no_such") is None
    assert missing("antigravity:fly") is not None
    assert set(sys.modules) == before


def test_a_module_that_fills_itself_is_believed(folder):
    (folder / "star.py").write_text("from os.path import *\n")
    (folder / "lazy.py").write_text("def __getattr__(name): ...\n")
    assert missing("star:anything", [folder]) is None
    assert missing("lazy:anything", [folder]) is None


@pytest.mark.parametrize(
    "source",
    [
        'globals()["dyn"] = build\n',
        "setattr(sys.modules[__name__], 'dyn', build)\n",
        "vars().update(dyn=build)\n",
        "exec('dyn = build')\n",
        "def make():\n    global dyn\n    dyn = build\nmake()\n",
        "if True:\n    sys.modules[__name__].dyn = build\n",
    ],
)
def test_a_name_that_a_module_makes_as_it_is_executed_is_believed(folder, source):
    """Reading does not show it; importing does, and says so where it is not there."""
    head = "import sys\nfrom torch import nn\n\n\ndef build():\n    return nn.Identity()\n\n\n"
    (folder / "filled.py").write_text(head + source)
    path = write(folder, ("torch.nn:Identity", "filled:dyn"))
    assert messages(path) == []
    with on_path(folder):
        assert import_callable("filled:dyn", "model.factory", InputError)().__class__.__name__ == "Identity"
    sys.modules.pop("filled")


def test_folders_without_images_are_said_at_once(folder):
    for part in ("calib", "val"):
        shutil.rmtree(folder / part)
        (folder / part).mkdir()
    assert [m.partition(":")[0] for m in messages(write(folder))] == ["calibration.images", "check.images"]


def test_a_folder_without_images(folder):
    shutil.rmtree(folder / "val" / "0")
    (folder / "val" / "notes.txt").write_text("")
    (message,) = messages(write(folder))
    assert message == (
        "check.images: holds no image (.jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp). "
        "Put the images of each class in a folder."
    )


@pytest.mark.parametrize("mode", ["int8_mode", "fp8_mode"])
@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "must be a whole JSON file (got "), ('{"format": "calib-table"}', "Calibrate again.")],
)
def test_a_table_that_cannot_be_read(folder, mode, content, why):
    """What the build would end with, before a model is loaded; whose table it is, the model alone can say."""
    (folder / "t.json").write_text(content)
    transform = "  transform: {resize: [32, 32], grayscale: true, normalize: {mean: [0.5], std: [0.5]}}\n"
    edits = [
        ("  images: calib\n" + transform, "  table: t.json\n"),
        ("  images: val\n", "  images: val\n" + transform),
        ("int8_mode", mode),
        ("[8.6, 12.0]", "[8.9, 12.0]"),
    ]
    (message,) = messages(write(folder, *edits))
    assert message.startswith(f"calibration.table: {folder}/t.json: ")
    assert why in message
    assert messages(write(folder, *edits), here=False) == []  # --job-only reads no data


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"image": np.zeros((4, 1, 32, 32), np.float32)}, None),
        ({"picture": np.zeros((4, 1, 32, 32), np.float32)}, r"must hold the inputs \['image'\]"),
        ({"image": np.zeros((4, 1, 32, 32), np.float32), "labels": np.zeros(3, int)}, "must have the same number of"),
        ({"image": np.zeros((4, 3, 32, 32), np.float32)}, r"must have shape \[1, 32, 32\] \(got \[3, 32, 32\]\)"),
        ({"image": np.zeros((0, 1, 32, 32), np.float32)}, "holds no samples. Check the path."),
        ({"image": np.zeros((4, 1, 32, 32), np.float32), "labels": np.zeros(4, np.float32)}, "must be integers"),
        ({"image": np.array([None, {}])}, "must be a readable .npz file of plain arrays .*holds Python objects"),
    ],
)
def test_arrays_that_the_build_would_refuse(folder, arrays, why):
    """By their headers: the values of a file may be many."""
    np.savez_compressed(folder / "a.npz", **arrays)
    files = ["a.npz"]
    if not any(a.dtype.hasobject for a in arrays.values()):
        save_file(arrays, folder / "a.safetensors")
        files.append("a.safetensors")
    for file in files:
        found = messages(write(folder, ("  images: val\n", f"  arrays: {file}\n")))
        assert len(found) == (why is not None)
        for message in found:
            assert message.startswith(f"check: {folder}/{file}: ")
            assert re.search(why, message)
        assert messages(folder / "job.yaml", here=False) == []


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("names.txt", "0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n", None),
        ("names.txt", "", "check.labels: must name the model's classes, one a line (got an empty file)."),
        ("names.txt", "0\n0\n1\n", "check.labels: must name each class that has a folder once (got 0 more than once)."),
        ("names.txt", "cat\ndog\n", "check.images: every class folder must be a class of the model (got 0, which is"),
        (
            "names.json",
            "{}",
            "check.labels: must name classes, or one class an image, where the job has no check.metrics",
        ),
        ("y.csv", "elsewhere.png,3\n", "check.labels: {folder}/y.csv: must "),
    ],
)
def test_labels_that_the_build_would_refuse(folder, name, text, why):
    """No model has to be loaded for it."""
    (folder / name).write_text(text)
    found = messages(write(folder, ("  images: val\n", f"  images: val\n  labels: {name}\n")))
    assert len(found) == (why is not None)
    assert all(message.startswith(why.format(folder=folder)) for message in found)


@pytest.mark.parametrize(("names", "mode", "said"), [
    (("0/a.png",), "L", None),
    (("0/a_mask.png",), "L", "{folder}/masks: must hold a mask for each image, named like it (got none for 0/a.png)."),
    (("0/a.png",), "RGB", "{folder}/masks/0/a.png: must be a mask of one channel (got mode RGB)."),
    ((), "L", "{folder}/masks: must hold a mask for each image, named like it (got none for 0/a.png)."),
])  # fmt: skip
def test_masks_that_the_build_would_refuse(folder, names, mode, said):
    (folder / "masks" / "0").mkdir(parents=True)
    for name in names:
        Image.new(mode, (8, 8)).save(folder / "masks" / name)
    labels = ("  images: val\n", "  images: val\n  labels: masks\n  metrics: {m: miou}\n")
    found = messages(write(folder, labels))
    assert len(found) == (said is not None)
    assert all(m.startswith(f"check.labels: {said.format(folder=folder)}") for m in found)


def test_a_limit_on_labels_that_no_sample_has(folder):
    (folder / "flat").mkdir()
    (folder / "flat" / "a.png").write_bytes(b"")
    limit = ("limits: {", "limits: {accuracy_drop_max: 0.01, ")
    assert messages(write(folder, limit)) == []
    assert messages(write(folder, limit, ("  images: val\n", "  images: flat\n"))) == [
        "check.limits.accuracy_drop_max: cannot be judged: it needs labels: folders of classes that "
        "check.labels, or as many calibration folders as the model has classes, name; `labels` beside the arrays; or "
        "one class a sample in check.labels"
    ]
    (folder / "y.csv").write_text("a.png,3\n")
    assert messages(write(folder, limit, ("  images: val\n", "  images: flat\n  labels: y.csv\n"))) == []


@pytest.mark.parametrize(("section", "name"), [("calibration", "calib"), ("check", "val")])
def test_more_samples_than_there_are(folder, section, name):
    found = messages(write(folder, (f"  images: {name}\n", f"  images: {name}\n  samples: 500\n")))
    assert found == [f"{section}: {folder}/{name}: must hold at least 500 samples (got 1). Ask for fewer, or add some."]


def test_what_a_built_in_metric_does_not_take(folder):
    found = messages(write(folder, ("check:", "check:\n  metrics: {a: {function: top5, args: {k: 0}}}")))
    assert found == ["check.metrics.a.args.k: Input should be greater than or equal to 1 (got 0). Correct it."]


def test_a_tensorrt_that_is_installed_and_cannot_be_imported(folder, monkeypatch):
    """What the build would end with once it has calibrated."""
    (folder / "lib" / "tensorrt_rtx").mkdir(parents=True)
    (folder / "lib" / "tensorrt_rtx" / "__init__.py").write_text(
        "raise ImportError('libtensorrt_rtx.so.1 is not here')"
    )
    path = write(folder)
    assert messages(path) == []
    monkeypatch.syspath_prepend(str(folder / "lib"))
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)
    (message,) = messages(path)
    assert message.startswith(
        f"build.target: {folder / 'lib' / 'tensorrt_rtx' / '__init__.py'} hides the package tensorrt_rtx (ImportError: "
        "libtensorrt_rtx.so.1 is not here). "
    )
    assert messages(path, here=False) == []
    assert main(["build", str(path)]) == 3


@pytest.mark.parametrize(
    ("files", "what"),
    [(False, "not installed"), (True, "here without package metadata (dist-info), by which its release is known")],
)
def test_packages_that_are_not_installed(folder, monkeypatch, files, what):
    real, present = metadata.version, packages.present
    monkeypatch.setattr(packages, "present", lambda name: files and present(name))

    def version(name):
        absent = ("torchao", "onnxscript", "jinja2", "numba", "networkx", "pycocotools")
        if name in absent or name.startswith("tensorrt"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert messages(write(folder)) == [
        f"model: onnxscript, numba, networkx and jinja2 are {what}. Run: pip install 'trtpipe[build]'",
        f"precision.int8_mode: torchao is {what}. Run: pip install 'trtpipe[build]'",
        f"build.target: tensorrt_rtx is {what}. Run: pip install 'trtpipe[rtx]'",
    ]
    assert messages(folder / "job.yaml", here=False) == []
    judged = write(folder, ("check:", "check:\n  metrics: {map: coco_map}"))
    assert messages(judged)[3:] == [f"check.metrics: pycocotools is {what}. Run: pip install 'trtpipe[coco]'"]
    write(folder)
    assert main(["validate", str(folder / "job.yaml")]) == 3
    assert main(["build", str(folder / "job.yaml")]) == 3
    assert main(["validate", str(folder / "job.yaml"), "--set", "check.seed=x"]) == 2


def test_what_a_release_cannot_honour(folder):
    lines = "  target: tensorrt\n  compute_capability: [8.6]\n  strip_plan: true"
    path = write(folder, ("  compute_capability: [8.6, 12.0]", lines), ("  fp16_mode: true", "  bf16_mode: true"))
    assert messages(path, here=False, version="8.6.1") == [
        "precision.bf16_mode: TensorRT 8.6.1 does not support BF16 (got true). Use precision.fp16_mode.",
        "build.compute_capability: TensorRT 8.6.1 does not support a choice of compute capabilities (got 8.6). "
        "TensorRT proper builds for the GPU at hand: leave it out, or use build.hardware_compatibility. TensorRT-RTX "
        "has it.",
        "build.strip_plan: TensorRT 8.6.1 does not support STRIP_PLAN (got true). "
        "Use TensorRT 10.0 or later or TensorRT-RTX, or leave it out.",
    ]
    assert [m.partition(":")[0] for m in messages(path, here=False, version="10.3.0")] == ["build.compute_capability"]


def test_compute_capabilities_that_rtx_has_not(folder):
    (message,) = messages(write(folder, ("[8.6, 12.0]", "[8.7]")))
    assert message.startswith("build.compute_capability: must be among 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 (got 8.7: ")


def test_the_version_must_be_one(folder, capsys):
    with pytest.raises(InputError, match=r"--for: must be a version like 10\.3\.0 \(got 'new'\)"):
        validate(write(folder), version="new")
    assert main(["validate", str(folder / "job.yaml"), "--for", "1.7.1"]) == 0
    assert capsys.readouterr() == (f"{folder / 'job.yaml'}: ok\n", "")


def test_a_version_of_no_use_is_noted(folder, capsys):
    path = write(folder, ("[8.6, 12.0]", "[]"), ("build:\n", "build:\n  target: onnxruntime\n"))
    assert main(["validate", "--job-only", str(path), "--for", "10.3.0"]) == 0
    note = f"{path}: note: a job for onnxruntime is for no TensorRT: its release 10.3.0 has no effect\n"
    assert capsys.readouterr() == (f"{path}: ok\n", note)
    both = write(folder, ("[8.6, 12.0]", "[]"), ("name:", "matrix:\n  target: [onnxruntime, tensorrt]\nname:"),
                 ("build:\n", "build:\n  target: \"{target}\"\n"), ("digits", "digits-{target}"))  # fmt: skip
    assert main(["validate", "--job-only", str(both), "--for", "10.3.0"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["validate", "--job-only", str(path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("target", "version", "expected"), [
    ("tensorrt", "7.2.1", "must be TensorRT 8.6 or later (got 7.2.1)"),
    ("tensorrt", "1.7.1", "must be TensorRT 8.6 or later (got 1.7.1)"),
    ("tensorrt_rtx", "1.2", "must be TensorRT-RTX 1.7.1 or later (got 1.2)"),
    ("tensorrt_rtx", "10.3.0", "must be a release of TensorRT-RTX, like 1.7.1 (got 10.3.0, which is TensorRT's)"),
    ("tensorrt", "12.0.0", "must be TensorRT 11 at most, the newest whose options are known (got 12.0.0)"),
    ("tensorrt_rtx", "2.0", "must be TensorRT-RTX 1 at most, the newest whose options are known (got 2.0)"),
    ("tensorrt", "11.9", None), ("tensorrt", "8.6.1", None), ("tensorrt", "10", None),
    ("tensorrt_rtx", "1.8", None), ("onnxruntime", "7", None),
])  # fmt: skip
@pytest.mark.parametrize("purpose", ["build", "prepare", "calibrate"])
def test_a_release_that_nothing_is_built_for_is_refused(target, version, expected, purpose, folder):
    path = write(folder, ("  compute_capability: [8.6, 12.0]", f"  target: {target}"))
    found = judge(path, version=version, here=False, purpose=purpose)
    said = [] if expected is None else [f"build.target: {expected}. Give a release with --for that is."]
    assert [p.message for _, problems in found for p in problems] == said


#: Of every kind: (target, release, why it is none).
UNSUPPORTED = [
    ("tensorrt", "8.5.3.1", "must be TensorRT 8.6 or later (got 8.5.3.1)"),
    ("tensorrt", "12.0.0", "must be TensorRT 11 at most, the newest whose options are known (got 12.0.0)"),
    ("tensorrt", "unknown", "must be TensorRT 8.6 or later (got unknown)"),
    ("tensorrt_rtx", "1.6.1.20", "must be TensorRT-RTX 1.7.1 or later (got 1.6.1.20)"),
    ("tensorrt_rtx", "2.0.0", "must be TensorRT-RTX 1 at most, the newest whose options are known (got 2.0.0)"),
    ("tensorrt_rtx", "10.3.0", "must be a release of TensorRT-RTX, like 1.7.1 (got 10.3.0, which is TensorRT's)"),
]


@pytest.mark.parametrize(("target", "release", "why"), UNSUPPORTED)
def test_an_unsupported_release_is_refused_by_all_that_judge_it(monkeypatch, folder, target, release, why):
    """What loads it, and what only reads its version: validate, doctor, and what a kit is compiled with."""
    command = install_command(target)
    monkeypatch.setitem(sys.modules, target, types.SimpleNamespace(__version__=release))
    with pytest.raises(InputError) as raised:
        flavour.load(target)
    assert str(raised.value) == f"build.target: {why}. Run: {command}"

    for name in ("trt.flavour", "pipeline.validate"):
        monkeypatch.setattr(f"trtpipe.{name}.installed", lambda: {target: (target, release)})
    path = write(folder, ("  compute_capability: [8.6, 12.0]", f"  target: {target}"))
    found = [p.message for _, problems in judge(path) for p in problems]
    assert f"build.target: {why}. Run: {command}" in found

    monkeypatch.setattr(driver, "probe", lambda: trt_double.GPU)
    monkeypatch.setattr(doctor.device_memory, "no_memory", lambda: "")
    monkeypatch.setattr(doctor, "import_failures", lambda modules: {})
    abilities = [a for a in doctor.examine().abilities if f"engine (target {target})" in a.what]
    assert {(a.possible, a.reason) for a in abilities} == {(False, f"{target} {why}")}

    kit = shipping.manifest(kind="kit", engine=None, build=Build(target=target), opset=20)
    here = Device("linux", "x86_64", {target: release}, "8.6", "RTX A4000")
    (said,) = compatibility.problems(kit, here)
    assert said.startswith(f"runtime: {why}. Install it")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("precision={int8_mode: true, fp8_mode: true}", "build={target: tensorrt, quantization: implicit}"),
         "precision.fp8_mode: FP8 must be explicit (got build.quantization implicit). Use explicit."),
        (("precision={weights: int4, fp16_mode: true}",
          "build={target: tensorrt, platform: jetson_agx_orin, default_device_type: dla, gpu_fallback: true}"),
         "precision.weights: INT4 weights must be on the GPU, as no DLA has it (got layers on a DLA). Use FP16 or "
         "INT8."),
        (("precision={fp8_mode: true}", "build={target: tensorrt}"), None),  # 8.6 cannot, 10 and 11 can
    ],
)  # fmt: skip
def test_what_no_release_can_honour_is_said_where_none_is_installed(settings, said, folder, monkeypatch):
    from trtpipe.trt import flavour

    monkeypatch.setattr(flavour, "installed", dict)
    monkeypatch.setattr("trtpipe.pipeline.validate.installed", dict)
    found = messages(write(folder), overrides=settings, here=False)
    assert said in found if said else found == []


def test_int8_on_a_jetson_nano_is_refused_whatever_is_installed(folder, monkeypatch):
    from trtpipe.trt import flavour

    nano = ("build.target=tensorrt", "build.platform=jetson_nano", "build.compute_capability=[]")
    monkeypatch.setattr(flavour, "installed", dict)
    found = messages(write(folder), overrides=nano, here=False)
    assert found == [
        "precision.int8_mode: Jetson Nano (compute capability 5.3) must compute in INT8 (got a platform with FP32, "
        "FP16). Use precision.fp16_mode.",
        "build.platform: Jetson Nano must have TensorRT 8.6 or later (got JetPack 4.6 as its last, with TensorRT 8.2). "
        "Use a Jetson Orin or Thor.",
    ]


ABSENT = "there is no usable NVIDIA GPU here (no driver). Run it on the machine the engine is for, or "
RTX = "build for target tensorrt_rtx, which needs no GPU."


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("build.target=tensorrt", "build.compute_capability=[]"), [f"build.target: {ABSENT}{RTX}"]),
        (("build.refit=all",), [f"build.refit: {ABSENT}leave out build.refit."]),
        (("build.strip_plan=true",), [f"build.strip_plan: {ABSENT}leave out build.strip_plan."]),
        (("build.route=torch_tensorrt", "build.target=tensorrt", "build.compute_capability=[]"), [
            "build.route: torch_tensorrt needs an NVIDIA GPU and its driver (no driver). Use build.route "
            "onnx, which builds TensorRT-RTX engines without one."
        ]),
        (("check.require=engine",), [
            f"check.require: {ABSENT}leave out check.require: engine, and have the graph checked."
        ]),
        ((), []),
        (("build.target=onnxruntime", "build.compute_capability=[]", "precision.fp16_mode=false"), []),
    ],
)  # fmt: skip
def test_what_a_build_would_end_at_without_a_gpu_is_said_before(folder, monkeypatch, overrides, said):
    from trtpipe.trt import driver, flavour

    both = {"tensorrt": ("tensorrt-cu12", "10.16.1"), "tensorrt_rtx": ("tensorrt-rtx", "1.7.1")}
    monkeypatch.setattr(flavour, "installed", lambda: both)
    monkeypatch.setattr("trtpipe.pipeline.validate.installed", lambda: both)
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="no driver"))
    path = write(folder)

    def here(**options):
        return [m for m in messages(path, overrides=overrides, **options) if "NVIDIA GPU" in m]

    assert here() == said
    assert here(version="10.3.0") == here(here=False) == []
    if said:
        assert any(p.missing for p in validate(path, overrides))


@pytest.mark.parametrize(
    ("capability", "named", "said"),
    [
        ("8.6", [], False), ("8.6", ["8.6", "12.0"], False), ("8.6", ["8.9"], True), ("9.0", [], True),
        ("9.0", ["8.6"], True), ("7.5", [], True), ("12.0", ["12.0"], False),
    ],
)  # fmt: skip
def test_an_engine_that_must_run_here_and_cannot_is_refused_before(folder, monkeypatch, capability, named, said):
    """It was built, for as long as that takes, and its check then failed."""
    from trtpipe.trt import driver, flavour

    here = driver.Driver("13.0", (driver.Gpu(0, "a GPU", capability, 24 << 30),))
    both = {"tensorrt_rtx": ("tensorrt-rtx", "1.7.1.116")}
    monkeypatch.setattr(driver, "probe", lambda: here)
    monkeypatch.setattr(flavour, "installed", lambda: both)
    monkeypatch.setattr("trtpipe.pipeline.validate.installed", lambda: both)
    monkeypatch.setattr("trtpipe.runtime.device_memory.no_memory", lambda: "")
    path, listed = write(folder), f"build.compute_capability={named}"

    def found(*overrides, **options):
        return [m for m in messages(path, overrides=(listed, *overrides), **options) if "cannot be engine" in m]

    assert found() == found("check.require=engine", here=False) == []
    told = found("check.require=engine")
    assert len(told) == said
    for line in told:
        assert line.startswith(
            "check.require: cannot be engine on this machine, whose GPU does not run the engine that the job asks for ("
        )
        assert line.endswith("). Leave it out, and have the graph checked.")


def test_int8_on_the_gpu_here(folder, monkeypatch):
    from trtpipe.trt import driver

    nano = driver.Driver("10.2", (driver.Gpu(0, "NVIDIA Tegra X1", "5.3", 4 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: nano)
    overrides = ("build.target=tensorrt", "build.compute_capability=[]")
    told = "precision.int8_mode: NVIDIA Tegra X1 (compute capability 5.3) must compute in INT8"
    assert any(m.startswith(told) for m in messages(write(folder), overrides=overrides))
    assert not any(m.startswith(told) for m in messages(write(folder), overrides=overrides, version="10.3.0"))


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["build.target=tensorrt", "build.compute_capability=[]"], True),
        (["build.target=tensorrt_rtx", "build.compute_capability=[]"], True),
        (["build.target=tensorrt_rtx", "build.compute_capability=['8.9']"], False),
        (["build.target=onnxruntime", "build.compute_capability=[]"], False),
    ],
)
def test_device_memory_for_the_check_is_asked_for_before_the_build(folder, monkeypatch, overrides, asked):
    """As a kit's build and `doctor` do: it was found out after hours. A GPU that is full now may have room later."""
    from trtpipe.runtime import device_memory
    from trtpipe.trt import driver, flavour

    here = driver.Driver("13.0", (driver.Gpu(0, "NVIDIA A10", "8.6", 24 << 30),))
    both = {"tensorrt": ("tensorrt-cu13", "11.4.0.106"), "tensorrt_rtx": ("tensorrt-rtx", "1.7.1.116")}
    monkeypatch.setattr(driver, "probe", lambda: here)
    monkeypatch.setattr(flavour, "installed", lambda: both)
    monkeypatch.setattr("trtpipe.pipeline.validate.installed", lambda: both)
    lacking = ["device memory: none works here. Install one.", ""]
    monkeypatch.setattr(device_memory, "no_memory", lambda: lacking[0])
    device_memory._require_memory.cache_clear()
    path = write(folder)

    def said(**options):
        found = validate(path, overrides, **options)
        return [(p.message.partition("build.target: ")[2], p.missing) for p in found if "device memory" in p.message]

    hidden = " Or let the graph be checked: set CUDA_VISIBLE_DEVICES to nothing."
    hidden *= "tensorrt_rtx" in overrides[0]  # TensorRT builds on the GPU
    assert said() == ([(lacking[0] + hidden, True)] if asked else [])
    assert said(version="10.3.0") == []
    lacking.pop(0)
    assert said() == []
    lacking[0] = "device memory: is asked for once where something gives it."
    assert said() == []
    device_memory._require_memory.cache_clear()
