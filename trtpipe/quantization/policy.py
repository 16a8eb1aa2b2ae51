"""Which operation computes in which number format: the job's modes, its globs, and what each format can do.

The order of preference with several modes on:

    linears                  precision.weights or NVFP4, then FP8, then INT8
    matmuls of activations   FP8, then INT8
    convolutions             INT8, then FP8

`precision.formats` puts another one first, by module; the last glob that matches decides. What a format cannot do, or
gains nothing from, gets the next one. Where none is left it stays in FP32, FP16 or BF16, and the report says why.

FP8's limits are those of ModelOpt (modelopt/onnx/quantization/graph_utils.py): matmuls with one row or column or under
16 inputs or outputs, depthwise convolutions, convolutions of at most 16 channels or a kernel of over 32 elements. The
4-bit formats hold linears alone, whose inputs fill whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtpipe.errors import InputError
from trtpipe.job.globs import matching, nearest_paths
from trtpipe.job.sections import Precision
from trtpipe.model.nodes import groups_of, is_constant, module_path, op_name
from trtpipe.model.products import MATMULS
from trtpipe.model.sites import of_product
from trtpipe.quantization.formats import FORMATS, block_size
from trtpipe.quantization.precision import Keep
from trtpipe.values import NumberFormatName, Site

if TYPE_CHECKING:
    from torch.fx import Node

#: The formats that `precision.placement` judges.
EIGHT_BITS: frozenset[NumberFormatName] = frozenset({"int8", "fp8"})
#: Under this many inputs or outputs a matmul gains nothing in FP8, and a convolution with no more channels.
LEAST_FEATURES = 16
#: TRT_FP4DynamicQuantize of TensorRT: "input tensor must be 2D or 3D".
MOST_DIMENSIONS_NVFP4 = 3
#: Kernel elements of a convolution beyond which FP8 has no kernels.
MOST_KERNEL = 32


@dataclass(frozen=True)
class Modes:
    """The job's number formats: those that are on, the one of weights alone, and (glob, format) of modules."""

    on: frozenset[NumberFormatName] = frozenset()
    weights: NumberFormatName | None = None
    formats: tuple[tuple[str, NumberFormatName], ...] = ()

    @property
    def narrow(self) -> bool:
        """Whether any format but INT8 is asked for."""
        return bool(self.on - {"int8"}) or self.weights is not None

    @property
    def asked(self) -> frozenset[NumberFormatName]:
        """Every format that is asked for, that of weights alone included."""
        return self.on | ({self.weights} if self.weights else set())

    @property
    def title(self) -> str:
        """Like "INT8 and FP8"."""
        return " and ".join(f.title for f in FORMATS.values() if f.name in self.asked)

    def named(self, node: Node) -> NumberFormatName | None:
        """The format that `precision.formats` chooses for the operation: the last glob that matches decides."""
        path = module_path(node)
        return next((name for glob, name in reversed(self.formats) if matching((glob,), path)), None)

    def weights_alone(self, number_format: NumberFormatName) -> bool:
        """Whether only weights get this format, and activations stay in FP32, FP16 or BF16."""
        return number_format == self.weights


def modes_of(precision: Precision) -> Modes:
    """The job's `precision` as number formats."""
    return Modes(frozenset(precision.modes), precision.weights, tuple(precision.formats.items()))


@dataclass(frozen=True)
class Choice:
    """The format of one operation, None for FP32, FP16 or BF16, and why it is not the preferred one: as a text, and by
    each format that was tried before."""

    format: NumberFormatName | None
    reason: str = ""
    kept_out: Mapping[NumberFormatName, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Assignment:
    """The choice for each operation with quantizable inputs, by node."""

    choices: Mapping[Node, Choice] = field(default_factory=dict)

    def excludes_int8(self, node: Node) -> bool:
        """Whether the operation has another format than INT8, or none."""
        choice = self.choices.get(node)
        return choice is not None and choice.format != "int8"

    def of(self, number_format: NumberFormatName) -> frozenset[Node]:
        """The operations that have this format."""
        return frozenset(n for n, c in self.choices.items() if c.format == number_format)


def assign(sites: Sequence[Site], modes: Modes, keep: Keep) -> Assignment:
    """The format of every operation that reads one of `sites` (rules Q1 and Q2)."""
    nodes = dict.fromkeys(s.consumer for s in sites if of_product(s))
    kept = {n: Choice(None, why) for n in nodes if (why := keep.entry(n)) is not None}
    return Assignment({n: kept.get(n) or _choice(n, modes, keep.wide) for n in nodes})


def checked_modes(modes: Modes, nodes: Sequence[Node]) -> Modes:
    """`modes`, after every glob was found to match a module that its format can hold.

    Raises:
        InputError: a glob matches nothing, or only what its format cannot do.
    """
    for glob, name in modes.formats:
        matched = [n for n in nodes if matching((glob,), module_path(n))]
        where = f"precision.formats.{glob}"
        if not matched:
            paths = [module_path(n) for n in nodes]
            raise InputError(
                f"{where}: must match a module with a convolution, linear or matmul (got {glob!r}, which matches "
                f"none). {nearest_paths(glob, paths)}"
            )
        refused = [cannot(n, name, weights_alone=modes.weights_alone(name)) for n in matched]
        if all(refused):
            raise InputError(
                f"{where}: must match something that {FORMATS[name].title} can hold (got {module_path(matched[0])}: "
                f"{refused[0]}). Choose another format, or another module."
            )
    return modes


def idle_globs(modes: Modes, nodes: Sequence[Node], keep: Keep) -> tuple[str, ...]:
    """A note for each glob of `precision.formats` that decides nothing: `precision.keep`, or a later glob, has all
    that it matches."""
    notes = []
    for k, (glob, _) in enumerate(modes.formats):
        later = [g for g, _ in modes.formats[k + 1 :]]
        matched = [n for n in nodes if matching((glob,), module_path(n))]
        stronger = [keep.entry(n) or matching(later, module_path(n)) for n in matched]
        if stronger and all(stronger):
            named = ", ".join(dict.fromkeys(s for s in stronger if s))
            notes.append(f"precision.formats.{glob}: decides nothing, as {named} decides for all that it matches")
    return tuple(notes)


def idle_modes(modes: Modes, chosen: Assignment) -> tuple[str, ...]:
    """A note for each format that is asked for and that no operation has, with every reason for that."""
    notes = []
    for number_format in FORMATS.values():
        if number_format.name in modes.asked and not chosen.of(number_format.name):
            reasons = dict.fromkeys(_kept_out(n, c, number_format.name) for n, c in chosen.choices.items())
            notes.append(f"precision: no operation is in {number_format.title} ({'; '.join(reasons)})")
    return tuple(notes)


def _kept_out(node: Node, choice: Choice, name: NumberFormatName) -> str:
    """Why an operation has another format than this one, or none."""
    if why := choice.kept_out.get(name) or cannot(node, name):
        return why
    return f"{FORMATS[choice.format].title} comes first" if choice.format else choice.reason


def _choice(node: Node, modes: Modes, wide: Mapping[str, str]) -> Choice:
    """`wide` says, by node name, what stays out of 8 bits because it gains nothing there."""
    kept_out: dict[NumberFormatName, str] = {}
    for name in _preference(node, modes):
        why = cannot(node, name, weights_alone=modes.weights_alone(name))
        why = why or (wide.get(node.name, "") if name in EIGHT_BITS else "")
        if not why:
            return Choice(name, _because(kept_out), kept_out)
        kept_out[name] = why
    return Choice(None, _because(kept_out), kept_out)


def _because(kept_out: Mapping[NumberFormatName, str]) -> str:
    """Each reason after the formats that it keeps the operation out of."""
    reasons: dict[str, list[str]] = {}
    for name, why in kept_out.items():
        reasons.setdefault(why, []).append(FORMATS[name].title)
    return "; ".join(f"{' and '.join(titles)}: {why}" for why, titles in reasons.items())


def _preference(node: Node, modes: Modes) -> tuple[NumberFormatName, ...]:
    """The formats to try, best first."""
    name, chosen = op_name(node), modes.named(node)
    order: tuple[NumberFormatName, ...]
    if name.startswith("conv"):
        order = ("int8", "fp8")
    elif name in MATMULS and not any(is_constant(x) for x in node.args[:2]):
        order = ("fp8", "int8")
    else:  # of a matmul by constants that are no matrix, too: it has weights, and says why they are not in 4 bits
        order = (*((modes.weights,) if modes.weights else ()), "nvfp4", "fp8", "int8")
    return tuple(dict.fromkeys((*((chosen,) if chosen else ()), *(f for f in order if f in modes.asked))))


def cannot(node: Node, name: NumberFormatName, *, weights_alone: bool = False) -> str:
    """Why the format cannot hold the operation, or gains nothing there; "" where it can.

    Args:
        node: the operation.
        name: the format.
        weights_alone: whether activations stay as they are.
    """
    kind = op_name(node)
    if name == "int8":
        return ""
    if FORMATS[name].bits == 4:
        if kind != "linear":
            return "4 bits are for the weights of linears"
        outputs, inputs = _shape(node.args[1])
        block = block_size(FORMATS[name], inputs)
        if block is None:
            return f"its {inputs} inputs do not fill blocks of {FORMATS[name].blocks[-1]}"
        if outputs * inputs == block:
            return f"its weight is one block of {block}, whose scale TensorRT takes for that of a whole tensor"
        dimensions = len(_shape(node.args[0]))
        if name == "nvfp4" and not weights_alone and dimensions > MOST_DIMENSIONS_NVFP4:
            return f"its input has {dimensions} dimensions, and TensorRT quantizes 2 or 3 to NVFP4 as it runs"
        return ""
    return _no_fp8_convolution(node) if kind.startswith("conv") else _no_fp8_matmul(node, kind)


def _no_fp8_convolution(node: Node) -> str:
    shape = _shape(node.args[1])
    groups = groups_of(node)
    transposed = op_name(node).startswith("conv_transpose")
    inner, outer = (shape[1], shape[0] // groups) if transposed else (shape[0] // groups, shape[1])
    kernel = 1
    for extent in shape[2:]:
        kernel *= extent
    if groups > 1 and min(inner, outer) == 1:
        return "a depthwise convolution has no FP8 kernel"
    if min(inner, outer) <= LEAST_FEATURES:
        return f"a convolution of at most {LEAST_FEATURES} channels gains nothing"
    if kernel > MOST_KERNEL:
        return f"a kernel of {kernel} elements (over {MOST_KERNEL}) has no FP8 convolution"
    return ""


def _no_fp8_matmul(node: Node, kind: str) -> str:
    left, right = _shape(node.args[0]), _shape(node.args[1])
    rows = left[:-1] if kind == "linear" else left[-2:-1]
    inputs, outputs = left[-1], right[0] if kind == "linear" else right[-1]
    if all(r == 1 for r in rows) or outputs == 1:
        return "a matmul of one row or column gains nothing"
    if min(inputs, outputs) < LEAST_FEATURES:
        return f"a matmul of under {LEAST_FEATURES} inputs or outputs gains nothing"
    return ""


def _shape(node: object) -> tuple[int, ...]:
    """Extents of a node's value; a dynamic one counts as large."""
    shape = node.meta["val"].shape  # type: ignore[attr-defined]
    return tuple(d if isinstance(d, int) else 1 << 20 for d in shape)
