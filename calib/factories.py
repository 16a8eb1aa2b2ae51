"""Samples from an importable callable: a sequence (a torch Dataset, a list) or an iterable that repeats itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from calib.arrays import array_digest
from calib.errors import CalibError
from calib.images import source_digest, to_array
from calib.samples import InputSpec, Sample, fit
from calib.types import Array
from calib.user_code import import_callable, undone, user_data

_END = object()
#: Samples of an iterable, which may never end, that are read where the job does not say how many to take: as many as
#: ImageNet's validation set has.
MOST_READ = 50_000


class Factory:
    """Samples that a callable gives, by position.

    A sequence is read by index. An iterable is read from its start, and again from its start when an earlier position
    is asked for; it must give the same samples each time.
    """

    classes: tuple[str, ...] | None = None

    def __init__(self, path: str, inputs: Sequence[InputSpec], limit: int | None, *, skip: bool) -> None:
        self._path, self._inputs = path, tuple(inputs)
        with undone():
            self._make = import_callable(path, "factory")
        self.recipe = f"factory {path}{source_digest(self._make)}"
        with user_data(f"factory: {path}"):
            made = self._make()
        if hasattr(made, "dataset") and hasattr(made, "batch_size"):
            raise CalibError(
                f"factory {path}: must give samples (got batches of a {type(made).__name__}). Return its dataset."
            )
        is_mapping = isinstance(made, Mapping)  # of names to whole arrays, say
        is_sequence = hasattr(made, "__getitem__") and hasattr(made, "__len__")
        self._sequence = made if is_sequence else None
        is_iterable = hasattr(made, "__iter__") or hasattr(made, "__getitem__")  # as `iter` has it
        if is_mapping or (self._sequence is None and not is_iterable):
            raise CalibError(
                f"factory {path}: must give a sequence or an iterable of samples (got {type(made).__name__}). "
                "Return a list."
            )
        self.sequential, self.root = self._sequence is None, ""
        self.whole = self._sequence is not None
        self._stream: Iterator[object] = iter(())
        self._next = 0
        labels: list[int | None] = []
        if self._sequence is not None:
            with user_data(f"factory: {path}: its length and targets"):
                count, targets = len(self._sequence), getattr(made, "targets", None)
                if targets is not None and len(targets) == count:
                    labels = [int(t) for t in targets]
            if not labels:
                labels = self._labels(count, skip)
        else:
            self._stream = self._iterator(made)
            while limit is None or len(labels) < limit:
                item = self._following(len(labels))
                if item is _END:
                    self.whole = True
                    break
                if limit is None and len(labels) == MOST_READ:
                    raise CalibError(
                        f"factory {path}: an iterable must end within {MOST_READ} samples (got more). Set samples, "
                        "which takes the first ones, or return a sequence."
                    )
                labels.append(self._split(len(labels), item)[1])
        if len({label is None for label in labels}) > 1:
            raise CalibError(
                f"factory {path}: some samples have a label and others have none. Label all of them, or none."
            )
        self.ids = tuple(f"{path}[{i}]" for i in range(len(labels)))
        self.labels: tuple[int, ...] | None = (
            tuple(v for v in labels if v is not None) if labels and labels[0] is not None else None
        )

    def _labels(self, count: int, skip: bool) -> list[int | None]:
        """The label of each item of the sequence; with `skip`, one that cannot be had has none that is known."""
        labels: list[int | None] = []
        bad = []
        for at in range(count):
            try:
                labels.append(self._split(at, self._item(at))[1])
            except CalibError:  # it is left out when its sample is loaded
                if not skip:
                    raise
                labels.append(None)
                bad.append(at)
        if any(label is not None for label in labels):
            for at in bad:
                labels[at] = -1
        return labels

    def load(self, at: int) -> Sample:
        """The arrays of one sample."""
        return fit(f"{self._path}[{at}]", self._arrays(at), self._inputs)

    def content(self, at: int) -> str:
        """sha256 hex of the arrays in the binding dtypes, whichever the callable gives."""
        return array_digest(self.load(at))

    def _arrays(self, at: int) -> dict[str, Array]:
        if self._sequence is not None:
            return self._split(at, self._item(at))[0]
        if at < self._next:
            self._next = 0
        if self._next == 0:
            with user_data(f"factory: {self._path}"):
                made = self._make()
            self._stream = self._iterator(made)
        while (item := self._following(self._next)) is not _END:
            self._next += 1
            if self._next == at + 1:
                return self._split(at, item)[0]
        raise CalibError(f"factory {self._path}: gave fewer samples than before. It must give the same ones each time.")

    def _item(self, at: int) -> Any:
        assert self._sequence is not None
        with user_data(f"factory: {self._path}[{at}]"):
            return self._sequence[at]

    def _iterator(self, made: Iterable[object]) -> Iterator[object]:
        with user_data(f"factory: {self._path}"):
            return iter(made)

    def _following(self, at: int) -> object:
        with user_data(f"factory: {self._path}[{at}]"):
            return next(self._stream, _END)

    def _split(self, at: int, item: Any) -> tuple[dict[str, Array], int | None]:
        where, label = f"{self._path}[{at}]", None
        if isinstance(item, tuple):
            scalar = len(item) == 2 and (isinstance(item[1], int) or getattr(item[1], "ndim", None) == 0)
            if not scalar:
                raise CalibError(
                    f"{where}: a sample must be an array, {{input: array}}, or a pair of that and an int label "
                    f"(got a tuple of {len(item)})."
                )
            item, label = item[0], int(item[1])
        if isinstance(item, Mapping):
            with user_data(f"{where}: reading the sample's arrays"):
                item = {name: item[name] for name in item}
        else:
            if len(self._inputs) != 1:
                raise CalibError(
                    f"{where}: must be {{input: array}} for {len(self._inputs)} inputs (got {type(item).__name__})."
                )
            item = {self._inputs[0].name: item}
        names = [i.name for i in self._inputs]
        if set(item) != set(names):
            raise CalibError(
                f"{where}: must hold the inputs {sorted(names)} (got {sorted(map(str, item))}). Name each."
            )
        return {name: to_array(where, item[name]) for name in names}, label


def open_factory(path: str, inputs: Sequence[InputSpec], limit: int | None, workers: int, *, skip: bool) -> Factory:
    """The samples of the callable at `path`; of an iterable the first `limit` ones (all when None).

    `skip`: items of a sequence that raise are samples without a label, which raise when they are loaded.

    Raises:
        CalibError: it cannot be imported, gives something else, or is an iterable and `workers` are asked for.
    """
    factory = Factory(path, inputs, limit, skip=skip)
    if workers and factory.sequential:
        raise CalibError(
            f"factory {path}: must give a sequence for worker processes to read by index (got an iterable, "
            f"workers {workers}). "
            "Set workers to 0."
        )
    return factory
