"""Loading ahead of the model in worker processes, by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def in_workers(work: Any, workers: int) -> Iterator[Any]:
    """`work[0]`, `work[1]`, ... in order, each computed by one of `workers` processes, two ahead of need for each."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(work, batch_size=None, shuffle=False, num_workers=workers, collate_fn=_as_it_is)
    return iter(loader)


def _as_it_is(item: Any) -> Any:
    return item
