"""The rules by which torch.onnx's optimizer, onnxscript's, may rewrite a graph: those that keep what it computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Modules with rules that do not (onnxscript 0.7.2): a term of up to 1e-8 is taken for 0 and a factor within 1e-5 of 1
#: for 1, so that what guards against a division by zero goes; clips of bounds that exclude each other become one; rows
#: that are added to, all of them, become what is added.
_INEXACT = ("no_op", "min_max_to_clip", "fuse_relus_clips", "redundant_scatter_nd")


@contextmanager
def exact_rules() -> Iterator[None]:
    """While the block runs, the optimizer has no other rules."""
    from onnxscript import rewriter

    before = rewriter._DEFAULT_REWRITE_RULES
    modules = [m for n, m in sys.modules.items() if n.startswith("onnxscript.") and _last(n) in _INEXACT]
    inexact = {id(rule) for module in modules for rule in module.rules}
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in before if id(rule) not in inexact)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


def _last(module: str) -> str:
    return module.rpartition(".")[2].removeprefix("_")
