"""Which samples are drawn, in which order, and as which arrays."""

import os
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from calib.data import Source, draw, open_source
from calib.errors import CalibError
from calib.folders import unread
from calib.samples import DataSpec, InputSpec, TransformSpec, Varying, copies, figures, fit, same_figures

IMAGE = InputSpec("image", "float32", (3, 16, 16))
MASK = InputSpec("mask", "float32", (1,))
PLAIN = TransformSpec(resize=16, center_crop=16)


def opened(folder, inputs=(IMAGE,), transform=PLAIN, **options):
    return open_source(DataSpec(images=str(folder), transform=transform, **options), inputs)


def all_of(source, batch_size=7):
    return np.concatenate([b.arrays[source.names[0]] for b in source.batches(batch_size)])


def test_every_sample_comes_once_and_the_last_batch_holds_the_rest(image_folder):
    source = opened(image_folder)
    batches = list(source.batches(8))
    assert [len(b.ids) for b in batches] == [8, 8, 4]
    assert [b.arrays["image"].shape for b in batches] == [(8, 3, 16, 16), (8, 3, 16, 16), (4, 3, 16, 16)]
    assert tuple(i for b in batches for i in b.ids) == source.ids
    assert sorted(source.ids) == sorted(p.relative_to(image_folder).as_posix() for p in image_folder.rglob("*.png"))
    assert np.concatenate([b.labels for b in batches]).tolist() == source.labels.tolist()
    assert source.classes == ("cat", "dog", "emu")
    assert all(source.classes[label] == i.split("/")[0] for i, label in zip(source.ids, source.labels, strict=True))


@pytest.mark.parametrize(
    ("mode", "pixels"),
    [("I;16", np.full((16, 16), 60000, np.uint16)), ("I;16", np.full((16, 16), 300, np.uint16)),
     ("I", np.full((16, 16), 70000, np.int32)), ("F", np.full((16, 16), 0.5, np.float32))],
)  # fmt: skip
def test_pixels_of_more_than_8_bits_do_not_become_white_or_black(tmp_path, mode, pixels):
    Image.fromarray(pixels).save(tmp_path / "deep.tiff")
    Image.new("RGB", (16, 16)).save(tmp_path / "plain.png")
    message = (
        f"{tmp_path}/deep.tiff: must have 8 bits a channel (got Pillow's mode {mode}, of which RGB keeps no value over "
        "255). Save it with 8 bits, or give arrays or a factory of samples."
    )
    with pytest.raises(CalibError, match=f"^{re.escape(message)}$"):
        all_of(opened(tmp_path))
    fault, _, _ = message.removeprefix(f"{tmp_path}/").partition(". Save it")
    assert opened(tmp_path, on_bad_sample="skip").skipped == (fault,)


def test_the_first_samples_are_those_of_the_whole(image_folder):
    whole = opened(image_folder)
    count = whole.sample_count
    few = whole.first(3)
    assert few.ids == whole.ids[:3]
    assert all_of(few)[1].tolist() == all_of(whole)[1][:3].tolist()
    assert few.digest != whole.digest
    assert whole.first(count) is whole.first(count + 1) is whole


def test_of_samples_that_hold_the_same_the_first_is_distinct(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    x[[2, 5, 7]] = x[[0, 1, 0]]
    x[7, 0] = -0.0
    np.save(tmp_path / "x.npy", x)
    whole = open_source(DataSpec(arrays=str(tmp_path / "x.npy")), [InputSpec("x", "float32", (3,))])
    few = whole.distinct()
    assert few.sample_count == 5
    assert [n for n in whole.ids if n in few.ids] == list(few.ids)
    rows, kept = (next(s.batches(8)).arrays["x"] for s in (whole, few))
    assert len(kept) == 5
    assert {tuple(row) for row in kept.tolist()} == {tuple(row) for row in rows.tolist()}
    assert few.distinct() is few
    (line,) = copies(dict(zip(whole.ids, whole.sample_digests, strict=True)))
    assert line.startswith("3 of 8 samples are copies of others and count again (first: x.npy[")
    assert copies(dict(zip(few.ids, few.sample_digests, strict=True))) == ()


def test_the_same_request_gives_the_same_batches(image_folder):
    first, second = (opened(image_folder, samples=9, seed=3) for _ in range(2))
    np.testing.assert_array_equal(all_of(first), all_of(second))
    np.testing.assert_array_equal(all_of(first), all_of(first, batch_size=2))
    assert first.digest == second.digest
    assert opened(image_folder, samples=9, seed=4).ids != first.ids


def test_workers_give_the_same_batches(image_folder):
    np.testing.assert_array_equal(all_of(opened(image_folder, workers=2)), all_of(opened(image_folder)))


def test_images_are_decoded_on_the_cpu_wherever_the_model_is_computed(image_folder):
    """As a factory's samples are; torchvision makes tensors too."""
    transform = TransformSpec(resize=16, center_crop=16, normalize_mean=(0.5,) * 3, normalize_std=(0.5,) * 3)
    source = opened(image_folder, transform=transform)
    plain = all_of(source)
    with torch.device("meta"):
        np.testing.assert_array_equal(all_of(source), plain)


def test_samples_are_drawn_in_proportion_with_one_of_each_class(image_folder):
    drawn = Counter(i.split("/")[0] for i in opened(image_folder, samples=10).ids)
    assert drawn == {"cat": 6, "dog": 3, "emu": 1}
    assert set(Counter(i.split("/")[0] for i in opened(image_folder, samples=3).ids)) == {"cat", "dog", "emu"}


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 60), st.integers(0, 3))
def test_a_draw_is_stratified(labels, samples, seed):
    ids = [f"{i}" for i in range(len(labels))]
    drawn = draw(ids, labels, samples, seed)
    assert len(drawn) == len(set(drawn)) == min(samples, len(ids))
    seen, all_labels = Counter(labels[i] for i in drawn), Counter(labels)
    if samples >= len(all_labels):
        assert set(seen) == set(all_labels)
    for label, count in seen.items():
        assert count <= all_labels[label]
        assert count <= max(1, len(drawn) * all_labels[label] / len(labels)) + 1


def test_a_draw_does_not_depend_on_what_else_is_in_the_list():
    ids = [f"{i}.png" for i in range(50)]
    full = [ids[i] for i in draw(ids, None, None, 0)]
    fewer = [i for i in ids if i != "7.png"]
    assert [fewer[i] for i in draw(fewer, None, None, 0)] == [i for i in full if i != "7.png"]


def test_float_pixels_are_torchvisions(image_folder):
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    theirs = transforms.Compose(
        [
            transforms.Resize(18),
            transforms.CenterCrop(16),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    folder = ImageFolder(str(image_folder))
    expected = {
        p.removeprefix(f"{image_folder}/"): theirs(image).numpy()
        for (p, _), (image, _) in zip(folder.samples, folder, strict=True)
    }
    ours = opened(image_folder, transform=TransformSpec(18, 16, normalize_mean=mean, normalize_std=std))
    for i, array in zip(ours.ids, all_of(ours), strict=True):
        np.testing.assert_array_equal(array, expected[i])
    half = opened(image_folder, [InputSpec("image", "float16", (3, 16, 16))], TransformSpec(18, 16))
    assert all_of(half).dtype == np.float16
    assert torch.from_numpy(all_of(half)).max() <= 1


def test_an_integer_binding_gets_raw_pixels(image_folder):
    source = opened(image_folder, [InputSpec("image", "uint8", (3, 20, 24))], TransformSpec())
    with Image.open(image_folder / source.ids[0]) as image:
        np.testing.assert_array_equal(all_of(source)[0], np.asarray(image).transpose(2, 0, 1))
    normalized = TransformSpec(normalize_mean=(0.5,) * 3, normalize_std=(1.0,) * 3)
    with pytest.raises(CalibError, match=r"needs a float input \(got uint8 for 'image'\).*let the engine normalise"):
        opened(image_folder, [InputSpec("image", "uint8", (3, 20, 24))], normalized)


def test_grayscale_gives_one_channel(image_folder):
    source = opened(image_folder, [InputSpec("image", "uint8", (1, 20, 24))], TransformSpec(grayscale=True))
    with Image.open(image_folder / source.ids[0]) as image:
        np.testing.assert_array_equal(all_of(source)[0, 0], np.asarray(image.convert("L")))


def as_float(image):
    return np.asarray(image, np.float32).transpose(2, 0, 1)[:, :16, :16] - 7


def test_a_callable_stands_in_place_of_the_transform(image_folder):
    source = opened(image_folder, transform=TransformSpec(callable="tests.calib.test_data:as_float"))
    with Image.open(image_folder / source.ids[0]) as image:
        np.testing.assert_array_equal(all_of(source)[0], as_float(image))
    with pytest.raises(CalibError, match="callable stands in place of all others"):
        opened(image_folder, transform=TransformSpec(resize=3, callable="tests.calib.test_data:as_float"))


def test_what_the_digest_covers(image_folder):
    digest = opened(image_folder).digest
    assert opened(image_folder, transform=TransformSpec(resize=17, center_crop=16)).digest != digest
    assert opened(image_folder, samples=19).digest != digest
    assert opened(image_folder, seed=1).digest == digest  # all of them: only the order differs
    file = image_folder / "cat" / "00.png"
    Image.new("RGB", (20, 24)).save(file)
    assert opened(image_folder).digest != digest


@pytest.mark.parametrize("damage", [b"", b"not an image", "cut", "pipe", "device"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_stops_the_run_or_is_skipped(image_folder, damage, workers):
    bad = image_folder / "cat" / "05.png"
    whole = bad.read_bytes()
    bad.unlink()
    if damage == "pipe":
        os.mkfifo(bad)
    elif damage == "device":
        bad.symlink_to("/dev/zero")
    else:
        bad.write_bytes(whole[:400] if damage == "cut" else damage)
    with pytest.raises(CalibError, match=r"cat/05.png: must be a readable image \(got .*on_bad_sample: skip"):
        all_of(opened(image_folder, workers=workers))
    source = opened(image_folder, workers=workers, on_bad_sample="skip")
    assert source.sample_count == 19 == len(source.ids) == len(source.labels) == len(all_of(source))
    assert len(source.skipped) == 1
    assert source.skipped[0].startswith("cat/05.png: must be a readable image (got ")
    unknown = "(got UnidentifiedImageError: of no format that Pillow knows" in source.skipped[0]
    assert unknown == (damage in (b"", b"not an image"))


def raising(image):
    if image.width != 20:
        raise ValueError("too small")
    return np.zeros((3, 16, 16), np.float32)


def bad_data(folder, kind):
    """The spec of data in `folder`, one sample of which is bad in this way."""
    folder.mkdir()
    if kind in ("row of arrays", "row of an archive"):
        rows = np.zeros((3, 3, 16, 16), np.float32)
        rows[1, 0, 0, 0] = np.nan
        name = "rows.npy" if kind == "row of arrays" else "rows.npz"
        np.save(folder / name, rows) if name.endswith("npy") else np.savez(folder / name, image=rows)
        return DataSpec(arrays=str(folder / name), on_bad_sample="skip")
    Image.new("RGB", (20, 20)).save(folder / "whole.png")
    odd = folder / "it's odd.png"
    if kind == "no image":
        odd.write_bytes(b"no image")
    elif kind == "cut":
        odd.write_bytes((folder / "whole.png").read_bytes()[:40])
    elif kind == "no file":
        os.mkfifo(odd)
    elif kind == "deep":
        Image.fromarray(np.full((20, 20), 60000, np.uint16)).save(odd)
    else:
        Image.new("RGB", (9, 7)).save(odd)
    transform = TransformSpec(callable=f"{__name__}:raising") if kind == "transform raises" else TransformSpec()
    return DataSpec(images=str(folder), transform=transform, on_bad_sample="skip")


@pytest.mark.parametrize(
    "kind",
    ["no image", "cut", "no file", "deep", "shape", "transform raises", "row of arrays", "row of an archive"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_kept_of_a_skipped_sample_is_the_same_on_every_machine(tmp_path, kind, workers):
    """Tables and manifests hold it: they name no folder of the machine, and do not advise what was done."""
    size = 16 if "row" in kind or "transform" in kind else 20
    binding = InputSpec("image", "float32", (3, size, size))
    specs = [replace(bad_data(tmp_path / name, kind), workers=workers) for name in ("here", "there")]
    (line,), other = (open_source(spec, (binding,)).skipped for spec in specs)
    assert other == (line,)
    assert "it's odd.png" in line or "rows.np" in line
    assert not [word for word in (str(tmp_path), "\n", "on_bad_sample", "Repair", "Change") if word in line]


def test_when_every_sample_is_bad(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"")
    with pytest.raises(CalibError, match=r"no sample could be used \(got 1 bad ones\)"):
        opened(tmp_path, on_bad_sample="skip")


def make_file(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    return tmp_path / "f"


def make_no_image(tmp_path):
    (tmp_path / "a.txt").write_text("")
    return tmp_path


def make_empty_class(tmp_path):
    (tmp_path / "a").mkdir()
    return tmp_path


def make_empty_class_beside_images(tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    return make_empty_class(tmp_path)


def make_class_of_another_kind(tmp_path):
    (make_empty_class(tmp_path) / "a" / "x.heic").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", r"nowhere: must be a folder of images \(got nothing\)\. Check the path\."),
        (make_file, r"f: must be a folder of images \(got a file\)\. Check the path\."),
        (make_no_image, r"must hold images, or one folder of images for each class \(got neither\)\. Check the path"),
        (make_empty_class, r"holds no samples\. Check the path\."),
        (
            make_empty_class_beside_images,
            r"holds no samples: pictures are beside the class folders and not read: move each into the folder of its "
            r"class, or these folders away \(1, first: x\.png\)\.$",
        ),
        (make_class_of_another_kind, r"holds no samples: pictures are of a kind that is not read: convert to one of "),
    ],
)
def test_bad_folders(tmp_path, make, message):
    with pytest.raises(CalibError, match=message):
        opened(make(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 21}, r"must hold at least 21 samples \(got 20\)\. Ask for fewer, or add some\."),
        ({"samples": 0}, r"samples: must be at least 1 \(got 0\)\."),
        ({"workers": -1}, r"workers: must be 0 or more \(got -1\)\."),
        ({"arrays": "x.npy"}, r"exactly one of images, arrays and factory must be set \(got images and arrays\)\."),
        ({"inputs": [IMAGE, MASK]}, r"images feed exactly one input \(got image, mask\)\. Use arrays"),
        ({"inputs": []}, r"inputs: at least one is needed\."),
        ({"transform": TransformSpec(normalize_mean=(0.5,))}, r"one of mean and std is missing\."),
        (
            {"transform": TransformSpec(normalize_mean=(0.5,) * 2, normalize_std=(1.0,) * 2)},
            r"normalize.mean: must have one value, or 3, one a channel \(got 2\)\.",
        ),
        (
            {"transform": TransformSpec(normalize_mean=(0.5,) * 3, normalize_std=(1.0, 0.0, 1.0))},
            r"normalize.std: must be over 0 \(got \[1.0, 0.0, 1.0\]\)\.",
        ),
        (
            {"transform": TransformSpec(callable="nonsense")},
            r"callable: must read package.module:callable \(got 'nonsense'\)",
        ),
        (
            {"transform": TransformSpec(callable="no_such_module:f")},
            r"must name a module that can be imported \(got 'no_such_module:f'\)",
        ),
        ({"transform": TransformSpec(callable="math:pi")}, r"must be package\.module:callable \(got 'math:pi'\)"),
    ],
)
def test_bad_requests(image_folder, options, message):
    options = {"images": str(image_folder), "transform": PLAIN, **options}
    inputs = options.pop("inputs", [IMAGE])
    with pytest.raises(CalibError, match=message):
        open_source(DataSpec(**options), inputs)


def test_no_data_at_all():
    with pytest.raises(CalibError, match=r"exactly one of images, arrays and factory must be set \(got none\)\."):
        open_source(DataSpec(), [IMAGE])


def test_an_image_of_another_shape_names_the_file(image_folder):
    message = r"/\d\d.png: a sample of input 'image' must have shape \[3, 16, 16\] \(got \[3, 20, 24\]\)\. Change the"
    with pytest.raises(CalibError, match=message):
        all_of(opened(image_folder, transform=TransformSpec()))


def test_batch_size_under_one(image_folder):
    with pytest.raises(CalibError, match=r"batch_size: must be at least 1 \(got 0\)\."):
        next(opened(image_folder).batches(0))


def test_shapes_that_vary_cannot_share_a_batch(image_folder):
    Image.new("RGB", (8, 8)).save(image_folder / "dog" / "00.png")
    inputs = [InputSpec("image", "float32", (3, None, None))]
    source = opened(image_folder, inputs, TransformSpec())
    with pytest.raises(CalibError, match=r"samples of one batch must have one shape for input 'image' .*batch_size 1"):
        list(source.batches(20))
    assert len(list(source.batches(1))) == 20
    at = source.ids.index("dog/00.png")
    for workers in (0, 1):
        source = opened(image_folder, inputs, TransformSpec(), workers=workers)
        apart = list(source.batches(20, apart=True))
        assert [b.ids for b in apart] == [source.ids[:at], source.ids[at : at + 1], source.ids[at + 1 :]]
        assert [b.arrays["image"].shape[2:] for b in apart] == [(20, 24), (8, 8), (20, 24)]
        assert all(len(b.labels) == len(b.ids) for b in apart)


@pytest.mark.parametrize(
    ("array", "dtype", "shape", "message"),
    [
        (np.zeros(3, np.float32), "float32", (4,), r"must have shape \[4\] \(got \[3\]\)"),
        (np.zeros((2, 3)), "float32", (None,), r"must have shape \[any\] \(got \[2, 3\]\)"),
        (np.zeros((2, 9)), "float32", (2, Varying("L", 1, 8)), r"must have shape \[2, L 1 to 8\] \(got \[2, 9\]\)"),
        (np.zeros(3), "float32", (Varying("L", 4, 8),), r"must have shape \[L 4 to 8\] \(got \[3\]\)"),
        (
            np.zeros((4, 5)),
            "float32",
            (Varying("L", 1, 8),) * 2,
            r"L must be one size in input x \(got 4 and 5\)\. Pad or cut one\.",
        ),
        (np.array([1.0, np.nan]), "float32", (2,), r"every value of input 'x' must be finite \(got 1 NaN or inf"),
        (
            np.array([2.0, -70000.0]),
            "float16",
            (2,),
            r"every value of input 'x' must be one that float16 holds \(got 70000, and 65504 is the largest\)",
        ),
        (
            np.array([1]),
            "float32",
            (1,),
            r"must be given as float32 \(got int64\)\. Convert the data, or change the input's dtype in the job\.",
        ),
        (
            np.array([1.5]),
            "uint8",
            (1,),
            r"must be given as uint8 \(got float64\)\. Convert the data, or change the input's dtype in the job\.",
        ),
        (np.array([300]), "uint8", (1,), r"is uint8 and a value does not fit \(got int64 data\)\."),
    ],
)
def test_arrays_that_do_not_fit(array, dtype, shape, message):
    with pytest.raises(CalibError, match="here: .*" + message):
        fit("here", {"x": array}, [InputSpec("x", dtype, shape)])


def test_arrays_that_fit_are_cast_within_their_kind():
    inputs = [InputSpec("x", "float32", (1,)), InputSpec("y", "int32", (None,))]
    fitted = fit("", {"x": np.array([0.1]), "y": np.array([7])}, inputs)
    assert fitted["x"].tolist() == [np.float32(0.1)]
    assert fitted["y"].dtype == np.int32


@pytest.mark.parametrize("classes", [True, False])
def test_pictures_that_are_not_read_are_named(tmp_path, classes):
    """Every picture below a folder is a sample, or in a note; files that are no pictures are in neither."""
    for name in (
        "cat/a.png",
        "cat/b.HEIC",
        "cat/deep/c.gif",
        "cat/.hidden.gif",
        "cat/notes.txt",
        "dog/d.JPG",
        "e.webp",
        "f.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    kind = (
        "photos: pictures are of a kind that is not read: convert to one of .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, "
        ".tiff, .webp (2, first: cat/b.HEIC)."
    )
    beside = (
        "photos: pictures are beside the class folders and not read: move each into the folder of its class, or these "
        "folders away (2, first: e.webp)."
    )
    assert unread("photos", tmp_path, classes=classes) == ((kind, beside) if classes else (kind,))
    assert unread("photos", tmp_path / "dog", classes=classes) == ()


def test_a_folder_of_images_alone_has_none_beside(tmp_path):
    (tmp_path / "a.png").touch()
    assert unread("photos", tmp_path, classes=True) == ()


@pytest.mark.parametrize("label", [1 << 63, (1 << 64) - 1, -(1 << 63) - 1, 1 << 70])
@pytest.mark.parametrize("way", ["npz", "safetensors", "factory", "by name"])
def test_a_label_that_is_no_int64(tmp_path, monkeypatch, label, way):
    """As -1 becomes in an unsigned type."""
    x, inputs = np.zeros((3, 2), np.float32), (InputSpec("x", "float32", (2,)),)
    text = r"\[\d\]: a label must be a class from 0, or -1 where it is unknown \(got -?\d+\)\. Save labels as int64\.$"
    if way in ("npz", "safetensors"):
        path = tmp_path / f"a.{way}"
        save = np.savez if way == "npz" else lambda path, **arrays: save_file(arrays, path)
        save(path, x=x, labels=np.array([0, 1, min(max(label, 1 << 63), (1 << 64) - 1)], np.uint64))
        spec = DataSpec(arrays=str(path))
    elif way == "factory":
        (tmp_path / "labels_of_any_size.py").write_text(
            f"import numpy as np\ndef make():\n    return [(np.zeros(2, np.float32), {label})] * 3\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        spec = DataSpec(factory="labels_of_any_size:make")
    else:
        np.save(tmp_path / "a.npy", x)
        source = open_source(DataSpec(arrays=str(tmp_path / "a.npy")), inputs)
        with pytest.raises(CalibError, match=text):
            source.labelled(dict.fromkeys(source.ids, label))
        return
    with pytest.raises(CalibError, match=text):
        open_source(spec, inputs)


class Changing:
    """Samples that are multiplied by `factor` from the second time on that each is read."""

    labels, classes, recipe, sequential, whole, root = (0, 1, 0, 1), ("a", "b"), "", False, True, ""
    ids = ("a", "b", "c", "d")

    def __init__(self, factor, dtype):
        self.factor, self.dtype, self.read = factor, dtype, set()

    def load(self, at):
        values = np.random.default_rng(at).standard_normal((3, 16, 16)) * 100
        factor = self.factor if at in self.read else 1
        self.read.add(at)
        return {"image": (values * factor).astype(self.dtype)}

    def content(self, at):
        return str(at)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool"])
def test_a_sample_that_is_another_when_it_is_read_again_is_refused(dtype):
    """An augmentation's values; another kernel's last bits are no other values."""
    source = Source(Changing(1.01 if dtype in ("float32", "float16") else 0, dtype), (IMAGE,), (0, 1, 2, 3))
    list(source.batches(2))
    again = source.numbered_by(("a", "b"))
    with pytest.raises(CalibError) as caught:
        list(again.batches(3))
    assert str(caught.value) == (
        "a: must hold the same values each time it is read (got others than at first). Take out what is random in how "
        "samples are made, as transforms for training and shuffling are, or seed it."
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[..., ::-1], lambda x: x[..., ::-1, :], lambda x: np.rot90(x, 1, (1, 2)), lambda x: x[::-1],
        lambda x: np.roll(x, 1, 2), lambda x: np.random.default_rng(5).permuted(x, axis=None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alone", [True, False], ids=["standardised", "as it is"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_a_sample_whose_values_stand_elsewhere_when_it_is_read_again_is_refused(change, alone, dtype):
    """A flip, a rotation, a shuffle: each number is there as before."""

    class Moved(Changing):
        def load(self, at):
            low = np.random.default_rng(at).random((3, 4, 4))
            values = np.kron(low, np.ones((1, 4, 4))) + 0.1 * np.random.default_rng(at).random((3, 16, 16))
            values = (values - values.mean()) / values.std() if alone else values
            values = values if dtype != "uint8" else np.clip(values * 60 + 60, 0, 255)
            changed = change(values) if at in self.read else values
            self.read.add(at)
            return {"image": np.ascontiguousarray(changed).astype(dtype)}

    source = Source(Moved(1, dtype), (IMAGE,), (0, 1, 2, 3))
    list(source.batches(2))
    with pytest.raises(CalibError, match=r"^a: must hold the same values each time it is read"):
        list(source.batches(2))


def test_roundings_of_another_decoder_are_the_same():
    """One of 255 levels, up or down, at every fifth place."""
    random = np.random.default_rng(0)
    for _ in range(100):
        levels = np.clip(random.normal(random.uniform(50, 200), random.uniform(10, 60), (3, 32, 32)).round(), 1, 254)
        other = levels + random.integers(-1, 2, levels.shape) * (random.random(levels.shape) < 0.3)
        one, again = (figures({"image": (x / 255)[None]}) for x in (levels, other))
        assert same_figures(one, again)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e300])
def test_a_sample_that_differs_in_its_last_bits_is_the_same(scale):
    changing = Changing(1 + 1e-7, "float64")
    changing.load = lambda at, load=changing.load: {n: a * scale for n, a in load(at).items()}
    source = Source(changing, (IMAGE,), (0, 1, 2, 3))
    first = [len(b.ids) for b in source.batches(2)]
    assert first == [len(b.ids) for b in source.batches(2)] == [2, 2]
