"""Loading ahead of the model in worker processes, by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calib.errors import CalibError


def in_workers(work: Any, workers: int) -> Iterator[Any]:
    """`work[0]`, `work[1]`, ... in order, each computed by one of `workers` processes, two ahead of need for each.

    Raises:
        CalibError: a process ended or could not be started.
    """
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(work, batch_size=None, shuffle=False, num_workers=workers, collate_fn=_as_it_is)
    try:
        yield from loader
    except RuntimeError as error:  # the loader's own; what the work raises is a value by then
        raise CalibError(
            f"workers: every worker process must live until all samples are loaded (got: {error}). "
            "Set workers to 0 to see what ends it."
        ) from error


def _as_it_is(item: Any) -> Any:
    return item
