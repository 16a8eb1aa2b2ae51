"""Loading ahead of the model in worker processes, by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from calib.errors import CalibError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Items(Protocol[T_co]):
    """Items by position; pickled to worker processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int) -> T_co: ...


def in_workers(work: Items[T], workers: int) -> Iterator[T]:
    """`work[0]`, `work[1]`, ... in order, each computed by one of `workers` processes, two ahead of need for each.

    Raises:
        CalibError: a process ended or could not be started.
    """
    from torch.utils.data import DataLoader

    loader: DataLoader[T] = DataLoader(
        work,  # type: ignore[arg-type]  # a map-style dataset needs no base class
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        collate_fn=_as_it_is,
    )
    try:
        yield from loader
    except RuntimeError as error:  # the loader's own; what the work raises is a value by then
        raise CalibError(
            f"workers: a worker process ended before all samples were loaded ({error}). "
            "Set workers to 0 to see what ends it."
        ) from error


def _as_it_is(item: T) -> T:
    return item
