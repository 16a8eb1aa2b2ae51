import json

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
        assert set(found) - {"path"} == set(json.loads(bundle.manifest_bytes))


def test_a_bundle_for_people(tmp_path, capsys):
    shipping.bundle(tmp_path / "colour")
    assert main(["inspect", str(tmp_path / "colour")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"bundle colour in {tmp_path / 'colour'}"
    assert lines[1].startswith("engine: onnxruntime 1.20.0, ")
    assert "input: image float32 [N, 3, 8, 8] (N 1/4/8)" in lines
    assert "layers: 1 int8" in lines
    assert "check: passed, graph executed by onnxruntime 1.20.0" in lines
    assert any(line.split() == ["logits.cosine", "0.999", "limit", "0.99"] for line in lines)
    assert any(line.split() == ["logits.sqnr_db", "inf"] for line in lines)
    assert "note: layer head kept in int8" in lines


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
    path.write_text("TRT-8601-EntropyCalibration2\ninput:0: 3c010a14\n\nconv: 3f800000\n")
    found = inspected(path, capsys)
    assert (found["kind"], found["header"]) == ("calibration cache", "TRT-8601-EntropyCalibration2")
    assert found["amax"]["conv"] == 127.0
    assert found["amax"]["input:0"] == pytest.approx(1 + 0.5 / 2048, rel=1e-6)  # half a bin of 2048 over 1
    path.write_text("TRT-8601-EntropyCalibration2\nconv: 3f80\n")
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err == f"{path}:2: must be 'tensor: 8 hex digits' (got 'conv: 3f80').\n"


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "nothing there"),
        (b"", "a file that begins with an empty file"),
        (b"\x08\x0a\x12", "a file that begins with 08 0a 12"),
    ],
)
def test_what_is_nothing_of_these(content, got, tmp_path, capsys):
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: must be a bundle, an engine or a calibration table (got {got}).\n"


def test_a_folder_that_is_no_bundle(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: must be a bundle (got a folder without manifest.json).\n"
