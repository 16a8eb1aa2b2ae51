"""Samples from files of arrays."""

import errno
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from calib.arrays import _readable, open_arrays
from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec, TransformSpec, Varying

X = InputSpec("x", "float32", (2, 3))
MASK = InputSpec("mask", "int64", (None,))
DATA = {
    "x": np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32),
    "mask": np.arange(24, dtype=np.int64).reshape(6, 4),
}


def opened(path, inputs=(X, MASK), **options):
    return open_source(DataSpec(arrays=str(path), **options), inputs)


def write(path, arrays):
    (np.savez if path.suffix == ".npz" else lambda p, **a: save_file(a, p))(path, **arrays)
    return path


@pytest.mark.parametrize("kind", [".npz", ".safetensors"])
@pytest.mark.parametrize("workers", [0, 2])
def test_several_inputs_and_labels(tmp_path, kind, workers):
    labels = np.array([3, 3, 3, 9, 9, 9])
    source = opened(write(tmp_path / f"s{kind}", {**DATA, "labels": labels}), workers=workers, samples=4)
    batches = list(source.batches(3))
    rows = [int(i.partition("[")[2][:-1]) for i in source.ids]
    assert [len(b.ids) for b in batches] == [3, 1]
    for name, array in DATA.items():
        np.testing.assert_array_equal(np.concatenate([b.arrays[name] for b in batches]), array[rows])
    assert source.labels.tolist() == labels[rows].tolist()
    assert sorted(source.labels.tolist()) == [3, 3, 9, 9]
    assert (source.classes, source.names) == (None, ("x", "mask"))


@pytest.mark.parametrize("kind", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_no_sample_has_no_label(tmp_path, kind, dtype):
    """Rows tell the dtype of labels, and a file without samples has none: it was refused for labels in float64."""
    held = {name: array[:0] for name, array in DATA.items()} | {"labels": np.zeros(0, dtype)}
    path = write(tmp_path / f"s{kind}", held)
    assert open_arrays(str(path), [X, MASK]).labels == ()
    with pytest.raises(CalibError) as caught:
        opened(path)
    assert "float64" not in str(caught.value)


def test_an_input_may_be_called_labels(tmp_path):
    """As Hugging Face's forward has it; it is then no class of a sample."""
    path = write(tmp_path / "s.npz", {"x": DATA["x"], "labels": DATA["mask"]})
    (batch,) = opened(path, [X, InputSpec("labels", "int64", (None,))]).batches(6)
    assert batch.labels is None
    assert sorted(batch.arrays["labels"][:, 0].tolist()) == DATA["mask"][:, 0].tolist()
    with pytest.raises(CalibError, match=r"must hold the inputs \['labels', 'x'\], .* \(got \['x'\]\)"):
        opened(write(tmp_path / "t.npz", {"x": DATA["x"]}), [X, InputSpec("labels", "int64", (None,))])


@pytest.mark.parametrize(("kind", "name"), [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3")])
def test_dtypes_that_numpy_lacks_are_refused_when_the_file_is_opened(tmp_path, kind, name):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save

    save({"x": torch.zeros(6, *DATA["x"].shape[1:]).to(getattr(torch, kind))}, tmp_path / "x.safetensors")
    message = rf"x\.safetensors: 'x' must be in a dtype of NumPy's \(got {name}\)\. Save it in float32\."
    with pytest.raises(CalibError, match=message):
        opened(tmp_path / "x.safetensors", [X])


def test_npy_feeds_one_input(tmp_path):
    np.save(tmp_path / "x.npy", DATA["x"].astype(np.float64))
    source = opened(tmp_path / "x.npy", [X])
    (batch,) = source.batches(6)
    assert batch.arrays["x"].dtype == np.float32
    assert batch.labels is None
    assert sorted(source.ids) == [f"x.npy[{i}]" for i in range(6)]
    with pytest.raises(CalibError, match=r"a .npy file feeds exactly one input \(got 2\)\. Use .npz or .safetensors"):
        opened(tmp_path / "x.npy")


def test_content_is_the_same_in_every_kind_of_file(tmp_path):
    first, second = (opened(write(tmp_path / n, DATA)) for n in ("a.npz", "b.safetensors"))
    assert sorted(first.sample_digests) == sorted(second.sample_digests)
    other = opened(write(tmp_path / "c.npz", {**DATA, "x": DATA["x"] + 1}))
    assert not set(first.sample_digests) & set(other.sample_digests)


@pytest.mark.parametrize(("x", "mask"), [("float64", "int32"), ("float32", "uint8"), (">f4", ">i8")])
def test_content_is_the_same_in_every_dtype(tmp_path, x, mask):
    stored = opened(write(tmp_path / "a.npz", DATA))
    other = opened(write(tmp_path / "b.npz", {"x": DATA["x"].astype(x), "mask": DATA["mask"].astype(mask)}))
    assert sorted(other.sample_digests) == sorted(stored.sample_digests)


def test_content_of_values_that_the_binding_rounds_is_what_the_model_takes(tmp_path):
    exact = opened(write(tmp_path / "a.npz", {**DATA, "x": DATA["x"] + np.float64(1e-12)}))
    rounded = opened(write(tmp_path / "b.npz", {**DATA, "x": (DATA["x"] + np.float64(1e-12)).astype(np.float32)}))
    assert sorted(exact.sample_digests) == sorted(rounded.sample_digests)


def test_a_bad_first_row_is_skipped_by_workers_too(tmp_path):
    """The file is opened before they start, without a check of what is in it."""
    x = DATA["x"].copy()
    x[0, 0, 0] = np.nan
    source = opened(write(tmp_path / "x.npz", {**DATA, "x": x}), on_bad_sample="skip", workers=1)
    assert source.sample_count == 5
    assert len(set(source.sample_digests)) == 5


def test_one_bad_row(tmp_path):
    x = DATA["x"].copy()
    x[4, 0, 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(
        CalibError, match=r"x.npy\[4\]: every value of input 'x' must be finite \(got 1 NaN or infinite\)"
    ):
        list(opened(tmp_path / "x.npy", [X]).batches(2))
    source = opened(tmp_path / "x.npy", [X], on_bad_sample="skip")
    assert source.sample_count == 5
    assert "x.npy[4]" in source.skipped[0]
    assert "x.npy[4]" not in source.ids


def saved(name, array):
    def make(folder):
        np.save(folder / name, array, allow_pickle=array.dtype == object)
        return folder / name

    return make


def written(name, data):
    def make(folder):
        (folder / name).write_bytes(data)
        return folder / name

    return make


def arrays(name, **changes):
    return lambda folder: write(folder / name, {k: v for k, v in {**DATA, **changes}.items() if v is not None})


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda p: p / "none.npy", [X], r"none.npy: must be a file \(got nothing\)\. Check the path\."),
        (lambda p: p, [X], r"must be a .npy, .npz or .safetensors file \(got 'no suffix'\)"),
        (written("x.pkl", b""), [X], r"must be a .npy, .npz or .safetensors file \(got '.pkl'\)"),
        (written("x.npy", b""), [X], r"must be a readable .npy file of plain arrays \(got (?s:.+)\)\."),
        (written("x.npy", b"junk" * 30), [X], r"must be a readable .npy file of plain arrays \(got (?s:.+)\)\."),
        (written("x.npz", b"PK\x03\x04junk"), [X], r"must be a readable .npz file of plain arrays \(got (?s:.+)\)\."),
        (
            written("x.safetensors", b"\xff" * 64),
            [X],
            r"must be a readable .safetensors file of plain arrays \(got (?s:.+)\)\.",
        ),
        (
            saved("x.npy", np.array([{}, {}], object)),
            [X],
            r"must be a readable .npy file of plain arrays .*Python objects",
        ),
        (saved("x.npy", np.array(1.0)), [X], r"holds no samples"),
        (saved("x.npy", np.zeros((0, 2, 3), np.float32)), [X], r"holds no samples"),
        (
            arrays("x.npz", mask=None),
            [X, MASK],
            r"must hold the inputs \['mask', 'x'\], and may hold .* \(got \['x'\]\)\. Rename the arrays\.$",
        ),
        (arrays("x.npz", extra=np.zeros(6)), [X, MASK], r"must hold the inputs .*\(got \['extra', 'mask', 'x'\]\)"),
        (arrays("x.npz", mask=DATA["mask"][:5]), [X, MASK], r"every array must have the same number of samples \(got"),
        (arrays("x.npz", labels=np.zeros(6)), [X, MASK], r"'labels' must be integers \[S\] \(got float64 \[6\]\)"),
        (
            arrays("x.npz", labels=np.zeros((6, 2), int)),
            [X, MASK],
            r"'labels' must be integers \[S\] \(got int64 \[6, 2\]\)",
        ),
    ],
)
def test_bad_files(tmp_path, make, inputs, message):
    with pytest.raises(CalibError, match=message):
        opened(make(tmp_path), inputs)


def test_transforms_are_for_images(tmp_path):
    with pytest.raises(CalibError, match=r"transform: applies to images alone \(got arrays\)"):
        opened(write(tmp_path / "x.npz", DATA), transform=TransformSpec(resize=3))


@pytest.mark.parametrize(("a", "b", "said"), [
    ((4, 5), (4, 5), None),
    ((4, 9), (4, 9), "a sample of input 'a' must have shape [L 1 to 8] (got [9]). Change the transform (resize, "
                     "center_crop, grayscale), the arrays or the input's shape."),
    ((4, 5), (4, 1), "L must be one size in inputs a and b (got 5 and 1). Pad or cut one."),
])  # fmt: skip
def test_headers_show_what_no_engine_takes(tmp_path, a, b, said):
    """Sizes beyond those declared, and two sizes of one name, which broadcasting would take."""
    inputs = [InputSpec(name, "float32", (Varying("L", 1, 8),)) for name in "ab"]
    np.savez(tmp_path / "x.npz", a=np.zeros(a, np.float32), b=np.zeros(b, np.float32))
    if said is None:
        assert open_arrays(str(tmp_path / "x.npz"), inputs).load(0)["a"].shape == (5,)
        return
    with pytest.raises(CalibError) as caught:
        open_arrays(str(tmp_path / "x.npz"), inputs)
    assert str(caught.value) == f"{tmp_path}/x.npz: {said}"


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_what_the_system_refuses_is_told_from_a_damaged_file(suffix: str, tmp_path: Path) -> None:
    link = tmp_path / f"x{suffix}"
    link.symlink_to(link.name)
    with pytest.raises(CalibError) as caught, _readable(link):
        link.read_bytes()
    assert str(caught.value) == (f"{link}: must be readable (got Too many levels of symbolic links). Repair the links.")
    with pytest.raises(CalibError) as caught, _readable(link):
        raise OSError(errno.EACCES, "Permission denied", str(link))
    assert str(caught.value) == f"{link}: must be readable (got Permission denied). Check its permissions."
