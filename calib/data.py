"""Samples for a model: which ones, in which order, and as which arrays. The same request gives the same batches every
time.

Image decoding and transforms are torchvision's, on PIL images; nothing here imports torch until a source is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from calib.errors import CalibError

Array = np.ndarray[Any, np.dtype[Any]]
Sample = dict[str, Array]


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
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    normalize_mean: tuple[float, ...] | None = None
    normalize_std: tuple[float, ...] | None = None
    callable: str | None = None


@dataclass(frozen=True)
class DataSpec:
    """Where samples come from and which are drawn. Exactly one of images, arrays and factory is set.

    Attributes:
        images: an ImageFolder: one folder a class.
        arrays: .npy (one input), .npz or .safetensors holding [S, ...] by input name, and int `labels` [S] if known.
        factory: "package.module:callable"; called without arguments it gives a sequence, or an iterable that gives
            the same samples each time, of {input name: array}, of an array (one input), or of (either, int label). Of
            an iterable the first `samples` are used, in its order.
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
    on_bad_sample: Literal["error", "skip"] = "error"


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: NumPy dtype name, and shape without the batch dimension, None where it may vary."""

    name: str
    dtype: str
    sample_shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Batch:
    """Some samples: arrays [B, ...] by input name in the binding dtype, int64 labels [B] if known, and their ids."""

    arrays: dict[str, Array]
    labels: np.ndarray[Any, np.dtype[np.int64]] | None
    ids: tuple[str, ...]


class Origin(Protocol):
    """Samples by position, as `images`, `arrays` and `factories` hold them."""

    ids: tuple[str, ...]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...] | None
    recipe: str  # what besides a sample's content decides its arrays: goes into the digest
    sequential: bool  # whether going backwards is slow: such samples are used in the order they come

    def load(self, at: int) -> Sample:
        """The arrays of one sample in the binding dtypes; CalibError when it is bad."""

    def content(self, at: int) -> str:
        """sha256 hex of what is stored of one sample, before any transform."""


class Source:
    """Samples drawn and ready to be batched, as often as wanted, in the same order each time."""

    def __init__(self, origin: Origin, inputs: Sequence[InputSpec], drawn: Sequence[int], workers: int = 0) -> None:
        self.names = tuple(i.name for i in inputs)
        self._origin, self._inputs, self._drawn, self._workers = origin, tuple(inputs), tuple(drawn), workers
        self.skipped: tuple[str, ...] = ()

    @property
    def sample_count(self) -> int:
        """How many samples `batches` gives."""
        return len(self._drawn)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the samples, in order: file names relative to the folder, or "file[position]"."""
        return tuple(self._origin.ids[i] for i in self._drawn)

    @property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """int64 [S], indices into `classes` where those are known; None without labels."""
        return (
            None if self._origin.labels is None else np.array([self._origin.labels[i] for i in self._drawn], np.int64)
        )

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in ImageFolder's order; None when unknown."""
        return self._origin.classes

    @cached_property
    def sample_digests(self) -> tuple[str, ...]:
        """sha256 hex of each sample's stored content, in order. The first use reads every file once."""
        return tuple(self._origin.content(i) for i in self._drawn)

    @property
    def recipe(self) -> str:
        """Canonical text of the transform and the input bindings: what turns stored content into arrays."""
        bindings = [f"{i.name}:{i.dtype}{list(i.sample_shape)}" for i in self._inputs]
        return "\n".join([self._origin.recipe, *bindings])

    @property
    def digest(self) -> str:
        """sha256 hex of the samples drawn (names and content, in whatever order) and how they become arrays."""
        return combine_digests(dict(zip(self.ids, self.sample_digests, strict=True)), self.recipe)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All samples in order, `batch_size` at a time; the last batch holds the rest.

        Raises:
            CalibError: batch_size under 1; a sample that cannot be read or used, naming it.
        """
        if batch_size < 1:
            raise CalibError(f"batch_size: must be at least 1 (got {batch_size}).")
        chunks = [self._drawn[i : i + batch_size] for i in range(0, len(self._drawn), batch_size)]
        work = _Loading(self._origin, chunks)
        loaded: Iterator[Batch | CalibError] = map(work.__getitem__, range(len(chunks)))
        if self._workers:
            from calib.loading import in_workers

            loaded = in_workers(work, self._workers)
        for batch in loaded:
            if isinstance(batch, CalibError):
                raise batch
            yield batch

    def without_bad(self) -> Source:
        """The same source less the samples that cannot be loaded, which its `skipped` names. Loads each one once."""
        singles = _Loading(self._origin, [(i,) for i in self._drawn])
        loaded: Iterator[Batch | CalibError] = map(singles.__getitem__, range(len(self._drawn)))
        if self._workers:
            from calib.loading import in_workers

            loaded = in_workers(singles, self._workers)
        problems = {i: str(b) for i, b in zip(self._drawn, loaded, strict=True) if isinstance(b, CalibError)}
        kept = Source(self._origin, self._inputs, [i for i in self._drawn if i not in problems], self._workers)
        kept.skipped = tuple(problems.values())
        return kept


class _Loading:
    """Batches by position; an error is given back as a value, since it may have to cross a process boundary."""

    def __init__(self, origin: Origin, chunks: Sequence[Sequence[int]]) -> None:
        self.origin, self.chunks = origin, chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: int) -> Batch | CalibError:
        chunk, origin = self.chunks[at], self.origin
        try:
            samples = [origin.load(i) for i in chunk]
        except CalibError as error:
            return error
        ids = tuple(origin.ids[i] for i in chunk)
        labels = None if origin.labels is None else np.array([origin.labels[i] for i in chunk], np.int64)
        arrays: dict[str, Array] = {}
        for name in samples[0]:
            shapes = {s[name].shape for s in samples}
            if len(shapes) > 1:
                odd = next(i for i, s in zip(ids, samples, strict=True) if s[name].shape != samples[0][name].shape)
                return CalibError(
                    f"{odd}: samples of one batch must have one shape for input {name!r} (got {sorted(shapes)}). "
                    "Resize or crop them, or use batch_size 1."
                )
            arrays[name] = np.stack([s[name] for s in samples])
        return Batch(arrays, labels, ids)


def open_source(spec: DataSpec, inputs: Sequence[InputSpec]) -> Source:
    """The samples that `spec` asks for, as the arrays that `inputs` take.

    Files are listed and drawn now and read when iterated; with on_bad_sample "skip" every drawn sample is also loaded
    once now, so that the source's ids and count are what its batches give.

    Raises:
        CalibError: not exactly one kind of data; data that is missing, empty, fewer than asked, or does not fit the
        inputs.
    """
    given = [k for k in ("images", "arrays", "factory") if getattr(spec, k) is not None]
    if len(given) != 1:
        raise CalibError(
            f"data: exactly one of images, arrays and factory must be set (got {' and '.join(given) or 'none'})."
        )
    if spec.samples is not None and spec.samples < 1:
        raise CalibError(f"samples: must be at least 1 (got {spec.samples}).")
    if spec.workers < 0:
        raise CalibError(f"workers: must be 0 or more (got {spec.workers}).")
    if spec.transform is not None and spec.images is None:
        raise CalibError(
            f"transform: applies to images alone (got {given[0]}). Transform the samples where they are made "
            f"and leave it out."
        )
    origin = _origin(spec, inputs)
    where, total = str(getattr(spec, given[0])), len(origin.ids)
    if not total:
        raise CalibError(f"{where}: must hold samples (got none). Check the path.")
    if spec.samples is not None and total < spec.samples:
        raise CalibError(
            f"{where}: must hold at least {spec.samples} samples (got {total}). Ask for fewer, or add some."
        )
    drawn = list(range(total)) if origin.sequential else draw(origin.ids, origin.labels, spec.samples, spec.seed)
    source = Source(origin, inputs, drawn, spec.workers)
    if spec.on_bad_sample == "skip":
        source = source.without_bad()
        if not source.sample_count:
            raise CalibError(
                f"{where}: no sample could be used (got {len(source.skipped)} bad ones). {source.skipped[0]}"
            )
    return source


def draw(ids: Sequence[str], labels: Sequence[int] | None, samples: int | None, seed: int) -> list[int]:
    """Positions of the samples drawn, in the order they are to be used.

    Every sample has a fixed place in a random-looking order: that of sha256(seed, id), the same on every machine.
    Classes share `samples` in proportion to their size (largest remainders), with at least one each where that is
    possible.
    """
    place = {i: hashlib.sha256(f"{seed}\0{name}".encode()).digest() for i, name in enumerate(ids)}
    order = sorted(place, key=place.__getitem__)
    if samples is None or samples >= len(order):
        return order
    groups: dict[int, list[int]] = {}
    for i in order:
        groups.setdefault(labels[i] if labels is not None else 0, []).append(i)
    least = 1 if samples >= len(groups) else 0
    shares = {k: max(least, len(v) * samples / len(order)) for k, v in groups.items()}
    counts = {k: int(s) for k, s in shares.items()}
    by_remainder = sorted(groups, key=lambda k: (counts[k] - shares[k], k))
    while sum(counts.values()) > samples:
        largest = max((k for k in groups if counts[k] > least), key=lambda k: (counts[k], k))
        counts[largest] -= 1
    while sum(counts.values()) < samples:
        for k in by_remainder:
            if sum(counts.values()) < samples and counts[k] < len(groups[k]):
                counts[k] += 1
    drawn = {i for k, v in groups.items() for i in v[: counts[k]]}
    return [i for i in order if i in drawn]


def overlap(source_a: Source, source_b: Source) -> tuple[str, ...]:
    """Ids of the samples of `source_a` whose stored content is also in `source_b`, whatever they are called there."""
    other = set(source_b.sample_digests)
    return tuple(i for i, d in zip(source_a.ids, source_a.sample_digests, strict=True) if d in other)


def combine_digests(samples: dict[str, str], recipe: str) -> str:
    """sha256 hex of {sample id: content digest} in sorted order and of the recipe."""
    lines = [recipe, *(f"{name}\0{digest}" for name, digest in sorted(samples.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fit(where: str, array: Array, spec: InputSpec) -> Array:
    """`array` as the binding takes it: the shape checked, floats cast to a float dtype and integers to an integer one.

    Raises:
        CalibError: another rank or size, a dtype of another kind, a value that does not fit or is not finite.
    """
    shape = tuple(array.shape)
    if len(shape) != len(spec.sample_shape) or any(
        w not in (None, g) for w, g in zip(spec.sample_shape, shape, strict=True)
    ):
        wanted = ["any" if d is None else d for d in spec.sample_shape]
        raise CalibError(
            f"{where}: a sample of input {spec.name!r} must have shape {wanted} (got {list(shape)}). "
            "Change the transform (resize, center_crop, grayscale) or the input's shape."
        )
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
                f"{where}: input {spec.name!r} is {dtype} and a value does not fit (got {array.dtype} data)."
            )
    else:
        raise CalibError(
            f"{where}: input {spec.name!r} must be given as {dtype} (got {array.dtype}). "
            "Convert the data, or change the input's dtype in the job."
        )
    if dtype.kind == "f" and not np.isfinite(result).all():
        bad = int(np.size(result) - np.isfinite(result).sum())
        raise CalibError(f"{where}: every value of input {spec.name!r} must be finite (got {bad} NaN or infinite).")
    return result


def _origin(spec: DataSpec, inputs: Sequence[InputSpec]) -> Origin:
    if not inputs:
        raise CalibError("inputs: at least one is needed (got none).")
    if spec.images is not None:
        from calib.images import Images

        return Images(spec.images, spec.transform or TransformSpec(), inputs)
    if spec.arrays is not None:
        from calib.arrays import open_arrays

        return open_arrays(spec.arrays, inputs)
    from calib.factories import open_factory

    assert spec.factory is not None
    return open_factory(spec.factory, inputs, spec.samples, spec.workers)
