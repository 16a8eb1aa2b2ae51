"""What each module costs the model when it alone is quantized."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from trtpipe.batching import ranked_output, unranked
from trtpipe.errors import Cancelled, InputError
from trtpipe.model.computing import CPU, apart, placed, sent
from trtpipe.model.sites import of_product
from trtpipe.quantization import narrow as narrow_formats
from trtpipe.quantization.partial import Partial, Roundings, Spent, roundings
from trtpipe.quantization.policy import Assignment, Choice, Modes, cannot
from trtpipe.quantization.precision import scale_types
from trtpipe.quantization.quantize import Narrow, SitePlan, narrow_sites, plan_sites
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.quantization.units import Unit, find_units

if TYPE_CHECKING:
    from torch.fx import Node

    from trtpipe.progress import Progress
    from trtpipe.quantization.precision import Keep, ScaleTypes
    from trtpipe.values import Captured, TensorSpec


#: Modules that are measured however little time there is.
LEAST = 1
EightBits = Literal["int8", "fp8"]
_NO_RANGES: Mapping[str, float] = {}


@dataclass(frozen=True)
class SampleBatch:
    """Inputs in order, each [B, ...]; how many samples count (the rest is padding); labels [B] or None."""

    inputs: tuple[torch.Tensor, ...]
    count: int
    labels: torch.Tensor | None = None


@dataclass
class _Ratio:
    """Energy of a signal and of the noise in it, summed over batches in float64. Mutable: the sums."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, reference: torch.Tensor, output: torch.Tensor) -> None:
        self.signal += float(reference.double().square().sum())
        self.noise += float(apart(reference, output).square().sum())

    def add_samples(self, reference: object, output: object, count: int) -> None:
        """The same of an operation's value: a tensor, or several as a split gives."""
        for wanted, got in zip(tree_leaves(reference), tree_leaves(output), strict=True):
            self.add(wanted[:count], got[:count])

    @property
    def db(self) -> float:
        if self.noise == 0:
            return math.inf
        if not math.isfinite(self.noise) or self.signal == 0:
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)


@dataclass
class _Losses:
    """What is summed of one unit over all batches. Mutable: the sums."""

    unit: Unit
    changed: Roundings
    others: Mapping[EightBits, Roundings]
    specs: tuple[TensorSpec, ...]
    outputs: list[_Ratio]
    last_label: int
    own: _Ratio = field(default_factory=_Ratio)
    half: _Ratio = field(default_factory=_Ratio)
    in_others: dict[EightBits, _Ratio] = field(default_factory=dict)
    ranked: bool = False
    samples: int = 0
    agreeing: int = 0
    labelled: int = 0
    loss_rise: float = 0.0

    def add(self, reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], sample: SampleBatch) -> None:
        """Sum what the unit alone in its format does to one batch; classes are those of `ranked_output`."""
        self.samples += sample.count
        pairs = [
            (_rows(spec, a, sample.count), _rows(spec, b, sample.count), spec)
            for spec, a, b in zip(self.specs, reference, outputs, strict=True)
        ]
        for ratio, (a, b, _) in zip(self.outputs, pairs, strict=True):
            ratio.add(a, b)
        scores = {
            spec.name: (a.float(), b.float())
            for a, b, spec in pairs
            if not unranked(spec) and a.is_floating_point() and a.dim() == 2 and a.shape[1] > 1
        }
        if not scores:
            return
        a, b = scores[ranked_output({name: a.shape[1] for name, (a, _) in scores.items()}, self.last_label)]
        self.ranked = True
        self.agreeing += int((a.argmax(1) == b.argmax(1)).sum())
        if sample.labels is None:
            return
        labels = sample.labels[: sample.count]
        known = (labels >= 0) & (labels < a.shape[1])
        a, b, labels = a[known], b[known], labels[known]
        losses = [torch.nn.functional.cross_entropy(x, labels, reduction="sum") for x in (a, b)]
        self.labelled += len(labels)
        self.loss_rise += float(losses[1] - losses[0])

    def result(self, macs: int, half: torch.dtype | None) -> ModuleSensitivity:
        """The figures of the unit."""
        used = {spec.name: r.db for spec, r in zip(self.specs, self.outputs, strict=True) if r.signal or r.noise}
        return ModuleSensitivity(
            self.unit.path,
            self.unit.source,
            self.unit.op,
            min(used.values(), default=math.inf),
            self.own.db,
            None if half is None else self.half.db,
            macs,
            self.agreeing / self.samples if self.ranked else None,
            self.loss_rise / self.labelled if self.labelled else None,
            fp8_sqnr_db=self.in_others["fp8"].db if "fp8" in self.in_others else None,
            int8_sqnr_db=self.in_others["int8"].db if "int8" in self.in_others else None,
            outputs_db=used,
        )


def measure_sensitivity(
    captured: Captured,
    amax: Mapping[str, float],
    samples: Iterable[SampleBatch],
    *,
    half: torch.dtype | None,
    keep: Keep,
    progress: Progress,
    ranges: Mapping[str, float] = _NO_RANGES,
    int8: bool = True,
    narrow: Narrow | None = None,
    seconds: float | None = None,
    device: str = CPU,
    last_label: int = -1,
) -> Sensitivity:
    """Each quantizable module alone in its format (INT8, or what `narrow` gives it), the rest in float32.

    One float32 pass walks along the graph with only the values that are still needed. Where it reaches a module, the
    rest of the graph is executed once from there with that module's inputs and weights rounded: nothing before
    the module is ever computed twice. For a network that is a chain of n equal modules that is (n + 1) / 2 passes, and
    one for the float values. A residual add's INT8 skip branch counts to the convolution that the add is fused with.

    Args:
        captured: the hub graph.
        amax: float amax by table key.
        samples: what to execute; read once.
        half: torch.float16, torch.bfloat16 or None: what scales are rounded to where `quantize` rounds them, and what
            `half_sqnr_db` is about.
        keep: modules that the job keeps wide already; they are not measured.
        progress: receives the modules done in each batch, and may cancel.
        ranges, int8, narrow: as for `quantize`.
        seconds: after this long, and the measurement that then runs, what was measured is given; None: however long it
            takes. A network that needs longer for one batch is measured in the modules that lose most at their own
            output, as many as there is time for.
        device: where PyTorch computes; formats below INT8 on the CPU alone.
        last_label: the largest label of the samples, by which one of several outputs of scores counts; -1 without any.

    Raises:
        InputError: nothing is left to quantize, or there is no sample.
        Cancelled: progress asked to stop.
    """
    on = CPU if narrow is not None else device
    with placed(captured.graph, on):
        there = (
            SampleBatch(sent(s.inputs, on), s.count, None if s.labels is None else s.labels.to(on)) for s in samples
        )
        return _measured(captured, amax, there, half, keep, progress, ranges, int8, narrow, seconds, last_label)


def _measured(
    captured: Captured,
    amax: Mapping[str, float],
    samples: Iterable[SampleBatch],
    half: torch.dtype | None,
    keep: Keep,
    progress: Progress,
    ranges: Mapping[str, float],
    int8: bool,
    narrow: Narrow | None,
    seconds: float | None,
    last_label: int,
) -> Sensitivity:
    clock = _Clock(seconds)
    graph = captured.graph
    plan = plan_sites(captured, int8=int8, keep=keep, modes=None if narrow is None else narrow.modes)
    units = find_units((*plan.int8, *dict.fromkeys(n.site for n in plan.narrow)))
    if not units:
        raise InputError("sensitivity: no module is left to quantize. Narrow precision.keep.")
    began = time.perf_counter()
    machine, bare, count = Partial(graph), Spent(), 0
    types = scale_types(graph, half, keep, ranges)
    everything = planned(captured, plan, amax, types, narrow)
    others = _others(captured, plan, amax, types, narrow)
    losses = []
    of_sites = {(s.consumer, s.producer) for unit in units for s in unit.sites}
    for unit in units:
        mine = {(s.consumer, s.producer) for s in unit.sites}
        inside = {n: everything[n] for n in dict.fromkeys(s.consumer for s in unit.sites) if n in everything}
        changed = {
            n: {x: r for x, r in of_node.items() if (n, x) in mine or (n, x) not in of_sites}
            for n, of_node in inside.items()
        }
        in_others = {name: {n: able[n] for n in unit.nodes if n in able} for name, able in others.items()}
        outputs = [_Ratio() for _ in captured.outputs]
        losses.append(_Losses(unit, changed, in_others, captured.outputs, outputs, last_label))
    for sample in samples:
        before = Spent(machine.spent.macs, machine.spent.nodes)
        with torch.inference_mode():
            if not count and seconds is not None:
                reference, losses = _first_look(machine, losses, sample, clock)
            else:
                reference, _ = machine.finish(0, machine.inputs(sample.inputs), {})
        bare.macs += machine.spent.macs - before.macs
        bare.nodes += machine.spent.nodes - before.nodes
        with torch.inference_mode():
            _walk(machine, losses, sample, reference, half, progress, clock)
        count += sample.count
        size = len(sample.inputs[0])
        if clock.over:
            break
    if not count:
        raise InputError("sensitivity: there is no sample. Give check or calibration data.")
    measured = [m for m in losses if m.samples]
    modules = [f.result(sum(machine.macs_of[n] for n in f.unit.nodes) // size, half) for f in measured]
    modules.sort(key=lambda m: m.sqnr_db)
    return Sensitivity(
        tuple(modules),
        count,
        sum(machine.macs_of.values()) // size,
        machine.spent.macs / max(1, bare.macs),
        machine.spent.nodes / bare.nodes,
        time.perf_counter() - began,
        len(units) - len(modules),
    )


class _Clock:
    """The time that is left; at least `LEAST` modules are measured whatever it says."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.perf_counter() + seconds
        self.measured = 0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self.left <= 0 and self.measured >= LEAST


def _first_look(
    machine: Partial, losses: Sequence[_Losses], sample: SampleBatch, clock: _Clock
) -> tuple[tuple[torch.Tensor, ...], list[_Losses]]:
    """The float outputs, and of all modules those that can be measured on this batch in the time left.

    They are the worst at their own output: the same pass says how much each loses there by its last operation. A module
    then takes half a pass on average.
    """
    began = time.perf_counter()
    ends = {f.unit.nodes[-1]: f for f in losses}
    own: dict[str, _Ratio] = {}
    alive = machine.inputs(sample.inputs)
    result: Any = ()
    for node in machine.nodes:
        noisy = machine.value(node, alive, ends[node].changed) if node in ends else None
        result = machine.step(node, alive, {})
        if noisy is not None:
            ratio = own[ends[node].unit.path] = _Ratio()
            ratio.add_samples(result, noisy, sample.count)
    pass_seconds = (time.perf_counter() - began) / 2
    room = max(LEAST, int(clock.left / max(pass_seconds / 2, 1e-9)))
    worst = {f.unit.path for f in sorted(losses, key=lambda f: own[f.unit.path].db)[:room]}
    return tuple(result), [m for m in losses if m.unit.path in worst]


def _walk(
    machine: Partial,
    losses: Sequence[_Losses],
    sample: SampleBatch,
    reference: tuple[torch.Tensor, ...],
    half: torch.dtype | None,
    progress: Progress,
    clock: _Clock,
) -> None:
    """One batch: float32 from the first node to the last, and from each unit on once more with that unit in INT8."""
    begins = {f.unit.nodes[0]: f for f in losses}
    ends = {f.unit.nodes[-1]: f for f in losses}
    owner = {n: f for f in losses for n in f.unit.nodes}
    own: dict[Node, torch.Tensor] = {}
    alive, done = machine.inputs(sample.inputs), 0
    for at, node in enumerate(machine.nodes):
        if clock.over:
            return
        if node in begins:
            if progress.cancelled():
                raise Cancelled
            one = begins[node]
            last = one.unit.nodes[-1]
            outputs, seen = machine.finish(at, alive, one.changed, (last,))
            one.add(reference, outputs, sample)
            own[last] = seen[last]
            done += 1
            clock.measured += 1
            progress.step(done, len(losses), "modules")
        rounded = None
        if half is not None and node in owner:
            rounded = machine.value(node, alive, {node: dict.fromkeys(node.all_input_nodes, _through(half))})
        others = owner[node].others if node in owner else {}
        values = {name: machine.value(node, alive, how) for name, how in others.items() if node in how}
        result = machine.step(node, alive, {})
        for name, value in values.items():
            owner[node].in_others.setdefault(name, _Ratio()).add_samples(result, value, sample.count)
        if rounded is not None and half is not None:
            halves = [_through(half)(x) for x in tree_leaves(rounded)]
            owner[node].half.add_samples(tree_leaves(result), halves, sample.count)
        if node in own:
            ends[node].own.add_samples(result, own.pop(node), sample.count)


def planned(
    captured: Captured,
    plan: SitePlan,
    amax: Mapping[str, float],
    types: ScaleTypes,
    narrow: Narrow | None,
) -> Roundings:
    """For each operation, what each of its inputs is rounded by in the format that the plan gives it, with the scales
    that `quantize` places."""
    changed = dict(roundings(plan.int8, amax, types, captured.int8))
    if narrow is not None:
        changed |= narrow_formats.roundings(plan.narrow, types, narrow.statistics)
    return changed


def _others(
    captured: Captured,
    plan: SitePlan,
    amax: Mapping[str, float],
    types: ScaleTypes,
    narrow: Narrow | None,
) -> dict[EightBits, Roundings]:
    """What an operation would read in the 8-bit formats that are on and that it does not have: in FP8 those in INT8 or
    4 bits that FP8 can hold, in INT8 those in FP8 or 4 bits."""
    if narrow is None:
        return {}
    narrower = plan.chosen.of("int4") | plan.chosen.of("nvfp4")
    on, fp8, int8 = narrow.modes.on, plan.chosen.of("int8") | narrower, plan.chosen.of("fp8") | narrower
    able = {n: Choice("fp8") for n in fp8 if not cannot(n, "fp8")} if "fp8" in on else {}
    back = int8 if "int8" in on else frozenset()
    sites = [s for s in captured.sites if of_product(s)]
    eights = Modes(frozenset({"fp8"}))  # weights and activations, where the job has 4-bit weights alone
    to_fp8 = narrow_formats.roundings(narrow_sites(sites, Assignment(able), eights), types, narrow.statistics)
    to_int8 = roundings([s for s in sites if s.consumer in back], amax, types, captured.int8)
    return {"fp8": to_fp8, "int8": to_int8}


def _rows(spec: TensorSpec, output: torch.Tensor, count: int) -> torch.Tensor:
    """The output of the first `count` samples, one row each; the whole output where it has no batch axis."""
    return output if spec.batch_axis is None else output.movedim(spec.batch_axis, 0)[:count]


def _through(half: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounds a float32 tensor to the numbers of `half`; what FP16 cannot hold becomes infinite."""
    return lambda x: x.to(half).to(torch.float32) if x.is_floating_point() else x
