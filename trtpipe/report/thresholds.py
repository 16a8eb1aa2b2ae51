"""Which of a table's thresholds and figures count in a graph of several number formats: they are INT8's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from calib.audit import data_warnings, threshold_warnings
from trtpipe.model.keys import is_read_by
from trtpipe.model.products import PRODUCTS
from trtpipe.values import NumberFormatName

if TYPE_CHECKING:
    from calib.audit import Audit, TensorAudit
    from calib.table import CalibrationTable
    from trtpipe.values import LayerPrecision

NUMBER_FORMATS: tuple[NumberFormatName, ...] = get_args(NumberFormatName)


def input_sqnr(layer: LayerPrecision, audits: Mapping[str, TensorAudit], scales: Mapping[str, str]) -> float | None:
    """The least SQNR in dB of the INT8 tensors that an operation reads; None where it reads none."""
    if not _may_read_int8(layer):
        return None
    read = [audits[scale] for scale in scales_read(layer, scales) if scale in audits]
    return min((a.sqnr_db for a in read if a.sqnr_db is not None), default=None)


def scale_keys(tensors: Collection[str], scales: Mapping[str, str]) -> Mapping[str, str]:
    """Table key of each quantized input -> table key whose scale it has; `scales` has those that differ."""
    return {**{key: key for key in tensors}, **scales}


def scales_read(layer: LayerPrecision, scales: Mapping[str, str]) -> frozenset[str]:
    """The table keys whose scales the inputs of an operation have."""
    return frozenset(scale for key, scale in scales.items() if is_read_by(key, layer.module, layer.op))


def any_in_int8(layers: Sequence[LayerPrecision]) -> bool:
    """Whether an operation computes in INT8: of a graph without any no INT8 threshold counts."""
    return any(layer.precision == "int8" for layer in layers)


def beyond_int8(layers: Sequence[LayerPrecision], table: CalibrationTable, scales: Mapping[str, str]) -> frozenset[str]:
    """The tensors of which no INT8 threshold counts: all where nothing computes in INT8, else what nothing reads that
    may read INT8. Of layers that are not known, none."""
    tensors = table.audit.tensors
    if layers and not any_in_int8(layers):
        return frozenset(tensors)
    keys = scale_keys(tensors, scales)
    without, rest = set[str](), set[str]()
    for layer in layers:
        (rest if _may_read_int8(layer) else without).update(scales_read(layer, keys))
    return frozenset(without - rest)


def _may_read_int8(layer: LayerPrecision) -> bool:
    """Whether an operation's inputs can be INT8: a product's are in its own format; a sum, a concat or a pool may read
    INT8 and compute in float."""
    return layer.precision == "int8" or not (layer.op.startswith(PRODUCTS) or layer.precision in NUMBER_FORMATS)


def int8_audit(table: CalibrationTable, unclipped: Collection[str]) -> Audit:
    """The table's audit of the tensors whose INT8 thresholds count: all but `unclipped`."""
    tensors = {key: audit for key, audit in table.audit.tensors.items() if key not in unclipped}
    return table.audit.model_copy(update={"tensors": tensors})


def table_warnings(table: CalibrationTable, unclipped: Collection[str]) -> tuple[str, ...]:
    """What the page says of the table: warnings about thresholds where those of INT8 count, of the data in any case."""
    if not unclipped:
        return table.audit.warnings
    tensors = int8_audit(table, unclipped).tensors
    named = tuple(w for w in table.audit.warnings if w.partition(": ")[0] in tensors)
    return (*named, *data_warnings(table.audit), *threshold_warnings(tensors))
