"""Builder flags and precision constraints for a weakly typed network, from the graph's own types.

Strongly typed networks (10 on demand, 11 and RTX always) take every type from the graph. On 8.6, with implicit
quantization and on DLA before 11, a network is typed weakly: flags allow FP16 and INT8, and TensorRT then also puts
FP32 layers into them. There the flags follow from the graph, and precision constraints hold its FP32 layers in FP32.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from trtpipe.job.sections import Build, Precision
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.network import enum_name
from trtpipe.trt.regions import Operation, OperationKind, int8_regions

if TYPE_CHECKING:
    from trtpipe.trt.types import IBuilderConfig, ILayer, INetworkDefinition

#: Layers that compute nothing: a precision constraint on them says nothing, or breaks the fusion of Q/DQ pairs.
_NOT_COMPUTING = frozenset({"CONSTANT", "SHAPE", "CAST", "IDENTITY", "QUANTIZE", "DEQUANTIZE", "SHUFFLE"})


def weakly_typed(flavour: Flavour, build: Build) -> bool:
    """Whether the network has to be weakly typed: on 8.6, for implicit quantization, and for DLA before 11."""
    if not flavour.has("strong_typing"):
        return True
    return flavour.has("weak_typing") and (build.quantization == "implicit" or build.uses_dla)


def allow_precisions(
    flavour: Flavour, config: IBuilderConfig, network: INetworkDefinition, build: Build, precision: Precision | None
) -> tuple[str, ...]:
    """Set the flags and constraints of a weakly typed network; notes on what TensorRT then chooses by itself.

    Explicit: FP16, BF16 and INT8 where the graph holds them, and constraints that keep its FP32 layers in FP32.
    Implicit: INT8 and, where the job says so, FP16; which layer gets which is TensorRT's choice.
    """
    trt = flavour.module
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    implicit = build.quantization == "implicit"
    outputs = {enum_name(layer.get_output(i).dtype) for layer in layers for i in range(layer.num_outputs)}
    half = "HALF" in outputs or bool(implicit and precision is not None and precision.fp16_mode)
    bfloat = "BF16" in outputs and flavour.has("bf16_flag")
    if half:
        config.set_flag(trt.BuilderFlag.FP16)
    if bfloat:
        config.set_flag(trt.BuilderFlag.BF16)
    if implicit or any(enum_name(layer.type) in ("QUANTIZE", "DEQUANTIZE") for layer in layers):
        config.set_flag(trt.BuilderFlag.INT8)
    if implicit:
        return ("implicit quantization: TensorRT chose the precision of each layer by itself",)
    if half or bfloat:
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        _hold_in_fp32(trt, layers)
    return ()


def _hold_in_fp32(trt: ModuleType, layers: list[ILayer]) -> None:
    """Constrain every computing FP32 layer to FP32, but for those that INT8 kernels take whole."""
    int8 = int8_regions([_operation(layer) for layer in layers])
    with warnings.catch_warnings():
        # Deprecated in 10.12 in favour of strong typing, which DLA does not have there.
        warnings.simplefilter("ignore", DeprecationWarning)
        for index, layer in enumerate(layers):
            outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
            if (
                enum_name(layer.type) not in _NOT_COMPUTING
                and all(enum_name(t.dtype) == "FLOAT" for t in outputs)
                and index not in int8
            ):
                layer.precision = trt.float32
                for output in range(layer.num_outputs):
                    layer.set_output_type(output, trt.float32)


def _operation(layer: ILayer) -> Operation:
    kinds: dict[str, OperationKind] = {"QUANTIZE": "quantize", "DEQUANTIZE": "dequantize", "CONSTANT": "constant"}
    inputs = (layer.get_input(i) for i in range(layer.num_inputs))
    return Operation(
        kinds.get(enum_name(layer.type), "other"),
        tuple(t.name for t in inputs if t is not None),
        tuple(layer.get_output(i).name for i in range(layer.num_outputs)),
    )
