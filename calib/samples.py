"""What a data set is described by and gives: the types that its kinds share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from calib.errors import CalibError
from calib.types import Array

Sample = dict[str, Array]
OnBadSample = Literal["error", "skip"]
#: Suffixes of the files that torchvision's ImageFolder reads, in lower case.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: Suffixes of pictures that it does not read: who has some in a folder of images means them to be read.
UNREAD_SUFFIXES = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".jfif", ".gif", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".tga",
    ".exr", ".hdr", ".svg", ".ico", ".psd",
)  # fmt: skip
#: Suffixes of the files of arrays that `calib.arrays` reads.
ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors")
#: The fields of a `DataSpec` that say where samples come from: exactly one is given.
SOURCES = ("images", "arrays", "factory")
Interpolation = Literal["nearest", "bilinear", "bicubic"]


def require_batch_size(batch_size: int) -> None:
    """CalibError unless at least one sample is run at a time."""
    if batch_size < 1:
        raise CalibError(f"batch_size: must be at least 1 (got {batch_size}).")


@dataclass(frozen=True)
class TransformSpec:
    """torchvision's transforms on a PIL image, in this order: resize, center_crop, grayscale, to array, normalize.

    Attributes:
        resize: the shorter side in pixels, or (height, width).
        center_crop: side in pixels, or (height, width).
        grayscale: one channel (ITU-R 601 luma) instead of three.
        interpolation: of resize; antialiased, as PIL does it.
        normalize_mean, normalize_std: by channel, for values in [0, 1]; both or neither.
        callable: "package.module:callable" taking the PIL image and giving the array [C, H, W], in place of all others.
    """

    resize: int | tuple[int, int] | None = None
    center_crop: int | tuple[int, int] | None = None
    grayscale: bool = False
    interpolation: Interpolation = "bilinear"
    normalize_mean: tuple[float, ...] | None = None
    normalize_std: tuple[float, ...] | None = None
    callable: str | None = None


@dataclass(frozen=True)
class DataSpec:
    """Where samples come from and which are drawn. Exactly one of images, arrays and factory is set.

    Attributes:
        images: a folder of images without labels, or an ImageFolder: one folder a class.
        arrays: .npy (one input), .npz or .safetensors holding [S, ...] by input name, and int `labels` [S] if known.
        factory: "package.module:callable"; called without arguments it gives a sequence, or an iterable that gives
            the same samples each time, of {input name: array}, of an array (one input), or of (either, int label). Of
            an iterable the first `samples` are used, in its order; without `samples` it must end within
            `factories.MOST_READ`.
        transform: of images.
        samples: how many to draw, stratified by class; all when None.
        seed: which ones are drawn, and their order.
        workers: processes that load ahead of the model; 0 loads between batches.
        on_bad_sample: "error" stops at a sample that cannot be read or used, "skip" leaves it out and lists it.
    """

    images: str | None = None
    arrays: str | None = None
    factory: str | None = None
    transform: TransformSpec | None = None
    samples: int | None = None
    seed: int = 0
    workers: int = 0
    on_bad_sample: OnBadSample = "error"


@dataclass(frozen=True)
class Varying:
    """A dimension of sizes `least` to `most`; wherever its name stands in one sample, it has one size."""

    name: str
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.name} {self.least} to {self.most}"


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: NumPy dtype name, and shape without the batch dimension; None may be any size."""

    name: str
    dtype: str
    sample_shape: tuple[int | Varying | None, ...]


@dataclass(frozen=True)
class Batch:
    """Some samples: arrays [B, ...] by input name in the binding dtype, int64 labels [B] if known, and their ids."""

    arrays: Mapping[str, Array]
    labels: npt.NDArray[np.int64] | None
    ids: tuple[str, ...]


#: Sums with random signs of the values at random places, as many of each sample: where its numbers change places, now
#: and then one of the sums hardly changes.
_SUMS, _PLACES = 8, 1 << 14
#: The figures of one sample that is read again differ by less, in shares of its root mean square: the roundings of
#: another decoder do not cancel out in the sums, as they do in the mean.
_SAME = np.array([1e-3, 1e-3, *[0.05] * _SUMS])


def figures(arrays: Mapping[str, Array]) -> npt.NDArray[np.float64]:
    """Mean, root mean square, and `_SUMS` sums of each sample of arrays [B, ...]: float64 [B, inputs, 2 + _SUMS], what
    one that is made at random has otherwise each time, and other kernels do not change. The sums, of values with fixed
    random signs, over the root of how many they are, differ where an image was flipped or values were shuffled."""
    made = []
    for array in arrays.values():
        rows, random = array.reshape(len(array), -1), np.random.default_rng(0)
        some = rows if rows.shape[1] <= _PLACES else rows[:, random.integers(0, rows.shape[1], _PLACES)]
        signs = random.integers(0, 2, (some.shape[1], _SUMS), np.int8) * 2.0 - 1.0
        rows = rows.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = some.astype(np.float64) @ signs / math.sqrt(max(some.shape[1], 1))
            made.append(np.column_stack([rows.mean(1), np.sqrt(np.square(rows).mean(1)), sums]))
    stacked: npt.NDArray[np.float64] = np.nan_to_num(np.stack(made, 1))
    return stacked


def same_figures(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> bool:
    """Whether the `figures` of samples, float64 [..., inputs, 2 + _SUMS] both, are the same."""
    return bool((np.abs(one - other) <= _SAME * np.maximum(one[..., 1:2], other[..., 1:2])).all())


class Origin(Protocol):
    """Samples by position, as `images`, `arrays` and `factories` hold them."""

    ids: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...] | None
    recipe: str  # what besides a sample's content decides its arrays: goes into the digest
    sequential: bool  # whether going backwards is slow: such samples are used in the order they come
    whole: bool  # whether `ids` are all that there are
    root: str  # the folder, with its "/", that messages name before a sample's id; "" where they name none

    def load(self, at: int) -> Sample:
        """The arrays of one sample in the binding dtypes; CalibError when it is bad."""

    def content(self, at: int) -> str:
        """sha256 hex of one sample: of an image its file, of arrays their names, shapes and values in the binding
        dtypes. CalibError when it cannot be read, or arrays are bad."""


def copies(digests: Mapping[str, str]) -> tuple[str, ...]:
    """A warning where samples hold what others do, by the digest of each sample by its id; empty otherwise."""
    count = len(digests) - len(set(digests.values()))
    if not count:
        return ()
    seen: dict[str, str] = {}
    copy, of = next((n, o) for n, d in digests.items() if (o := seen.setdefault(d, n)) != n)
    return (
        f"{count} of {len(digests)} samples {'is a copy' if count == 1 else 'are copies'} of others and count again "
        f"(first: {copy}, of {of}).",
    )


def combine_digests(samples: dict[str, str], recipe: str) -> str:
    """sha256 hex of {sample id: content digest} in sorted order and of the recipe."""
    lines = [recipe, *(f"{name}\0{digest}" for name, digest in sorted(samples.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def two_sizes(sizes: Iterable[tuple[str, str, int]]) -> str | None:
    """What is wrong with (input, name of a dimension, its size) where a name has two sizes; None where none has."""
    held: dict[str, tuple[str, int]] = {}
    for name, dim, size in sizes:
        first, there = held.setdefault(dim, (name, size))
        if there != size:
            where = f"inputs {first} and {name}" if name != first else f"input {name}"
            return f"{dim} must be one size in {where} (got {there} and {size}). Pad or cut one."
    return None


def require_shapes(where: str, shapes: Mapping[str, Sequence[int]], inputs: Sequence[InputSpec]) -> None:
    """CalibError unless arrays of these shapes, by input name, can be a sample of the inputs."""
    for spec in inputs:
        shape = tuple(shapes[spec.name])
        if len(shape) != len(spec.sample_shape) or not all(map(_takes, spec.sample_shape, shape)):
            wanted = ", ".join("any" if d is None else str(d) for d in spec.sample_shape)
            raise CalibError(
                f"{where}: a sample of input {spec.name!r} must have shape [{wanted}] (got {list(shape)}). "
                "Change the transform (resize, center_crop, grayscale), the arrays or the input's shape."
            )
    named = ((i.name, d, g) for i in inputs for d, g in zip(i.sample_shape, shapes[i.name], strict=True))
    if wrong := two_sizes((name, d.name, size) for name, d, size in named if isinstance(d, Varying)):
        raise CalibError(f"{where}: {wrong}")


def _takes(dim: int | Varying | None, size: int) -> bool:
    return dim.least <= size <= dim.most if isinstance(dim, Varying) else dim in (None, size)


def fit(where: str, arrays: Mapping[str, Array], inputs: Sequence[InputSpec]) -> Sample:
    """The arrays of one sample as the bindings take them: shapes checked, floats cast to a float dtype and integers to
    an integer one.

    Raises:
        CalibError: another rank or size, a dtype of another kind, a value that does not fit or is not finite.
    """
    require_shapes(where, {i.name: arrays[i.name].shape for i in inputs}, inputs)
    return {i.name: _cast(where, arrays[i.name], i) for i in inputs}


def _cast(where: str, array: Array, spec: InputSpec) -> Array:
    dtype = np.dtype(spec.dtype)
    if array.dtype == dtype:
        result = array
    elif array.dtype.kind == "f" and dtype.kind == "f":
        with np.errstate(over="ignore"):
            result = array.astype(dtype)
    elif array.dtype.kind in "iub" and dtype.kind in "iub":
        result = array.astype(dtype)
        if not np.array_equal(result, array):
            raise CalibError(
                f"{where}: input {spec.name!r} is {dtype} and a value does not fit (got {array.dtype} data). Check it."
            )
    else:
        raise CalibError(
            f"{where}: input {spec.name!r} must be given as {dtype} (got {array.dtype}). "
            "Convert the data, or change the input's dtype in the job."
        )
    if dtype.kind == "f" and not np.isfinite(result).all():
        given = np.isfinite(array)
        if given.all():
            raise CalibError(
                f"{where}: every value of input {spec.name!r} must be one that {dtype} holds (got "
                f"{np.abs(array).max():.6g}, and {np.finfo(dtype).max:.6g} is the largest)."
            )
        bad = int(array.size - given.sum())
        raise CalibError(f"{where}: every value of input {spec.name!r} must be finite (got {bad} NaN or infinite).")
    return result
