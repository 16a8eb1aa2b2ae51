"""Outputs that a model sorts: a place in them is a rank, and no class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trtpipe.errors import InputError
from trtpipe.model.bindings import Bound

#: Operators whose values and places come in order.
_SORT = ("aten::topk", "aten::sort", "aten::msort")
#: Operators that leave each entry at its place, beside those of single elements.
_IN_PLACE = (
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::flatten", "aten::expand", "aten::clone",
    "aten::contiguous", "aten::alias", "aten::detach", "aten::slice", "aten::narrow", "aten::squeeze",
    "aten::unsqueeze", "aten::to", "aten::_to_copy", "aten::softmax", "aten::_softmax",
    "aten::log_softmax", "aten::_log_softmax",
)  # fmt: skip


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation, and keeps the tensors whose entries are in the order of a sort."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranked: dict[int, torch.Tensor] = {}  # the tensors are held, as an id is one's only while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _SORT:
            of = made if isinstance(made, (list, tuple)) else (made,)
            self.ranked |= {id(t): t for t in of}
        elif isinstance(made, torch.Tensor) and (name in _IN_PLACE or torch.Tag.pointwise in func.tags):
            ranked = [a for a in args if isinstance(a, torch.Tensor) and id(a) in self.ranked]
            # The least of the k largest, against which all scores are held, gives the result no order.
            if any(name in _IN_PLACE or a.shape[-1:] == made.shape[-1:] for a in ranked):
                self.ranked[id(made)] = made
        return made


def returned_in_order(module: Bound, args: Sequence[torch.Tensor]) -> tuple[object, frozenset[int]]:
    """What the network returns for `args`, one tensor an input, in its dtype and shape [N, ...], and the places of the
    outputs whose entries it has sorted.

    What cannot be followed, such as a function that PyTorch has compiled, is run as it is, and sorts nothing.

    Raises:
        InputError: what it returns is not what the job names.
    """
    following = _Following()
    try:
        with following:
            returned = module.returned(args)
            outputs = module.outputs(returned)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException:  # noqa: BLE001  (whether it runs at all, the next line says)
        return module.returned(args), frozenset()
    return returned, frozenset(k for k, t in enumerate(outputs) if id(t) in following.ranked)
