"""build_engine with the real TensorRT-RTX, which needs no GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest
from onnx import TensorProto
from trt_graphs import BATCH, cast_model, conv_model

from trtpipe import errors
from trtpipe.job.build_options import FORMAT_DIMENSIONS, TENSOR_FORMATS, BuildOptions, TensorFormat
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.trt import config, driver, flavour, implicit, network, plan, plugins
from trtpipe.trt.builder import build_engine
from trtpipe.trt.monitor import Watch, make_logger
from trtpipe.trt.options import refusals
from trtpipe.values import DimRange, TensorSpec

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


class Recorder(Silent):
    """Keeps what it is told; cancels once `cancel_at` percent are built."""

    def __init__(self, cancel_at: int = 101) -> None:
        self.cancel_at, self.steps, self.notes = cancel_at, [], []

    def step(self, done, total, unit):
        self.steps.append((done, total, unit))

    def note(self, message):
        self.notes.append(message)

    def cancelled(self):
        return bool(self.steps) and self.steps[-1][0] >= self.cancel_at


@pytest.fixture(scope="module")
def model():
    return conv_model()


@pytest.fixture(scope="module")
def engine(model):
    return build_engine(model, Build(), progress=Silent())


def test_the_engine_is_what_its_header_says(model, engine):
    assert engine.target == "tensorrt_rtx"
    assert engine.version.startswith("1.7.1")
    assert engine.compute_capabilities == ()
    assert engine.inputs == model.inputs
    assert engine.graph is model
    header = plan.read_header(engine.data)
    assert header.portable
    assert engine.version == header.version
    assert header.length == len(engine.data)


def test_the_same_graph_gives_the_same_bytes(model, engine):
    assert build_engine(model, Build(), progress=Silent()).data == engine.data


def test_two_profiles_progress_and_compute_capabilities(model, engine):
    recorder = Recorder()
    build = Build(compute_capability=("8.9", "8.6"), profiles=({"N": DimRange(1, 1, 1)}, {"N": DimRange(2, 4, 8)}))
    built = build_engine(model, build, progress=recorder)
    assert built.compute_capabilities == ("8.6", "8.9")
    assert plan.read_header(built.data).compute_capabilities == ("8.6", "8.9")
    assert len(built.data) > 1.5 * len(engine.data)  # a profile each
    percents = [done for done, _, _ in recorder.steps]
    assert percents == sorted(set(percents))
    assert len(percents) > 10
    assert recorder.steps[-1] == (100, 100, "%")
    assert built.options == {
        "compute_capability": ["8.9", "8.6"],
        "profiles": [{"N": {"min": 1, "opt": 1, "max": 1}}, {"N": {"min": 2, "opt": 4, "max": 8}}],
    }


def test_cancel_in_the_middle(model):
    recorder = Recorder(cancel_at=30)
    with pytest.raises(errors.Cancelled, match=r"build: cancelled while TensorRT was building; nothing was written\."):
        build_engine(model, Build(), progress=recorder)
    assert recorder.steps[-1][0] < 60


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("callback", ["step", "note"])
def test_what_a_callback_raises_is_not_lost(model, raised, callback):
    class Raising(Silent):
        pass

    def fail(self, *arguments):
        raise raised

    setattr(Raising, callback, fail)
    wanted = errors.Cancelled if raised is KeyboardInterrupt else raised
    with pytest.raises(wanted):
        build_engine(model, Build(log_level="verbose"), progress=Raising())


def test_ctrl_c_during_the_build(model):
    class Pressed(Silent):
        def step(self, done, total, unit):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(errors.Cancelled):
        build_engine(model, Build(), progress=Pressed())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_build_leaves_no_tensorrt_object_behind(model):
    # TensorRT keeps one logger a process: had the failed build kept its own, this one's notes would go there
    with pytest.raises(errors.Cancelled) as kept:
        build_engine(model, Build(), progress=Recorder(cancel_at=0))
    recorder = Recorder()
    build_engine(model, Build(log_level="info"), progress=recorder)
    assert any("Detected 1 inputs and 1 output network tensors" in n for n in recorder.notes)
    assert kept.value is not None


def test_messages_are_collected_and_not_printed(model, capfd):
    recorder = Recorder()
    build_engine(model, Build(), progress=recorder)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert recorder.notes == []
    build_engine(model, Build(log_level="verbose"), progress=recorder)
    assert any(n.startswith("TensorRT verbose: Parsing node: layer3.1.conv2 [Conv]") for n in recorder.notes)


def test_a_node_that_tensorrt_refuses_is_named():
    with pytest.raises(errors.BuildError) as raised:
        build_engine(conv_model(op="Frobnicate"), Build(), progress=Silent())
    message = str(raised.value)
    assert message.startswith("onnx: TensorRT-RTX 1.7.1")
    assert "does not accept every node (layer3.1.act [Frobnicate]: INVALID_NODE, " in message
    assert message.endswith("Change the model there, or try build.route torch_tensorrt.")


def test_a_file_that_is_no_onnx(model):
    with pytest.raises(errors.BuildError, match=r"\(the file: MODEL_DESERIALIZE_FAILED, "):
        build_engine(replace(model, data=b"garbage"), Build(), progress=Silent())


FLOAT, UINT8, INT64, FLOAT16, BFLOAT16 = 1, 2, 7, 10, 16


@pytest.mark.parametrize(
    ("types", "dtypes"),
    [((FLOAT16, FLOAT), ("float16", "float32")), ((UINT8, FLOAT16), ("uint8", "float16")),
     ((INT64, FLOAT), ("int64", "float32"))],
)  # fmt: skip
def test_bindings_in_their_own_dtypes(types, dtypes):
    engine = build_engine(cast_model(*types, *dtypes), Build(), progress=Silent())
    assert (engine.inputs[0].dtype, engine.outputs[0].dtype) == dtypes


@pytest.mark.parametrize(
    ("types", "dtypes", "problem"),
    [((FLOAT, FLOAT16), ("float16", "float16"), "inputs.x is float32, not float16"),
     ((FLOAT, FLOAT16), ("float32", "float32"), "outputs.y is float16, not float32"),
     ((FLOAT, BFLOAT16), ("float32", "float16"), "outputs.y is bfloat16, not float16")],
)  # fmt: skip
def test_a_binding_of_another_dtype_is_an_error(types, dtypes, problem):
    with pytest.raises(errors.BuildError) as raised:
        build_engine(cast_model(*types, *dtypes), Build(), progress=Silent())
    assert f"must be those of the job (got {problem})" in str(raised.value)


def test_names_and_shapes_of_bindings_are_checked(model):
    other = replace(
        model,
        inputs=(TensorSpec("picture", "float32", ("N", 3, 16, 16), {"N": BATCH}),),
        outputs=(TensorSpec("map", "float32", ("N", 9, 16, 16), {"N": BATCH}),),
    )
    with pytest.raises(errors.BuildError) as raised:
        build_engine(other, Build(), progress=Silent())
    for problem in (
        "inputs.image is not in the job",
        "inputs.picture is not in the network",
        "outputs.map has shape (-1, 8, 16, 16), not ('N', 9, 16, 16)",
    ):
        assert problem in str(raised.value)


def test_a_fixed_extent_that_the_job_has_dynamic_is_an_error(model):
    tall = TensorSpec("image", "float32", ("N", 3, "H", 16), {"N": BATCH, "H": BATCH})
    with pytest.raises(errors.BuildError) as raised:
        build_engine(replace(model, inputs=(tall,)), Build(), progress=Silent())
    assert "inputs.image has fixed shape (-1, 3, 16, 16), where ('N', 3, 'H', 16) varies" in str(raised.value)


def test_what_tensorrt_objects_to_is_an_error(model):
    said = (
        r"^build: TensorRT-RTX \S+ cannot compile the graph \(.*unsupported by tensor's allowed.*\)\. "
        r"Try it without build\.tensor_formats \(image: hwc8\)\. Set build\.log_level to verbose"
    )
    with pytest.raises(errors.BuildError, match=said):
        build_engine(model, Build(tensor_formats={"image": ("hwc8",), "map": ("linear",)}), progress=Silent())


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"memory_pools": {"tactic_shared_memory": 1}}, "build.memory_pools (tactic_shared_memory: 1)"),
        ({"workspace": 2**63 - 1}, "build.workspace (9223372036854775807)"),
        ({"workspace": 1, "memory_pools": {"tactic_shared_memory": 1}},
         "build.memory_pools (tactic_shared_memory: 1) and build.workspace (1)"),
    ],
)  # fmt: skip
def test_limits_of_memory_are_named_where_nothing_compiles(options, given, model):
    with pytest.raises(errors.BuildError) as raised:
        build_engine(model, Build(**options), progress=Silent())
    assert f" Try it without {given}. Set build.log_level to verbose" in str(raised.value)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "types"),
    [("float32", (TensorProto.FLOAT, TensorProto.FLOAT16)), ("float16", (TensorProto.FLOAT16, TensorProto.FLOAT)),
     ("uint8", (TensorProto.UINT8, TensorProto.FLOAT))],
)  # fmt: skip
def test_memory_formats_are_refused_where_tensorrt_rtx_builds_none(dtype, types, rank):
    """Each, of every dtype that has some: what it does not build is refused before, and nothing else is. With fixed
    sizes its compiler fails at some of them too."""
    graph = cast_model(*types, dtype, "float16" if dtype == "float32" else "float32", ("N", 8, 4, 4)[:rank])
    found = flavour.load("tensorrt_rtx")
    for form in get_args(TensorFormat):
        build = Build(tensor_formats={"x": (form,)})
        legal = form in TENSOR_FORMATS[dtype] and FORMAT_DIMENSIONS.get(form, 3) <= rank
        accepted = legal and not refusals(build, None, found.name, found.version)
        try:
            built = build_engine(graph, build, progress=Silent(), judged=False) is not None
        except errors.BuildError as error:
            built = f"Try it without build.tensor_formats (x: {form})." not in str(error)
        assert built == accepted, form


def test_tensorrt_that_is_not_installed(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(errors.MissingError) as raised:
        build_engine(model, Build(target="tensorrt"), progress=Silent())
    assert str(raised.value).startswith("build.target: tensorrt is not installed. Run: pip install")
    assert raised.value.exit_code == 3


def test_what_needs_a_gpu_says_so(model, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="libcuda.so.1 is not here"))
    for build, option in ((Build(refit="all"), "build.refit"), (Build(strip_plan=True), "build.strip_plan")):
        with pytest.raises(errors.MissingError) as raised:
            build_engine(model, build, progress=Silent())
        assert str(raised.value).startswith(f"{option} with TensorRT-RTX 1.7.1")
        assert "there is no usable NVIDIA GPU here (libcuda.so.1 is not here)" in str(raised.value)
        assert str(raised.value).endswith(f"the engine is for, or leave out {option}.")


def test_a_plan_of_another_version_is_an_error(model, monkeypatch):
    genuine = plan.read_header
    monkeypatch.setattr(plan, "read_header", lambda data: replace(genuine(data), version="1.6.0.1"))
    with pytest.raises(errors.BuildError, match=r"must say TensorRT-RTX 1\.7\.1.* \(got TensorRT-RTX 1\.6\.0"):
        build_engine(model, Build(), progress=Silent())


def test_the_module_paths_are_the_layers_names(model):
    found = flavour.load("tensorrt_rtx")
    watch = Watch(Silent(), "error")
    logger = make_logger(found, watch)
    builder = found.module.Builder(logger)
    graph = network.create_network(found, builder, weakly_typed=False)
    parser = network.parse(found, graph, logger, model, watch)
    names = [config.module_path(graph.get_layer(i).name) for i in range(graph.num_layers)]
    assert "layer3.1.conv2" in names
    del parser, graph, builder, logger
    gc.collect()


def _flag(name):
    return lambda config, trt, network: config.get_flag(getattr(trt.BuilderFlag, name))


def _attribute(name, value, enum=""):
    def shown(config, trt, network):
        return getattr(config, name) == (getattr(getattr(trt, enum), value) if enum else value)

    return shown


def _pool(name, size):
    return lambda config, trt, network: config.get_memory_pool_limit(getattr(trt.MemoryPoolType, name)) == size


#: Field: (value, other fields, how the builder's own getters show it; None where it must be refused).
OPTIONS = {
    "compute_capability": (("8.6",), {}, lambda c, t, n: c.get_compute_capability(0) == t.ComputeCapability.SM86),
    "platform": ("rtx_40", {}, "test_platforms_of_rtx in test_trt_options"),
    "quantization": ("implicit", {}, None),
    "calibration_cache": ("file", {"quantization": "implicit"}, None),
    "profiles": (({"N": BATCH}, {"N": DimRange(1, 1, 1)}), {}, lambda c, t, n: c.num_optimization_profiles == 2),
    "workspace": (1 << 22, {}, _pool("WORKSPACE", 1 << 22)),
    "memory_pools": ({"tactic_shared_memory": 1 << 16}, {}, _pool("TACTIC_SHARED_MEMORY", 1 << 16)),
    "optimization_level": (5, {}, None),
    "tiling_optimization_level": ("fast", {}, None),
    "l2_limit_for_tiling": (4096, {"tiling_optimization_level": "full"}, None),
    "max_num_tactics": (3, {}, None),
    "avg_timing_iterations": (4, {}, None),
    "max_aux_streams": (2, {}, None),
    "tactic_sources": (("jit_convolutions",), {}, None),
    "timing_cache": ("folder", {}, None),
    "editable_timing_cache": (True, {"timing_cache": "folder"}, None),
    "error_on_timing_cache_miss": (True, {"timing_cache": "folder"}, None),
    "profiling_verbosity": ("none", {}, _attribute("profiling_verbosity", "NONE", "ProfilingVerbosity")),
    "log_level": ("verbose", {}, "test_messages_are_collected_and_not_printed"),
    "tf32": (False, {}, lambda c, t, n: not c.get_flag(t.BuilderFlag.TF32)),
    "sparse_weights": (True, {}, None),
    "strict_nans": (True, {}, None),
    "direct_io": (True, {}, None),
    "tensor_formats": (
        {"image": ("hwc",)}, {}, lambda c, t, n: n.get_input(0).allowed_formats == 1 << int(t.TensorFormat.HWC),
    ),
    "hardware_compatibility": ("ampere_plus", {}, None),
    "version_compatible": (True, {"exclude_lean_runtime": True}, _flag("VERSION_COMPATIBLE")),
    "exclude_lean_runtime": (True, {"version_compatible": True}, _flag("EXCLUDE_LEAN_RUNTIME")),
    "runtime_platform": ("windows_amd64", {}, None),
    "strip_plan": (True, {}, _flag("STRIP_PLAN")),
    "refit": ("individual", {}, _flag("REFIT_INDIVIDUAL")),
    "weight_streaming": (True, {}, _flag("WEIGHT_STREAMING")),
    "default_device_type": ("dla", {}, None),
    "dla_core": (0, {"default_device_type": "dla"}, None),
    "gpu_fallback": (True, {"default_device_type": "dla"}, None),
    "device_types": ({"layer3": "gpu"}, {}, lambda c, t, n: c.is_device_type_set(n.get_layer(0))),
    "plugins": (("libtwice.so",), {}, None),
}  # fmt: skip


def test_every_option_has_its_row():
    assert set(OPTIONS) == set(BuildOptions.model_fields)


@pytest.mark.parametrize("option", [n for n, row in OPTIONS.items() if not isinstance(row[2], str)])
def test_an_option_is_honoured_or_refused(model, option):
    value, others, shown = OPTIONS[option]
    build = Build(**{option: value}, **others)
    found = flavour.load("tensorrt_rtx")
    refused = dict(refusals(build, None, found.name, found.version, found.capabilities))
    if shown is None:
        assert refused[f"build.{option}"].startswith(f"build.{option}: TensorRT-RTX 1.7.1")
        with pytest.raises(errors.InputError):
            build_engine(model, build, progress=Silent())
        return
    assert refused == {}
    watch = Watch(Silent(), "error")
    logger = make_logger(found, watch)
    builder = found.module.Builder(logger)
    graph = network.create_network(found, builder, weakly_typed=False)
    parser = network.parse(found, graph, logger, model, watch)
    settings = builder.create_builder_config()
    config.apply(found, settings, graph, build)
    profiles = config.add_profiles(found, builder, settings, model.inputs, build)
    assert shown(settings, found.module, graph)
    assert watch.errors(0) == ()
    del profiles, settings, parser, graph, builder, logger


@pytest.mark.parametrize(
    "options",
    [{"workspace": 1 << 28, "profiling_verbosity": "none"}, {"tf32": False},
     {"version_compatible": True, "exclude_lean_runtime": True}, {"tensor_formats": {"image": ("hwc",)}}],
    ids=lambda o: "-".join(o),
)  # fmt: skip
def test_options_change_the_engine(model, engine, options):
    assert build_engine(model, Build(**options), progress=Silent()).data != engine.data


def test_plugins_are_loaded_before_the_graph_is_parsed_and_kept_with_the_engine(model, tmp_path, monkeypatch):
    (tmp_path / "libtwice.so").write_bytes(b"native code")
    order = []
    parse = network.parse
    monkeypatch.setattr(plugins, "load", lambda tensorrt, libraries, reason: order.append(dict(libraries)))
    monkeypatch.setattr(network, "parse", lambda *given: [order.append("parse"), parse(*given)][1])
    build = Build(plugins=(str(tmp_path / "libtwice.so"),))
    engine = build_engine(model, build, progress=Silent(), judged=False)
    assert order == [{"libtwice.so": b"native code"}, "parse"]
    assert engine.plugins == {"libtwice.so": b"native code"}
    assert "plugins" not in engine.options  # a path of this machine


def test_a_profile_that_tensorrt_does_not_accept_is_said() -> None:
    builder, settings = Mock(), Mock()
    settings.add_optimization_profile.return_value = -1
    settings.set_calibration_profile.return_value = False
    release = SimpleNamespace(title="TensorRT 10.3.0")
    inputs = (TensorSpec("x", "float32", ("N", 3), {"N": DimRange(1, 2, 4)}),)
    with pytest.raises(errors.InputError) as profile:
        config.add_profiles(release, builder, settings, inputs, Build())  # type: ignore[arg-type]
    assert str(profile.value) == (
        "build.profiles[0]: TensorRT 10.3.0 does not accept the profile ({'N': DimRange(min=1, opt=2, max=4)}). Check "
        "its ranges against the model."
    )
    with pytest.raises(errors.BuildError) as calibration:
        implicit.attach(release, builder, settings, Mock(), inputs, 8)  # type: ignore[arg-type]
    assert str(calibration.value) == (
        "build.quantization: TensorRT 10.3.0 does not accept the calibration profile (batch 8). Set "
        "calibration.batch_size within the range of the inputs' batch."
    )
