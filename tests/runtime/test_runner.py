"""A bundle run by real ONNX Runtime: images in, classes out, without torch."""
# ruff: noqa: E501  (whole messages)

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shipping
from PIL import Image

import trtpipe
from calib.arrays import open_arrays
from calib.errors import CalibError
from calib.samples import InputSpec
from trtpipe.bundle import golden, signing
from trtpipe.bundle.format import Bundle, Replaced
from trtpipe.bundle.manifest import EngineInfo, describe_engine
from trtpipe.errors import InputError, MissingError
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build, Transform
from trtpipe.runtime import session as runner_module
from trtpipe.runtime.device import Device
from trtpipe.runtime.inputs import open_feed
from trtpipe.runtime.recheck import recheck
from trtpipe.runtime.session import Model, open_model
from trtpipe.values import DimRange, Engine, TensorSpec

COLOURS = {"red": (250, 10, 20), "green": (5, 200, 30), "blue": (0, 40, 180)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An ImageFolder of plain colours, two of each; the second blue one lies: it is green."""
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (20, 16), colour).save(tmp_path / "photos" / name / "a.png")
        Image.new("RGB", (9, 30), COLOURS["green"] if name == "blue" else colour).save(
            tmp_path / "photos" / name / "b.jpg", quality=95
        )
    return tmp_path / "photos"


@pytest.mark.parametrize("top", [0, -1, 1.5, True, None, np.int64(0)])
def test_top_is_a_count(tmp_path: Path, photos: Path, top: Any) -> None:
    shipping.bundle(tmp_path / "b")
    with trtpipe.load(tmp_path / "b") as model, pytest.raises(InputError) as caught:
        model.classify(sorted(photos.rglob("*.png"))[:1], top=top)
    assert (
        str(caught.value) == f"top: must be a whole number of 1 or more (got {top!r}). It is how many classes to give."
    )


def test_top_is_at_most_the_classes(tmp_path: Path, photos: Path) -> None:
    shipping.bundle(tmp_path / "b")
    with trtpipe.load(tmp_path / "b") as model:
        assert len(model.classify([photos / "red" / "a.png"], top=3)[0].indices) == 3
        with pytest.raises(InputError) as caught:
            model.classify([photos / "red" / "a.png"], top=4)
    assert str(caught.value) == "top: must be at most 3, the classes of output logits (got 4)."


@pytest.mark.parametrize(
    ("graph", "given", "said"),
    [
        (True, "bogus", "specialization: must be lazy, eager or none (got 'bogus')."),
        (False, "bogus", "specialization: must be lazy, eager or none (got 'bogus')."),
        (True, "eager", "specialization: must be left out for a bundle whose graph is run (got eager)."),
        (False, "eager", "specialization: must be left out for a bundle whose graph is run (got eager)."),
    ],
)
def test_a_specialization_that_does_nothing_is_refused(tmp_path: Path, graph: bool, given: Any, said: str) -> None:
    shipping.bundle(tmp_path / "b")
    with pytest.raises(InputError) as caught:
        trtpipe.load(tmp_path / "b", graph=graph, specialization=given)
    assert str(caught.value) == said


def test_tensorrt_proper_specializes_nothing(tmp_path: Path) -> None:
    plan = b"ftrt" + bytes(20) + bytes((10, 13, 0, 0)) + bytes(36)
    found = Engine(plan, "tensorrt", "10.13.0", (), (shipping.INPUT,), (shipping.OUTPUT,), None, {"opset": 18})
    build = Build(target="tensorrt", platform="l4")
    made = shipping.bundle(
        tmp_path / "b", engine=describe_engine(found, build), build=build, extra={"model.engine": plan}
    )
    with pytest.raises(InputError) as caught:
        open_model(made, specialization="eager")
    assert str(caught.value) == (
        "specialization: must be left out for a bundle whose engine of TensorRT proper is run (got eager)."
    )


@pytest.mark.parametrize(
    "other", [("ids", "int64", ("N", 5)), ("one", "float32", ("N", 1)), ("map", "float32", ("N", 4, 4))]
)
def test_classes_are_those_of_the_output_that_the_check_ranks(other: tuple[str, str, Any]) -> None:
    """Sorted ids were taken for scores."""
    name, dtype, shape = other
    first = shipping.replaced(shipping.OUTPUT, name=name, dtype=dtype, shape=shape)
    manifest = shipping.manifest(outputs=(first, shipping.OUTPUT))
    assert Model.scores.fget(SimpleNamespace(manifest=manifest)) == shipping.OUTPUT


def test_load_and_classify(tmp_path: Path, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    with trtpipe.load(tmp_path / "c") as model:
        found = model.classify(
            [photos / "red" / "a.png", str(photos / "blue" / "a.png"), Image.new("L", (8, 8), 255)], top=3
        )
        assert [p.label for p in found] == ["red", "blue", "red"]
        assert found[0].index == 0
        # A plain colour is its own mean: (250 / 255 - 0.5) / 0.5.
        assert found[0].scores == pytest.approx([(v / 255 - 0.5) / 0.5 for v in (250, 20, 10)], abs=1e-6)
        assert found[0].labels == ("red", "blue", "green")
        assert model.executed == "graph"
        outputs = model(np.zeros((11, 3, 8, 8), np.float32))
        assert outputs["logits"].shape == (11, 3)
    with pytest.raises(InputError, match=r"c: must be open to be run \(it was closed\). Load it again."):
        model(np.zeros((1, 3, 8, 8), np.float32))


class Recorder:
    """Stands in for an engine: remembers the batches it was given, answers with the mean of each channel."""

    name = "recorder"
    notes = ()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.batches.append(-1)

    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
        image = inputs["image"]
        self.batches.append(len(image))
        return {"logits": image.mean((2, 3))}


def test_batches_fit_the_engine(tmp_path: Path) -> None:
    batch = {"N": DimRange(3, 4, 5)}
    bundle = shipping.bundle(
        tmp_path / "c",
        inputs=(shipping.replaced(shipping.INPUT, dims=batch),),
        outputs=(shipping.replaced(shipping.OUTPUT, dims=batch),),
    )
    recorder = Recorder()
    images = np.random.default_rng(0).standard_normal((11, 3, 8, 8)).astype(np.float32)
    with Model(bundle, recorder, "engine") as model:
        found = model(images)["logits"]
    np.testing.assert_array_equal(found, images.mean((2, 3)))
    assert recorder.batches == [5, 5, 3, -1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"photo": np.zeros((1, 3, 8, 8), np.float32)}, "must be given the inputs image (got photo). Name them so."),
        ({"image": np.zeros((1, 3, 8, 8))}, "input image must be float32 (got float64). Convert it."),
        ({"image": [[1.0, 2.0]]}, "input image must be a NumPy array (got list of list). Convert it."),
        (
            {"image": np.ma.masked_equal(np.zeros((1, 3, 4, 4), np.float32), 0)},
            "input image must have no masked values (got some). Fill them.",
        ),
        (
            {"image": np.zeros((1, 3, 8, 9), np.float32)},
            "input image must have the shape [N, 3, 8, 8] (got [1, 3, 8, 9]). Reshape or resize it.",
        ),
        (
            {"image": np.where(np.arange(3)[:, None, None, None] == 1, np.nan, np.zeros((3, 3, 8, 8), np.float32))},
            "every value of input image must be finite, as in the check (got NaN or infinity in sample 1). Leave it out "
            "or replace them.",
        ),
        (
            None,
            "must be given a list of images (paths or PIL images), an array, or arrays by input name (got NoneType).",
        ),
        (
            [[0.0]],
            "must be given a list of images (paths or PIL images), an array, or arrays by input name (got list of list).",
        ),
        ([b"x"], "or arrays by input name (got list of bytes). Convert it."),
        (
            {"image": np.zeros((0, 3, 8, 8), np.float32)},
            "every input must hold the same samples, one or more (got [0])",
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: Any, message: str) -> None:
    shipping.bundle(tmp_path / "c")
    with trtpipe.load(tmp_path / "c") as model, pytest.raises(InputError) as caught:
        model(arrays)
    assert message in str(caught.value)


def test_a_bundle_checked_on_arrays_takes_no_images(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c", preprocessing=None)
    with trtpipe.load(tmp_path / "c") as model:
        assert model(np.ones((1, 3, 8, 8), np.float32))["logits"].shape == (1, 3)
        with pytest.raises(
            InputError, match=r"must say how an image becomes input image \(it does not: it was checked on arr"
        ):
            model([Image.new("RGB", (8, 8))])


def test_no_images_at_all(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    with (
        trtpipe.load(tmp_path / "c") as model,
        pytest.raises(InputError, match=r"no image was given\. Give at least one\."),
    ):
        model([])


def test_nothing_is_loaded_before_signature_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is code: an unsigned one, or one for another GPU, is refused before any runner sees a byte of it."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("deserialized")

    monkeypatch.setattr("trtpipe.runtime.onnxruntime.OrtRunner.__init__", never)
    public = signing.generate_key(tmp_path / "key")
    shipping.bundle(tmp_path / "c")
    with pytest.raises(InputError, match="must be signed"):
        trtpipe.load(tmp_path / "c", key=public)
    monkeypatch.setenv(signing.KEY_VARIABLE, str(public))
    with pytest.raises(InputError, match="must be signed"):
        trtpipe.load(tmp_path / "c")

    engine = EngineInfo(file="model.engine", target="tensorrt", version="10.3.0.26", os="linux", machine="x86_64")
    bundle = shipping.bundle(tmp_path / "d")
    other = bundle.manifest.model_copy(update={"engine": engine, "build": Build(target="tensorrt")})
    bundle = type(bundle)(bundle.path, other, bundle.manifest_bytes, None)
    monkeypatch.setattr(runner_module, "this_device", lambda: Device("linux", "x86_64", {"tensorrt": "11.0.0"}, "8.9"))
    monkeypatch.setattr(type(bundle), "read", never)
    with pytest.raises(
        MissingError, match=r"version: TensorRT must be 10.3.0.26, as the engine is not version compatible"
    ):
        open_model(bundle)


def test_a_kit_is_not_run(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "k", kind="kit", engine=None)
    with pytest.raises(InputError, match=r"k: is a kit, which has no engine to run. Finish it here: trtpipe build"):
        trtpipe.load(tmp_path / "k")
    with trtpipe.load(tmp_path / "k", graph=True) as model:
        assert model.classify([Image.new("RGB", (8, 8), COLOURS["blue"])])[0].label == "blue"


def test_feed_of_a_folder(tmp_path: Path, photos: Path) -> None:
    shipping.bundle(tmp_path / "c")
    (photos / "notes.txt").write_text("no image")
    (photos / "elsewhere").mkdir()
    Image.new("RGB", (8, 8)).save(photos / "elsewhere" / "x.png")
    with trtpipe.load(tmp_path / "c") as model:
        feed = open_feed(photos, model)
        assert feed.ids == (
            "blue/a.png",
            "blue/b.jpg",
            "elsewhere/x.png",
            "green/a.png",
            "green/b.jpg",
            "red/a.png",
            "red/b.jpg",
        )
        assert feed.truths == ("blue", "blue", None, "green", "green", "red", "red")
        assert [len(b["image"]) for b in feed.batches(model, 3)] == [3, 3, 1]


def save_images(path: Path, images: np.ndarray) -> None:
    """A file of the input's array, in the format of its suffix; .npz compressed."""
    from safetensors.numpy import save_file

    if path.suffix == ".npy":
        np.save(path, images)
    elif path.suffix == ".npz":
        np.savez_compressed(path, image=images)
    else:
        save_file({"image": images}, path)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_feed_of_arrays(tmp_path: Path, suffix: str) -> None:
    shipping.bundle(tmp_path / "c")
    images = shipping.golden_data().inputs["image"]
    path = tmp_path / f"x.{suffix}"
    save_images(path, images)
    with trtpipe.load(tmp_path / "c") as model:
        feed = open_feed(path, model)
        assert feed.ids == tuple(f"x.{suffix}[{i}]" for i in range(4))
        np.testing.assert_array_equal(np.concatenate([b["image"] for b in feed.batches(model, 3)]), images)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("labels", "truths"),
    [
        (np.array([0, 2, 1, -1]), ("red", "blue", "green", None)),
        (np.array([0, 1, 2, 9], np.uint8), ("red", "green", "blue", None)),
    ],
)
def test_labels_beside_arrays_are_what_is_right(
    tmp_path: Path, suffix: str, labels: np.ndarray, truths: tuple[str | None, ...]
) -> None:
    """As in a file that the check takes."""
    from safetensors.numpy import save_file

    shipping.bundle(tmp_path / "c")
    images, path = shipping.golden_data().inputs["image"], tmp_path / f"x.{suffix}"
    if suffix == "npz":
        np.savez(path, image=images, labels=labels)
    else:
        save_file({"image": images, "labels": labels}, path)
    with trtpipe.load(tmp_path / "c") as model:
        names = model.manifest.class_names
        feed = open_feed(path, model)
        assert names is not None
        wanted = {"red": names[0], "green": names[1], "blue": names[2], None: None}
        assert feed.truths == tuple(wanted[t] for t in truths)
        assert [list(b) for b in feed.batches(model, 4)] == [["image"]]


def test_feeds_that_are_none(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.mp4").touch()
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "scalar.npy", np.float32(1))
    image = np.zeros((1, 3, 8, 8), np.float32)
    np.savez(tmp_path / "text.npz", image=image)
    np.savez(tmp_path / "labels.npz", image=image, labels=np.zeros(1))
    np.savez(tmp_path / "more.npz", image=image, mask=image)
    with zipfile.ZipFile(tmp_path / "text.npz", "a") as archive:
        archive.writestr("readme.txt", "Pictures.")
    expected = {
        "gone": "there is no such file or folder. Give an image, a folder of images or an array file.",
        "empty": "holds no image (.jpg, ",
        "a.mp4": "must be one of .jpg, ",
        "objects.npy": "must be a readable .npy file of plain arrays (got ",
        "text.npz": "must be a readable .npz file of plain arrays (got ",
        "scalar.npy": "must hold one sample or more (got none). Check it.",
        "labels.npz": "'labels' must be integers [S] (got float64 [1]). Save one class number a sample.",
        "more.npz": "must hold the inputs ['image'], and may hold 'labels' (got ['image', 'mask']). Rename the arrays.",
    }
    with trtpipe.load(tmp_path / "c") as model:
        for name, message in expected.items():
            with pytest.raises(InputError) as caught:
                open_feed(tmp_path / name, model)
            assert message in str(caught.value)
            assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_damaged_file_of_arrays_is_read_or_refused(tmp_path: Path, suffix: str) -> None:
    """Whatever bytes are cut off or changed, and whatever NumPy, zipfile, zlib or safetensors raise of them."""
    shipping.bundle(tmp_path / "c")
    images = np.zeros((4, 3, 8, 8), np.float32)  # compressed, the file is little more than its format
    whole, path = tmp_path / f"whole.{suffix}", tmp_path / f"x.{suffix}"
    save_images(whole, images)
    data, random = whole.read_bytes(), np.random.default_rng(0)
    damaged = [data[:cut] for cut in random.integers(0, len(data), 40)]
    for at in random.integers(0, min(len(data), 400), 160):
        damaged.append(data[:at] + bytes([data[at] ^ random.integers(1, 256)]) + data[at + 1 :])
    refused, inputs = [], [InputSpec("image", "float32", (3, 8, 8))]
    with trtpipe.load(tmp_path / "c") as model:
        for content in damaged:
            path.write_bytes(content)
            for reads in (open_feed, open_arrays):
                try:
                    reads(path, model) if reads is open_feed else open_arrays(str(path), inputs)
                except (InputError, CalibError) as error:
                    refused.append(str(error))
    assert len(refused) > 20
    assert {r.startswith(f"{path}: ") for r in refused} == {True}


def test_recheck_passes_and_can_fail(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c", limits=Limits(cosine_min=0.99, top1_agreement_min=0.98))
    with runner_module.load(tmp_path / "c", as_written=True) as model:
        report = recheck(model)
    assert report.passed, report.problems
    assert (report.samples, report.executed) == (4, "graph")
    assert report.runner.startswith("onnxruntime ")
    assert report.notes == ("top1_agreement_min is a share of samples, and was not judged on 4",)
    cosine = next(m for m in report.metrics if m.name == "cosine")
    assert cosine.limit == 0.99
    assert cosine.value == pytest.approx(1, abs=1e-6)

    # The same golden data against a model whose weights were swapped: red is blue.
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(shipping.graph())
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(shipping.weights()[:, ::-1].copy(), "w"))
    shipping.bundle(tmp_path / "wrong", extra={"model.onnx": proto.SerializeToString()})
    with trtpipe.load(tmp_path / "wrong") as model:
        assert not recheck(model).passed


def test_recheck_without_a_recorded_control_makes_its_own(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c", check=None)
    with trtpipe.load(tmp_path / "c") as model:
        report = recheck(model)
    assert report.passed
    assert (report.control.damaged, report.control.failed) == ("every output", True)
    shipping.bundle(tmp_path / "blunt", check=None, limits=Limits(cosine_min=-1))
    with trtpipe.load(tmp_path / "blunt") as model:
        report = recheck(model)
    assert not report.passed
    assert "the check cannot fail" in report.problems[0]


def test_loading_and_running_imports_no_torch(tmp_path: Path) -> None:
    """In a fresh interpreter where torch, onnx and torchvision cannot be imported at all."""
    shipping.bundle(tmp_path / "c")
    code = f"""
import sys
for name in ("torch", "torchvision", "torchao", "onnx", "onnxscript", "tensorrt", "tensorrt_rtx", "yaml", "matplotlib"):
    sys.modules[name] = None
import trtpipe, numpy
with trtpipe.load({str(tmp_path / "c")!r}) as model:
    assert model(numpy.ones((2, 3, 8, 8), numpy.float32))["logits"].shape == (2, 3)
    from trtpipe.runtime.recheck import recheck
    assert recheck(model).passed
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("other", [{"shape": ("N", 3, 1)}, {"classes": False}, {"batch_axis": None}])
def test_outputs_without_classes_are_not_classified(other: dict[str, object]) -> None:
    dense = SimpleNamespace(
        manifest=SimpleNamespace(outputs=(shipping.replaced(shipping.OUTPUT, **other),), mixed=(), inputs=()),
        path="out/dense",
    )
    model = Model(dense, Recorder(), "graph")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^out/dense: has no output \[N, C\] to classify by\. Use the raw outputs\.$"):
        model.predictions({})
    with pytest.raises(InputError, match=r"^out/dense: has no output \[N, C\] to classify by\. Add --raw\.$"):
        model.require_classes(1, "--top", "Add --raw.")


def test_arrays_are_run_in_batches_that_a_profile_takes() -> None:
    """A batch of one with the largest samples, or eight small ones, whatever the inputs' own ranges are."""
    dims = {"N": DimRange(1, 4, 8), "L": DimRange(1, 5, 9)}
    profiles = ({"N": DimRange(1, 1, 1)}, {"N": DimRange(8, 8, 8), "L": DimRange(1, 2, 3)})
    manifest = SimpleNamespace(
        mixed=(),
        inputs=(TensorSpec("x", "float32", ("N", "L"), dims),),
        outputs=(TensorSpec("y", "float32", ("N", "L"), dims),),
        build=Build(profiles=profiles),
    )
    shapes: list[tuple[int, ...]] = []

    class Identity(Recorder):
        def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
            shapes.append(inputs["x"].shape)
            return {"y": inputs["x"]}

    model = Model(SimpleNamespace(manifest=manifest, path="out/two"), Identity(), "graph")  # type: ignore[arg-type]
    assert model.run_arrays({"x": np.zeros((2, 9), np.float32)})["y"].shape == (2, 9)
    assert model.run_arrays({"x": np.zeros((9, 3), np.float32)})["y"].shape == (9, 3)
    assert shapes == [(1, 9), (1, 9), (8, 3), (1, 3)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_images_of_several_sizes_are_run_a_size_at_a_time(tmp_path: Path, size: int) -> None:
    """A folder from a camera roll, for an engine of dynamic height and width."""
    dims = {"N": DimRange(1, 4, 8), "H": DimRange(4, 8, 16), "W": DimRange(4, 8, 16)}
    manifest = SimpleNamespace(
        mixed=(),
        inputs=(TensorSpec("image", "float32", ("N", 3, "H", "W"), dims),),
        outputs=(TensorSpec("y", "float32", ("N", 3), {"N": dims["N"]}),),
        build=Build(), preprocessing=Transform(), class_names=None,
    )  # fmt: skip
    model = Model(SimpleNamespace(manifest=manifest, path="out/any"), Recorder(), "graph")  # type: ignore[arg-type]
    sides = [(8, 6), (8, 6), (8, 6), (4, 12), (8, 6)]
    paths = [tmp_path / f"{k}.png" for k in range(5)]
    for path, side in zip(paths, sides, strict=True):
        Image.new("RGB", side).save(path)
    batches = [b["image"].shape for b in open_feed(tmp_path, model).batches(model, size)]
    assert sum(b[0] for b in batches) == 5
    assert max(b[0] for b in batches) == min(size, 3)
    assert [b[2:] for b in batches for _ in range(b[0])] == [side[::-1] for side in sides]
    with pytest.raises(InputError) as caught:
        model(paths)
    assert str(caught.value) == (
        "out/any: images of one call must become one shape (got [3, 6, 8] and [3, 12, 4]). Call it once for each size."
    )


def test_a_dimension_of_two_inputs_has_one_size() -> None:
    dims = {"N": DimRange(1, 2, 4), "L": DimRange(1, 5, 9)}
    inputs = tuple(TensorSpec(name, "float32", ("N", "L"), dims) for name in "ab")
    model = SimpleNamespace(manifest=SimpleNamespace(inputs=inputs), bundle=SimpleNamespace(path="out/two"))
    one, five = np.zeros((2, 1), np.float32), np.zeros((2, 5), np.float32)
    assert Model._check_arrays(model, {"a": five, "b": five}) == 2  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        Model._check_arrays(model, {"a": five, "b": one})  # type: ignore[arg-type]
    assert str(caught.value) == "out/two: L must be one size in inputs a and b (got 5 and 1). Pad or cut one."


def test_images_are_for_models_of_one_input() -> None:
    inputs = tuple(TensorSpec(name, "float32", ("N", 4), {}) for name in ("left", "right"))
    model = SimpleNamespace(manifest=SimpleNamespace(inputs=inputs), bundle=SimpleNamespace(path="out/two"))
    with pytest.raises(InputError) as caught:
        Model._only_input(model)  # type: ignore[arg-type]
    assert str(caught.value) == ("out/two: must have one input to take images (got left, right). Give arrays by name.")


@pytest.mark.parametrize("times", [1, 3])
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The manifest of one and the golden data of another are no damaged bundle."""
    shipping.bundle(tmp_path / "b")
    real, left = runner_module.compatibility.admit, [times]

    def admit(path: Path, key: Path | None) -> tuple[Bundle, str]:
        """A writer comes right after a bundle was admitted, with golden data of other values."""
        admitted = real(path, key)
        if left[0]:
            left[0] -= 1
            data = shipping.golden_data()
            other = dataclasses.replace(data, inputs={"image": data.inputs["image"] * (2 + left[0])})
            shipping.bundle(path, extra={"golden.safetensors": golden.to_bytes(other)}, notes=(f"{left[0]} left",))
        return admitted

    monkeypatch.setattr(runner_module.compatibility, "admit", admit)
    with trtpipe.load(tmp_path / "b", graph=True) as model:
        assert model.manifest.notes == ("0 left",)
        shipping.bundle(tmp_path / "b", notes=("later",), class_names=("a", "b", "c"))
        said = f"{tmp_path}/b: must stay in place while it is used (another bundle has replaced it). Load it again."
        (tmp_path / "b" / "model.onnx").write_bytes(b"other")
        with pytest.raises(Replaced) as caught:
            model.bundle.read("model.onnx")
        assert str(caught.value) == said
    left[0] = 100
    shipping.bundle(tmp_path / "b")
    with pytest.raises(Replaced):
        trtpipe.load(tmp_path / "b", graph=True)
