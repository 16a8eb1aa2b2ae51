"""The real torch2trt on a machine without a GPU: TensorRT-RTX's builder stands in for TensorRT 10.

TensorRT-RTX has the network and the builder that torch2trt writes to, but no weak typing and no calibrators. Their
names are added, and what they would do to the build is left out: the FP16 and INT8 flags change nothing, so layers
without Q/DQ come out in FP32. A calibrator that is set is driven as TensorRT drives one. Converters, network, Q/DQ and
build are real.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from driverless import Network

from calib.algorithms import BASES

VERSION = "10.14.0"


class CalibrationAlgoType(enum.Enum):
    LEGACY_CALIBRATION = 0
    ENTROPY_CALIBRATION = 1
    ENTROPY_CALIBRATION_2 = 2
    MINMAX_CALIBRATION = 3


class CreationFlag(enum.IntEnum):
    EXPLICIT_BATCH = 0


class Calibrator:
    def __init__(self) -> None:
        pass


@dataclass
class Seen:
    """`flags` are the builder flags that TensorRT-RTX does not have; `batches` counts what the calibrator gave,
    `network` is what the builder was given."""

    flags: list[str] = field(default_factory=list)
    calibrator: Any = None
    batches: int = 0
    inputs: list[str] = field(default_factory=list)
    network: Network = field(default_factory=Network)


class Engine:
    num_io_tensors = 0

    def __init__(self, plan: Any) -> None:
        self._plan = bytes(plan)

    def serialize(self) -> bytes:
        return self._plan

    def create_execution_context(self) -> None:
        return None


class Runtime:
    def __init__(self, logger: Any) -> None:
        pass

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def deserialize_cuda_engine(self, plan: Any) -> Engine:
        return Engine(plan)


@functools.cache
def tensorrt(rtx: Any) -> types.ModuleType:
    """TensorRT-RTX under the name of TensorRT 10."""

    class Proxy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(rtx, name)

    trt: Any = Proxy("tensorrt")
    trt.__version__, trt.__path__ = VERSION, []
    trt.__spec__ = importlib.util.spec_from_loader("tensorrt", loader=None)
    trt.CalibrationAlgoType, trt.NetworkDefinitionCreationFlag, trt.Runtime = CalibrationAlgoType, CreationFlag, Runtime
    for name in ("IInt8Calibrator", *BASES.values()):
        setattr(trt, name, type(name, (Calibrator,), {}))
    flags = dict(rtx.BuilderFlag.__members__) | {"FP16": "FP16", "INT8": "INT8"}
    trt.BuilderFlag = types.SimpleNamespace(**flags)
    return trt


@contextlib.contextmanager
def _named_tensorrt(trt: types.ModuleType) -> Iterator[None]:
    before = sys.modules.get("tensorrt")
    sys.modules["tensorrt"] = trt
    try:
        yield
    finally:
        if before is None:
            del sys.modules["tensorrt"]
        else:
            sys.modules["tensorrt"] = before


@contextlib.contextmanager
def torch2trt_on_rtx() -> Iterator[Seen]:
    """Use trtpipe.routes.torch2trt.route inside."""
    import numpy as np
    import tensorrt_rtx as rtx

    from trtpipe.routes.torch2trt import route
    from trtpipe.trt import driver, flavour, implicit, plan

    seen = Seen()
    config, dtype = rtx.IBuilderConfig, rtx.ITensor.__dict__["dtype"]
    set_flag, build = config.set_flag, rtx.Builder.build_serialized_network

    def flagged(self: Any, flag: Any) -> None:
        if isinstance(flag, str):
            seen.flags.append(flag)
        else:
            set_flag(self, flag)

    def given_calibrator(_config: Any, calibrator: Any) -> None:
        seen.calibrator = calibrator

    def calibrated(self: Any, network: Any, given: Any) -> Any:
        seen.network.read(network, rtx)
        if seen.calibrator is not None:
            seen.inputs = [network.get_input(i).name for i in range(network.num_inputs)]
            if seen.calibrator.read_calibration_cache() is None:
                while seen.calibrator.get_batch(seen.inputs) is not None:
                    seen.batches += 1
        return build(self, network, given)

    class Memory:
        def place(self, array: Any) -> tuple[int, Any]:
            held = np.ascontiguousarray(array)
            return held.ctypes.data, held

    trt = tensorrt(rtx)
    gpu = driver.Driver("13.0", (driver.Gpu(0, "none: torch2trt on TensorRT-RTX", "8.9", 8 << 30),))
    found = flavour.Flavour("tensorrt", trt, VERSION, flavour.expected("tensorrt", VERSION))
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (rtx.ITensor, "location", property(lambda self: None, lambda self, value: None)),
            (rtx.ITensor, "dtype", property(lambda self: dtype.__get__(self), lambda self, value: None)),
            (config, "set_flag", flagged),
            (config, "int8_calibrator", property(lambda self: seen.calibrator, given_calibrator)),
            (config, "set_calibration_profile", lambda self, profile: True),
            (rtx.Builder, "build_serialized_network", calibrated),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, value, create=not hasattr(target, name)))
        stack.enter_context(_named_tensorrt(trt))
        stack.enter_context(mock.patch.object(driver, "probe", return_value=gpu))
        stack.enter_context(mock.patch.object(flavour, "load", return_value=found))
        stack.enter_context(mock.patch.object(implicit, "open_memory", return_value=Memory()))
        stack.enter_context(mock.patch.object(route, "DEVICE", "cpu"))
        stack.enter_context(mock.patch.object(plan, "own_header", lambda data, *_: plan.read_header(data)))
        yield seen
