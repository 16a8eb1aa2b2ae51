"""What the job's code changes of the whole process, put back for later stages and other jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def put_back(note: Callable[[str], None]) -> Iterator[None]:
    """Put back what the job's code changes of the whole process within the block, with a note of each.

    These are the current folder, from which relative outputs are written, the standard streams, and torch's default
    dtype.
    """
    folder, dtype, streams = os.getcwd(), _default_dtype(), (sys.stdout, sys.stderr)
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) != streams:
            sys.stdout, sys.stderr = streams
            note("the job's code replaced sys.stdout or sys.stderr; put back")
        if os.getcwd() != folder:
            note(f"the job's code went to the folder {os.getcwd()}; back to {folder}")
            os.chdir(folder)
        found = _default_dtype()
        if found is not None and found != (dtype or "float32"):
            import torch

            note(f"the job's code set torch's default dtype to {found}; back to {dtype or 'float32'}")
            torch.set_default_dtype(getattr(torch, dtype or "float32"))


def _default_dtype() -> str | None:
    """The name of torch's default dtype; None while torch is not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
