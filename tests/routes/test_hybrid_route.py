"""build.allow_torch_fallback with the real Torch-TensorRT: partitioned, converted and built, without a GPU.

No engine is executed: where a module's answers are asked for, PyTorch runs the very graphs that the engines were
converted from, in the engines' place.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driverless import Part
from models import job, line, tiny

from trtpipe.bundle import hybrid
from trtpipe.bundle.hybrid import OperatorStep
from trtpipe.errors import BuildError, InputError
from trtpipe.progress import Silent
from trtpipe.routes.torch_tensorrt import partition as hybrid_route
from trtpipe.routes.torch_tensorrt import route
from trtpipe.runtime.hybrid_runner import HybridRunner
from trtpipe.values import DimRange


class Odd(torch.nn.Module):
    """erfc has no converter in Torch-TensorRT 2.14."""

    def forward(self, x):
        return torch.erfc(x)


class Cut(torch.nn.Module):
    """Three convolutions, an operation that TensorRT cannot take, two more and a linear; `few` before it or not."""

    def __init__(self, few: bool = False) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.body = torch.nn.Sequential(*[torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(1 if few else 2)])
        self.odd = Odd()
        self.tail = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.more = torch.nn.Conv2d(8, 8, 1)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for part in self.body:
            x = torch.relu(part(x))
        x = self.odd(x)
        x = torch.relu(self.more(torch.relu(self.tail(x))))
        return self.head(x.mean((2, 3)))


def cut(few: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    network = Cut(few).eval()
    with torch.no_grad():
        for m in network.modules():
            if isinstance(m, torch.nn.Conv2d):
                m.weight.mul_(3)  # so that the answers tell one image from another
    return network


@pytest.fixture(scope="module")
def small():
    return line(cut(), 16, 5)


@pytest.fixture(scope="module")
def int8(world, small):
    """The INT8 hybrid, its module, and its two parts."""
    engine, module = compiled(world, small, small.quantized(int8=True))
    return engine, module, tuple(world.parts)


def compiled(world, model, quantized, **build):
    world.parts.clear()
    wanted = job("torch_tensorrt", "tensorrt_rtx", build={"allow_torch_fallback": True, **build})
    engine = route.compile_engine(wanted, model.loaded, quantized, Silent())
    return engine, hybrid.from_bytes(engine.data, "model.hybrid") if engine.fallback else None


class InPyTorch:
    """The graph of one part in its engine's place."""

    name = "PyTorch in an engine's place"
    device = "cpu"

    def __init__(self, part: Part) -> None:
        self.graph = part.graph

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run_tensors(self, inputs, outputs, /):
        found = self.graph(*inputs.values())
        return list(found) if isinstance(found, list | tuple) else [found]


def answers(parts, engine, images):
    """The outputs of the plan when PyTorch does what the engines would."""
    left = iter(parts)

    class Next(InPyTorch):
        def __init__(self, engine: bytes, **options: object) -> None:
            super().__init__(next(left))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trtpipe.runtime.hybrid_runner.DeviceRunner", Next)
        with HybridRunner(engine.data) as runner:
            return runner.run({"image": images})


def check_wiring(parts, engine, program, tolerance):
    """The plan's answers are the program's, and tell one image from another."""
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    images *= torch.tensor([0.1, 1.0, 6.0]).reshape(-1, 1, 1, 1)
    (wanted,) = program(images)
    found = answers(parts, engine, images.numpy())["logits"]
    assert found.dtype == np.float32
    assert np.ptp(found, axis=0).max() > 10 * tolerance
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=tolerance)


def test_a_hybrid_is_cut_at_the_operation_and_wired_as_the_program(int8, small):
    engine, module, parts = int8
    assert [(f.module, f.op, f.reason) for f in engine.fallback] == [("odd", "aten.erfc.default", hybrid_route.NONE)]
    assert engine.fallback[0].source.startswith("test_hybrid_route.py:")
    assert [s.op if isinstance(s, OperatorStep) else s.engine for s in module.plan.steps] == [0, "aten.erfc.default", 1]
    assert (module.plan.inputs, set(module.plan.outputs)) == (("image",), {"logits"})
    assert all(e[:4] == b"vtrt" for e in module.engines)
    assert len(parts) == 2
    assert (engine.target, engine.compute_capabilities) == ("tensorrt_rtx", ())
    check_wiring(parts, engine, small.quantized(int8=True).program.module(), 1e-5)


@pytest.mark.parametrize(("half", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 2e-2)])
def test_halves(world, small, half, tolerance):
    quantized = small.quantized(int8=half is torch.float16, half=half)
    engine, module = compiled(world, small, quantized)
    assert len(module.engines) == 2
    name = "HALF" if half is torch.float16 else "BF16"
    first, second = world.parts
    assert first.bindings["output0"][1] == name
    assert {d for n, (_, d) in second.bindings.items() if n != "output0"} == {name}
    assert second.bindings["output0"][1] == "FLOAT"
    check_wiring(world.parts, engine, quantized.program.module(), tolerance)


def test_each_engine_has_its_own_share_of_the_tables_scales(int8, small):
    """Q/DQ of activations and of weights stand in the engine that computes with them."""
    first, second = int8[2]
    table = {np.float32(a) / np.float32(127) for a in small.amax.values()}
    activations = [{s[0] for s in part.scales.values() if s.size == 1} for part in (first, second)]
    assert activations[0] | activations[1] == table
    network = small.loaded.module.network

    def weights(*modules):
        found = []
        for m in modules:
            w = m.weight.detach().numpy().reshape(m.weight.shape[0], -1)
            found.append((np.abs(w).max(axis=1) / np.float32(127)).astype(np.float32).tobytes())
        return sorted(found)

    held = [sorted(s.tobytes() for s in part.scales.values() if s.size > 1) for part in (first, second)]
    assert held == [weights(network.stem, *network.body), weights(network.tail, network.more, network.head)]
    # Nothing but activations goes from one to the other.
    assert [len(part.bindings) for part in (first, second)] == [2, 2]


def test_every_part_takes_every_batch_of_the_job(world, small, int8):
    """Torch-TensorRT by itself takes the export's example for the best shape, and twice the least for a product's."""
    for part in int8[2]:
        (profile,) = part.profiles
        assert {tuple(s[0] for s in shapes) for shapes in profile.values()} == {(1, 8, 32)}
    two = ({"N": DimRange(1, 1, 4)}, {"N": DimRange(4, 16, 32)})
    compiled(world, small, small.quantized(), profiles=two)
    for part in world.parts:
        found = [{tuple(s[0] for s in shapes) for shapes in profile.values()} for profile in part.profiles]
        assert found == [{(1, 1, 4)}, {(4, 16, 32)}]


def test_few_operations_stay_where_they_are_and_it_is_said(world):
    few = line(cut(few=True), 16, 5)
    engine, module = compiled(world, few, few.quantized())
    assert len(module.engines) == 1
    assert {(f.module, f.op) for f in engine.fallback if f.reason == hybrid_route.SMALL_BLOCK} == {
        ("stem", "aten.convolution.default"), ("body.0", "aten.convolution.default"), ("", "aten.relu.default"),
    }  # fmt: skip
    said = "\n".join(engine.notes)
    assert (
        "build.allow_torch_fallback: hybrid, 1 engine, and 5 operations in PyTorch; at least 5 convertible operations "
        "that stand together (min_block_size) make an engine"
    ) in said
    assert "stayed in PyTorch: aten.erfc.default in odd: Torch-TensorRT has no converter for it" in said
    assert (
        "stayed in PyTorch: aten.convolution.default in body.0, stem: it has a converter, and stands among fewer than "
        "5 that have one"
    ) in said
    # Its weights are in the file, and the plan uses them.
    check_wiring(world.parts, engine, few.captured.graph, 1e-5)


def test_where_everything_converts_the_engine_is_whole_and_says_so(world):
    whole = line(tiny(), 16, 5)
    engine, module = compiled(world, whole, whole.quantized(int8=True))
    assert (engine.fallback, module) == ((), None)
    assert engine.data[:4] == b"vtrt"
    assert route.NOT_NEEDED_NOTE in engine.notes
    assert world.bindings == {"image": ((-1, 3, 16, 16), "FLOAT"), "logits": ((-1, 5), "FLOAT")}


def test_without_the_option_the_engine_has_to_be_whole(world, small):
    with pytest.raises(BuildError, match=r"\(no converter for aten\.erfc\.default \(odd\)\)\."):
        route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), small.loaded, small.quantized(), Silent())


def test_a_program_with_nothing_to_convert_is_refused(world):
    class Little(torch.nn.Module):
        def forward(self, x):
            return torch.erfc(x).mean((2, 3))

    little = line(Little().eval(), 16, 3)
    with pytest.raises(BuildError) as caught:
        compiled(world, little, little.quantized())
    assert str(caught.value) == (
        "build: at least 5 operations that stand together must have converters in Torch-TensorRT (got none that do). "
        "Use build.route onnx."
    )


def test_two_outputs_one_of_them_from_pytorch(world):
    from trtpipe.model.bindings import bind
    from trtpipe.model.capture import capture
    from trtpipe.model.export import export
    from trtpipe.values import LoadedModel, Quantized, TensorSpec

    class Two(Cut):
        def forward(self, x):
            odd = self.odd(torch.relu(self.body(torch.relu(self.stem(x)))))
            return super().forward(x), odd.mean((1, 2, 3))

    torch.manual_seed(0)
    one = line(tiny(), 16, 5)
    dims = one.loaded.inputs[0].dims
    outputs = (TensorSpec("logits", "float32", ("N", 5), dims), TensorSpec("energy", "float32", ("N",), dims))
    loaded = LoadedModel(
        bind(Two().eval(), one.loaded.inputs, {}, ("logits", "energy")), one.loaded.inputs, outputs, "0" * 64, "t"
    )
    captured = capture(loaded)
    quantized = Quantized(export(captured.graph, loaded.inputs), loaded.inputs, outputs, (), {}, (), ())
    world.parts.clear()
    wanted = job("torch_tensorrt", "tensorrt_rtx", build={"allow_torch_fallback": True})
    engine = route.compile_engine(wanted, loaded, quantized, Silent())
    assert engine.fallback
    images = torch.rand(2, 3, 16, 16)
    found = answers(world.parts, engine, images.numpy())
    for name, want in zip(("logits", "energy"), captured.graph(images), strict=True):
        np.testing.assert_allclose(found[name], want.detach().numpy(), atol=1e-5)


def graph_of(function, *shape):
    """`function` as the kind of module that a hybrid is made of, with one TensorRT part that is none."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.export.export(Module(), (torch.zeros(*shape),)).module()


def test_what_cannot_be_written_down_is_refused_with_its_name(small):
    inputs, outputs = small.loaded.inputs, small.loaded.outputs
    with pytest.raises(BuildError) as caught:
        hybrid_route._operator_name(
            next(n for n in graph_of(lambda x: x.clone().mul_(2), 2).graph.nodes if "mul_" in str(n.target))
        )
    assert str(caught.value) == (
        "build: an operation that stays in PyTorch must be one of ATen's that writes to no argument (got aten.mul_."
        "Tensor in the model itself). Leave build.allow_torch_fallback out and use build.route onnx, or rewrite the "
        "operation."
    )
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    part = graph.call_module("part", (x,))
    part.meta["val"] = 3
    graph.output((part,))
    root = torch.nn.Module()
    root.part = torch.nn.Module()
    root.part.serialized_engine = b""
    with pytest.raises(
        BuildError, match=r"an engine would take or give what is no tensor of known shape \(the number 3\)\."
    ):
        hybrid_route.hybrid_of(torch.fx.GraphModule(root, graph), inputs, outputs)
    part.meta["val"] = torch.zeros(1)
    root.part.requires_output_allocator = True
    with pytest.raises(BuildError, match=r"\(an output whose shape only its values decide"):
        hybrid_route.hybrid_of(torch.fx.GraphModule(root, graph), inputs, outputs)


def test_an_argument_that_compile_lacks_is_refused(world, small, monkeypatch):
    frontend, _ = route.load("tensorrt_rtx")

    def older(exported_program, inputs=None, *, arg_inputs=None, require_full_compilation=False, **kwargs):
        raise AssertionError("not reached")

    monkeypatch.setattr(frontend.dynamo, "compile", older)
    with pytest.raises(
        InputError, match=r"lacks arguments that this job needs \(\S.*min_block_size.* in version 2\.14"
    ):
        compiled(world, small, small.quantized())


def test_an_argument_that_no_file_can_hold_is_refused():
    from trtpipe.routes.torch_tensorrt.partition import _argument

    with pytest.raises(BuildError) as caught:
        _argument(torch.Generator, {}, None, None)
    assert str(caught.value).startswith(
        "build: arguments of an operation that stays in PyTorch must be tensors and numbers (got <class "
    )


def test_what_is_no_operation_is_not_taken():
    node = torch.fx.Graph().placeholder("x")
    with pytest.raises(BuildError) as caught:
        hybrid_route._node(node, torch.nn.Module(), {}, hybrid_route._HybridDraft(), "")
    assert str(caught.value) == (
        "build: x must be an operation of a graph (got placeholder). Leave build.allow_torch_fallback out and use "
        "build.route onnx, or rewrite the operation."
    )
