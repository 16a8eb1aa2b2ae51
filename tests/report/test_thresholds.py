"""Which thresholds count in a graph of several number formats."""

from __future__ import annotations

from calib.audit import Audit, TensorAudit
from calib.table import CalibrationTable
from trtpipe.report.thresholds import beyond_int8, input_sqnr, table_warnings
from trtpipe.values import LayerPrecision


def test_in_a_job_of_several_formats_int8s_figures_are_of_what_int8_reads() -> None:
    layers = [
        LayerPrecision("a", "linear", "fp8", ""),
        LayerPrecision("b", "linear", "int8", ""),
        LayerPrecision("c", "conv2d", "fp16", ""),
        LayerPrecision("d", "matmul", "nvfp4", ""),
        LayerPrecision("e", "linear", "fp8", ""),
        LayerPrecision("f", "add", "fp16", ""),  # it may read INT8 all the same
    ]
    keys = ("a:input", "b:input", "c:input", "d:matmul_1.input_0", "f:add.input_1")
    seen = {k: TensorAudit(low=-2.0, high=1.0, elements=9, zeros=0.0, clipped=0.5, sqnr_db=9.0, stability=0.5,
                           state="live") for k in keys}  # fmt: skip
    named = ("a:input: minmax leaves 9.0 dB", "b:input: minmax leaves 9.0 dB")
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors=seen, warnings=named)
    table = CalibrationTable("minmax", 99.99, dict.fromkeys(keys, 0.5), {}, {}, "", audit)
    shared = {"e:input": "b:input"}  # what FP8 and INT8 read both has a threshold in one of them
    assert beyond_int8(layers, table, shared) == {"a:input", "c:input", "d:matmul_1.input_0"}
    assert beyond_int8([], table, {}) == frozenset()
    assert table_warnings(table, {"a:input", "c:input", "d:matmul_1.input_0"}) == (
        "b:input: minmax leaves 9.0 dB",
        "2 thresholds differ by over 10 % between two halves of the data and need more samples: f:add.input_1 (50 %), "
        "b:input (50 %).",
        "2 tensors have over 1 % of their values clipped: f:add.input_1 (50.0 %), b:input (50.0 %).",
    )


def test_an_operation_shows_the_ratio_of_what_it_reads_itself() -> None:
    """In a module of attention: its linears, its matmuls, and a softmax that reads nothing quantized."""
    ratios = {"a:input": 30.0, "a:input_1": 20.0, "a:matmul.input_0": 25.0, "a:matmul_1.input_1": 15.0}
    audits = {k: TensorAudit(low=-1.0, high=1.0, elements=9, zeros=0.0, clipped=0.0, sqnr_db=r, stability=None,
                             state="live") for k, r in ratios.items()}  # fmt: skip
    keys = {k: k for k in ratios}
    found = [input_sqnr(LayerPrecision("a", op, "int8", ""), audits, keys) for op in ("linear", "matmul", "softmax")]
    assert found == [20.0, 15.0, None]
    assert [input_sqnr(LayerPrecision("a", "linear", p, ""), audits, keys) for p in ("fp16", "fp8")] == [None, None]
