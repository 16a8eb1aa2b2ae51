"""Samples from a folder of images, or of one folder a class: torchvision's order of an ImageFolder, its transforms."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from calib.errors import CalibError
from calib.files import FETCH, LFS_POINTER, as_text, is_lfs_pointer, open_regular, unreadable
from calib.folders import class_folders, images_below
from calib.once import kept
from calib.samples import InputSpec, Sample, TransformSpec, fit
from calib.strictjson import loads
from calib.types import Array
from calib.user_code import import_callable, undone, user_data

#: What Pillow raises as it opens or decodes a file that is damaged, too large or no image.
UNREADABLE_IMAGE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


#: What recipes of images begin with; then the transform as JSON, and a digest of a callable's source.
_IMAGES = "images "


def transform_of(recipe: str) -> dict[str, object]:
    """By what images of `recipe` (`Source.recipe`) became arrays: the values of a TransformSpec that are no defaults,
    by name. Nothing where they were taken as they are, or are no images."""
    found = re.match(rf"{_IMAGES}(\{{.*\}})", recipe)
    try:
        given = {} if found is None else loads(found[1])
    except (ValueError, RecursionError):  # of a table that was written by hand
        return {}
    default = asdict(TransformSpec())
    return {k: v for k, v in given.items() if v != default.get(k)} if isinstance(given, dict) else {}


def beyond_8_bits(mode: str) -> str | None:
    """Why an image of this mode of Pillow's must not become RGB, which cuts what is over 255; None where it may."""
    if not mode.startswith(("I", "F")):
        return None
    return (
        f"must have 8 bits a channel (got Pillow's mode {mode}, of which RGB keeps no value over 255). Save it with "
        "8 bits, or give arrays or a factory of samples."
    )


def wrong_count(values: Sequence[float], channels: int) -> str:
    """Why these values of a mean or std fit no image of so many channels, as "must have ..."; "" where they do."""
    if len(values) in (1, channels):
        return ""
    each = "" if channels == 1 else f", or {channels}, one a channel"
    return f"must have one value{each} (got {len(values)})"


class Images:
    """The images under `folder`; each becomes one sample of the model's only input."""

    sequential, whole = False, True

    def __init__(self, folder: str, transform: TransformSpec, inputs: Sequence[InputSpec]) -> None:
        if len(inputs) != 1:
            names = ", ".join(i.name for i in inputs)
            raise CalibError(
                f"{folder}: images feed exactly one input (got {names}). Use arrays or a factory for several inputs."
            )
        self._input = inputs[0]
        self._transform = ImageTransform(transform, self._input)
        self._folder = Path(folder)
        self.root = f"{self._folder}/"
        self._paths, self.ids, self.labels, self.classes = kept(_listing, self._folder)
        self.recipe = self._transform.recipe

    def load(self, at: int) -> Sample:
        """The decoded, transformed image, [C, H, W].

        Raises:
            CalibError: it cannot be read, or does not fit the input.
        """
        path = self._paths[at]
        try:
            with open_regular(path) as stream, Image.open(stream) as image:
                fault = beyond_8_bits(image.mode)
                pixels = image.convert("RGB")
        except UNREADABLE_IMAGE as error:
            got, step = f"{type(error).__name__}: {_without_file(error)}", "Repair or remove the file"
            if is_lfs_pointer(path):
                got, step = LFS_POINTER, FETCH.rstrip(".")
            raise CalibError(
                f"{path}: must be a readable image (got {got}). {step}, or set on_bad_sample: skip."
            ) from error
        if fault is not None:
            raise CalibError(f"{path}: {fault}")
        return {self._input.name: self._transform(str(path), pixels)}

    def content(self, at: int) -> str:
        """sha256 hex of the file.

        Raises:
            CalibError: it cannot be read.
        """
        try:
            with open_regular(self._paths[at]) as stream:
                return hashlib.sha256(stream.read()).hexdigest()
        except OSError as error:
            raise CalibError(unreadable(self._paths[at], error)) from error


def _without_file(error: Exception) -> str:
    """What the error says but for the file, which Pillow and the system name by a path or as an open stream."""
    if isinstance(error, UnidentifiedImageError):
        return "of no format that Pillow knows"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


class ImageTransform:
    """A TransformSpec for one input: PIL image in, array [C, H, W] in the binding dtype out.

    The geometry is torchvision's on the PIL image. uint8 and other integer bindings get raw pixels; float ones get
    pixels / 255 in float32, then (x - mean) / std in float32, then the cast to the binding dtype.
    """

    def __init__(self, spec: TransformSpec, binding: InputSpec) -> None:
        self._binding = binding
        self._callable: Callable[[Image.Image], object] | None = None
        mean, std = spec.normalize_mean, spec.normalize_std
        if spec.callable is not None:
            if asdict(spec) != asdict(TransformSpec(callable=spec.callable)):
                raise CalibError(
                    f"transform: callable stands in place of all others (got {spec.callable} and others). Drop either."
                )
            with undone():
                self._callable, self._name = import_callable(spec.callable, "transform.callable"), spec.callable
        if (mean is None) != (std is None):
            raise CalibError("transform.normalize: one of mean and std is missing. Give both.")
        self._float = np.dtype(binding.dtype).kind == "f"
        if mean is not None and not self._float:
            raise CalibError(
                f"transform.normalize: needs a float input (got {binding.dtype} for {binding.name!r}). An "
                f"integer input takes "
                "raw pixels; let the engine normalise, with inputs.<name>.normalize."
            )
        channels = 1 if spec.grayscale else 3
        for name, values in (("mean", mean), ("std", std)):
            if values is not None and (wrong := wrong_count(values, channels)):
                raise CalibError(f"transform.normalize.{name}: {wrong}.")
        if std is not None and not all(s > 0 for s in std):
            raise CalibError(f"transform.normalize.std: must be over 0 (got {list(std)}).")
        self._mean = None if mean is None else np.array(mean, np.float32)[:, None, None]
        self._std = None if std is None else np.array(std, np.float32)[:, None, None]
        self._spec = spec
        self.recipe = _IMAGES + json.dumps(asdict(spec), sort_keys=True) + source_digest(self._callable)

    @functools.cached_property
    def _steps(self) -> list[Callable[[Image.Image], Image.Image]]:
        """Made where the first image is: torchvision need not be there before."""
        return geometry(self._spec)

    def __call__(self, where: str, image: Image.Image) -> Array:
        """The array of one RGB image; `where` names it in errors."""
        if self._callable is not None:
            where = f"transform.callable: {self._name} on {where}"
            with user_data(where):
                made = self._callable(image)
            return self._fit(where, to_array(where, made))
        for step in self._steps:
            image = step(image)
        pixels = np.asarray(image, np.uint8)
        pixels = np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        if not self._float:
            return self._fit(where, pixels)
        values = pixels.astype(np.float32) / np.float32(255)
        if self._mean is not None and self._std is not None:
            values = (values - self._mean) / self._std
        return self._fit(where, values)

    def _fit(self, where: str, array: Array) -> Array:
        return fit(where, {self._binding.name: array}, (self._binding,))[self._binding.name]


def source_digest(function: Callable[..., object] | None) -> str:
    """Text that changes when the callable's source does; empty where it has none to read."""
    try:
        return "" if function is None else " sha256:" + hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def to_array(where: str, value: Any) -> Array:
    """A NumPy array, of its own dtype and shape, of what a user's callable gave: an array, a tensor or nested numbers.

    Raises:
        CalibError: it is none of these, or has masked values.
    """
    with user_data(f"{where}: making a NumPy array of a sample ({type(value).__name__})"):
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        masked = np.ma.is_masked(value)
        array: Array = np.array(value)  # a copy: the callable may fill the same buffer with the next sample
    if masked:
        raise CalibError(f"{where}: a sample must have no masked values (got some). Fill them: numpy.ma.filled.")
    if array.dtype.kind not in "fiub":
        raise CalibError(
            f"{where}: a sample must be an array of numbers (got {type(value).__name__} of {array.dtype})."
        )
    return array


def geometry(spec: TransformSpec) -> list[Callable[[Image.Image], Image.Image]]:
    """torchvision's transforms of the PIL image, in order: resize, center crop, grayscale."""
    from torchvision import transforms

    steps: list[Callable[[Image.Image], Image.Image]] = []
    if spec.resize is not None:
        steps.append(transforms.Resize(spec.resize, transforms.InterpolationMode(spec.interpolation)))
    if spec.center_crop is not None:
        steps.append(transforms.CenterCrop(spec.center_crop))
    if spec.grayscale:
        steps.append(transforms.Grayscale(1))
    return steps


def _listing(
    folder: Path,
) -> tuple[tuple[Path, ...], tuple[str, ...], tuple[int, ...] | None, tuple[str, ...] | None]:
    """The images in order, their names, their classes and the classes' names: no classes where the images are in the
    folder itself."""
    if not folder.is_dir():
        raise CalibError(
            f"{folder}: must be a folder of images (got {'a file' if folder.exists() else 'nothing'}). Check the path."
        )
    if names := class_folders(folder):
        by_class = [images_below(folder / name) for name in names.values()]
        labels = tuple(label for label, paths in enumerate(by_class) for _ in paths)
        files = tuple(p for paths in by_class for p in paths)
        return files, _ids(folder, files), labels, tuple(names)
    if files := tuple(images_below(folder)):
        return files, _ids(folder, files), None, None
    raise CalibError(
        f"{folder}: must hold images, or one folder of images for each class (got neither). Check the path."
    )


def _ids(folder: Path, paths: tuple[Path, ...]) -> tuple[str, ...]:
    return tuple(as_text(p.relative_to(folder).as_posix()) for p in paths)
