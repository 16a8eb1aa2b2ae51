"""FP8 and 4 bits on the captured graph: which operation gets what, its numbers, and how they are stored."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace

import nets
import onnx
import pytest
import torch
from models import Attention, line, tiny

from calib.audit import Audit, TensorAudit
from calib.table import CalibrationTable, given_table
from trtpipe.errors import InputError
from trtpipe.job.globs import matching
from trtpipe.model.capture import capture
from trtpipe.model.nodes import module_path, op_name
from trtpipe.progress import Silent
from trtpipe.quantization import formats
from trtpipe.quantization import narrow as ops
from trtpipe.quantization.moments import block_moments, shrunk
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import Choice, Modes, assign, cannot
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.quantization.sensitivity import SampleBatch, measure_sensitivity
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner

FP8, BOTH = Modes(frozenset({"fp8"})), Modes(frozenset({"fp8", "int8"}))
INT4, NVFP4 = Modes(weights="int4"), Modes(frozenset({"nvfp4"}))
NVFP4_WEIGHTS = Modes(weights="nvfp4")


@pytest.fixture(scope="module")
def net():
    return line(Attention().eval(), 16, 10)


@pytest.fixture
def images():
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(7))


def quantized(net, modes, *, half=None, keep=None, moments=None, ranges=None):
    statistics = Statistics(net.amax, moments or {})
    return quantize(
        net.captured,
        int8="int8" in modes.on,
        half=half,
        keep=keep or Keep(),
        amax=net.amax,
        ranges=ranges or {},
        narrow=Narrow(modes, statistics),
    )


def kinds(found):
    return {
        (layer.module, layer.op): layer.precision
        for layer in found.layers
        if layer.op in ("conv2d", "linear", "matmul")
    }


@pytest.mark.parametrize("modes", [Modes(frozenset({"int8"})), FP8, BOTH, INT4, NVFP4, NVFP4_WEIGHTS])
@pytest.mark.parametrize("large", ["stem", "conv", "q", "mlp", "", "none of them"])
def test_every_operation_in_fp32_says_so_whatever_format_is_beside_it(net, modes, large):
    """Read from the program's own types: with FP16 on, what computes in FP32 has its reason in the report."""
    ranges = {n.name: 5e4 if module_path(n) == large else 1.0 for n in net.captured.graph.graph.nodes}
    found = quantized(net, modes, half=torch.float16, ranges=ranges)
    ops = ("conv2d", "linear", "matmul")
    nodes = [n for n in found.program.graph.nodes if n.op == "call_function" and op_name(n) in ops]
    layers = [layer for layer in found.layers if layer.op in ops]
    assert [layer.module for layer in layers] == [module_path(n) for n in nodes]
    why = "observed amax 5e+04 nears FP16's largest number 65504"
    for node, layer in zip(nodes, layers, strict=True):
        beside = layer.precision not in ("fp32", "fp16")
        told = f"beside it FP32: {why}" if beside else why
        assert layer.reason.endswith(told) is (node.meta["val"].dtype is torch.float32), layer
    assert any(why in layer.reason for layer in layers) is (large != "none of them")


LINEARS = [(n, "linear") for n in ("q", "k", "v", "mlp", "narrow", "head")]
#: Modes to what [stem, conv, matmuls, q k v mlp narrow, head] compute in; "head" has 10 outputs and 24 inputs.
CASES = [
    (FP8, ["fp32", "fp8", "fp8", "fp8", "fp32"]),
    (BOTH, ["int8", "int8", "fp8", "fp8", "int8"]),
    (INT4, ["fp32", "fp32", "fp32", "int4", "fp32"]),
    (NVFP4, ["fp32", "fp32", "fp32", "nvfp4", "fp32"]),
    (NVFP4_WEIGHTS, ["fp32", "fp32", "fp32", "nvfp4", "fp32"]),
    (Modes(frozenset({"fp8", "int8"}), "int4"), ["int8", "int8", "fp8", "int4", "int8"]),
    (Modes(frozenset({"nvfp4", "fp8"})), ["fp32", "fp8", "fp8", "nvfp4", "fp32"]),
]


@pytest.mark.parametrize(("modes", "expected"), CASES)
def test_the_default_format_of_each_operation(net, modes, expected):
    found = kinds(quantized(net, modes))
    stem, conv, matmul, linear, head = expected
    assert found[("stem", "conv2d")] == stem
    assert found[("conv", "conv2d")] == conv
    assert found[("", "matmul")] == matmul
    assert {found[n] for n in LINEARS[:-1]} == {linear}
    assert found[("head", "linear")] == head


def test_why_an_operation_is_not_in_the_format_it_would_have(net):
    reasons = {layer.module: layer.reason for layer in quantized(net, FP8).layers}
    assert reasons["stem"] == "FP8: a convolution of at most 16 channels gains nothing"
    assert reasons["head"] == "FP8: a matmul of under 16 inputs or outputs gains nothing"
    reasons = {layer.module: layer.reason for layer in quantized(net, INT4).layers}
    assert reasons["head"] == "INT4: its 24 inputs do not fill blocks of 64"


@pytest.mark.parametrize(
    ("inputs", "outputs", "name", "fits"),
    [(64, 1, "int4", False), (128, 1, "int4", False), (256, 1, "int4", True), (64, 2, "int4", True),
     (16, 1, "nvfp4", False), (32, 1, "nvfp4", True)],
)  # fmt: skip
def test_a_weight_of_a_single_block_is_left_wide(inputs, outputs, name, fits):
    """TensorRT's parser takes one scale for that of a whole tensor, which 4 bits have not."""
    captured = capture(nets.loaded(torch.nn.Linear(inputs, outputs), ("N", inputs), out_shape=("N", outputs)))
    (node,) = {s.consumer for s in captured.sites}
    assert (cannot(node, name) == "") is fits
    blocks = f"its weight is one block of {inputs}, whose scale TensorRT takes for that of a whole tensor"
    assert cannot(node, name) == ("" if fits else blocks)


@pytest.mark.parametrize("between", [(), (3,), (3, 5), (2, 3, 5)])
def test_nvfp4_activations_have_two_or_three_dimensions(between):
    """TRT_FP4DynamicQuantize takes no others; weights alone are in NVFP4 whatever they are multiplied with."""
    shape = ("N", *between, 64)
    captured = capture(nets.loaded(torch.nn.Linear(64, 32), shape, out_shape=(*shape[:-1], 32)))
    (node,) = {s.consumer for s in captured.sites}
    fits = len(shape) <= 3
    said = f"its input has {len(shape)} dimensions, and TensorRT quantizes 2 or 3 to NVFP4 as it runs"
    assert cannot(node, "nvfp4") == ("" if fits else said)
    assert cannot(node, "nvfp4", weights_alone=True) == cannot(node, "int4") == ""
    chosen = assign(captured.sites, Modes(frozenset({"nvfp4", "fp8"})), Keep()).choices[node]
    assert chosen == (Choice("nvfp4") if fits else Choice("fp8", f"NVFP4: {said}", {"nvfp4": said}))


def test_globs_choose_and_the_last_that_fits_decides(net):
    modes = Modes(frozenset({"int8", "fp8"}), formats=(("*", "int8"), ("q", "fp8"), ("conv", "fp8")))
    found = kinds(quantized(net, modes))
    assert found[("q", "linear")] == found[("conv", "conv2d")] == "fp8"
    assert found[("k", "linear")] == found[("", "matmul")] == found[("head", "linear")] == "int8"


@pytest.mark.parametrize("glob", ["*", "q", "[qk]", "conv", "stem"])
@pytest.mark.parametrize("first", ["int8", "fp8", "int4"])
def test_what_the_chosen_format_cannot_hold_gets_what_it_would_have_without_the_glob(net, glob, first):
    """The property behind the globs: they put a format first, and take none away."""
    plain = Modes(frozenset({"int8", "fp8"}), "int4")
    nodes = {s.consumer for s in net.captured.sites if s.rule in ("Q1", "Q2")}
    without = assign(net.captured.sites, plain, Keep()).choices
    found = assign(net.captured.sites, dataclasses.replace(plain, formats=((glob, first),)), Keep()).choices
    for node in nodes:
        if matching((glob,), module_path(node)) and not cannot(node, first):
            assert found[node] == Choice(first)
        else:
            assert found[node].format == without[node].format


def test_what_the_job_keeps_is_in_no_format(net):
    found = quantized(net, BOTH, half=torch.float16, keep=Keep(fp16=("q",), fp32=("conv",)))
    assert kinds(found)[("q", "linear")] == "fp16"
    assert kinds(found)[("conv", "conv2d")] == "fp32"
    assert {layer.module: layer.reason for layer in found.layers}["q"] == "precision.keep.fp16: q"


@pytest.mark.parametrize(
    ("formats", "kept", "idle"),
    [
        ((("*", "int8"), ("q", "fp8")), (), ""),  # the second takes a part of what the first has
        ((("q", "fp8"), ("*", "int8")), (), "precision.formats.q: decides nothing, as * decides"),
        ((("q", "fp8"),), ("q", "conv"), "precision.formats.q: decides nothing, as precision.keep.fp32: q decides"),
        ((("[qk]", "fp8"), ("q", "int8")), ("k",),
         "precision.formats.[qk]: decides nothing, as q, precision.keep.fp32: k decides"),
        ((("[qk]", "fp8"),), ("k",), ""),
    ],
)  # fmt: skip
def test_a_glob_that_decides_nothing_is_noted(net, formats, kept, idle):
    modes = Modes(frozenset({"int8", "fp8"}), formats=formats)
    found = [n for n in quantized(net, modes, keep=Keep(fp32=kept)).unmet if n.startswith("precision.formats")]
    assert found == ([f"{idle} for all that it matches"] if idle else [])


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (Modes(frozenset({"int8", "fp8"}), formats=(("qq*", "fp8"),)),
         "precision.formats.qq*: must match a module with a convolution, linear or matmul (got 'qq*', which matches "
         "none). Nearest paths: q, "),
        (Modes(frozenset({"int8", "fp8"}), formats=(("stem", "fp8"),)),
         "precision.formats.stem: must match something that FP8 can hold (got stem: a convolution of at most 16 "
         "channels gains nothing). Choose another format, or another module."),
        (Modes(frozenset({"int8"}), "int4", (("conv", "int4"),)),
         "precision.formats.conv: must match something that INT4 can hold (got conv: 4 bits are for the weights of "
         "linears). Choose another format, or another module."),
        (Modes(frozenset({"nvfp4", "int8"}), formats=(("conv", "nvfp4"),)),
         "precision.formats.conv: must match something that NVFP4 can hold (got conv: 4 bits are for the weights of "
         "linears). Choose another format, or another module."),
    ],
)  # fmt: skip
def test_a_glob_that_cannot_be(net, modes, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        quantized(net, modes)


@pytest.mark.parametrize(
    ("modes", "kept", "note"),
    [
        (Modes(frozenset({"int8"}), "int4"), (), "INT4 (4 bits are for the weights of linears)"),
        (Modes(frozenset({"int8", "nvfp4"})), (), "NVFP4 (4 bits are for the weights of linears)"),
        (BOTH, (), "FP8 (a convolution of at most 16 channels gains nothing; INT8 comes first)"),
        (dataclasses.replace(BOTH, formats=(("1", "fp8"),)), ("0",),
         "INT8 (precision.keep.fp32: 0; FP8 comes first)"),
    ],
)  # fmt: skip
def test_a_format_that_no_operation_has_is_noted(modes, kept, note):
    torch.manual_seed(0)
    convs = line(
        torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 32, 3), torch.nn.Flatten()).eval(), 8, 512
    )
    assert f"precision: no operation is in {note}" in quantized(convs, modes, keep=Keep(fp32=kept)).unmet


def test_every_format_asked_for_is_of_an_operation_or_noted(net):
    for globs in ((), (("*", "int8"),), (("*", "fp8"),)):
        modes = Modes(frozenset({"int8", "fp8"}), "int4", globs)
        chosen = assign(net.captured.sites, modes, Keep())
        idle = " ".join(n for n in quantized(net, modes).unmet if n.startswith("precision: no operation"))
        assert all((f" in {formats.FORMATS[f].title} (" in idle) != bool(chosen.of(f)) for f in ("int8", "fp8", "int4"))
        for choice in chosen.choices.values():  # every reason is there, however many there are
            assert all(why in idle for f, why in choice.kept_out.items() if not chosen.of(f))


def test_a_network_of_convolutions_has_nothing_for_4_bits():
    with pytest.raises(InputError) as raised:
        quantized(line(torch.nn.Sequential(tiny().stem, torch.nn.Flatten()), 16, 2048), INT4)
    assert str(raised.value) == (
        "precision: something must be left to quantize in INT4 (got none: INT4: 4 bits are for the weights of linears)."
        " Choose another format, or none."
    )


def test_a_table_without_a_tensor(net):
    lacking = {k: v for k, v in net.amax.items() if k != "mlp:input"}
    with pytest.raises(InputError, match=re.escape("got none for mlp:input). Calibrate again")):
        quantize(
            net.captured, int8=False, half=None, keep=Keep(), amax={}, ranges={},
            narrow=Narrow(FP8, Statistics(lacking, {})),
        )  # fmt: skip


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modes", [m for m, _ in CASES], ids=lambda m: m.title)
def test_the_onnx_file_computes_what_the_program_does(net, images, modes, half):
    """Every format and float type: ONNX Runtime on the file, against PyTorch on the program."""
    found = quantized(net, modes, half=half)
    model = to_onnx(found)
    with torch.inference_mode():
        program = found.program.module()(images)[0]
    with OrtRunner(model.data, as_written=True) as runner:
        graph = torch.from_numpy(runner.run({"image": images.numpy()})["logits"])
        assert ("NVFP4" in runner.name) == ("NVFP4" in modes.title)
    error = (graph - program).norm() / program.norm()
    # Sums in another order round to other halves, and those to other INT8, FP8 or FP4 numbers.
    assert error < (1e-3 if half is None else 0.05)
    wide = Attention().eval()(images)
    ratio = 10 * torch.log10(wide.square().sum() / (graph - wide).square().sum())
    assert ratio > (12 if "NVFP4" in modes.title else 15)


def test_weights_are_stored_as_narrow_as_they_are(net):
    types = {}
    for modes in (FP8, INT4, NVFP4_WEIGHTS):
        model = onnx.load_from_string(to_onnx(quantized(net, modes)).data)
        types[modes.title] = {onnx.TensorProto.DataType.Name(i.data_type) for i in model.graph.initializer if
                              tuple(i.dims) == (128, 128)}  # fmt: skip
        assert model.opset_import[0].version == {"FP8": 20, "INT4": 21, "NVFP4": 23}[modes.title]
    assert types == {"FP8": {"FLOAT8E4M3FN"}, "INT4": {"INT4"}, "NVFP4": {"FLOAT4E2M1"}}


class Constants(torch.nn.Module):
    """Tokens [N, 8, 128] times a matrix, times a matrix for each of 2 heads, and a matrix times them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Linear(48, 128)
        self.one, self.two, self.left = (
            torch.nn.Parameter(torch.randn(*n) / 16) for n in ((128, 128), (2, 128, 128), (16, 16))
        )

    def forward(self, x):
        y = self.tokens(x.reshape(x.shape[0], 16, 48)) @ self.one
        z = (y.unflatten(1, (2, 8)) @ self.two).flatten(1, 2)
        return (self.left @ z).mean(1)


@pytest.mark.parametrize("modes", [FP8, INT4, Modes(frozenset({"int8"})), Modes(frozenset({"fp8"}), "int4")])
def test_every_constant_that_is_multiplied_is_stored_narrow_or_says_why(modes):
    found = quantized(line(Constants().eval(), 16, 128), modes)
    stored = onnx.load_from_string(to_onnx(found).data).graph.initializer
    types = {tuple(i.dims): onnx.TensorProto.DataType.Name(i.data_type) for i in stored if len(i.dims) > 1}
    narrow = {"FP8": "FLOAT8E4M3FN", "INT8": "INT8", "INT4": "INT4"}
    for shape, title in types.items():
        assert title in narrow.values() or "INT4" in modes.title, (shape, title)
    layers = [layer for layer in found.layers if layer.op in ("linear", "matmul")]
    assert {layer.op: layer.precision for layer in layers if layer.op == "linear"} == {
        "linear": "int4" if modes.weights else next(iter(modes.on))
    }
    for layer in layers:
        if layer.op == "matmul" and modes.weights:
            assert "INT4: 4 bits are for the weights of linears" in layer.reason
        assert layer.reason or layer.precision != "fp32"


def test_the_same_job_gives_the_same_file(net):
    for modes in (BOTH, INT4, NVFP4):
        first, second = (to_onnx(quantized(net, modes, half=torch.float16)).data for _ in range(2))
        assert first == second


def test_what_several_operations_read_is_quantized_once(net):
    graph = quantized(net, FP8).program.graph
    quantizers = [n for n in graph.nodes if "fp8_quantize" in str(n.target)]
    read = [n.args[0] for n in quantizers]
    assert len(read) == len(set(read))


def test_moments_are_of_what_each_linear_reads(net, images):
    found = block_moments(net.captured, [[images[:1]], [images[1:]]])
    module = Attention().eval()
    seen = {}
    for name in ("q", "mlp"):
        getattr(module, name).register_forward_hook(lambda _m, x, _y, name=name: seen.__setitem__(name, x[0].detach()))
    module(images)
    by_module = {
        "".join(n.meta["nn_module_stack"][list(n.meta["nn_module_stack"])[-1]][0].split(".")[-1:]): n.name
        for n in net.captured.graph.graph.nodes
        if n.name in found
    }
    assert list(seen) == ["q", "mlp"]
    for name, x in seen.items():
        rows = x.reshape(-1, 128)
        expected = shrunk((rows.T @ rows / len(rows)).double()[None], len(rows))
        expected = (expected / expected.diagonal(dim1=1, dim2=2).mean()).float()
        torch.testing.assert_close(found[by_module[name]], expected, rtol=1e-4, atol=1e-6)


def test_moments_of_inputs_whose_squares_no_float32_holds_are_those_of_smaller_ones():
    x = torch.rand(40, 256, generator=torch.Generator().manual_seed(1))
    captured = SimpleNamespace(graph=torch.export.export(torch.nn.Linear(256, 4), (x,)).module())
    (large,), (usual,) = (block_moments(captured, [[x * size]]).values() for size in (1e25, 1.0))
    torch.testing.assert_close(large, usual, rtol=1e-4, atol=1e-5)


def test_dynamic_nvfp4_by_hand():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6.0, 2.4, -0.3])
    # amax 6: the block's scale is 6 / 6 / (1 / 448) = 448 exactly; 2.4 rounds to 2, -0.3 to -0.5.
    assert ops.fp4_dynamic(x, 1 / 448)[0, :4].tolist() == pytest.approx([6.0, 2.0, -0.5, 0.0], rel=1e-6)


def table(tensors, amax):
    audit = Audit(batches=1, batch_size=1, coverage=None, skipped=(), tensors=tensors, warnings=())
    return CalibrationTable("entropy_2", 99.99, amax, {}, {}, "", audit)


def seen(low, high, state="live"):
    return TensorAudit(
        low=low, high=high, elements=9, zeros=0.0, clipped=0.0, sqnr_db=None, stability=None, state=state
    )


def test_fp8_takes_the_exact_maximum_out_of_a_table_of_any_algorithm():
    tensors = {"a": seen(-3.0, 2.0), "b": seen(0.0, 7.5), "dead": seen(0.0, 0.0, "dead")}
    found = formats.maxima(table(tensors, {"a": 1.25, "b": 2.0, "dead": 1.0}))
    assert found == {"a": 3.0, "b": 7.5, "dead": 1.0}
    assert formats.maxima(given_table({"a": 1.25}, {})) == {"a": 1.25}  # nothing more is known of those


@pytest.mark.parametrize("modes", [FP8, BOTH, INT4], ids=lambda m: m.title)
def test_each_module_is_measured_in_its_own_format(net, images, modes):
    found = measure_sensitivity(
        net.captured,
        net.amax,
        [SampleBatch((images,), len(images))],
        half=None,
        keep=Keep(),
        progress=Silent(),
        int8="int8" in modes.on,
        narrow=Narrow(modes, Statistics(net.amax, {})),
    )
    measured = {m.module for m in found.modules}
    quantized_modules = {m for (m, _), p in kinds(quantized(net, modes)).items() if p != "fp32"}
    assert measured == quantized_modules
    conv = next((m for m in found.modules if m.module == "conv"), None)
    if modes is BOTH:
        assert conv is not None
        assert conv.fp8_sqnr_db is not None
        assert 10 < conv.fp8_sqnr_db < 60
        mlp = next(m for m in found.modules if m.module == "mlp")
        assert (mlp.fp8_sqnr_db, conv.int8_sqnr_db) == (None, None)
        assert mlp.int8_sqnr_db > mlp.own_sqnr_db  # normal numbers: INT8 rounds them finer
    else:
        assert all(m.fp8_sqnr_db is m.int8_sqnr_db is None for m in found.modules)
    assert all(5 < m.own_sqnr_db < 80 for m in found.modules)


@pytest.mark.parametrize("weights", ["int4", "nvfp4", None])
@pytest.mark.parametrize("eights", [("fp8",), ("int8",), ("fp8", "int8"), ()], ids="-".join)
def test_a_module_in_4_bits_is_measured_in_the_8_bits_that_are_on(net, images, weights, eights):
    """What a search could give it instead; both are better than 4 bits."""
    modes = Modes(frozenset((*eights, *(() if weights else ("nvfp4",)))), weights)
    found = measure_sensitivity(
        net.captured, net.amax, [SampleBatch((images,), len(images))], half=None, keep=Keep(), progress=Silent(),
        int8="int8" in eights, narrow=Narrow(modes, Statistics(net.amax, {})),
    )  # fmt: skip
    mlp = next(m for m in found.modules if m.module == "mlp")
    other = {"fp8": mlp.fp8_sqnr_db, "int8": mlp.int8_sqnr_db}
    assert {name for name, db in other.items() if db is not None} == set(eights)
    assert all(db > mlp.own_sqnr_db + 2 for db in other.values() if db is not None)


def test_every_pair_of_modes_leaves_each_operation_one_format(net):
    """The property behind the table above: whatever is on, an operation reads Q/DQ of one format alone."""
    on = [frozenset(c) for n in range(4) for c in itertools.combinations(("int8", "fp8", "nvfp4"), n)]
    for modes in (Modes(o, w) for o in on for w in (None, "int4") if (o or w) and not (w and "nvfp4" in o)):
        found = quantized(net, modes)
        by_format = set()
        for node in found.program.graph.nodes:
            formats_read = {
                "int8" if "per_" in str(a.target) else re.split(r"[._]", str(a.target))[1]
                for a in node.all_input_nodes
                if "dequantize" in str(a.target) or "fp4_dynamic" in str(a.target)
            }
            assert len(formats_read) <= 1, (modes, node, formats_read)
            by_format |= formats_read
        assert by_format, modes
