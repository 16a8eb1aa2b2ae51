import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import shipping

from trtpipe.cli.main import main


def inspected(path, capsys):
    assert main(["inspect", "--json", str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_bundle_as_json_is_its_whole_manifest(tmp_path, capsys):
    bundle = shipping.bundle(tmp_path / "colour")
    for path in (tmp_path / "colour", tmp_path / "colour" / "manifest.json"):
        found = inspected(path, capsys)
        assert (found["kind"], found["path"]) == ("bundle", str(tmp_path / "colour"))
        assert found["engine"]["target"] == "onnxruntime"
        assert found["layers"][0]["precision"] == "int8"
        assert found["calibration_digest"] == "ab" * 32
        assert found["check"]["executed"] == "graph"
        assert set(found) - {"path"} == set(json.loads(bundle.manifest_bytes)) - {"digest"}


def test_a_bundle_for_people(tmp_path, capsys):
    shipping.bundle(tmp_path / "colour")
    assert main(["inspect", str(tmp_path / "colour")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"bundle colour in {tmp_path / 'colour'}"
    assert lines[1].startswith("engine: onnxruntime 1.20.0, ")
    assert "input: image float32 [N, 3, 8, 8] (N 1/4/8)" in lines
    assert "layers: 1 int8" in lines
    assert any(line.startswith("check: passed, graph executed by onnxruntime 1.20.0 on ") for line in lines)
    assert any(line.split() == ["logits.cosine", "0.999", "limit", "0.99", "ok"] for line in lines)
    assert any(line.split() == ["logits.sqnr_db", "inf"] for line in lines)
    assert "note: layer head kept in int8" in lines


def test_no_text_of_a_bundle_reaches_the_terminal_as_more_than_text(tmp_path, capsys):
    """Anybody may have written it: no escape sequence, and no line of its own."""
    evil = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\nsigned by key 0123"
    shipping.bundle(tmp_path / "colour", notes=(evil,), class_names=(evil, "b", "c"))
    assert main(["inspect", str(tmp_path / "colour")]) == 0
    out = capsys.readouterr().out
    assert [c for c in out if ord(c) < 32 or 127 <= ord(c) < 160] == ["\n"] * out.count("\n")
    assert not [line for line in out.splitlines() if line.startswith("signed")]
    assert "note: \\x1b[31mred\\x1b]0;title\\x07\\x9b2J\\nsigned by key 0123" in out.splitlines()
    assert main(["inspect", str(tmp_path / evil.replace("/", "").splitlines()[0])]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(tmp_path, capsys, kind):
    path = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"{path}: must be a file or a folder (got a pipe or a device). Save its content in a file, and give that.\n"
    )


def test_a_damaged_bundle_is_a_user_error(tmp_path, capsys):
    shipping.bundle(tmp_path / "colour")
    (tmp_path / "colour" / "model.onnx").write_bytes(b"x")
    assert main(["inspect", str(tmp_path / "colour")]) == 2
    assert "model.onnx" in capsys.readouterr().err


def test_an_engine_is_told_by_its_header(tmp_path, capsys):
    plan = bytearray(64)
    plan[:4], plan[16:24], plan[24:28], plan[32] = b"vtrt", (64).to_bytes(8, "little"), bytes([1, 7, 1, 116]), 0x0C
    path = tmp_path / "anything.bin"
    path.write_bytes(plan)
    assert inspected(path, capsys) == {
        "kind": "engine",
        "path": str(path),
        "bytes": 64,
        "flavour": "tensorrt_rtx",
        "version": "1.7.1.116",
        "compute_capabilities": ["8.6", "8.9"],
        "length": 64,
        "portable": False,
    }
    assert main(["inspect", str(path)]) == 0
    assert "compute_capabilities: [8.6, 8.9]" in capsys.readouterr().out


def test_a_tensorrt_calibration_cache(tmp_path, capsys):
    path = tmp_path / "calibration.cache"
    path.write_text("TRT-8601-EntropyCalibration2\ninput:0: 3c010a14\nconv: 3f800000\n")
    found = inspected(path, capsys)
    assert (found["kind"], found["header"]) == ("calibration cache", "TRT-8601-EntropyCalibration2")
    assert found["amax"]["conv"] == 127.0
    assert found["amax"]["input:0"] == pytest.approx(1 + 0.5 / 2048, rel=1e-6)  # half a bin of 2048 over 1
    path.write_text("TRT-8601-EntropyCalibration2\nconv: 3f80\n")
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"{path}:2: must read `tensor: 8 hex digits` (got 'conv: 3f80'). Is the file cut short?\n"
    )


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, ""),
        (b"", "a file that begins with an empty file"),
        (b"\x08\x0a\x12", "a file that begins with 08 0a 12"),
    ],
)
def test_what_is_nothing_of_these(content, got, tmp_path, capsys):
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    kinds = "a bundle, an engine, an ONNX file, a calibration table or a calibration cache"
    expected = (
        f"must be {kinds} (got {got}). Check the path."
        if content is not None
        else f"there is no such file or folder. Give {kinds}."
    )
    assert capsys.readouterr().err == f"{path}: {expected}\n"


def test_a_folder_that_is_no_bundle(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"{tmp_path}: must be a bundle (got a folder without manifest.json). Check the path.\n"
    )


def test_a_kit_is_prose_as_a_bundle_is(tmp_path, capsys):
    shipping.bundle(tmp_path / "k", kind="kit", engine=None)
    assert inspected(tmp_path / "k", capsys)["kind"] == "kit"
    assert main(["inspect", str(tmp_path / "k")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"kit colour in {tmp_path / 'k'}",
        "to be built: onnxruntime, on its device",
        "input: image float32 [N, 3, 8, 8] (N 1/4/8)",
    ]
    assert any(line.startswith("check: passed, graph executed by onnxruntime 1.20.0 on ") for line in lines)
    assert not any(line.startswith(("schema_version", "build:", "  {")) for line in lines)


def test_an_onnx_file(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(shipping.graph())
    found = inspected(path, capsys)
    assert found == {
        "kind": "onnx",
        "path": str(path),
        "bytes": len(shipping.graph()),
        "opsets": {"ai.onnx": 18},
        "producer": "",
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["N", 3, 8, 8]}],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": ["N", 3]}],
        "nodes": 2,
        "quantize_linear": 0,
        "dequantize_linear": 0,
        "precisions": {"float32": 1},
        "operators": {"Flatten": 1, "MatMul": 1},
    }
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"ONNX file {path}, {len(shipping.graph()) / 1000:.1f} kB",
        "opset: ai.onnx 18",
        "input: image float32 [N, 3, 8, 8]",
        "output: logits float32 [N, 3]",
        "convolutions and matrix products: 1 in float32",
        "quantization: 0 QuantizeLinear, 0 DequantizeLinear",
        "nodes: 2: 1 Flatten, 1 MatMul",
    ]


@pytest.mark.parametrize(("int8", "half"), [(False, None), (True, None), (True, "float16"), (False, "float16")])
def test_the_precisions_of_an_onnx_file_are_read_off_it(tmp_path, capsys, int8, half):
    import models
    import torch

    from trtpipe.routes.onnx import to_onnx

    line = models.line(models.tiny(), 8, 5)
    graph = to_onnx(line.quantized(int8=int8, half=None if half is None else getattr(torch, half)))
    (tmp_path / "m.onnx").write_bytes(graph.data)
    found = inspected(tmp_path / "m.onnx", capsys)
    assert sum(found["precisions"].values()) == 4  # three convolutions and a linear
    assert set(found["precisions"]) == ({"int8"} if int8 else {half or "float32"})
    assert bool(found["quantize_linear"]) == int8
    assert found["dequantize_linear"] >= found["quantize_linear"]


#: Formats that are on -> what the linears of `Attention` but its head compute in, and its matmuls.
NARROW = [
    ((("fp8",), None), "float8e4m3fn", "float8e4m3fn"),
    ((("int8",), None), "int8", "int8"),
    (((), "int4"), "{half} with int4 weights", "{half}"),
    (((), "nvfp4"), "{half} with float4e2m1 weights", "{half}"),
    ((("nvfp4",), None), "float4e2m1", "{half}"),
    ((("nvfp4", "fp8"), None), "float4e2m1", "float8e4m3fn"),
    ((("int8",), "int4"), "{half} with int4 weights", "int8"),
]


@pytest.mark.parametrize("half", ["float16", "float32"])
@pytest.mark.parametrize(("formats", "linear", "matmul"), NARROW, ids=str)
def test_every_number_format_of_an_onnx_file_is_read_off_it(tmp_path, capsys, formats, linear, matmul, half):
    import models
    import torch

    from trtpipe.quantization.narrow import Statistics
    from trtpipe.quantization.policy import Modes
    from trtpipe.quantization.precision import Keep
    from trtpipe.quantization.quantize import Narrow, quantize
    from trtpipe.routes.onnx import to_onnx

    on, weights = formats
    line = models.line(models.Attention().eval(), 16, 10)
    narrow = Narrow(Modes(frozenset(on), weights), Statistics(line.amax, {}))
    kept, in_half = Keep(fp32=("stem", "conv", "head")), torch.float16 if half == "float16" else None
    graph = quantize(
        line.captured, int8="int8" in on, half=in_half, keep=kept, amax=line.amax, ranges={}, narrow=narrow
    )
    (tmp_path / "m.onnx").write_bytes(to_onnx(graph).data)
    expected = Counter({"float32": 3})
    expected.update({linear.format(half=half): 5})
    expected.update({matmul.format(half=half): 2})
    assert inspected(tmp_path / "m.onnx", capsys)["precisions"] == dict(expected)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 64, b"no protobuf at all, only text that goes on", "half"],
    ids=["empty", "zeros", "text", "half"],
)
def test_what_is_no_onnx_file_is_a_user_error(tmp_path, capsys, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(shipping.graph()[: len(shipping.graph()) // 2] if content == "half" else content)
    assert main(["inspect", str(path)]) == 2
    said = capsys.readouterr().err
    expected = "must be an ONNX file (got" if content else "is an ONNX file without nodes. Export it again."
    assert f"{path}: {expected}" in said
    assert "Traceback" not in said


def test_without_onnx_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    (tmp_path / "m.onnx").write_bytes(shipping.graph())
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 3
    assert "m.onnx: onnx, which reads ONNX files, is not installed. Run: pip install onnx\n" in capsys.readouterr().err


def test_an_onnx_file_is_one_whatever_its_name(tmp_path, capsys):
    (tmp_path / "model").write_bytes(shipping.graph())
    assert inspected(tmp_path / "model", capsys)["kind"] == "onnx"


def test_what_an_onnx_file_does_not_say_is_unknown(tmp_path, capsys):
    from onnx import TensorProto, helper, save

    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
        helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [1]),
    ]
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    save(helper.make_model(helper.make_graph([node], "g", ends[:2], ends[2:])), tmp_path / "m.onnx")
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:5] == [
        "input: x float32 of unknown shape",
        "input: s float32 []",
        "output: y sequence of unknown shape",
    ]


def test_a_packed_bundle_is_to_be_unpacked(tmp_path, capsys):
    shipping.bundle(tmp_path / "b")
    assert main(["pack", str(tmp_path / "b"), str(tmp_path / "b.trtb")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b.trtb")]) == 2
    assert "b.trtb: is a packed bundle. Run `trtpipe unpack " in capsys.readouterr().err
