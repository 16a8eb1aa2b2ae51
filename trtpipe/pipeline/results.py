"""Results of stages that need not be computed again: what may hold them, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from trtpipe.pipeline.codecs import Codec

T = TypeVar("T")


class Results(Protocol):
    """Results of stages that need not be computed again."""

    def in_memory(self, name: str, make: Callable[[], T]) -> T:
        """A value that only lives in this process: the one that an earlier job with the same model made, or `make()`.

        Args:
            name: "model" or "capture".
            make: makes it.
        """

    def on_disk(self, codec: Codec[T], make: Callable[[], T]) -> T:
        """A value that can be stored: the one stored for this job's stage, or `make()`.

        Args:
            codec: which kind of value it is, and how it is stored.
            make: makes it.
        """

    def recording(self) -> AbstractContextManager[object]:
        """A context manager that records what the job's code reads; entered while that code may run."""


class Uncached:
    """`Results` without a store: everything is computed."""

    def in_memory(self, name: str, make: Callable[[], T]) -> T:
        """Make it."""
        return make()

    def on_disk(self, codec: Codec[T], make: Callable[[], T]) -> T:
        """Make it."""
        return make()

    def recording(self) -> AbstractContextManager[object]:
        """Record nothing."""
        return nullcontext()
