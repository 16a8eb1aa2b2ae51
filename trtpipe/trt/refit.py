"""Other weights for an engine that is built: what can be changed is marked as it is built, and given from an ONNX file.

With `build.refit: all` TensorRT lets every weight be changed. With `individual` it lets nothing be changed that was
not marked (`INetworkDefinition.mark_weights_refittable`), by the name that the weight has in the ONNX file.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trtpipe.errors import InputError
from trtpipe.progress import Silent
from trtpipe.trt import driver, flavour, plan
from trtpipe.trt.calls import load_engine
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch, make_logger

if TYPE_CHECKING:
    from trtpipe.trt.types import ICudaEngine, ILogger, INetworkDefinition

#: Fields of ONNX's protobuf (onnx.proto); its floating data types (FLOAT, FLOAT16, DOUBLE, BFLOAT16), and those that
#: quantized weights are stored in (INT8, FLOAT8E4M3FN, INT4, FLOAT4E2M1).
_GRAPH, _INITIALIZER, _NAME, _DATA_TYPE, _DIMS = 7, 5, 8, 2, 1
_FLOATING, _QUANTIZED = frozenset((1, 10, 11, 16)), frozenset((3, 17, 22, 23))
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}


def weight_names(onnx: bytes) -> tuple[str, ...]:
    """The names of an ONNX file's initializers that are weights: floating ones, and quantized ones of two axes and more
    (zero points have fewer). Read here, as a device need not have the package onnx.

    Raises:
        ValueError: the bytes are no protobuf message.
    """
    names = []
    for graph in _messages(onnx, _GRAPH):
        for tensor in _messages(graph, _INITIALIZER):
            listed = list(_fields(tensor))
            fields, axes = dict(listed), sum(number == _DIMS for number, _ in listed)
            kind, name = fields.get(_DATA_TYPE), fields.get(_NAME)
            if (kind in _FLOATING or (kind in _QUANTIZED and axes > 1)) and isinstance(name, bytes):
                names.append(name.decode())
    return tuple(names)


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    return (value for number, value in _fields(data) if number == wanted and isinstance(value, bytes))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protobuf message (protobuf.dev/programming-guides/encoding)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("a protobuf message ends within a number")
            byte, at = data[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == _VARINT:
            yield number, varint()
            continue
        if kind != _LENGTH and kind not in _FIXED:
            raise ValueError(f"a protobuf message has no fields of wire type {kind}")
        size = varint() if kind == _LENGTH else _FIXED[kind]
        if at + size > len(data):
            raise ValueError("a protobuf message ends within a field")
        value, at = data[at : at + size], at + size
        if kind == _LENGTH:
            yield number, value


def mark_weights(network: INetworkDefinition, onnx: bytes) -> tuple[str, ...]:
    """Mark every weight of the ONNX file that the network was parsed from; a note on those that cannot be.

    Raises:
        InputError: none can be.
    """
    names = weight_names(onnx)
    left = [name for name in names if not network.mark_weights_refittable(name)]
    if len(left) == len(names):
        raise InputError(
            f"build.refit: individual needs a weight that TensorRT can change later (got none among {len(names)}). "
            "Use all, or leave it out."
        )
    if not left:
        return ()
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return (f"build.refit: {len(left)} of {len(names)} weights cannot be changed: {', '.join(left[:3])}{more}",)


def give_weights(
    tensorrt: Flavour, engine: ICudaEngine, logger: ILogger, onnx: bytes, reason: Callable[[], str], step: str
) -> None:
    """Refit the weights of a loaded engine from an ONNX file.

    Args:
        tensorrt: that loaded it.
        engine: the engine; nothing may be executing.
        logger: of its runtime.
        onnx: the file.
        reason: TensorRT's last error message.
        step: what to do about a refusal.

    Raises:
        InputError: TensorRT refuses.
    """
    refitter = tensorrt.module.Refitter(engine, logger)
    parser = tensorrt.module.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_bytes(onnx) or not refitter.refit_cuda_engine():
        raise InputError(
            f"engine: the weights are not those of the graph that the engine was built from ({reason()}). {step}"
        )


def refitted(engine: bytes, onnx: bytes) -> bytes:
    """The plan with the weights of an ONNX file of the same graph.

    Args:
        engine: a plan that was built with build.refit.
        onnx: the file.

    Raises:
        InputError: the plan is not for this GPU and TensorRT, nothing in it can be changed, or the file is of another
            graph.
        MissingError: no GPU, or no TensorRT.
    """
    header = plan.read_header(engine)
    device = driver.require("refit").devices[0]
    tensorrt = flavour.load(header.flavour)
    if problems := plan.misfits(header, tensorrt.name, tensorrt.version, device.compute_capability):
        raise InputError("\n".join(f"engine: {p}" for p in problems))
    watch = Watch(Silent(), "error")
    try:
        return _refitted(tensorrt, engine, onnx, watch, device.name)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # TensorRT's objects must not live on in a traceback
        raise


def _refitted(tensorrt: Flavour, engine: bytes, onnx: bytes, watch: Watch, device: str) -> bytes:
    def reason() -> str:
        return watch.errors[-1] if watch.errors else "no error message"

    logger = make_logger(tensorrt, watch)
    runtime = tensorrt.module.Runtime(logger)
    loaded = load_engine(tensorrt, runtime, engine, device, reason)
    if not loaded.refittable:
        raise InputError("engine: no weight can be changed in it. Build it with build.refit: all, or individual.")
    give_weights(tensorrt, loaded, logger, onnx, reason, "Prepare the kit from the same model with other weights.")
    serialized = loaded.serialize()
    if serialized is None:
        raise InputError(f"engine: {tensorrt.title} cannot serialize the refitted engine ({reason()}).")
    data = bytes(serialized)
    del serialized, loaded, runtime
    return data
