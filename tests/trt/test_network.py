"""What is said of a graph that TensorRT's parser refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.errors import BuildError
from trtpipe.progress import Silent
from trtpipe.trt.monitor import Watch
from trtpipe.trt.network import parse


class Error:
    def __init__(self, func: str, operator: str = "", name: str = "") -> None:
        self._values = {"func": func, "node_operator": operator, "node_name": name}

    def __getattr__(self, name: str) -> Any:
        known = self._values | {"node": -1, "code": "ErrorCode.UNSUPPORTED_NODE", "desc": "why"}
        return lambda: known[name]


class Parser:
    num_errors = 1

    def __init__(self, error: Error) -> None:
        self._error = error

    def parse(self, data: bytes) -> bool:
        return False

    def get_error(self, i: int) -> Error:
        return self._error


ELSEWHERE = "Change the model there, or try build.route torch_tensorrt."
WITH_A_GPU = (
    "A plugin of TensorRT's own stands for that operation, and it needs an NVIDIA GPU and its driver already while the "
    "network is parsed: build where they are, or change the model there."
)


@pytest.mark.parametrize(
    ("error", "logged", "where", "step"),
    [
        (Error("importRoiAlign", "RoiAlign", "head/RoiAlign"), "", "head/RoiAlign [RoiAlign]", ELSEWHERE),
        (
            Error("importRoiAlign", "RoiAlign", "head/RoiAlign"),
            "roiAlignPlugin.cpp (161) - Cuda Error in ROIAlignV3: 35 (CUDA driver version is insufficient)",
            "head/RoiAlign [RoiAlign]",
            WITH_A_GPU,
        ),
        (Error("importScatterElements"), "", "a ScatterElements node", ELSEWHERE),
        (Error("deserializeOnnxModel"), "", "the file", ELSEWHERE),
    ],
)
def test_a_refused_node_is_named_with_what_helps(error: Error, logged: str, where: str, step: str) -> None:
    watch = Watch(Silent(), "error")
    watch.message("error", "Cuda error of an earlier operation")

    def parser(network: object, logger: object) -> Parser:
        if logged:
            watch.message("error", logged)
        return Parser(error)

    module = SimpleNamespace(OnnxParser=parser)
    flavour: Any = SimpleNamespace(module=module, title="TensorRT 10.3.0", has=lambda name: True)
    with pytest.raises(BuildError) as caught:
        parse(flavour, Any, Any, SimpleNamespace(data=b""), watch)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"onnx: TensorRT 10.3.0 does not accept every node ({where}: UNSUPPORTED_NODE, why). {step}"
    )


def test_a_parser_that_gives_no_reason_is_quoted_so() -> None:
    silent = SimpleNamespace(parse=lambda data: False, num_errors=0)
    module = SimpleNamespace(OnnxParser=lambda network, logger: silent)
    flavour: Any = SimpleNamespace(module=module, title="TensorRT 10.3.0")
    with pytest.raises(BuildError) as caught:
        parse(flavour, Any, Any, SimpleNamespace(data=b""), Watch(Silent(), "error"))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"onnx: TensorRT 10.3.0 does not accept every node (the parser gave no reason). {ELSEWHERE}"
    )
