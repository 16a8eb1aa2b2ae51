"""From an image to an input binding as calibration did it, in Pillow and NumPy alone.

The operations and their order are torchvision's on PIL images: Resize, CenterCrop, Grayscale, ToTensor, Normalize.
torchvision hands resizing, cropping and gray to Pillow as well, so these are the same pixels; only the arithmetic on
floats is done here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from calib.files import open_regular
from calib.images import UNREADABLE_IMAGE, beyond_8_bits, wrong_count
from calib.types import Array
from trtpipe.batching import has_shape
from trtpipe.errors import InputError
from trtpipe.job.sections import Transform
from trtpipe.values import TensorSpec

#: No image is resized to more pixels than this. One of more than twice Pillow's MAX_IMAGE_PIXELS it does not open.
MAX_PIXELS = 256 << 20


def load_image(path: Path) -> Image.Image:
    """The image in `path` as RGB, the way torchvision's ImageFolder loads it.

    Raises:
        InputError: not an image, damaged, or so large that Pillow refuses it.
    """
    try:
        with open_regular(path) as file, _quiet_pillow(), Image.open(file) as image:
            if fault := beyond_8_bits(image.mode):
                raise InputError(f"{path}: {fault}")
            return image.convert("RGB")
    except UNREADABLE_IMAGE as error:
        raise InputError(f"{path}: must be an image that Pillow reads (got: {error}). Remove or replace it.") from None


def preprocess(image: Image.Image, transform: Transform | None, spec: TensorSpec) -> Array:
    """One sample [C, H, W] in the binding's dtype.

    Args:
        image: of any mode; used as RGB.
        transform: from the manifest; None: only to tensor.
        spec: the input binding; an integer binding takes the pixels 0 to 255 as they are.

    Raises:
        InputError: the transform is Python code, or the result has not the binding's shape.
    """
    if transform is not None and transform.callable is not None:
        raise InputError(
            f"preprocessing: must be data for a device to repeat it (got the callable {transform.callable}). "
            "Give arrays (.npy) that are preprocessed already."
        )
    t = transform or Transform()
    if fault := beyond_8_bits(image.mode):
        raise InputError(f"image: {fault}")
    image = image if image.mode == "RGB" else image.convert("RGB")
    image = _center_crop(_resize(image, t), t)
    if t.grayscale:
        image = image.convert("L")
    pixels = np.asarray(image)
    chw = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if not np.issubdtype(np.dtype(spec.dtype), np.floating):
        if t.normalize is not None:
            raise InputError(
                f"preprocessing.normalize: must be absent for a {spec.dtype} input, which takes pixels as they are. "
                "Normalize inside the engine: inputs.<name>.normalize."
            )
        result: Array = np.ascontiguousarray(chw).astype(spec.dtype)
    else:
        result = chw.astype(np.float32) / np.float32(255)
        if t.normalize is not None:
            result = _normalize(result, t.normalize.mean, t.normalize.std)
        result = np.ascontiguousarray(result.astype(spec.dtype, copy=False))
    _check_shape(result, spec)
    return result


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Without Pillow's warning of large images: those of twice that size are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def _resize(image: Image.Image, t: Transform) -> Image.Image:
    """torchvision.transforms.Resize: an int is the length of the shorter edge, a pair is (height, width)."""
    if t.resize is None:
        return image
    modes = {
        "nearest": Image.Resampling.NEAREST,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
    }
    if isinstance(t.resize, int):
        short, long = sorted((image.width, image.height))
        # torchvision truncates the longer edge.
        longer = int(t.resize * long / short)
        width, height = (t.resize, longer) if image.width <= image.height else (longer, t.resize)
    else:
        height, width = t.resize
    if width * height > MAX_PIXELS:
        raise InputError(
            f"preprocessing.resize: must give at most {MAX_PIXELS} pixels (got {width}x{height} of an image of "
            f"{image.width}x{image.height}). Check the bundle's manifest, or shrink the image."
        )
    return image if (width, height) == image.size else image.resize((width, height), modes[t.interpolation])


def _center_crop(image: Image.Image, t: Transform) -> Image.Image:
    """torchvision.transforms.CenterCrop, which pads a smaller image with black first."""
    if t.center_crop is None:
        return image
    height, width = (t.center_crop, t.center_crop) if isinstance(t.center_crop, int) else t.center_crop
    if width > image.width or height > image.height:
        missing_w, missing_h = max(0, width - image.width), max(0, height - image.height)
        left, top = missing_w // 2, missing_h // 2
        image = ImageOps.expand(image, (left, top, missing_w - left, missing_h - top), fill=0)
        if (width, height) == image.size:
            return image
    # Python's round is torchvision's: halves go to the even neighbour.
    top, left = round((image.height - height) / 2.0), round((image.width - width) / 2.0)
    return image.crop((left, top, left + width, top + height))


def _normalize(chw: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    """(x - mean) / std by channel, in float32."""
    for name, values in (("mean", mean), ("std", std)):
        if wrong := wrong_count(values, len(chw)):
            raise InputError(f"preprocessing.normalize.{name}: {wrong}. Build the bundle again.")
    shift = np.asarray(mean, np.float32).reshape(-1, 1, 1)
    scale = np.asarray(std, np.float32).reshape(-1, 1, 1)
    result: Array = (chw - shift) / scale
    return result


def _check_shape(sample: Array, spec: TensorSpec) -> None:
    if not has_shape(sample.shape, spec.shape[1:], spec.dims):
        raise InputError(
            f"{spec.name}: a preprocessed image must have the shape {spec.described} of its binding, without the first "
            f"(got {list(sample.shape)}). "
            "Resize the images, or give the job's transform a center_crop."
        )
