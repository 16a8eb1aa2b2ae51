"""What each kind of target has in INT8: a model is calibrated and corrected once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from trtpipe.model.marks import is_marked
from trtpipe.model.sites import kept_sites
from trtpipe.quantization.payoff import gains_nothing, places
from trtpipe.quantization.policy import Modes
from trtpipe.quantization.precision import Keep
from trtpipe.trt.flavour import TARGET_TITLES, FlavourName
from trtpipe.values import Captured

if TYPE_CHECKING:
    from trtpipe.job.job import Job


@dataclass(frozen=True)
class Placement:
    """Which operations are in INT8.

    Attributes:
        title: the target that has them so, as messages name it; "" where there is one placement.
        wide: names of the operations that could be in INT8 and are not.
    """

    title: str
    wide: frozenset[str]

    def of(self, captured: Captured) -> Captured:
        """The graph with sites of the operations in INT8 alone."""
        return replace(captured, sites=kept_sites(captured.sites, lambda n: n.name in self.wide))


#: All that can be.
EVERYTHING = Placement("", frozenset())


def placements(job: Job, captured: Captured) -> tuple[Placement, ...]:
    """What the rules leave in INT8 for a job on each kind of target, fewest operations first.

    A model is calibrated and corrected once for all targets: P4 is TensorRT-RTX's alone. What `precision.keep` keeps
    makes no noise that others could make up for; `precision.formats` has no part, as other formats make some too.
    """
    if is_marked(captured.graph):
        return (EVERYTHING,)
    keep = Keep.of(job.precision.keep)
    kept = frozenset(s.consumer.name for s in captured.sites if keep.out_of_int8(s.consumer))
    if not places(job):
        return (Placement("", kept),)
    wide: dict[frozenset[str], str] = {}
    for target in get_args(FlavourName):
        out, _ = gains_nothing(captured, target, Modes(frozenset({"int8"})), keep)
        wide.setdefault(kept | frozenset(out), TARGET_TITLES[target])
    found = [Placement(title, out) for out, title in wide.items()]
    return tuple(sorted(found, key=lambda p: -len(p.wide))) if len(found) > 1 else (replace(found[0], title=""),)
