"""Preprocessing against torchvision's own transforms on 200 photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shipping

from trtpipe.errors import InputError
from trtpipe.job.sections import Normalize, Transform
from trtpipe.runtime.preprocess import load_image, preprocess
from trtpipe.values import DimRange, TensorSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def spec(*sample: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec("image", dtype, ("N", *sample), {"N": DimRange(1, 4, 8)})


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_image_of_more_than_8_bits_is_refused(tmp_path: Path, mode: str) -> None:
    from PIL import Image

    says = (
        f"must have 8 bits a channel (got Pillow's mode {mode}, of which RGB keeps no value over 255). Save it with 8 "
        "bits, or give arrays or a factory of samples."
    )
    path = tmp_path / "deep.tiff"
    Image.new(mode, (8, 8), 300).save(path)
    with pytest.raises(InputError) as caught:
        load_image(path)
    assert str(caught.value) == f"{path}: {says}"
    with pytest.raises(InputError) as caught:
        preprocess(Image.new(mode, (8, 8), 300), None, spec(3, 8, 8))
    assert str(caught.value) == f"image: {says}"


@pytest.fixture(scope="module")
def photos() -> list[Any]:
    """200 crops of many sizes of scikit-learn's two sample photos, a fifth of them gray or with an alpha channel."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    sources = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    made: list[Any] = []
    for i in range(200):
        source = sources[i % 2]
        width, height = (int(n) for n in random.integers(40, 400, 2))
        left, top = (int(random.integers(0, n - m + 1)) for n, m in zip(source.size, (width, height), strict=True))
        crop = source.crop((left, top, left + width, top + height))
        made.append(crop.convert({0: "L", 5: "RGBA"}.get(i % 10, "RGB")))
    return made


TRANSFORMS: list[tuple[str, Transform, tuple[int, ...]]] = [
    (
        "ImageNet",
        Transform(resize=256, center_crop=224, normalize=Normalize(mean=MEAN, std=STD)),
        (3, 224, 224),
    ),
    ("digits", Transform(resize=(32, 32), grayscale=True, normalize=Normalize(mean=(0.5,), std=(0.5,))), (1, 32, 32)),
    ("bicubic", Transform(resize=(48, 64), interpolation="bicubic"), (3, 48, 64)),
    ("nearest", Transform(resize=64, center_crop=(63, 61), interpolation="nearest"), (3, 63, 61)),
    ("crop that pads", Transform(center_crop=(301, 288)), (3, 301, 288)),
]


@pytest.mark.parametrize(("transform", "shape"), [t[1:] for t in TRANSFORMS], ids=[t[0] for t in TRANSFORMS])
def test_equal_to_torchvision(photos: list[Any], transform: Transform, shape: tuple[int, ...]) -> None:
    """Geometry is bit for bit the same; normalization may differ in the last bit of a float."""
    from torchvision import transforms as tv

    steps: list[Any] = []
    if transform.resize is not None:
        size = transform.resize if isinstance(transform.resize, int) else list(transform.resize)
        steps.append(tv.Resize(size, tv.InterpolationMode(transform.interpolation)))
    if transform.center_crop is not None:
        steps.append(tv.CenterCrop(transform.center_crop))
    if transform.grayscale:
        steps.append(tv.Grayscale())
    steps.append(tv.ToTensor())
    if transform.normalize is not None:
        steps.append(tv.Normalize(transform.normalize.mean, transform.normalize.std))
    reference = tv.Compose(steps)
    worst = mean = 0.0
    for photo in photos:
        got = preprocess(photo, transform, spec(*shape))
        want = reference(photo.convert("RGB")).numpy()
        assert got.shape == want.shape == shape
        assert got.dtype == np.float32
        difference = np.abs(got.astype(np.float64) - want)
        worst, mean = max(worst, difference.max()), max(mean, difference.mean())
    assert mean <= 1e-7
    assert worst <= 1e-6


def test_integer_inputs_take_pixels_as_they_are() -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    got = preprocess(Image.fromarray(pixels), None, spec(3, 5, 7, dtype="uint8"))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, pixels.transpose(2, 0, 1))


def test_half_inputs_are_rounded_once() -> None:
    from PIL import Image

    image = Image.new("RGB", (2, 2), (255, 128, 0))
    got = preprocess(
        image, Transform(normalize=Normalize(mean=(0.5,) * 3, std=(0.25,) * 3)), spec(3, 2, 2, dtype="float16")
    )
    assert got.dtype == np.float16
    assert got[:, 0, 0].tolist() == [2.0, float(np.float16((128 / 255 - 0.5) / 0.25)), -2.0]


def test_one_mean_and_std_are_for_all_channels(photos: list[Any]) -> None:
    """As torchvision's Normalize has it, in calibration, check and on the device alike."""
    from calib.images import ImageTransform
    from calib.samples import InputSpec, TransformSpec

    made = []
    for mean, std in (((0.5,), (0.25,)), ((0.5,) * 3, (0.25,) * 3)):
        transform = Transform(resize=(8, 8), normalize=Normalize(mean=mean, std=std))
        made.append(preprocess(photos[1], transform, spec(3, 8, 8)))
        given = TransformSpec(resize=(8, 8), normalize_mean=mean, normalize_std=std)
        made.append(ImageTransform(given, InputSpec("image", "float32", (3, 8, 8)))("x", photos[1].convert("RGB")))
    assert all(np.array_equal(made[0], other) for other in made)


REFUSED: list[tuple[Transform, TensorSpec, str]] = [
    (
        Transform(resize=10**9),
        spec(3, 8, 8),
        "preprocessing.resize: must give at most 268435456 pixels (got 1000000000x1000000000 of an image of 8x8). "
        "Check the bundle's manifest, or shrink the image.",
    ),
    (
        Transform(callable="my.code:crop"),
        spec(3, 8, 8),
        "preprocessing: must be data for a device to repeat it (got the ",
    ),
    (
        Transform(normalize=Normalize(mean=(0.5,) * 3, std=(1.0,) * 3)),
        spec(3, 8, 8, dtype="uint8"),
        "preprocessing.normalize: must be absent for a uint8 input, which takes pixels as they are.",
    ),
    (
        Transform(grayscale=True, normalize=Normalize(mean=(0.5,) * 3, std=(0.5,) * 3)),
        spec(1, 8, 8),
        "preprocessing.normalize.mean: must have one value (got 3). Build the bundle again.",
    ),
    (
        Transform(),
        spec(3, 9, 8),
        "image: a preprocessed image must have the shape [N, 3, 9, 8] of its binding, without the first "
        "(got [3, 8, 8])",
    ),
]


@pytest.mark.parametrize(("transform", "binding", "message"), REFUSED)
def test_refused(transform: Transform, binding: TensorSpec, message: str) -> None:
    from PIL import Image

    with pytest.raises(InputError) as caught:
        preprocess(Image.new("RGB", (8, 8)), transform, binding)
    assert message in str(caught.value)


def test_images_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    (tmp_path / "a.png").write_bytes(b"no image")
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "b.png").read_bytes()[:80])
    for name in "ac":
        with pytest.raises(InputError, match=rf"{name}.png: must be an image that Pillow reads"):
            load_image(tmp_path / f"{name}.png")
    assert load_image(tmp_path / "b.png").getpixel((0, 0)) == (1, 2, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2047)
    with pytest.raises(
        InputError, match=r"b.png: must be an image that Pillow reads \(got: Image size \(4096 pixels\)"
    ):
        load_image(tmp_path / "b.png")


def test_the_shared_transform_fits_the_shared_model() -> None:
    from PIL import Image

    assert preprocess(Image.new("L", (20, 9)), shipping.TRANSFORM, shipping.INPUT).shape == (3, 8, 8)
