"""Samples for a model: which ones, in which order, and as which arrays. The same request gives the same batches every
time.

Image decoding and transforms are torchvision's, on PIL images; nothing here imports torch until a source is opened.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from calib.arrays import open_arrays
from calib.errors import CalibError, some_of
from calib.factories import open_factory
from calib.folders import unread
from calib.images import Images
from calib.loading import in_workers
from calib.process_state import imported
from calib.samples import (
    SOURCES,
    Batch,
    DataSpec,
    InputSpec,
    Origin,
    Sample,
    TransformSpec,
    combine_digests,
    figures,
    require_batch_size,
    same_figures,
)
from calib.types import Array

#: Labels are int64.
_PAST_LABELS = 1 << 63


class Source:
    """Drawn samples, which can be batched any number of times, in the same order each time.

    Raises:
        CalibError: a label is no int64.
    """

    def __init__(self, origin: Origin, inputs: Sequence[InputSpec], drawn: Sequence[int], workers: int = 0) -> None:
        self.names = tuple(i.name for i in inputs)
        self._origin, self._inputs, self._drawn, self._workers = origin, tuple(inputs), tuple(drawn), workers
        self.skipped: tuple[str, ...] = ()
        self._seen: dict[str, npt.NDArray[np.float64]] = {}  # the figures of what was read, by id
        for name, label in zip(origin.ids, origin.labels or (), strict=False):
            if not -_PAST_LABELS <= label < _PAST_LABELS:
                raise CalibError(
                    f"{name}: a label must be a class from 0, or -1 where it is unknown (got {label}). Save labels as "
                    "int64."
                )

    @property
    def total_count(self) -> int | None:
        """How many samples there are to draw from; None of an iterable of which no more are read than are used."""
        return len(self._origin.ids) if self._origin.whole else None

    @property
    def sample_count(self) -> int:
        """How many samples `batches` gives."""
        return len(self._drawn)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the samples, in order: file names relative to the folder, or "file[position]"."""
        return tuple(self._origin.ids[i] for i in self._drawn)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
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
        """sha256 hex of each sample's content (`Origin.content`), in order. The first use reads every file once."""
        return tuple(self._origin.content(i) for i in self._drawn)

    @property
    def recipe(self) -> str:
        """Canonical text of the transform and the input bindings: what turns content into arrays."""
        shapes = ([d if isinstance(d, int) else None for d in i.sample_shape] for i in self._inputs)
        bindings = [f"{i.name}:{i.dtype}{shape}" for i, shape in zip(self._inputs, shapes, strict=True)]
        return "\n".join([self._origin.recipe, *bindings])

    @property
    def digest(self) -> str:
        """sha256 hex of the samples drawn (names and content, in whatever order) and how they become arrays."""
        return combine_digests(dict(zip(self.ids, self.sample_digests, strict=True)), self.recipe)

    def numbered_by(self, names: Sequence[str], given_by: str = "") -> Source:
        """The same samples with labels that are places in `names`, which has to have every class of this source.

        `given_by` is what says the names, for the message.

        Raises:
            CalibError: it has not, or the classes of this source have no names.
        """
        have = self.classes
        if have is None or self._origin.labels is None:
            raise CalibError("labels: the samples have no class names. Give images in one folder for each class.")
        if unknown := [c for c in have if c not in names]:
            alike = {unicodedata.normalize("NFC", n) for n in names}
            if odd := [c for c in unknown if unicodedata.normalize("NFC", c) in alike]:
                raise CalibError(
                    f"labels: every class folder must be a class of the model (got {odd[0]}, which looks like one and "
                    "is another Unicode form of it, as folders from macOS are). Write both alike: NFC."
                )
            by = f", by {given_by}" if given_by else ""
            raise CalibError(
                f"labels: every class folder must be a class of the model (got {some_of(unknown)}, which is none). "
                f"The model's classes{by}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. "
                "Rename the folders, or name the classes in check.labels."
            )
        places = [list(names).index(c) for c in have]
        labels = tuple(places[k] for k in self._origin.labels)
        return self._relabelled(_Relabelled(self._origin, labels, tuple(names)))

    def first(self, count: int) -> Source:
        """The first `count` samples; this source itself where it has no more."""
        return self if len(self._drawn) <= count else self._of(self._origin, self._drawn[:count])

    def distinct(self) -> Source:
        """Of the samples that hold the same the first; this source itself where all differ."""
        first = dict(reversed([*zip(self.sample_digests, self._drawn, strict=True)]))
        kept = set(first.values())
        return self if len(kept) == len(self._drawn) else self._of(self._origin, [i for i in self._drawn if i in kept])

    def without_labels(self) -> Source:
        """The same samples, of unknown class."""
        return self._relabelled(_Relabelled(self._origin, None, None))

    def labelled(self, labels: Mapping[str, int]) -> Source:
        """The same samples with the class that `labels` gives each by its name, which has to be there."""
        given = tuple(labels.get(name, -1) for name in self._origin.ids)  # of samples not drawn, nothing is known
        return self._relabelled(_Relabelled(self._origin, given, None))

    def _relabelled(self, origin: Origin) -> Source:
        return self._of(origin, self._drawn)

    def _of(self, origin: Origin, drawn: Sequence[int]) -> Source:
        source = Source(origin, self._inputs, drawn, self._workers)
        source.skipped, source._seen = self.skipped, self._seen
        return source

    def _require_same(self, batch: Batch) -> None:
        """Refuse samples that hold other values than when they were read before: what is compared on them would be of
        different ones."""
        now = figures(batch.arrays)
        for name, row in zip(batch.ids, now, strict=True):
            if not same_figures(self._seen.setdefault(name, row), row):
                raise CalibError(
                    f"{name}: must hold the same values each time it is read (got others than at first). Take out what "
                    "is random in how samples are made, as transforms for training and shuffling are, or seed it."
                )

    def batches(self, batch_size: int, *, apart: bool = False) -> Iterator[Batch]:
        """All samples in order, `batch_size` at a time; the last batch holds the rest.

        Args:
            batch_size: how many samples make a batch.
            apart: where samples of one batch differ in shape, make several of it, each of one shape.

        Raises:
            CalibError: batch_size under 1; a sample that cannot be read or used, or holds other values than when it was
                read before, naming it; samples of several shapes in one batch, unless they are kept `apart`.
        """
        require_batch_size(batch_size)
        chunks = [self._drawn[i : i + batch_size] for i in range(0, len(self._drawn), batch_size)]
        work = _Loading(self._origin, chunks, apart)
        loaded: Iterator[tuple[Batch, ...] | CalibError] = map(work.__getitem__, range(len(chunks)))
        if self._workers:
            loaded = in_workers(work, self._workers)
        for made in loaded:
            if isinstance(made, CalibError):
                raise made
            for batch in made:
                self._require_same(batch)
                yield batch

    def without_bad(self) -> Source:
        """The same source less the samples that cannot be loaded, which its `skipped` names. Loads each one once."""
        singles = _Loading(self._origin, [(i,) for i in self._drawn])
        loaded: Iterator[tuple[Batch, ...] | CalibError] = map(singles.__getitem__, range(len(self._drawn)))
        if self._workers:
            loaded = in_workers(singles, self._workers)
        tried = zip(self._drawn, loaded, strict=True)
        problems = {i: _fault(b, self._origin) for i, b in tried if isinstance(b, CalibError)}
        kept = Source(self._origin, self._inputs, [i for i in self._drawn if i not in problems], self._workers)
        kept.skipped = tuple(problems.values())
        return kept


def _fault(error: CalibError, origin: Origin) -> str:
    """What is wrong with a sample, in words that are the same on every machine: by its id, without what to do now that
    it is left out, and without the frames of the user's code."""
    line = str(error).partition("\n")[0]
    if origin.root:
        line = line.replace(origin.root, "")
    fact, end, _ = line.rpartition("). ")
    return f"{fact})" if end else line


class _Relabelled:
    """The samples of another origin under other labels."""

    def __init__(self, origin: Origin, labels: tuple[int, ...] | None, classes: tuple[str, ...] | None) -> None:
        self.ids, self.recipe, self.sequential, self.root = origin.ids, origin.recipe, origin.sequential, origin.root
        self.whole = origin.whole
        self.labels, self.classes = labels, classes
        self._origin = origin

    def load(self, at: int) -> Sample:
        """The arrays of one sample."""
        return self._origin.load(at)

    def content(self, at: int) -> str:
        """sha256 hex of one sample, as the other origin has it."""
        return self._origin.content(at)


class _Loading:
    """Batches by position, several of one place where samples of other shapes are kept apart; an error is returned as
    a value, since it may have to cross a process boundary."""

    def __init__(self, origin: Origin, chunks: Sequence[Sequence[int]], apart: bool = False) -> None:
        self.origin, self.chunks, self.apart = origin, chunks, apart

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: int) -> tuple[Batch, ...] | CalibError:
        chunk = self.chunks[at]
        try:
            with _made_on_the_cpu():
                samples = [self.origin.load(i) for i in chunk]
            pairs = zip(chunk, samples, strict=True)
            alike = groupby(pairs, lambda pair: {n: a.shape for n, a in pair[1].items()} if self.apart else None)
            return tuple(self._batch(*zip(*run, strict=True)) for _, run in alike)
        except CalibError as error:
            return error

    def _batch(self, chunk: Sequence[int], samples: Sequence[Sample]) -> Batch:
        origin = self.origin
        ids = tuple(origin.ids[i] for i in chunk)
        labels = None if origin.labels is None else np.array([origin.labels[i] for i in chunk], np.int64)
        arrays: dict[str, Array] = {}
        for name in samples[0]:
            shapes = {s[name].shape for s in samples}
            if len(shapes) > 1:
                odd = next(i for i, s in zip(ids, samples, strict=True) if s[name].shape != samples[0][name].shape)
                raise CalibError(
                    f"{odd}: samples of one batch must have one shape for input {name!r} (got {sorted(shapes)}). "
                    "Resize or crop them, or use batch_size 1."
                )
            arrays[name] = np.stack([s[name] for s in samples])
        return Batch(arrays, labels, ids)


def _made_on_the_cpu() -> AbstractContextManager[object]:
    """New tensors of torch are on the CPU in the block, also where a model that a GPU computes asks for samples."""
    torch = imported("torch")
    return nullcontext() if torch is None else torch.device("cpu")


def open_source(spec: DataSpec, inputs: Sequence[InputSpec]) -> Source:
    """The samples that `spec` asks for, as the arrays that `inputs` take.

    Files are listed and drawn now and read when iterated; with on_bad_sample "skip" every drawn sample is also loaded
    once now, so that the source's ids and count are what its batches give.

    Raises:
        CalibError: not exactly one kind of data; data that is missing, empty, fewer than asked, or does not fit the
        inputs.
    """
    given = [k for k in SOURCES if getattr(spec, k) is not None]
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
        empty = f"{where}: holds no samples"
        reasons = () if spec.images is None else unread(empty, spec.images, classes=True)
        raise CalibError(next(iter(reasons), f"{empty}. Check the path."))
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


def _origin(spec: DataSpec, inputs: Sequence[InputSpec]) -> Origin:
    if not inputs:
        raise CalibError("inputs: at least one is needed.")
    if spec.images is not None:
        return Images(spec.images, spec.transform or TransformSpec(), inputs)
    if spec.arrays is not None:
        arrays = open_arrays(spec.arrays, inputs)
        if spec.workers and arrays.ids:
            arrays.stored(0)  # what it then holds of the file, its workers have too
        return arrays
    assert spec.factory is not None
    return open_factory(spec.factory, inputs, spec.samples, spec.workers, skip=spec.on_bad_sample == "skip")
