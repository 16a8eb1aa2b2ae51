"""Bicubic resizing by a whole factor, captured as one to a size.

By a factor, torch.export gives the result a size like trunc(2.0 * W), and refuses the model where that has to be the
2 W of another operation; of bilinear and nearest resizing it makes 2 W by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ToWholeSizes(TorchFunctionMode):
    """While it is active, bicubic resizing by whole factors is resizing to the sizes that they make, which computes the
    same: the step between two samples is one over the factor either way."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.interpolate and given.get("mode") == "bicubic" and args:
            if sizes := _whole(args[0], given.get("scale_factor")):
                given |= {"size": sizes, "scale_factor": None, "recompute_scale_factor": None}
        elif func is torch.ops.aten.upsample_bicubic2d.vec and len(args) == 4 and (sizes := _whole(args[0], args[3])):
            args = (args[0], sizes, args[2], None)
        return func(*args, **given)


def _whole(x: torch.Tensor, factor: Any) -> list[Any]:
    """The last two sizes of `x` [N, C, H, W] times the factor, or the two of them; none where one is not whole."""
    factors = [factor] * 2 if isinstance(factor, int | float) else list(factor or ())
    if len(factors) != 2 or any(f != int(f) for f in factors):
        return []
    return [n * int(f) for n, f in zip(x.shape[2:], factors, strict=True)]
