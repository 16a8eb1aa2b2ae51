"""A double of torch2trt 0.5.0 and of as much of TensorRT 10.3 as it touches, written from their observed behaviour.

torch2trt is on no package index. The double has its exact signature, and what trtpipe must live with: **kwargs swallow
typos, inputs that are not float, half or bool vanish, tensors with a stale `_trt` are no inputs, operations without a
converter print a warning and are frozen, the calibrator is made as `DatasetCalibrator(dataset, algorithm=...)` from its
module's namespace and not made where `qat_mode` is given, a failed build gives an engine of None. It computes no
network: how it comes to one is in torch2trt_hooks.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

from torch2trt_hooks import KINDS, Context, DataType, Hooks, Layer, Network, Tensor

from calib.algorithms import BASES

__all__ = ["DataType", "Double", "Layer", "Network", "Tensor", "tensorrt"]


class CalibrationAlgoType(enum.Enum):
    LEGACY_CALIBRATION = 0
    ENTROPY_CALIBRATION = 1
    ENTROPY_CALIBRATION_2 = 2
    MINMAX_CALIBRATION = 3


class DeviceType(enum.Enum):
    GPU = 0
    DLA = 1


class Calibrator:
    """Base of TensorRT's calibrators; its own constructor must be called."""

    def __init__(self) -> None:
        self.constructed = True


class PlanEngine:
    def __init__(self, version: str) -> None:
        self._version = bytes(int(n) for n in (*version.split("."), "26"))

    def serialize(self) -> memoryview:
        return memoryview(b"ftrt" + bytes(20) + self._version + bytes(36))


class Converted:
    engine: Any
    network: Network


def tensorrt() -> types.ModuleType:
    """A module like tensorrt 10.3.0."""
    trt = types.ModuleType("tensorrt")
    trt.__version__ = "10.3.0"  # type: ignore[attr-defined]
    members = {
        "DataType": DataType,
        "CalibrationAlgoType": CalibrationAlgoType,
        "DeviceType": DeviceType,
        "BuilderFlag": types.SimpleNamespace(FP16="FP16", INT8="INT8"),
        "MatrixOperation": types.SimpleNamespace(NONE="NONE", TRANSPOSE="TRANSPOSE"),
        "ElementWiseOperation": types.SimpleNamespace(SUM="SUM"),
        "Weights": type("Weights", (), {}),
        "float32": DataType.FLOAT,
        "float16": DataType.HALF,
        "int8": DataType.INT8,
        "Logger": types.SimpleNamespace(ERROR="error", WARNING="warning", INFO="info", VERBOSE="verbose"),
        **{name: type(name, (Calibrator,), {}) for name in BASES.values()},
    }
    for name, value in members.items():
        setattr(trt, name, value)
    return trt


class Double:
    """The package, and what it was asked. `unconverted` are names of operations that it has no converter for."""

    def __init__(self, trt: types.ModuleType) -> None:
        self.trt = trt
        self.calls: list[dict[str, Any]] = []
        self.calibrators: list[Any] = []
        self.batches: list[tuple[tuple[int, ...], ...]] = []
        self.unconverted: tuple[str, ...] = ()
        self.builds = True
        self.reads = True
        self.module = types.ModuleType("torch2trt.torch2trt")
        self.module.DatasetCalibrator = self._dataset_calibrator  # type: ignore[attr-defined]
        self.package = types.ModuleType("torch2trt")
        self.package.torch2trt = self._function()  # type: ignore[attr-defined]
        self.hooks = Hooks()
        self.package.tensorrt_converter = self.hooks.tensorrt_converter  # type: ignore[attr-defined]
        self.package.CONVERTERS = self.hooks.converters  # type: ignore[attr-defined]
        self.networks: list[Network] = []
        self.flags: list[str] = []

    def install(self, monkeypatch: Any) -> None:
        monkeypatch.setitem(sys.modules, "torch2trt", self.package)
        monkeypatch.setitem(sys.modules, "torch2trt.torch2trt", self.module)

    def _dataset_calibrator(self, dataset: Any, algorithm: Any = None, cache_file: Any = None, flattener: Any = None):
        raise AssertionError("torch2trt's own calibrator was made")

    def _function(self) -> Any:
        default = self.trt.CalibrationAlgoType.ENTROPY_CALIBRATION  # what 0.5.0 has on TensorRT 10
        gpu = self.trt.DeviceType.GPU

        def torch2trt(module,
                      inputs,
                      input_names=None,
                      output_names=None,
                      log_level="error",
                      fp16_mode=False,
                      max_workspace_size=1 << 25,
                      strict_type_constraints=False,
                      keep_network=True,
                      int8_mode=False,
                      int8_calib_dataset=None,
                      int8_calib_algorithm=default,
                      use_onnx=False,
                      default_device_type=gpu,
                      dla_core=0,
                      gpu_fallback=True,
                      device_types={},  # noqa: B006
                      min_shapes=None,
                      max_shapes=None,
                      opt_shapes=None,
                      onnx_opset=None,
                      max_batch_size=None,
                      avg_timing_iterations=None,
                      **kwargs):  # fmt: skip
            given = dict(locals())
            self.calls.append({k: v for k, v in given.items() if k not in ("self", "default", "gpu")})
            if strict_type_constraints:
                raise AttributeError("type object 'BuilderFlag' has no attribute 'STRICT_TYPES'")
            module(*inputs)
            made = Converted()
            made.network = self._network(module, list(inputs), input_names, output_names, use_onnx, given)
            self.networks.append(made.network)
            if default_device_type is not gpu and min_shapes != max_shapes:
                raise ValueError("Dataset cannot have multiple shapes when using DLA")
            for name in self.unconverted:
                print(f"Warning: Encountered known unsupported method {name}")
            if int8_mode and "qat_mode" not in kwargs:
                calibrator = self.module.DatasetCalibrator(int8_calib_dataset, algorithm=int8_calib_algorithm)
                self.calibrators.append(calibrator)
                self._calibrate(calibrator, made.network, opt_shapes)
            made.engine = PlanEngine(self.trt.__version__) if self.builds else None
            return made

        return torch2trt

    def _network(
        self, module: Any, inputs: list[Any], names: Any, output_names: Any, use_onnx: bool, given: dict[str, Any]
    ) -> Network:
        network = Network()
        if use_onnx:
            return network  # its parser's errors are ignored
        kept = [t for t in inputs if t.dtype in KINDS]
        for name, tensor in zip(names, kept, strict=False):
            if not hasattr(tensor, "_trt"):
                network.inputs.append(Tensor(name, KINDS[tensor.dtype], tuple(tensor.shape)))
                tensor._trt = network.inputs[-1]
        ctx = Context(network, module, given)
        with self.hooks.attached(ctx):
            outputs = [t for t in module(*inputs) if t.dtype in KINDS]
        for name, tensor in zip(output_names, outputs, strict=False):
            made = tensor._trt  # an AttributeError where no converter took part
            made.name, made.dtype, made.shape = name, KINDS[tensor.dtype], tuple(tensor.shape)
            network.outputs.append(made)
        self.flags = ctx.builder_config.flags
        if not self.reads:
            network.layers = []
        return network

    def _calibrate(self, calibrator: Any, network: Network, opt_shapes: Any) -> None:
        """As TensorRT 10 does: what a callback raises is logged and read as the end of the data."""
        assert calibrator.constructed
        names = [t.name for t in network.inputs]
        try:
            if calibrator.read_calibration_cache() is None:
                while (pointers := calibrator.get_batch(names)) is not None:
                    self.batches.append(tuple(tuple(s) for s in opt_shapes))
                    assert all(isinstance(p, int) and p for p in pointers)
            calibrator.write_calibration_cache(memoryview(b"TRT-100300-EntropyCalibration2\nimage: 3c010a14\n"))
        except Exception:  # noqa: BLE001
            pass
