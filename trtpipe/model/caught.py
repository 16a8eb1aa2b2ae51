"""Errors of PyTorch that a model's forward catches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trtpipe.errors import InputError
from trtpipe.model.failures import place_here, typed_line


def require_no_caught_errors(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a model that answers although PyTorch raised in it: torch.jit.trace crashes on those (2.6 to 2.14).

    Args:
        module: in eval mode.
        inputs: a batch of what it takes, of any dtypes and shapes.

    Raises:
        InputError: it does.
    """
    raised = _Raised()
    try:
        with torch.inference_mode(), raised:
            module(*inputs)
    except Exception:  # noqa: BLE001  # tracing it says so
        return
    if raised.last:
        raise InputError(
            f"model: its forward must not catch errors of PyTorch (got {raised.last}). TorchScript and torch.export "
            "follow one way through it: decide by what the inputs' shapes are, or in __init__."
        )


class _Raised(TorchFunctionMode):
    """While it is active, what PyTorch's functions raise is remembered, with the line that called them."""

    last = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            where = place_here()
            self.last = f"{typed_line(error)}{f' at {where}' if where else ''}"
            raise
