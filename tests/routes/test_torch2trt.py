"""Route torch2trt against a double with the real one's signature and semantics."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading

import numpy as np
import pytest
import torch
from models import job, line, tiny
from torch2trt_double import DataType, Double, Layer, Network, Tensor, tensorrt

from calib.errors import CalibError
from trtpipe.errors import BuildError, InputError, MissingError
from trtpipe.model.data import open_calibration
from trtpipe.progress import Silent
from trtpipe.routes.native import native_calibration
from trtpipe.routes.torch2trt import route
from trtpipe.trt import driver, flavour, implicit

GPU = driver.Driver("12.6", (driver.Gpu(0, "NVIDIA Orin", "8.7", 8 << 30),))


class Memory:
    """Host memory in the place of the device's; the addresses handed out and what still holds them."""

    def __init__(self):
        self.placed = []

    def place(self, array):
        held = np.ascontiguousarray(array)
        self.placed.append(held)
        return held.ctypes.data, held


@pytest.fixture(scope="module")
def small():
    return line(tiny(), 16, 5)


@pytest.fixture
def memory(monkeypatch):
    made = Memory()
    monkeypatch.setattr(implicit, "open_memory", lambda: made)
    return made


@pytest.fixture
def double(monkeypatch, memory):
    trt = tensorrt()
    made = Double(trt)
    made.install(monkeypatch)
    found = flavour.Flavour("tensorrt", trt, "10.3.0", flavour.expected("tensorrt", "10.3.0"))
    monkeypatch.setattr(flavour, "load", lambda target: found)
    monkeypatch.setattr(driver, "probe", lambda: GPU)
    monkeypatch.setattr(route, "DEVICE", "cpu")
    return made


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "calibration.npy"
    np.save(path, np.random.default_rng(0).random((20, 3, 16, 16), dtype=np.float32))
    return path


def wanted(build=None, **sections):
    return job("torch2trt", "tensorrt", build=build, **sections)


def int8(samples, **calibration):
    return wanted(
        {"quantization": "implicit"},
        precision={"int8_mode": True},
        calibration={"arrays": str(samples), "batch_size": 8, **calibration},
    )


def compiled(asked, small):
    """The engine of an implicit job, which has its calibration's samples."""
    calibration = native_calibration(asked, open_calibration(asked))
    return route.compile_engine(asked, small.loaded, small.quantized(), Silent(), calibration)


def test_every_argument_is_given_as_the_job_says(double, small):
    asked = wanted({"log_level": "warning", "avg_timing_iterations": 4}, precision={"fp16_mode": True})
    engine = route.compile_engine(asked, small.loaded, small.quantized(), Silent())

    (call,) = double.calls
    trt = double.trt
    assert {k: call[k] for k in call if k not in ("module", "inputs")} == {
        "input_names": ["image"],
        "output_names": ["logits"],
        "log_level": "warning",
        "fp16_mode": True,
        "max_workspace_size": 1 << 25,  # its default: TensorRT 10 ignores it
        "strict_type_constraints": False,
        "keep_network": True,
        "int8_mode": False,
        "int8_calib_dataset": None,
        "int8_calib_algorithm": trt.CalibrationAlgoType.ENTROPY_CALIBRATION,
        "use_onnx": False,
        "default_device_type": trt.DeviceType.GPU,
        "dla_core": 0,
        "gpu_fallback": False,  # its default is True
        "device_types": {},
        "min_shapes": [(1, 3, 16, 16)],
        "opt_shapes": [(8, 3, 16, 16)],
        "max_shapes": [(32, 3, 16, 16)],
        "onnx_opset": None,
        "max_batch_size": None,
        "avg_timing_iterations": 4,
        "kwargs": {},
    }
    assert isinstance(call["inputs"], list)
    assert call["inputs"][0].shape == (8, 3, 16, 16)
    assert (engine.target, engine.version, engine.data[:4]) == ("tensorrt", "10.3.0", b"ftrt")
    assert engine.options == {"log_level": "warning", "avg_timing_iterations": 4}
    assert route.FP16_NOTE in engine.notes
    assert route.IMPLICIT_GRAPH_NOTE in engine.notes
    assert engine.graph is not None


def test_on_tensorrt_8_the_workspace_is_the_jobs_or_the_gpus_memory(double, small, monkeypatch):
    double.trt.__version__ = "8.6.1"
    found = flavour.Flavour("tensorrt", double.trt, "8.6.1", flavour.expected("tensorrt", "8.6.1"))
    given = route.keywords(wanted(), small.loaded, double.package, found)
    assert given["max_workspace_size"] == 8 << 30
    given = route.keywords(wanted({"workspace": 1 << 20}), small.loaded, double.package, found)
    assert given["max_workspace_size"] == 1 << 20


def test_the_calibrator_is_calibs_and_sees_every_sample_once_in_the_jobs_batches(double, small, samples, memory):
    engine = compiled(int8(samples), small)

    (calibrator,) = double.calibrators
    assert isinstance(calibrator, double.trt.IInt8EntropyCalibrator2)
    assert type(calibrator).__name__.startswith("Calib")
    assert calibrator.get_batch_size() == 8
    assert double.batches == [((8, 3, 16, 16),)] * 3
    seen = np.concatenate(memory.placed)
    drawn = np.load(samples)
    assert seen.shape[0] == 24  # 20 samples in batches of 8: the last is filled up with the first 4
    assert sorted(s.tobytes() for s in seen[:20]) == sorted(s.tobytes() for s in drawn)
    np.testing.assert_array_equal(seen[20:], seen[:4])
    assert "4 samples are used twice to fill the last calibration batch of 8." in engine.notes
    assert route.INT8_NOTE in engine.notes
    assert double.calls[0]["int8_calib_algorithm"] is double.trt.CalibrationAlgoType.ENTROPY_CALIBRATION_2


@pytest.mark.parametrize(
    ("algorithm", "base", "member"),
    [
        ("entropy", "IInt8EntropyCalibrator", "ENTROPY_CALIBRATION"),
        ("minmax", "IInt8MinMaxCalibrator", "MINMAX_CALIBRATION"),
        ("percentile", "IInt8LegacyCalibrator", "LEGACY_CALIBRATION"),
    ],
)
def test_the_algorithm_is_the_jobs_and_not_a_default(double, small, samples, algorithm, base, member):
    compiled(int8(samples, algorithm=algorithm), small)
    assert isinstance(double.calibrators[0], getattr(double.trt, base))
    assert double.calls[0]["int8_calib_algorithm"] is double.trt.CalibrationAlgoType[member]


def test_what_a_callback_raises_ends_the_build(double, small, samples, memory, monkeypatch):
    def broken(array):
        raise RuntimeError("device lost")

    monkeypatch.setattr(memory, "place", broken)
    with pytest.raises(RuntimeError, match=r"^device lost$"):
        compiled(int8(samples), small)


def test_a_calibration_cut_short_ends_the_build(double, small, samples, monkeypatch):
    monkeypatch.setattr(double, "_calibrate", lambda calibrator, network, shapes: calibrator.get_batch(["image"]))
    with pytest.raises(CalibError, match=r"did not read all of the data \(1 batches of 3 read\)"):
        compiled(int8(samples), small)


def test_another_torch2trt_without_the_class_is_refused(double, small, samples, monkeypatch):
    monkeypatch.delattr(double.module, "DatasetCalibrator")
    with pytest.raises(BuildError, match=r"^calibration: this torch2trt has no DatasetCalibrator to replace"):
        compiled(int8(samples), small)


def test_a_calibrator_of_its_own_is_noticed(double, small, samples, monkeypatch):
    def ignoring(*a, int8_mode=False, **k):
        return real(*a, int8_mode=False, **k)

    real = double.package.torch2trt
    ignoring.__signature__ = inspect.signature(real)
    monkeypatch.setattr(double.package, "torch2trt", ignoring)
    with pytest.raises(BuildError, match=r"^calibration: torch2trt did not calibrate with trtpipe's calibrator"):
        compiled(int8(samples), small)
    with pytest.raises(BuildError, match=r"torch2trt must read the samples through trtpipe's calibrator"):
        len(route.Unread())


def test_the_patch_is_taken_back(double, small, samples):
    before = double.module.DatasetCalibrator
    compiled(int8(samples), small)
    assert double.module.DatasetCalibrator == before


def test_an_argument_it_would_swallow_is_refused(double, small, monkeypatch):
    def older(module, inputs, input_names=None, output_names=None, fp16_mode=False, **kwargs):
        raise AssertionError("not reached")

    monkeypatch.setattr(double.package, "torch2trt", older)
    with pytest.raises(InputError) as caught:
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())
    message = str(caught.value)
    assert message.startswith("build.route: torch2trt lacks arguments that this job needs (")
    assert "device_types" in message
    assert message.endswith("Update it: pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt")


def test_an_operation_without_a_converter_is_named_and_not_frozen(double, small):
    double.unconverted = ("torch.Tensor.dim", "torch.is_tensor", "torch.cumsum")
    with pytest.raises(BuildError) as caught:
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())
    assert str(caught.value) == (
        "build: torch2trt has no converter for torch.cumsum, whose results it would "
        "freeze at their values for the example input. Use build.route onnx."
    )


def test_harmless_queries_are_no_lost_operations(double, small):
    double.unconverted = ("torch.Tensor.dim", "torch.Tensor.size", "torch.Tensor.is_floating_point", "torch.is_tensor")
    route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())


def test_an_engine_of_none_is_noticed(double, small):
    double.builds = False
    with pytest.raises(BuildError, match=r"^build: TensorRT gave no engine for the network of torch2trt"):
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())


def test_ignored_parser_errors_are_noticed(double, small):
    with pytest.raises(BuildError, match=r"^inputs.image: is not in the network that torch2trt made"):
        route.compile_engine(wanted({"use_onnx": True}), small.loaded, small.quantized(), Silent())
    assert double.calls[0]["use_onnx"] is True


def test_an_input_that_no_layer_reads_is_noticed(double, small):
    double.reads = False
    with pytest.raises(BuildError, match=r"^inputs.image: is read by no layer of the network"):
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())


def test_a_binding_of_another_dtype_is_noticed(small):
    network = Network()
    network.inputs = [Tensor("image", DataType.FLOAT, (8, 3, 16, 16))]
    network.outputs = [Tensor("logits", DataType.HALF, (8, 5))]
    network.layers = [Layer(network.inputs[0])]
    with pytest.raises(BuildError, match=r"^outputs.logits: must be float32 in the network \(got HALF\)"):
        route.check_network(network, small.loaded)


@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 1)])
def test_a_binding_of_another_shape_is_noticed(small, shape):
    """Its transposed convolution takes the number of inputs for that of outputs."""
    network = Network()
    network.inputs = [Tensor("image", DataType.FLOAT, (-1, 3, 16, 16))]
    network.outputs = [Tensor("logits", DataType.FLOAT, shape)]
    network.layers = [Layer(network.inputs[0])]
    with pytest.raises(BuildError) as caught:
        route.check_network(network, small.loaded)
    assert str(caught.value) == (
        f"outputs.logits: must have the shape [N, 5] in the network that torch2trt made (got {list(shape)}). One of "
        "its converters does not cover an operation: use build.route onnx."
    )
    network.outputs = [Tensor("logits", DataType.FLOAT, (-1, -1))]  # it computes shapes where it runs
    route.check_network(network, small.loaded)


def test_what_torch2trt_raises_is_an_error_of_the_build(double, small, monkeypatch):
    """Its own ONNX export fails on current PyTorch."""

    def failing(*a, **k):
        print("Warning: Encountered known unsupported method torch.cumsum")
        raise TypeError("export() got an unexpected argument\nand more")

    failing.__signature__ = inspect.signature(double.package.torch2trt)
    monkeypatch.setattr(double.package, "torch2trt", failing)
    with pytest.raises(BuildError) as caught:
        route.compile_engine(wanted({"use_onnx": True}), small.loaded, small.quantized(), Silent())
    assert str(caught.value) == (
        "build: torch2trt cannot convert the module (no converter for torch.cumsum; then TypeError: export() got an "
        "unexpected argument). Use build.route onnx."
    )


def test_the_calibration_cache_is_kept_read_and_refused_for_another_model(double, small, samples, tmp_path, memory):
    file = tmp_path / "caches" / "int8.cache"

    def build(loaded):
        asked = int8(samples)
        options = asked.build.model_copy(update={"calibration_cache": str(file)})
        return compiled(asked.model_copy(update={"build": options}), dataclasses.replace(small, loaded=loaded))

    build(small.loaded)
    assert len(double.batches) == 3
    assert file.read_bytes().endswith(b"\nTRT-100300-EntropyCalibration2\nimage: 3c010a14\n")
    again = build(small.loaded)
    assert len(double.batches) == 3  # nothing was calibrated
    assert f"{file}: scales read from it; nothing was calibrated." in again.notes
    assert "calibration_cache" not in again.options  # a path of this machine
    other = dataclasses.replace(small.loaded, weights_digest="1" * 64)
    with pytest.raises(CalibError) as caught:
        build(other)
    assert str(caught.value) == (
        f"{file}: must be made from this calibration's own model, data and settings (got weights 000000000000... for "
        "111111111111...). Remove it to calibrate again, or name another file."
    )


def test_stale_attributes_of_an_earlier_conversion_are_left_behind(double):
    network = tiny()
    network.register_buffer("mean", torch.zeros(1))
    model = line(network, 16, 5)
    inner, quantized = model.loaded.module.network, model.quantized()
    inner.stem.weight._trt = threading.Lock()  # cannot be copied, as TensorRT's tensors cannot
    inner.mean._trt = inner.stem.weight._trt
    route.compile_engine(wanted(), model.loaded, quantized, Silent())
    route.compile_engine(wanted(), model.loaded, quantized, Silent())
    module = double.calls[0]["module"]
    assert not any(hasattr(t, "_trt") for t in (*module.parameters(), *module.buffers()))
    assert hasattr(inner.stem.weight, "_trt")  # the caller's module is as it was
    assert double.calls[0]["inputs"][0] is not double.calls[1]["inputs"][0]


def test_half_bindings_take_a_half_module(double):
    halves = line(tiny(), 16, 5, dtype="float16", out="float16")
    image = {"dtype": "float16", "shape": [4, 3, 16, 16]}
    asked = wanted(inputs={"image": image}, outputs={"logits": {"dtype": "float16"}})
    route.compile_engine(asked, halves.loaded, halves.quantized(), Silent())
    module, inputs = double.calls[0]["module"], double.calls[0]["inputs"]
    assert inputs[0].dtype is torch.float16
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    assert module(*inputs)[0].dtype is torch.float16
    assert {p.dtype for p in halves.loaded.module.parameters()} == {torch.float32}


def test_devices_by_glob_the_last_one_deciding(double, small):
    trt = double.trt
    made = route.device_types(small.loaded.module, {"*": "dla", "head": "gpu"}, trt)
    net = small.loaded.module.network
    assert made == {net.stem: trt.DeviceType.DLA, net.body: trt.DeviceType.DLA, net.skip: trt.DeviceType.DLA,
                    net.head: trt.DeviceType.GPU}  # fmt: skip
    with pytest.raises(InputError, match=r"^build.device_types.haed: must fit the path of .*\(got none of 4\)"):
        route.device_types(small.loaded.module, {"haed": "gpu"}, trt)
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()), torch.nn.ReLU())
    made = route.device_types(nested, {"0": "dla"}, trt)  # a container's holds for all inside, as everywhere
    assert made == {nested[0]: trt.DeviceType.DLA, nested[0][0]: trt.DeviceType.DLA}


def test_dla_for_the_whole_static_model(double):
    whole = wanted(
        {"default_device_type": "dla", "dla_core": 1, "gpu_fallback": True},
        inputs={"image": {"shape": [4, 3, 16, 16]}},
        precision={"fp16_mode": True},
    )
    from trtpipe.values import LoadedModel, TensorSpec

    fixed = line(tiny(), 16, 5)
    specs = (TensorSpec("image", "float32", (4, 3, 16, 16)),), (TensorSpec("logits", "float32", (4, 5)),)
    loaded = LoadedModel(fixed.loaded.module, *specs, "0" * 64, "test")
    route.compile_engine(whole, loaded, fixed.quantized(), Silent())
    call = double.calls[0]
    assert (call["default_device_type"], call["dla_core"], call["gpu_fallback"]) == (double.trt.DeviceType.DLA, 1, True)


def test_without_a_gpu_it_points_to_the_onnx_route(small, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="no driver"))
    with pytest.raises(MissingError) as caught:
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())
    assert str(caught.value) == (
        "build.route: torch2trt needs an NVIDIA GPU and its driver (no driver). "
        "Use build.route onnx, which builds TensorRT-RTX engines without one."
    )


def test_without_torch2trt_it_says_where_to_get_it(double, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch2trt", None)
    with pytest.raises(MissingError) as caught:
        route.compile_engine(wanted(), small.loaded, small.quantized(), Silent())
    assert str(caught.value) == (
        "build.route: torch2trt cannot be imported here (it is not installed). "
        "Run: pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt; or use build.route onnx."
    )
