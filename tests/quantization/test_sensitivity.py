"""Sensitivities against the converted Q/DQ graph (torchao's operations), FlopCounterMode and hand-counted work."""

import dataclasses
import math
import re

import hard
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trtpipe.errors import Cancelled, InputError
from trtpipe.job.limits import Limits
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.nodes import module_path
from trtpipe.progress import Silent
from trtpipe.quantization.diagnose import blame, failed_outputs, is_about_numbers, step_of
from trtpipe.quantization.macs import macs
from trtpipe.quantization.partial import Partial, roundings
from trtpipe.quantization.precision import Keep, ScaleTypes
from trtpipe.quantization.quantize import place_qdq, prepare
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.quantization.sensitivity import SampleBatch, measure_sensitivity
from trtpipe.quantization.units import find_units
from trtpipe.values import CheckReport, Control, DimRange, LoadedModel, Metric, TensorSpec

N = {"N": DimRange(1, 4, 64)}


def captured_of(network, *shape):
    x, y = TensorSpec("x", "float32", ("N", *shape), N), TensorSpec("y", "float32", ("N", 5), N)
    return capture(LoadedModel(bind(network.eval(), (x,), {}, ("y",)), (x,), (y,), "0" * 64, "test"))


def amax_of(captured, x):
    """The exact maximum of each quantized tensor, read off the nodes themselves."""
    sites, values = captured.sites, {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n):
            values[n] = super().run_node(n)
            return values[n]

    with torch.inference_mode():
        Watch(captured.graph).run(x)
    amax = {}
    for site in sites:
        if site.axis is None:
            amax[site.group] = max(amax.get(site.group, 0.0), float(values[site.producer].abs().max()))
    return amax


def sqnr(reference, found):
    a, b = reference.double().numpy(), found.double().numpy()
    if (a == b).all():
        return math.inf
    return 10 * math.log10((a**2).sum() / ((b - a) ** 2).sum())


def of(found, module):
    """The figures of one module."""
    (one,) = (m for m in found.modules if m.module == module)
    return one


@pytest.fixture(scope="module")
def x():
    return torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def captured():
    return captured_of(hard.net(), 3, 16, 16)


@pytest.fixture(scope="module")
def amax(captured, x):
    return amax_of(captured, x)


@pytest.fixture(scope="module")
def labels():
    return torch.arange(12) % 5


@pytest.fixture(scope="module")
def found(captured, x, amax, labels):
    samples = [SampleBatch((x[:8],), 8, labels[:8]), SampleBatch((x[8:],), 4, labels[8:])]
    return measure_sensitivity(captured, amax, samples, half=torch.float16, keep=Keep(), progress=Silent())


def float_and_alone(captured, amax, x, path):
    """Outputs of the float graph, and of the Q/DQ graph that torchao converts with all modules but one kept."""
    prepared = prepare(captured, lambda n: module_path(n) != path)
    graph, _ = place_qdq(prepared, amax)
    with torch.inference_mode():
        return captured.graph(x)[0], graph(x)[0]


@pytest.mark.parametrize("path", [hard.WORST, "layer1.0.conv1", "head"])
def test_a_module_alone_costs_what_the_converted_graph_says(captured, amax, x, found, labels, path):
    reference, alone = float_and_alone(captured, amax, x, path)
    one = of(found, path)
    # the noise of layer2.0.conv2 includes that of the skip branch its add reads, which this graph leaves in float
    assert one.sqnr_db == pytest.approx(sqnr(reference, alone), abs=1.0)
    loss = nn.functional.cross_entropy
    assert one.loss_rise == pytest.approx(float(loss(alone, labels) - loss(reference, labels)), abs=2e-3)
    assert one.agreement == pytest.approx(float((alone.argmax(1) == reference.argmax(1)).double().mean()))


class Answering(nn.Module):
    """A network whose outputs are scores and what they say: whole numbers and yes or no."""

    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.kept = nn.Linear(8, 16), nn.Linear(16, 5), kept

    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        every = y, y > 0, (y * 40).int(), y.argmax(1)
        return tuple(every[k] for k in self.kept)


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_outputs_of_every_dtype_count(kept):
    """What a module alone changes in yes-or-no answers and whole numbers is measured as in scores: recomputed from the
    graph that torchao converts."""
    x_spec = TensorSpec("x", "float32", ("N", 8), N)
    every = [("scores", "float32", ("N", 5)), ("signs", "bool", ("N", 5)), ("levels", "int32", ("N", 5)),
             ("class", "int64", ("N",))]  # fmt: skip
    specs = tuple(TensorSpec(*every[k], N) for k in kept)
    bound = bind(Answering(kept).eval(), (x_spec,), {}, tuple(s.name for s in specs))
    captured = capture(LoadedModel(bound, (x_spec,), specs, "0" * 64, "test"))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    amax = amax_of(captured, x)
    found = measure_sensitivity(captured, amax, [SampleBatch((x,), 64)], half=None, keep=Keep(), progress=Silent())
    for path in ("a", "b"):
        prepared = prepare(captured, lambda n, path=path: module_path(n) != path)
        graph, _ = place_qdq(prepared, amax)
        with torch.inference_mode():
            wanted = {s.name: sqnr(a, b) for s, a, b in zip(specs, captured.graph(x), graph(x), strict=True)}
        assert of(found, path).outputs_db == pytest.approx(wanted, abs=1e-6)
        assert of(found, path).sqnr_db == pytest.approx(min(wanted.values()), abs=1e-6)


class TwoHeads(nn.Module):
    """A side answer of few classes, and the one that the labels are of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side, self.head = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 10)

    def forward(self, x):
        y = torch.relu(self.body(x))
        return self.side(y), self.head(y)


def test_classes_are_of_the_output_that_has_one_for_every_label():
    x_spec = TensorSpec("x", "float32", ("N", 8), N)
    specs = (TensorSpec("side", "float32", ("N", 3), N), TensorSpec("classes", "float32", ("N", 10), N))
    bound = bind(TwoHeads().eval(), (x_spec,), {}, ("side", "classes"))
    captured = capture(LoadedModel(bound, (x_spec,), specs, "0" * 64, "test"))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    amax, labels = amax_of(captured, x), torch.arange(64) % 10
    sample = SampleBatch((x,), 64, labels)
    reference = captured.graph(x)[1]
    for last, head, other in ((9, "head", "side"), (-1, "side", "head")):
        found = measure_sensitivity(
            captured, amax, [sample], half=None, keep=Keep(), progress=Silent(), last_label=last
        )  # fmt: skip
        assert of(found, head).agreement < 1 or of(found, head).loss_rise != 0
        assert (of(found, other).agreement, of(found, other).loss_rise) == (1, 0)
    prepared = prepare(captured, lambda n: module_path(n) != "head")
    graph, _ = place_qdq(prepared, amax)
    loss = nn.functional.cross_entropy
    rise = float(loss(graph(x)[1], labels) - loss(reference, labels))
    found = measure_sensitivity(captured, amax, [sample], half=None, keep=Keep(), progress=Silent(), last_label=9)
    assert of(found, "head").loss_rise == pytest.approx(rise, abs=1e-6)


@pytest.mark.parametrize("half", [None, torch.float16])
def test_everything_rounded_is_the_quantized_graph(captured, amax, x, half):
    prepared = prepare(captured, types=ScaleTypes(half))
    everything = roundings(prepared.sites, amax, ScaleTypes(half))
    graph, _ = place_qdq(prepared, amax)
    machine = Partial(captured.graph)
    outputs, _ = machine.finish(0, machine.inputs((x,)), everything)
    with torch.inference_mode():
        torch.testing.assert_close(outputs[0], graph(x)[0], rtol=1e-3, atol=1e-4)


def test_the_worst_module_is_the_one_with_the_outlier_and_its_line_is_known(captured, found):
    worst = found.modules[0]
    assert worst.module == hard.WORST
    line = int(re.fullmatch(r"hard\.py:(\d+)", worst.source)[1])
    with open(hard.__file__) as source:
        assert "self.conv2(y)" in source.read().splitlines()[line - 1]
    assert found.modules[1].sqnr_db > worst.sqnr_db + 15
    assert [m.sqnr_db for m in found.modules] == sorted(m.sqnr_db for m in found.modules)
    assert {m.module for m in found.modules} == {u.path for u in find_units(captured.sites)}


def test_a_module_kept_out_is_not_measured(captured, amax, x):
    keep = Keep(fp32=("layer*",))
    some = measure_sensitivity(captured, amax, [SampleBatch((x,), 12)], half=None, keep=keep, progress=Silent())
    assert {m.module for m in some.modules} == {"stem.0", "head"}
    assert all(m.half_sqnr_db is None and m.loss_rise is None for m in some.modules)


def test_padding_does_not_count(captured, amax, x, labels):
    def run(sample):
        return measure_sensitivity(captured, amax, [sample], half=torch.float16, keep=Keep(), progress=Silent())

    padded = SampleBatch((torch.cat([x[:3], 100 * x[3:4]]),), 3, labels[:3])
    plain, other = run(SampleBatch((x[:3],), 3, labels[:3])), run(padded)
    assert other.samples == 3
    for a in plain.modules:
        b = of(other, a.module)
        assert b.sqnr_db == pytest.approx(a.sqnr_db, abs=0.05)
        assert b.own_sqnr_db == pytest.approx(a.own_sqnr_db, abs=0.05)
        assert b.half_sqnr_db == pytest.approx(a.half_sqnr_db, abs=0.05)
        assert b.loss_rise == pytest.approx(a.loss_rise, abs=1e-4)


class Chain(nn.Module):
    """Six equal linears in a row."""

    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(6)])
        self.scale = scale

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x * self.scale


def test_the_work_is_half_the_chain_for_each_module():
    chain = captured_of(Chain(), 5)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    amax = amax_of(chain, x)
    with FlopCounterMode(display=False) as counted:
        some = measure_sensitivity(chain, amax, [SampleBatch((x,), 4)], half=None, keep=Keep(), progress=Silent())
    # one pass for the outputs, one walk, and from module k on the remaining 6, 5, ... 1 of 6 linears
    assert some.passes == pytest.approx(2 + 21 / 6)
    assert some.macs == 6 * 25
    assert counted.get_total_flops() == 2 * some.passes * some.macs * 4


def test_a_half_precision_overflow_is_minus_infinity():
    network = Chain()
    network.steps[2].weight.data *= 1e6
    chain = captured_of(network, 5)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    some = measure_sensitivity(
        chain, amax_of(chain, x), [SampleBatch((x,), 4)], half=torch.float16, keep=Keep(), progress=Silent()
    )
    assert of(some, "steps.2").half_sqnr_db == -math.inf
    assert 55 < of(some, "steps.1").half_sqnr_db < 90


def test_nothing_to_quantize_and_no_sample_are_refused(captured, amax, x):
    with pytest.raises(InputError, match=r"^sensitivity: no module is left to quantize\. Narrow"):
        measure_sensitivity(captured, amax, [SampleBatch((x,), 12)], half=None, keep=Keep(("*",)), progress=Silent())
    with pytest.raises(InputError, match=r"^sensitivity: there is no sample\. Give check"):
        measure_sensitivity(captured, amax, [], half=None, keep=Keep(), progress=Silent())


def test_it_can_be_cancelled(captured, amax, x):
    class Impatient(Silent):
        def cancelled(self):
            return True

    with pytest.raises(Cancelled):
        measure_sensitivity(captured, amax, [SampleBatch((x,), 12)], half=None, keep=Keep(), progress=Impatient())


@pytest.mark.parametrize(
    ("name", "run", "shapes"),
    [
        ("conv2d", lambda x, w: torch.conv2d(x, w, groups=2), [(3, 4, 9, 9), (6, 2, 3, 3)]),
        ("conv1d", torch.conv1d, [(3, 4, 9), (6, 4, 3)]),
        ("conv_transpose2d", lambda x, w: torch.conv_transpose2d(x, w, groups=2), [(3, 4, 5, 5), (4, 3, 2, 2)]),
        ("linear", torch.nn.functional.linear, [(3, 7, 4), (6, 4)]),
        ("matmul", torch.matmul, [(2, 3, 5, 4), (2, 3, 4, 6)]),
        ("bmm", torch.bmm, [(3, 5, 4), (3, 4, 6)]),
    ],
)
def test_macs_are_half_of_what_flop_counter_mode_counts(name, run, shapes):
    args = [torch.zeros(s) for s in shapes]
    with FlopCounterMode(display=False) as counted:
        result = run(*args)
    assert 2 * macs(name, args, result) == counted.get_total_flops() > 0


def test_the_skip_of_a_residual_add_belongs_to_the_convolution_it_is_fused_with(captured):
    units = {u.path: u for u in find_units(captured.sites)}
    q4 = {path: [s.key for s in u.sites if s.rule == "Q4"] for path, u in units.items()}
    assert q4["layer1.0.conv2"] == ["layer1.0:add.input_1"]
    assert q4["layer1.0.conv1"] == []


def one(module, sqnr_db):
    return ModuleSensitivity(module, "net.py:7", "conv2d", sqnr_db, 10.0, None, 1)


def test_blame_names_the_worst_with_source_and_a_next_step():
    some = Sensitivity((one("a.b", 9.55), one("c", 30.0), one("", 31.0), one("d", 50.0)), 32, 4, 1.0, 1.0, 0.1)
    assert blame(some, "fp16") == (
        "worst quantized modules: a.b (net.py:7) 9.6 dB, then c (net.py:7) 30.0 dB, "
        "then the model itself (net.py:7) 31.0 dB "
        "at the outputs when it alone is quantized (the median of 4: 30.5 dB). "
        "Keep the first in precision.keep.fp16, or run `trtpipe tune`."
    )
    assert "precision.keep.fp32" in blame(some, None)
    assert "(the median of 4 of 9 that there was time for: 30.5 dB)" in blame(
        dataclasses.replace(some, left_out=5), None
    )
    nameless = Sensitivity((one("", 9.0), one("c", 30.0)), 32, 4, 1.0, 1.0, 0.1)
    assert blame(nameless, "fp16").endswith(" Keep c in precision.keep.fp16, or run `trtpipe tune`.")
    assert step_of(blame(nameless, "fp16")) == "Keep c in precision.keep.fp16, or run `trtpipe tune`."


def test_blame_advises_no_search_that_was_made():
    for modules in ((one("a.b", 9.55), one("c", 30.0)), (one("", 9.0),), (one("a", math.inf),)):
        said = blame(Sensitivity(modules, 32, 4, 1.0, 1.0, 0.1), "fp16", (), "A search was made. Do something else.")
        assert said.endswith(". A search was made. Do something else.")
        assert "trtpipe tune" not in said
        assert "precision.keep" not in said
        assert step_of(said) == ("A search was made. Do something else." if modules[0].sqnr_db < math.inf else "")


def test_blame_is_of_the_outputs_that_miss_a_limit():
    """A module that another output alone depends on can change nothing of them."""

    def two(module, logits, aux):
        return dataclasses.replace(one(module, min(logits, aux)), outputs_db={"logits": logits, "aux": aux})

    some = Sensitivity(
        (two("aux", math.inf, 20.7), two("head", 28.1, math.inf), two("c", 40.0, 35.0)), 8, 4, 1.0, 1.0, 0.1
    )
    assert blame(some, None).startswith("worst quantized modules: aux (net.py:7) 20.7 dB, then head ")
    assert blame(some, None, {"logits"}) == (
        "worst quantized modules: head (net.py:7) 28.1 dB, then c (net.py:7) 40.0 dB at output logits when it alone is "
        "quantized (the median of 3: 40.0 dB). Keep the first in precision.keep.fp32, or run `trtpipe tune`."
    )


@pytest.mark.parametrize(
    ("failed", "problems", "found"),
    [
        (("logits",), (), {"logits"}),
        (("logits", "aux"), (), set()),
        ((), (), set()),
        (("logits", ""), (), set()),
        (("logits",), ("output aux holds NaN or infinity in what was executed",), set()),
    ],
)
def test_the_outputs_that_a_limit_is_missed_of(failed, problems, found):
    metrics = [Metric("cosine", name, 0.9, 0.95, name not in failed) for name in ("logits", "aux")]
    metrics += [Metric("latency_ms", "", 9.0, 5.0, False)] if "" in failed else []
    report = CheckReport("graph", "x", 1, tuple(metrics), None, False, tuple(problems))
    assert failed_outputs(report) == found


def test_blame_names_nobody_where_no_module_alone_changes_an_answer():
    """Outputs that are classes or yes and no: a module that changes none of them is not the worst of anything."""
    none = Sensitivity(tuple(one(name, math.inf) for name in ("a", "b", "c")), 32, 4, 1.0, 1.0, 0.1)
    assert blame(none, "fp16") == (
        "worst quantized modules: none. Each of 3 alone leaves the outputs of the samples that were measured "
        "as they are. Run `trtpipe tune`."
    )


def test_blame_is_for_numbers_only():
    def report(metrics=(), problems=()):
        return CheckReport("graph", "r", 1, metrics, Control("d", "h", True, 1), False, problems)

    limits = Limits(cosine_min=0.9)
    assert is_about_numbers(report((Metric("cosine", "y", 0.1, 0.9, False),)), limits)
    assert is_about_numbers(report(problems=("output y holds NaN or infinity in what was executed",)), limits)
    assert not is_about_numbers(report(problems=("check.require is engine, and no GPU executed it here",)), limits)
    assert not is_about_numbers(report((Metric("cosine", "y", 0.99, 0.9, True),)), limits)
    assert not is_about_numbers(report((Metric("cosine", "y", 0.99, 0.9, False, (0.8, 1.0)),)), limits)


def test_copying_leaves_the_captured_graph_alone(captured, amax, x):
    before = [(n.name, n.target) for n in captured.graph.graph.nodes]
    weights = {k: v.clone() for k, v in captured.graph.state_dict().items()}
    measure_sensitivity(captured, amax, [SampleBatch((x,), 12)], half=None, keep=Keep(), progress=Silent())
    assert before == [(n.name, n.target) for n in captured.graph.graph.nodes]
    for name, value in captured.graph.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), weights[name].numpy())
