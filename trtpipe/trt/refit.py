"""Other weights for an engine that is built: what can be changed is marked as it is built, and given from an ONNX file.

With `build.refit: all` TensorRT lets every weight be changed. With `individual` it lets nothing be changed that was
not marked (`INetworkDefinition.mark_weights_refittable`), by the name that the weight has in the ONNX file.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from calib.errors import some_of
from trtpipe.errors import InputError
from trtpipe.onnx_format import ELEMENT_TYPES
from trtpipe.progress import Silent
from trtpipe.trt import driver, flavour, plan
from trtpipe.trt.calls import load_engine
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch, create, make_logger

if TYPE_CHECKING:
    from trtpipe.trt.types import ICudaEngine, ILogger, INetworkDefinition

#: Fields of ONNX's protobuf (onnx.proto); its floating data types, and those that quantized weights are stored in.
_GRAPH, _INITIALIZER, _NAME, _DATA_TYPE, _DIMS = 7, 5, 8, 2, 1
_FLOATING = {ELEMENT_TYPES[name]: name for name in ("float32", "float16", "float64", "bfloat16")}
_QUANTIZED = {ELEMENT_TYPES[name]: name for name in ("int8", "float8e4m3fn", "int4", "float4e2m1")}
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}
#: How a note on weights that no refit can change begins.
FIXED = "build.refit: "


def weight_names(onnx: bytes) -> tuple[str, ...]:
    """The names of an ONNX file's initializers that are weights: floating ones, and quantized ones of two axes and more
    (zero points have fewer). Read here, as a device need not have the package onnx.

    Raises:
        ValueError: the bytes are no protobuf message.
    """
    return tuple(name for name, _ in _weights(onnx))


def _weights(onnx: bytes) -> Iterator[tuple[str, bytes]]:
    """The name of each weight, and its whole message."""
    for graph in _messages(onnx, _GRAPH):
        for tensor in _messages(graph, _INITIALIZER):
            listed = list(_fields(tensor))
            fields, axes = dict(listed), sum(number == _DIMS for number, _ in listed)
            kind, name = fields.get(_DATA_TYPE), fields.get(_NAME)
            if (kind in _FLOATING or (kind in _QUANTIZED and axes > 1)) and isinstance(name, bytes):
                yield name.decode(), tensor


def changed_weights(one: bytes, other: bytes) -> tuple[str, ...]:
    """The names of the weights of an ONNX file that another one has otherwise, or not at all; as `weight_names`."""
    before = dict(_weights(other))
    return tuple(name for name, content in _weights(one) if before.get(name) != content)


def weight_mismatches(one: bytes, other: bytes) -> tuple[str, ...]:
    """What weights of an ONNX file are not in another one, or are of another type or shape there; as `weight_names`."""
    here, there = dict(_types(one)), dict(_types(other))
    return tuple(
        f"weight {name} must be {there.get(name, 'absent')}, as in the bundle's graph (got {here.get(name, 'none')})"
        for name in dict.fromkeys((*there, *here))
        if here.get(name) != there.get(name)
    )


def _types(onnx: bytes) -> Iterator[tuple[str, str]]:
    """The name of each weight, and its type and shape like "float32 [3, 4]"."""
    for name, tensor in _weights(onnx):
        fields = list(_fields(tensor))
        kind = (_FLOATING | _QUANTIZED)[next(v for n, v in fields if n == _DATA_TYPE and isinstance(v, int))]
        yield name, f"{kind} {[v for n, v in fields if n == _DIMS]}"


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
    return (f"{FIXED}{len(left)} of {len(names)} weights cannot be changed: {some_of(left, 3)}",)


def give_weights(
    tensorrt: Flavour,
    engine: ICudaEngine,
    logger: ILogger,
    onnx: bytes,
    watch: Watch,
    step: str,
    *,
    marked: Collection[str] = (),
) -> None:
    """Refit the weights of a loaded engine from an ONNX file.

    Args:
        tensorrt: that loaded it.
        engine: the engine; nothing may be executing.
        logger: of its runtime.
        onnx: the file.
        watch: of that logger.
        step: what to do about a refusal.
        marked: names of weights that have to be among those that can be changed; the parser passes over others.

    Raises:
        InputError: TensorRT refuses, or one of `marked` cannot be changed.
        MissingError: TensorRT gives no refitter.
    """
    refitter = create(tensorrt, "Refitter", watch, engine, logger)
    if fixed := sorted(set(marked) - set(refitter.get_all_weights() if marked else ())):
        raise InputError(
            f"engine: {some_of(fixed, 3)} must be the engine's own, as TensorRT cannot change it there. {step}"
        )
    since = watch.mark()
    parser = tensorrt.module.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_bytes(onnx) or not refitter.refit_cuda_engine():
        raise InputError(
            "engine: the weights are not those of the graph that the engine was built from "
            f"({watch.reason(since)}). {step}"
        )


def refitted(engine: bytes, onnx: bytes, *, marked: Collection[str] = (), version_compatible: bool = False) -> bytes:
    """The plan with the weights of an ONNX file of the same graph.

    Args:
        engine: a plan that was built with build.refit.
        onnx: the file.
        marked: names of weights that other ones are given for, where TensorRT can change those alone that were marked.
        version_compatible: the plan was built with build.version_compatible: it brings host code of its own, which is
            run. Another release that may load it does not refit it.

    Raises:
        InputError: the plan is not for this GPU and TensorRT, nothing in it can be changed, one of `marked` cannot,
            or the file is of another graph.
        MissingError: no GPU, or no TensorRT, or CUDA does not start.
    """
    header = plan.read_header(engine)
    device = driver.require("refit").devices[0]
    tensorrt = flavour.load(header.flavour)
    # Of an engine that is version compatible too: it is written again, and the bundle says by which release.
    plan.require_fit(header, tensorrt.name, tensorrt.version, device.compute_capability)
    watch = Watch(Silent(), "error")
    try:
        return _refitted(tensorrt, engine, onnx, watch, device.name, marked, version_compatible)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # TensorRT's objects must not live on in a traceback
        raise


def _refitted(
    tensorrt: Flavour,
    engine: bytes,
    onnx: bytes,
    watch: Watch,
    device: str,
    marked: Collection[str],
    version_compatible: bool,
) -> bytes:
    logger = make_logger(tensorrt, watch)
    runtime = create(tensorrt, "Runtime", watch, logger)
    if version_compatible:
        runtime.engine_host_code_allowed = True
    loaded = load_engine(tensorrt, runtime, engine, device, watch)
    if not loaded.refittable:
        raise InputError("engine: no weight can be changed in it. Build it with build.refit: all, or individual.")
    step = "Prepare the kit from the same model with other weights."
    give_weights(tensorrt, loaded, logger, onnx, watch, step, marked=marked)
    since = watch.mark()
    serialized = loaded.serialize()
    if serialized is None:
        raise InputError(
            f"engine: {tensorrt.title} cannot serialize the refitted engine ({watch.reason(since)}). Build it again."
        )
    data = bytes(serialized)
    del serialized, loaded, runtime
    return data
