"""The project's builder on real bindings over stub libraries; run by test_contract.py once for each release."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import signal

import pytest
import tensorrt as trt
import tensorrt_libs as stub
from stubbed import engine_of, flag, logger_address, texts
from world import LAYERS, LOG_SLOT, MODEL, ORIN, PLAN, VERSION, build

from trtpipe import errors
from trtpipe.job.sections import Precision
from trtpipe.progress import Silent
from trtpipe.trt import driver, flavour
from trtpipe.trt.builder import build_engine
from trtpipe.values import DimRange

WEAK = VERSION < (11,)
STRONG = VERSION >= (10,)
FP16 = Precision(fp16_mode=True)


def test_what_is_found_by_looking_is_what_is_on_record():
    found = flavour.load("tensorrt")
    assert found.version == stub.VERSION
    assert found.capabilities == flavour.expected("tensorrt", stub.VERSION)


def test_installed_names_the_bindings():
    distribution, version = flavour.installed()["tensorrt"]
    assert distribution.endswith("bindings")
    assert version == stub.VERSION


def test_a_graph_of_a_newer_opset_than_the_parser_takes_is_refused_with_the_way_out(world):
    newer = dataclasses.replace(MODEL, opset=18)
    if STRONG:
        assert build_engine(newer, build(), progress=Silent(), precision=FP16).data == PLAN
        return
    with pytest.raises(errors.InputError) as raised:
        build_engine(newer, build(), progress=Silent(), precision=FP16)
    assert str(raised.value) == (
        f"onnx: TensorRT {stub.VERSION} parses opset 17 at most (got 18). "
        f"Prepare the kit for it: trtpipe prepare --for {stub.VERSION}."
    )


def test_an_engine_comes_out_with_its_header_read(world):
    engine = engine_of()
    assert (engine.data, engine.target, engine.version) == (PLAN, "tensorrt", stub.VERSION)
    assert engine.compute_capabilities == ("8.9",)  # of the GPU at hand: the plan does not say
    assert any("no progress monitor" in note for note in engine.notes) == (VERSION < (10,))


def test_the_builder_is_driven_in_order(world):
    engine_of()
    order = [n for n in world.names() if n in ("create_network", "parse", "set_shape", "add_profile", "build")]
    assert order == ["create_network", "parse", "set_shape", "set_shape", "set_shape", "add_profile", "build"]
    assert world.asked("set_shape") == [
        ("image", "min", (1, 3, 8, 8)),
        ("image", "opt", (4, 3, 8, 8)),
        ("image", "max", (8, 3, 8, 8)),
    ]
    if VERSION >= (10,):
        assert world.names().index("progress_monitor") < world.names().index("build")


def test_the_network_is_strongly_typed_wherever_it_can_be(world):
    engine_of()
    name = "STRONGLY_TYPED" if STRONG else "EXPLICIT_BATCH"
    assert world.asked("create_network") == [(1 << flag("NetworkDefinitionCreationFlag", name),)]


def test_layers_are_described_in_detail_unless_the_job_says_otherwise(world):
    engine_of()
    assert world.asked("profiling_verbosity") == [(flag("ProfilingVerbosity", "DETAILED"),)]


def test_precision_flags_only_where_nothing_is_strongly_typed(world):
    engine_of()
    if STRONG:
        assert world.flags() == {"TF32"}
        assert world.asked("layer.precision") == []
    else:
        assert world.flags() == {"TF32", "FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"}
        # layer2.conv is fed by a DequantizeLinear: it is to fuse into INT8
        assert world.asked("layer.precision") == [("head.fc", flag("DataType", "FLOAT"))]


def test_an_fp32_graph_gets_no_precision_flag(world):
    world.layers(tuple((n, "CONVOLUTION", "FLOAT", o, i) for n, _, _, o, i in LAYERS))
    world.seen.clear()
    engine_of()
    assert world.flags() == {"TF32"}


def test_several_profiles(world):
    engine_of(profiles=({"N": DimRange(1, 1, 1)}, {"N": DimRange(2, 4, 8)}))
    assert [shape[2][0] for shape in world.asked("set_shape")] == [1, 1, 1, 2, 4, 8]
    assert world.names().count("add_profile") == 2


def test_a_changed_binding_is_an_error(world):
    world.bindings({"image": ("HALF", (-1, 3, 8, 8))}, {"logits": ("FLOAT", (-1, 10))})
    with pytest.raises(errors.BuildError, match=r"inputs\.image is float16, not float32"):
        engine_of()


def test_a_parser_error_names_its_node(world):
    world.parse(accepted=False)
    error = world.parser.get_error(0)
    stub.answer(lambda: error.desc(), "no such operator")
    stub.answer(lambda: error.code(), trt.ErrorCode.UNSUPPORTED_NODE)
    stub.answer(lambda: error.node(), 7)
    expected = "node 7: UNSUPPORTED_NODE, no such operator"
    if VERSION >= (10,):
        stub.answer(lambda: error.node_name(), "head.frob")
        stub.answer(lambda: error.node_operator(), "Frobnicate")
        expected = "head.frob [Frobnicate]: UNSUPPORTED_NODE, no such operator"
    with pytest.raises(errors.BuildError) as raised:
        engine_of()
    assert expected in str(raised.value)
    assert "build" not in world.names()


def test_no_driver_is_an_error_before_anything_is_asked(world, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="no library"))
    gc.collect()  # what other tests left is released by calls of its own
    before = stub.count()
    with pytest.raises(errors.MissingError, match=r"there is no usable NVIDIA GPU here \(no library\)"):
        engine_of()
    assert stub.count() == before


def test_warnings_reach_the_engine_and_errors_the_message(world):
    warning, error = texts("weights are denormal", "no tactic for head.fc")

    def act():
        for severity, text in ((trt.ILogger.Severity.WARNING, warning), (trt.ILogger.Severity.ERROR, error)):
            stub.invoke(logger_address(), LOG_SLOT, int(severity), ctypes.addressof(text))

    world.during_build(act)
    engine = engine_of()
    assert "TensorRT: weights are denormal" in engine.notes


def test_an_option_that_tensorrt_objects_to_is_an_error(world):
    (error,) = texts("the pool is too small")
    workspace = trt.MemoryPoolType.WORKSPACE
    stub.hook(
        lambda: world.config.set_memory_pool_limit(workspace, 1),
        lambda *_: stub.invoke(
            logger_address(), LOG_SLOT, int(trt.ILogger.Severity.ERROR), ctypes.addressof(error)
        ),
    )  # fmt: skip
    world.seen.clear()
    with pytest.raises(errors.BuildError, match=r"does not accept every option \(the pool is too small\)"):
        engine_of(workspace=1)
    assert "build" not in world.names()


def test_an_error_logged_by_a_parser_that_succeeds_is_no_error(world):
    (error,) = texts("plugin not found, using the local function")
    stub.hook(
        lambda: world.parser.parse(b"x"),
        lambda *_: stub.invoke(
            logger_address(), LOG_SLOT, int(trt.ILogger.Severity.ERROR), ctypes.addressof(error)
        ),
    )  # fmt: skip
    assert engine_of().data == PLAN


@pytest.mark.skipif(VERSION < (10,), reason="8.6 has no progress monitor")
class TestMonitor:
    """The progress monitor as TensorRT calls it: phase_start, step_complete, phase_finish at slots 4, 5 and 6."""

    def drive(self, world, answers):
        outer, inner = self.kept = texts("Building engine", "Timing")

        def act():
            (monitor,) = world.monitor
            outer_at, inner_at = ctypes.addressof(outer), ctypes.addressof(inner)
            stub.invoke(monitor, 4, outer_at, 0, 4)
            answers.append(stub.invoke(monitor, 5, outer_at, 0) & 0xFF)
            stub.invoke(monitor, 4, inner_at, outer_at, 2)
            answers.append(stub.invoke(monitor, 5, inner_at, 0) & 0xFF)
            stub.invoke(monitor, 6, inner_at)
            answers.append(stub.invoke(monitor, 5, outer_at, 1) & 0xFF)
            stub.invoke(monitor, 6, outer_at)

        world.during_build(act)

    def test_progress_is_told_in_percent(self, world):
        told, answers = [], []

        class Listener(Silent):
            def step(self, done, total, unit):
                told.append((done, total, unit))

        self.drive(world, answers)
        build_engine(MODEL, build(), progress=Listener())
        # one of four steps; half of the second; two of four; and the end
        assert told == [(25, 100, "%"), (37, 100, "%"), (50, 100, "%"), (100, 100, "%")]
        assert answers == [1, 1, 1]

    def test_cancelling_stops_the_build(self, world):
        answers = []

        class Impatient(Silent):
            def cancelled(self):
                return len(answers) >= 1

        self.drive(world, answers)
        with pytest.raises(errors.Cancelled, match="cancelled while TensorRT was building; nothing was written"):
            build_engine(MODEL, build(), progress=Impatient())
        assert answers == [1, 0, 0]

    def test_an_interrupt_inside_a_callback_is_not_lost(self, world):
        answers = []

        class Interrupted(Silent):
            def step(self, done, total, unit):
                raise KeyboardInterrupt

        self.drive(world, answers)
        with pytest.raises(errors.Cancelled):
            build_engine(MODEL, build(), progress=Interrupted())
        assert answers == [0, 0, 0]

    def test_ctrl_c_stops_the_build_and_the_handler_is_put_back(self, world):
        answers = []

        class Pressed(Silent):
            def step(self, done, total, unit):
                signal.raise_signal(signal.SIGINT)

        self.drive(world, answers)
        with pytest.raises(errors.Cancelled):
            build_engine(MODEL, build(), progress=Pressed())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_build_that_returns_nothing_is_an_error_with_its_reason(world, monkeypatch):
    (error,) = kept = texts("no tactic for head.fc")
    world.during_build(
        lambda: stub.invoke(logger_address(), LOG_SLOT, int(trt.ILogger.Severity.ERROR), ctypes.addressof(error))
    )
    stub.answer(lambda: world.builder.build_serialized_network(world.network, world.config), 0)
    with pytest.raises(
        errors.BuildError,
        match=r"cannot compile the graph \(no tactic for head\.fc\)\. Set build\.log_level to verbose "
        r"to see what it was doing\.",
    ):
        engine_of()
    del kept


def test_a_plan_of_another_release_is_an_error(world):
    other = PLAN[:24] + bytes((7, 1, 0, 0)) + PLAN[28:]
    stub.host_memory(lambda: world.builder.build_serialized_network(world.network, world.config), other)
    with pytest.raises(errors.BuildError, match=r"the plan's header must say TensorRT .* \(got TensorRT 7\.1\.0"):
        engine_of()


def test_log_level(world):
    (text,) = kept = texts("Trying tactic 7")
    world.during_build(
        lambda: stub.invoke(logger_address(), LOG_SLOT, int(trt.ILogger.Severity.VERBOSE), ctypes.addressof(text))
    )
    notes = []

    class Listener(Silent):
        def note(self, message):
            notes.append(message)

    for level in ("info", "verbose"):
        build_engine(MODEL, build(log_level=level), progress=Listener())
    assert notes == ["TensorRT verbose: Trying tactic 7"]
    del kept


def test_a_timing_cache_is_kept_by_gpu_and_driver(world, tmp_path):
    stub.host_memory(lambda: world.config.get_timing_cache().serialize(), b"timings")
    engine_of(timing_cache=str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.name == f"tensorrt-{stub.VERSION}_NVIDIA-L4_sm89_cuda12.6.timing"
    assert file.read_bytes() == b"timings"
    engine_of(timing_cache=str(tmp_path))
    assert [f.name for f in tmp_path.iterdir()] == [file.name]


def test_what_dla_cannot_run_is_named_by_module(world, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: ORIN)
    layer = world.network.get_layer(0)
    stub.answer(lambda: world.config.get_device_type(layer), trt.DeviceType.DLA)
    stub.answer(lambda: world.config.can_run_on_DLA(layer), 0)
    on_dla = build(default_device_type="dla", dla_core=0, gpu_fallback=True)
    engine = build_engine(MODEL, on_dla, progress=Silent(), precision=FP16)
    names = "layer1.conv, layer1.q, layer1.dq, layer2.conv, head.fc"
    assert f"DLA: 5 of 5 layers run on the GPU: {names}" in engine.notes
    with pytest.raises(errors.InputError, match=rf"^build\.gpu_fallback: .* it cannot run {names}\)\. Set"):
        build_engine(MODEL, build(default_device_type="dla", dla_core=0), progress=Silent(), precision=FP16)
    stub.answer(lambda: world.config.can_run_on_DLA(layer), 1)
    build_engine(MODEL, build(default_device_type="dla", dla_core=0), progress=Silent(), precision=FP16)


def test_dla_is_typed_weakly_where_it_must_be(world, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: ORIN)
    build_engine(MODEL, build(default_device_type="dla", dla_core=0), progress=Silent(), precision=FP16)
    wanted = 0 if WEAK and STRONG else 1 << flag(
        "NetworkDefinitionCreationFlag", "STRONGLY_TYPED" if STRONG else "EXPLICIT_BATCH"
    )  # fmt: skip
    assert world.asked("create_network") == [(wanted,)]
    assert ("FP16" in world.flags()) == WEAK


def test_a_platform_is_where_the_engine_is_built(world):
    assert engine_of(platform="l4").compute_capabilities == ("8.9",)
    with pytest.raises(errors.InputError) as raised:
        engine_of(platform="jetson_agx_orin")
    assert str(raised.value) == (
        "build.platform: Jetson AGX Orin, of compute capability 8.7, must be where the engine is built (got NVIDIA L4, "
        "8.9). Build it there."
    )


def test_int8_on_a_gpu_without_it_is_refused(world, monkeypatch):
    nano = driver.Driver("10.2", (driver.Gpu(0, "NVIDIA Tegra X1", "5.3", 4 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: nano)
    with pytest.raises(
        errors.InputError, match=r"precision\.int8_mode: NVIDIA Tegra X1 \(compute capability 5\.3\) must"
    ):
        build_engine(MODEL, build(), progress=Silent(), precision=Precision(int8_mode=True))


def test_an_unknown_glob_or_binding_is_an_error(world):
    with pytest.raises(errors.InputError, match=r"build\.device_types\.stem\.\*: must fit the module path of a layer"):
        engine_of(device_types={"stem.*": "gpu"})
    with pytest.raises(
        errors.InputError, match=r"build\.tensor_formats\.x: must be a binding, image, logits \(got x\)"
    ):
        engine_of(tensor_formats={"x": ("linear",)})
