"""What gains nothing from INT8 or FP8 and stays in FP16 or BF16 where the job allows that; each with its reason.

Rules for every TensorRT, in this order:

    P1  one row: an operation with one output position a sample, such as squeeze-and-excitation, a classifier behind a
        pool, a matmul with one row or column. Its weights are read once and used once, so that tensor cores do not
        help (NVIDIA Model Optimizer 0.47 leaves out matmuls with M or N of 1,
        `find_nodes_from_matmul_to_exclude`); the classifier also rounds what everything before it computed
    P2  depthwise convolutions: one channel a group fills no tensor core tile (pytorch/pytorch pull request 22302, and
        NVIDIA/TensorRT issue 2197: MobileNetV3 in INT8 is no faster than in FP16), and they are where INT8 costs
        MobileNets and EfficientNets most of their accuracy
    P3  small matrices: matmuls with K or N below 16, and convolutions with fewer than 16 channels, but for the shapes
        that Model Optimizer quantizes (`find_nodes_from_convs_to_exclude`); FP8's own limits, which are stricter, are
        those of `policy.cannot`
    P5  attention in INT8: both matmuls around a softmax. One scale for all of its probabilities rounds most of them to
        zero. Of a trained ViT-S with 257 tokens they make nearly all of INT8's noise (12 calibration photographs, no
        corrections): 21.4 dB at the output with everything in INT8, 31.2 without attention, 22.7 with the
        probabilities in INT8 and nothing else. TensorRT fuses attention in FP16 and BF16 as well, and in INT8 not over
        512 tokens, "due to accuracy reason" (NVIDIA/TensorRT issue 3724; Model Optimizer's
        `find_nodes_from_mha_to_exclude`), and there are no weights to save. It stays in FP8, which rounds relatively
    P6  what would move more bytes. A convolution or linear waits for memory where it does fewer than about 100
        multiply-accumulates for each byte that it reads or writes in FP16 (T4 102, A100 100, Jetson AGX Orin 104, H100
        148, L4 200: dense FP16 of the data sheets / memory bandwidth). In 8 bits it reads half the bytes, and what is
        written for it is half as large; but behind an operation that stays in FP16, a kernel of its own reads FP16 and
        writes 8 bits (seen in TensorRT-RTX's engines, see P4). The pointwise convolutions between MobileNetV2's
        depthwise ones do 5 to 30 % of the work that would hide that; in its last blocks the weights outweigh it. Three
        channels of an image take 16 bytes a pixel in either. One sample is counted, where weights weigh most: a larger
        batch leaves less

and one for TensorRT-RTX alone:

    P4  what would make the engine larger (`trtpipe/quantization/engine_size.py`)

Which operations P4 and P6 leave in 8 bits is a choice of projects that share tools (Rhys, "A selection problem of
shared fixed costs and network flows", Management Science 17 (1970) 200-207). For P4 an operation gains the bytes that
its weights save, and needs the kernel behind itself and those behind what it reads; for P6 it gains the bytes of
traffic, and needs what it reads in 8 bits, which costs nothing where its producer is in 8 bits too. The best choice is
a minimum cut.

Nothing here changes where Q/DQ could stand: calibration tables do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import networkx
import torch
from torch.fx import GraphModule, Node

from trtpipe.model.marks import is_marked
from trtpipe.model.nodes import calls, constant_value, groups_of, is_constant, is_float, op_name, shape_of
from trtpipe.model.products import MATMULS, WEIGHTED
from trtpipe.model.sites import of_product
from trtpipe.quantization.engine_size import in_all, kernels, makes_larger
from trtpipe.quantization.formats import FORMATS
from trtpipe.quantization.macs import macs
from trtpipe.quantization.partial import extent_of
from trtpipe.quantization.policy import EIGHT_BITS, Modes, assign, modes_of
from trtpipe.quantization.precision import SOFTMAX, Keep
from trtpipe.values import Site

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.values import Captured, Target

#: Channels, rows and columns that fill a tile of the INT8 tensor cores.
TILE = 16
#: Multiply-accumulates in FP16 that a GPU does while it moves a byte: the least of P6's list.
RIDGE = 100
#: Channels of a pixel, and numbers that a linear sums, are padded to this in the layouts of tensor cores: NHWC8 in FP16
#: (TensorRT's "Data Format Descriptions"), and 16 in 8 bits.
ROW_BYTES = 16
#: What P6 takes for a gain: a share of what an operation moves in FP16.
LEAST_GAIN = 0.01
#: Of an engine with a loop P4 does not tell whether it is smaller: with FP8 one of GRUs is, and one of RNNs is not.
RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")

ONE_ROW = "one row a sample: 8 bits gain nothing where each weight is used once"
DEPTHWISE = "depthwise: one channel a group is no work for tensor cores"
ATTENTION = "attention: INT8 rounds most of a softmax' probabilities to zero, and TensorRT fuses attention in FP16 too"
SMALL = f"fewer than {TILE} channels, rows or columns do not fill INT8 tensor cores"
TRAFFIC = "memory-bound: quantizing what it reads moves more bytes than 8 bits save"
LARGER = "in 8 bits it adds more kernels to a TensorRT-RTX engine than its weights save"
ONLY_SIZE = (
    "precision.placement: no operation of this network gains from {modes} ({reasons}); those whose weights make the "
    "engine smaller are quantized, because the job asks for {modes}"
)
NOTHING_GAINS = (
    "precision.placement: no operation of this network gains from {modes} ({reasons}), and all are quantized because "
    "the job asks for {modes}"
)
ALL_LARGER = f"{NOTHING_GAINS}. Without that the engine is smaller."
LARGER_THAN_FP16 = (
    "precision.placement: with all operations in {modes} that can be, a TensorRT-RTX engine is larger than in FP16: "
    "about {added:.1f} MB more of kernels, and {saved:.1f} MB less of weights. With {instead}, what makes it larger "
    "stays out of {modes}"
)

FITTED_TO_MORE = (
    "calibration: the table's corrections were fitted with {} operations in INT8 that stay wide here, and make up for "
    "their noise too: calibrating this job by itself may serve it better"
)


def keep_of(job: Job, captured: Captured) -> Keep:
    """The job's `precision.keep` and, where FP16 or BF16 is allowed and `precision.placement` is `auto`, P1 to P6.

    A model that is quantized already is taken as it is: P1 to P6 are not for it. Nor are they for what
    `precision.formats` names.

    P6 is for networks in which it leaves something in 8 bits. If the others leave nothing, P4 alone decides. If that
    leaves nothing either, or is not for the target, everything is quantized, because the job asks for it. A note says
    so, and of the engine's size what P4 found; so does one where these rules are not for the job.
    """
    precision = job.precision
    keep, wide, notes = Keep.of(precision.keep), dict[str, str](), tuple[str, ...]()
    modes = modes_of(precision)
    if not is_marked(captured.graph) and modes.on & EIGHT_BITS:
        if places(job):
            wide, notes = gains_nothing(captured, job.build.target, modes, keep)
        elif job.build.quantization == "explicit":
            notes = _larger_than_fp16(captured, modes, job, keep)
    # What was corrected for another target, P4 alone keeps wide here.
    as_it_came = is_marked(captured.graph) and not (job.calibration is not None and job.calibration.recalibrate)
    fitted = {s.consumer for s in captured.sites if s.consumer.name in captured.int8 and not as_it_came}
    more = precision.int8_mode * sum(bool(keep.entry(n)) or wide.get(n.name, LARGER) != LARGER for n in fitted)
    return replace(keep, wide=wide, notes=(*notes, *((FITTED_TO_MORE.format(more),) if more else ())))


def places(job: Job) -> bool:
    """Whether P1 to P6 hold for a job; with implicit quantization TensorRT places by itself."""
    precision = job.precision
    half = precision.fp16_mode or precision.bf16_mode
    return half and job.build.quantization == "explicit" and precision.placement == "auto"


def gains_nothing(
    captured: Captured, target: Target, modes: Modes, keep: Keep
) -> tuple[dict[str, str], tuple[str, ...]]:
    """By node name, why an operation stays out of INT8 and FP8; and notes on rules that were not applied.

    Args:
        captured: the hub graph.
        target: P4 holds for tensorrt_rtx.
        modes: the job's number formats.
        keep: operations that the job keeps wide by itself.
    """
    graph = captured.graph
    chosen = assign(captured.sites, modes, keep)
    eight = {n: c.format for n, c in chosen.choices.items() if c.format in EIGHT_BITS}
    sites = [s for s in captured.sites if of_product(s) and s.consumer in eight]
    certain = {n for n, f in eight.items() if modes.named(n) == f or (f == "fp8" and op_name(n) in MATMULS)}
    nodes = [n for n in eight if n not in certain]
    by_shape = {n: why for n in nodes if (why := shape_reason(graph, n))}

    def by_size(left: Collection[Node]) -> dict[Node, str]:
        if target != "tensorrt_rtx":
            return {}
        return dict.fromkeys(makes_larger(graph, sites, left, certain), LARGER)

    by_traffic = dict.fromkeys(moves_more(graph, sites, [n for n in nodes if n not in by_shape], certain), TRAFFIC)
    by_shape |= by_traffic if len(by_shape) + len(by_traffic) < len(eight) else {}
    wide = by_shape | by_size([n for n in nodes if n not in by_shape])
    notes: tuple[str, ...] = ()
    if wide and len(wide) == len(eight):
        larger = {} if any(op_name(n) in RECURRENT for n in calls(graph.graph)) else by_size(nodes)
        reasons = "; ".join(dict.fromkeys(why for n, why in wide.items() if n in by_shape or n in larger))
        # Of sizes a note says what P4 says of all operations, and nothing where it keeps none of them wide.
        note = NOTHING_GAINS if not larger else ONLY_SIZE if len(larger) < len(nodes) else ALL_LARGER
        wide = larger if note is ONLY_SIZE else {}
        notes = (note.format(modes=_titles(eight.values()), reasons=reasons),) if reasons else ()
    return {n.name: why for n, why in wide.items()}, notes


def _larger_than_fp16(captured: Captured, modes: Modes, job: Job, keep: Keep) -> tuple[str, ...]:
    """A note where everything is in 8 bits that can be, and the engine is larger than in FP16 (P4)."""
    graph = captured.graph
    if job.build.target != "tensorrt_rtx" or any(op_name(n) in RECURRENT for n in calls(graph.graph)):
        return ()
    formats = {n: c.format for n, c in assign(captured.sites, modes, keep).choices.items() if c.format in EIGHT_BITS}
    sites = [s for s in captured.sites if of_product(s) and s.consumer in formats]
    added, saved = in_all(graph, sites, list(formats))
    if added <= saved:
        return ()
    half = job.precision.fp16_mode or job.precision.bf16_mode
    instead = "precision.placement: auto" if half else "precision.fp16_mode too"
    numbers = {"added": added / 1e6, "saved": saved / 1e6, "instead": instead}
    return (LARGER_THAN_FP16.format(modes=_titles(formats.values()), **numbers),)


def _titles(formats: Collection[str]) -> str:
    """`INT8 and FP8`, of those that are there."""
    return " and ".join(FORMATS[f].title for f in ("int8", "fp8") if f in formats)


def shape_reason(graph: GraphModule, node: Node) -> str:
    """Why a convolution, linear or matmul gains nothing by its shape or place (P1 to P3, P5); "" when it may gain.

    Dynamic extents count as large.
    """
    name, out = op_name(node), node.meta["val"].shape
    if name in MATMULS:
        (rows, inner), columns = node.args[0].meta["val"].shape[-2:], out[-1]  # type: ignore[union-attr]
        if _is_one(rows) or _is_one(columns):
            return ONE_ROW
        if _below_tile(inner) or _below_tile(columns):
            return SMALL
        return ATTENTION if _around_softmax(node) else ""
    weight = constant_value(graph, node.args[1])  # type: ignore[arg-type]
    if _rows(out) <= _samples(graph) if name == "linear" else all(_is_one(extent) for extent in out[2:]):
        return ONE_ROW
    if name == "linear":
        return SMALL if min(weight.shape) < TILE else ""
    groups = groups_of(node)
    outputs, inputs = weight.shape[:2]
    if groups > 1 and inputs == 1:
        return DEPTHWISE
    if min(outputs, inputs) >= TILE:
        return ""
    kernel = tuple(weight.shape[2:])
    if groups > 1:
        good = outputs % 8 == 0 and min(kernel) >= 3
    else:
        first = node.args[0].op == "placeholder"  # type: ignore[union-attr]
        eights = outputs % 8 == 0 or inputs % 8 == 0
        good = eights and (first or max(outputs, inputs) >= TILE) and len(set(kernel)) == 1
    return "" if good else SMALL


def _around_softmax(node: Node) -> bool:
    """Whether a matmul reads a softmax' probabilities, or makes its scores and another one reads them."""
    if any(op_name(n) in SOFTMAX for x in node.args[:2] for n in _nearby(x, lambda n: n.all_input_nodes)):  # type: ignore[arg-type]
        return True
    behind = [s for s in _nearby(node, lambda n: n.users) if op_name(s) in SOFTMAX]
    return any(op_name(r) in MATMULS for s in behind for n in _nearby(s, lambda n: n.users) for r in n.users)


def _nearby(start: Node, neighbours: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """`start`, and what a scale, a mask or a dropout of the same shape leads to from there, up to the next softmax,
    matmul or operation with a weight."""
    reached, shape = [start], shape_of(start)
    for node in reached:
        if node is not start and op_name(node) in (*SOFTMAX, *MATMULS, *WEIGHTED):
            continue
        reached += [n for n in neighbours(node) if is_float(n) and shape_of(n) == shape and n not in reached]
    return reached


def _rows(shape: Sequence[int | torch.SymInt]) -> int:
    """Rows of a linear's output [..., N], whichever axes hold them: attention may have them before the batch, or both
    in one axis."""
    return math.prod(extent_of(d) for d in shape[:-1])


def _samples(graph: GraphModule) -> int:
    """The batch that the graph was captured with."""
    shape = next(n for n in graph.graph.nodes if n.op == "placeholder").meta["val"].shape
    return extent_of(shape[0])


def _is_one(extent: object) -> bool:
    return isinstance(extent, int) and extent == 1


def _below_tile(extent: object) -> bool:
    return isinstance(extent, int) and extent < TILE


def moves_more(
    graph: GraphModule, sites: Collection[Site], nodes: Collection[Node], certain: Collection[Node] = ()
) -> list[Node]:
    """Of `nodes`, the operations that in 8 bits move more bytes through memory than in FP16 (P6).

    Args: as for `makes_larger`.
    """
    behind, _, free = kernels(graph)
    network = networkx.DiGraph()
    network.add_nodes_from(("operations", "passes"))
    for node in nodes:
        read = [s.producer for s in sites if s.consumer is node and s.rule == "Q1"]
        inputs = {size: sum(_bytes(graph, x, node, size) for x in read) for size in (1, 2)}
        weights = [s.producer for s in sites if s.consumer is node and s.rule == "Q2"]
        constants = {size: sum(_weight_bytes(graph, x, node, size) for x in weights) for size in (1, 2)}
        outputs = _bytes(graph, node, node, 2)
        in_half, in_eight = (
            max(inputs[size] + constants[size] + outputs, size * _work(graph, node, size) / (2 * RIDGE))
            for size in (2, 1)
        )
        # Whoever writes the inputs writes fewer bytes too.
        network.add_edge("operations", node, capacity=in_half - in_eight + inputs[2] - inputs[1])
        network.add_edge(node, "passes", capacity=LEAST_GAIN * in_half)
        for x in read:
            producers = behind.get(x, ())
            for producer in producers:
                if producer.op == "placeholder" or producer in free or producer in certain:
                    continue  # a kernel that stands anyway writes 8 bits; what comes in is converted in any case
                # Otherwise it is written in FP16, read again and written in 8 bits.
                network.add_edge(node, ("pass", x, producer))
                there = producer if producer in nodes else "passes"
                part = 2 * _bytes(graph, x, node, 2) / len(producers)
                network.add_edge(("pass", x, producer), there, capacity=part)
    _, (stays, _) = networkx.minimum_cut(network, "operations", "passes")
    return [n for n in nodes if n not in stays]


def _padded(channels: int, size: int) -> int:
    """Channels in the layouts of tensor cores, whose rows have a multiple of 16 bytes."""
    return -(-channels * size // ROW_BYTES) * ROW_BYTES // size


def _bytes(graph: GraphModule, value: Node, operation: Node, size: int) -> float:
    """Bytes of an operation's input or output for one sample, in elements of `size` bytes."""
    extents = [extent_of(d) for d in value.meta["val"].shape]
    axis = 1 if op_name(operation).startswith("conv") else -1
    extents[axis] = _padded(extents[axis], size)
    return size * math.prod(extents) / _samples(graph)


def _weight_bytes(graph: GraphModule, weight: Node, operation: Node, size: int) -> float:
    """Bytes of a weight [outputs, inputs, ...], or of a transposed convolution's [inputs, outputs, ...]."""
    shape = constant_value(graph, weight).shape
    inputs = 0 if op_name(operation).startswith("conv_transpose") else 1
    return size * math.prod(shape) // shape[inputs] * _padded(shape[inputs], size)


def _work(graph: GraphModule, node: Node, size: int) -> float:
    """Multiply-accumulates of an operation for one sample, with inputs padded to rows of elements of `size` bytes."""

    def sized(value: object) -> object:
        if is_constant(value):
            return constant_value(graph, value)
        if not isinstance(value, Node):
            return value
        return torch.empty([extent_of(d) for d in value.meta["val"].shape], device="meta")

    summed = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    if op_name(node).startswith("conv"):
        weight = constant_value(graph, node.args[1])  # type: ignore[arg-type]
        summed = weight.shape[0 if op_name(node).startswith("conv_transpose") else 1]
    padding = _padded(extent_of(summed), size) / extent_of(summed)
    return padding * macs(op_name(node), [sized(a) for a in node.args], sized(node)) / _samples(graph)
