"""Module paths of nodes, from the names that exporters write."""

from __future__ import annotations

import pytest

from trtpipe.model.onnx.names import module_path

SCOPES = {"pkg.torch.onnx.name_scopes": "['', 'layer1', 'layer1.0', 'layer1.0.bn1', '_native_batch_norm']"}


@pytest.mark.parametrize(
    ("name", "op", "output", "weight", "metadata", "path"),
    [
        ("node_Conv_1", "Conv", "y", "layer1.0.conv1.weight", SCOPES, "layer1.0.conv1"),  # dynamo, batch norm folded
        ("node_Conv_2", "Conv", "y", "stem.weight", SCOPES, "stem"),
        ("node_Gemm_3", "Gemm", "y", "layer1.0.bn1.out_proj.weight", SCOPES, "layer1.0.bn1"),
        ("/attn/Gemm_1", "Gemm", "y", "attn.out_proj.weight", {}, "attn"),
        ("/Gemm", "Gemm", "y", "head.weight", {}, ""),
        ("/attn/Gemm", "Gemm", "y", "attn2.weight", {}, "attn2"),
        ("node_add", "Add", "y", None, SCOPES, "layer1.0.bn1"),
        ("/layer1/layer1.0/conv/conv.0/conv.0.0/Conv", "Conv", "y", "onnx::Conv_1", {}, "layer1.0.conv.0.0"),
        ("/layer1/layer1.0/Add_1", "Add", "y", None, {}, "layer1.0"),
        ("/Add", "Add", "y", None, {}, ""),
        ("layer1.0.conv1/Conv_2", "Conv", "y", None, {}, "layer1.0.conv1"),  # trtpipe's own files
        ("Conv_12", "Conv", "y", "w", {}, "Conv_12"),
        ("model/conv/Conv2D", "Conv", "y", "w", {}, "model.conv.Conv2D"),  # tf2onnx
        ("", "Relu", "block/relu:0", None, {}, "block.relu:0"),
        ("", "Relu", "", None, {}, "Relu"),
    ],
)
def test_path(name: str, op: str, output: str, weight: str | None, metadata: dict[str, str], path: str) -> None:
    assert module_path(name, op, output, weight, metadata) == path
