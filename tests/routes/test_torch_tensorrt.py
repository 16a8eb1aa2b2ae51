"""Route torch_tensorrt against the real Torch-TensorRT and the real TensorRT-RTX build, without a GPU."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import warnings

import numpy as np
import pytest
import torch
from driverless import driverless
from models import job, line, tiny

from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.progress import Silent
from trtpipe.routes import frontends, options
from trtpipe.routes.support import POOL_KEYWORDS, ROUTE_OPTIONS, Taken
from trtpipe.routes.torch_tensorrt import route
from trtpipe.trt import driver, timing_cache
from trtpipe.values import DimRange, TensorSpec

try:
    importlib.metadata.version("torch-tensorrt-rtx")
    HERE = True
except importlib.metadata.PackageNotFoundError:
    HERE = False
needs_frontend = pytest.mark.skipif(not HERE, reason="torch-tensorrt-rtx is not installed")


@pytest.fixture(scope="module")
def small():
    return line(tiny(), 16, 5)


@pytest.fixture(scope="module")
def world():
    if not HERE:
        pytest.skip("torch-tensorrt-rtx is not installed")
    with driverless() as seen:
        yield seen


def weight_scales(network: torch.nn.Module) -> dict[tuple[int, ...], int]:
    """Bytes of amax/127 by output channel, in float32, of every convolution and linear."""
    found: dict[tuple[int, ...], int] = {}
    for m in network.modules():
        if isinstance(m, torch.nn.Conv2d | torch.nn.Linear):
            w = m.weight.detach().numpy().reshape(m.weight.shape[0], -1)
            scale = (np.abs(w).max(axis=1) / np.float32(127)).astype(np.float32)
            found[scale.tobytes()] = found.get(scale.tobytes(), 0) + 1  # type: ignore[index, arg-type]
    return found


def test_int8_reaches_the_network_with_the_tables_scales(world, small):
    engine = route.compile_engine(
        job("torch_tensorrt", "tensorrt_rtx"), small.loaded, small.quantized(int8=True), Silent()
    )

    table = {np.float32(a) / np.float32(127) for a in small.amax.values()}
    activations = {s[0] for s in world.scales.values() if s.size == 1}
    assert activations == table
    weights = [s.tobytes() for s in world.scales.values() if s.size > 1]
    assert sorted(weights) == sorted(weight_scales(small.loaded.module.network))
    assert world.bindings == {"image": ((-1, 3, 16, 16), "FLOAT"), "logits": ((-1, 5), "FLOAT")}
    assert world.dtypes["INT8"] > 0
    assert any("stem/quantize" in name for name in world.layers)
    assert (engine.target, engine.compute_capabilities) == ("tensorrt_rtx", ())
    assert engine.data[:4] == b"vtrt"


def test_the_graph_is_the_onnx_of_the_same_program_and_says_so(world, small):
    from trtpipe.routes.onnx import to_onnx

    quantized = small.quantized(int8=True)
    before = to_onnx(quantized).data
    engine = route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), small.loaded, quantized, Silent())
    assert engine.graph is not None
    assert engine.graph.data == before == to_onnx(quantized).data
    assert route.GRAPH_NOTE in engine.notes


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_build_with_scales_in_the_half(world, small, half):
    quantized = small.quantized(int8=True, half=half)
    route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), small.loaded, quantized, Silent())
    assert world.dtypes["HALF" if half is torch.float16 else "BF16"] > 0
    assert world.bindings["logits"][1] == "FLOAT"
    if half is torch.float16:
        assert {s[0] for s in world.scales.values() if s.size == 1} == {
            np.float32(s) for s in quantized.scales.values()
        }


def test_bindings_have_the_jobs_dtypes(world):
    halves = line(tiny(), 16, 5, dtype="float16", out="float16")
    route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), halves.loaded, halves.quantized(), Silent())
    assert world.bindings == {"image": ((-1, 3, 16, 16), "HALF"), "logits": ((-1, 5), "HALF")}


def test_every_profile_of_the_job_is_in_the_engine(world, small):
    two = ({"N": DimRange(1, 1, 4)}, {"N": DimRange(4, 16, 32)})
    wanted = job("torch_tensorrt", "tensorrt_rtx", build={"profiles": two, "max_aux_streams": 2, "tf32": False})
    engine = route.compile_engine(wanted, small.loaded, small.quantized(), Silent())
    assert world.config.num_optimization_profiles == 2
    assert world.config.max_aux_streams == 2
    import tensorrt_rtx as trt

    assert not world.config.get_flag(trt.BuilderFlag.TF32)
    assert engine.options["max_aux_streams"] == 2


def test_the_import_leaves_warnings_and_loggers_as_they_were(world, small):
    shown, levels = warnings.showwarning, [logging.getLogger(n).level for n in route.LOGGERS]
    route.load("tensorrt_rtx")
    route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), small.loaded, small.quantized(), Silent())
    assert warnings.showwarning is shown
    assert not getattr(logging, "_warnings_showwarning", None)
    assert [logging.getLogger(n).level for n in route.LOGGERS] == levels
    assert not any(logging.getLogger(n).handlers for n in route.LOGGERS)


def test_without_a_gpu_it_points_to_the_onnx_route(small, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="libcuda.so.1 is not on this machine"))
    with pytest.raises(MissingError) as caught:
        route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), small.loaded, small.quantized(), Silent())
    assert str(caught.value) == (
        "build.route: torch_tensorrt needs an NVIDIA GPU and its driver (libcuda.so.1 is not on this "
        "machine). Use build.route onnx, which builds TensorRT-RTX engines without one."
    )
    assert caught.value.exit_code == 3


def test_the_other_flavour_is_refused(monkeypatch):
    rtx = options.Frontend("tensorrt_rtx", "torch-tensorrt-rtx", "2.14.0")
    monkeypatch.setattr(options, "installed_frontend", lambda: rtx)
    with pytest.raises(MissingError) as caught:
        route.load("tensorrt")
    assert str(caught.value) == (
        "build.route: torch_tensorrt for target tensorrt must have torch-tensorrt (got torch-tensorrt-rtx 2.14.0). "
        "Run: pip install 'torch-tensorrt==2.14.*'"
    )
    monkeypatch.setattr(options, "installed_frontend", lambda: None)
    with pytest.raises(MissingError, match=r"must have torch-tensorrt-rtx \(got none\)\. Run: pip install --no-deps"):
        route.load("tensorrt_rtx")


def test_pytorch_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingError, match=r"needs the CUDA build of PyTorch \("):
        route.load("tensorrt_rtx")


def test_a_static_export_with_a_dynamic_binding_is_refused(small):
    fixed = torch.export.export(small.captured.graph, (torch.zeros(4, 3, 16, 16),))
    with pytest.raises(BuildError) as caught:
        route.check_shapes(fixed, small.loaded.inputs)
    assert str(caught.value) == (
        "inputs.image: dimension 0 of the exported program must be 1 to 32 (got 4). "
        "The model fixes it: declare it as a number in inputs.*.shape."
    )


def test_an_export_with_a_narrower_range_is_refused(small):
    batch = torch.export.Dim("N", min=2, max=16)
    narrow = torch.export.export(small.captured.graph, (torch.zeros(4, 3, 16, 16),), dynamic_shapes=({0: batch},))
    with pytest.raises(BuildError, match=r"must be 1 to 32 \(got 2 to 16\)"):
        route.check_shapes(narrow, small.loaded.inputs)
    static = TensorSpec("image", "float32", (4, 3, 8, 16))
    with pytest.raises(BuildError, match=r"dimension 2 of the exported program must be 8 \(got 16\)"):
        route.check_shapes(torch.export.export(small.captured.graph, (torch.zeros(4, 3, 16, 16),)), (static,))


def test_an_argument_that_this_version_lacks_is_refused():
    def older(exported_program, inputs=None, *, arg_inputs=None, disable_tf32=False, **kwargs):
        raise AssertionError("not reached")

    with pytest.raises(InputError) as caught:
        route._known(older, {"disable_tf32": True, "workspace_size": 1}, "2.12.0")
    assert str(caught.value) == (
        "build.route: torch_tensorrt lacks arguments that this job needs ("
        "arg_input_binding_names, output_binding_names, workspace_size in version 2.12.0). "
        "Use build.route onnx, or Torch-TensorRT 2.14."
    )


def test_every_keyword_of_the_tables_is_in_the_real_signature(world, tmp_path):
    import inspect

    frontend, _ = route.load("tensorrt_rtx")
    have = inspect.signature(frontend.dynamo.convert_exported_program_to_serialized_trt_engine).parameters
    rows = {row.torch_tensorrt.by for row in ROUTE_OPTIONS if isinstance(row.torch_tensorrt, Taken)}
    words = {by for by in rows if isinstance(by, str)}
    made = {"disable_tf32", "hardware_compatible", "immutable_weights", "refit_identical_engine_weights", "device"}
    wanted = {*words, *POOL_KEYWORDS.values(), *made, "timing_cache_path"}
    assert wanted <= set(have)


def test_an_operation_without_a_converter_is_named(world):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x.mean((2, 3)))

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            return torch.relu(self.odd(x))

    odd = line(Outer().eval(), 16, 3)
    with pytest.raises(BuildError, match=r"cannot convert the program \(no converter for \S*bessel_j0\S* \(odd\)\)\."):
        route.compile_engine(job("torch_tensorrt", "tensorrt_rtx"), odd.loaded, odd.quantized(), Silent())


def test_one_tensor_returned_twice_is_refused(world):
    class Twice(torch.nn.Module):
        def forward(self, x):
            y = x.mean((2, 3))
            return y, y

    from trtpipe.model.bindings import bind
    from trtpipe.model.capture import capture
    from trtpipe.values import LoadedModel, Quantized

    one = line(tiny(), 16, 5)
    outputs = tuple(TensorSpec(n, "float32", ("N", 3), one.loaded.inputs[0].dims) for n in ("a", "b"))
    module = bind(Twice().eval(), one.loaded.inputs, {}, ("a", "b"))
    captured = capture(LoadedModel(module, one.loaded.inputs, outputs, "0" * 64, "test"))
    from trtpipe.model.export import export

    quantized = Quantized(export(captured.graph, one.loaded.inputs), one.loaded.inputs, outputs, (), {}, (), ())
    with pytest.raises(
        BuildError, match=r"^outputs.b: each output must be a tensor of its own .*\(got the tensor of a"
    ):
        route.checked_program(quantized)


@needs_frontend
def test_importing_the_route_imports_no_frontend():
    import subprocess

    code = "import sys, trtpipe.routes.torch_tensorrt.route, trtpipe.routes.options; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_resnet18_at_64_pixels(world):
    """Acceptance: the sizes, and every scale of the table in the network to the last bit."""
    import torchvision

    torch.manual_seed(0)
    network = torchvision.models.resnet18().eval()
    model = line(network, 64, 1000)
    wanted = job("torch_tensorrt", "tensorrt_rtx", size=64)
    plain = route.compile_engine(wanted, model.loaded, model.quantized(), Silent())
    assert 46e6 <= len(plain.data) <= 49e6
    int8 = route.compile_engine(wanted, model.loaded, model.quantized(int8=True), Silent())
    assert len(int8.data) <= 16e6
    activations = {s[0] for s in world.scales.values() if s.size == 1}
    assert activations == {np.float32(a) / np.float32(127) for a in model.amax.values()}
    assert len([s for s in world.scales.values() if s.size > 1]) == 21  # 20 convolutions, one linear
    assert world.bindings["image"] == ((-1, 3, 64, 64), "FLOAT")


class WithTimingCache:
    """A TensorRT that times tactics, as TensorRT proper does and TensorRT-RTX does not."""

    name, version = "tensorrt", "11.4.0.106"

    def has(self, capability):
        return capability == "timing_cache"


def test_a_timing_cache_is_never_the_one_that_all_users_share(world, tmp_path, monkeypatch):
    frontend, _ = route.load("tensorrt_rtx")
    shared = frontend.dynamo._defaults.TIMING_CACHE_PATH
    own = route.settings(frontend, WithTimingCache(), job("torch_tensorrt", "tensorrt").build, tmp_path / "scratch")
    assert own["timing_cache_path"] == str(tmp_path / "scratch" / "timing") != shared
    monkeypatch.setattr(timing_cache, "file_name", lambda *_: "of-this-gpu.cache")
    named = job("torch_tensorrt", "tensorrt", build={"timing_cache": str(tmp_path / "kept")}).build
    kept = route.settings(frontend, WithTimingCache(), named, tmp_path / "scratch")
    assert kept["timing_cache_path"] == str(tmp_path / "kept" / "of-this-gpu.cache")


def test_precision_is_the_graphs_own(world, tmp_path):
    """What 2.13 took away is never passed, nor what would make Torch-TensorRT choose types by itself."""
    frontend, found = route.load("tensorrt_rtx")
    wanted = job("torch_tensorrt", "tensorrt_rtx", precision={"fp16_mode": True}).build
    made = route.settings(frontend, found, wanted, tmp_path)
    assert not {"enabled_precisions", "use_explicit_typing", "enable_autocast", "truncate_double"} & set(made)


def test_float32_bindings_around_a_half_model(world, small):
    route.compile_engine(
        job("torch_tensorrt", "tensorrt_rtx"), small.loaded, small.quantized(half=torch.float16), Silent()
    )
    assert {name: dtype for name, (_, dtype) in world.bindings.items()} == {"image": "FLOAT", "logits": "FLOAT"}
    assert world.dtypes["HALF"] > 0


def test_the_example_of_an_export_is_never_one(small):
    """A batch of 1 would be taken for a number of the model's own."""
    from trtpipe.model.export import example_inputs, export

    (image,) = example_inputs(small.loaded.inputs)
    assert image.shape[0] == 2
    program = export(small.captured.graph, small.loaded.inputs)
    route.check_shapes(program, small.loaded.inputs)


def test_a_program_without_an_onnx_form_says_so_in_one_line(monkeypatch):
    def refuse(quantized):
        raise BuildError("onnx: no translation (got this).\nNext steps:\n- implement it")

    monkeypatch.setattr(frontends, "to_onnx", refuse)
    assert frontends.graph_of(None, "note") == (
        None,
        ("the program has no ONNX form, so only the engine can be checked: onnx: no translation (got this).",),
    )


def test_a_frontend_that_returns_nothing_gives_no_engine(world, small, monkeypatch):
    frontend, _ = route.load("tensorrt_rtx")
    monkeypatch.setattr(route, "converted", lambda *_: b"")
    with pytest.raises(BuildError) as caught:
        route._whole(frontend, small.quantized(), job("torch_tensorrt", "tensorrt_rtx").build, {}, None)
    assert str(caught.value) == (f"build: Torch-TensorRT {frontend.__version__} gave no engine. Use build.route onnx.")
