"""The program that compares two checkouts finds each difference that counts, and no other."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = {
    "name": "a", "environment": {"trtpipe": "1"}, "created": "then", "files": {"model.onnx": {"size": 1}},
    "layers": [{"module": "stem", "precision": "int8", "source": "digits.py:40"}], "fingerprint": "x",
}  # fmt: skip


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks" / "compare_checkouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def bundle(**changed: object) -> dict[str, bytes]:
    files = {"model.engine": b"engine", "model.onnx": b"graph", "calibration.json": b"{}", "report.html": b"a"}
    return files | {"manifest.json": json.dumps(MANIFEST | changed).encode()}


def test_what_a_rebuild_may_change_is_no_difference(program: ModuleType) -> None:
    moved = [{"module": "stem", "precision": "int8", "source": "digits.py:42"}]
    other = bundle(environment={"trtpipe": "2"}, created="now", fingerprint="y", files={}, layers=moved)
    assert program.compared(bundle(), other | {"report.html": b"b"}) == []


def test_every_other_difference_is_a_line(program: ModuleType) -> None:
    layers = [{"module": "stem", "precision": "fp16", "source": "digits.py:40"}]
    other = bundle(layers=layers, name="b") | {"model.engine": b"other!!", "new": b""}
    assert program.compared(bundle(), other) == [
        "new: only after",
        f"model.engine: {digest(b'engine')} (6 bytes) -> {digest(b'other!!')} (7 bytes)",
        "manifest layers.0.precision: int8 -> fp16",
        "manifest name: a -> b",
    ]
