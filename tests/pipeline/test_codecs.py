"""What the cache stores of a stage is what it gives back: every field of every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline import codecs
from trtpipe.pipeline.cache.remote import DamagedEntry
from trtpipe.pipeline.cache.store import Cache, Entry
from trtpipe.pipeline.lowered import Compiled, Lowered
from trtpipe.values import Baseline, DimRange, Engine, Fallback, LayerPrecision, OnnxModel, TensorSpec

INPUTS = (TensorSpec("x", "float32", ("N", 3), {"N": DimRange(1, 2, 4)}),)
OUTPUTS = (TensorSpec("y", "int64", ("N",), {"N": DimRange(1, 2, 4)}, 0), TensorSpec("z", "float32", (), {}, None))
LAYERS = (LayerPrecision("a.b", "conv2d", "int8", "", "net.py:3"), LayerPrecision("", "add", "fp32", "kept"))
NAMES = st.from_regex(r"lib[a-z]{1,8}\.so", fullmatch=True)


def stored(folder: Path, dumped: codecs.Stored) -> Entry:
    """The entry as another process finds it in the cache."""
    Cache(folder).put("stage", "0" * 64, *dumped)
    entry = Cache(folder).get("stage", "0" * 64)
    assert entry is not None
    return entry


def in_order(value: object) -> object:
    """The value with every mapping as the list of its items: mappings that differ in their order are equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, in_order(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(k, in_order(v)) for k, v in value.items()]
    if isinstance(value, tuple | list):
        return [in_order(v) for v in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def compiled(engine: bytes, cache: bytes, plugins: dict[str, bytes], graph: bytes | None) -> Compiled:
    onnx = None if graph is None else OnnxModel(graph, 20, INPUTS, OUTPUTS, ("a note",), ("fp32", "int8"))
    lowered = Lowered(INPUTS, OUTPUTS, "w", "g", ("m",), LAYERS, ("n",), ("u",), None, {"b": "c", "a": "b"}, onnx)
    made = Engine(
        engine, "tensorrt", "10.3.0", ("8.6",), INPUTS, OUTPUTS, onnx, {"tf32": True, "a": {"z": 1, "b": 2}}, ("e",),
        (Fallback("a", "aten.sort", "no converter", "net.py:9"),), "8.9", cache, plugins,
    )  # fmt: skip
    return Compiled(lowered, made)


BYTES = st.binary(max_size=64)


@given(BYTES, BYTES, st.dictionaries(NAMES, BYTES, max_size=3), st.none() | BYTES)
def test_an_engine_comes_back_with_its_plugins(
    tmp_path_factory: pytest.TempPathFactory,
    engine: bytes,
    cache: bytes,
    plugins: dict[str, bytes],
    graph: bytes | None,
) -> None:
    made = compiled(engine, cache, plugins, graph)
    entry = stored(tmp_path_factory.mktemp("entry"), codecs.COMPILED.dump(made))
    assert codecs.COMPILED.load(entry) == made
    assert codecs.LOWERED.load(entry) == made.lowered
    assert in_order(codecs.COMPILED.load(entry)) == in_order(made)


@pytest.mark.parametrize("name", ["libtwice.so", "model.engine", "model.onnx", "timing.cache"])
def test_a_file_that_was_changed_is_no_engine(tmp_path: Path, name: str) -> None:
    entry = stored(tmp_path, codecs.COMPILED.dump(compiled(b"engine", b"timings", {"libtwice.so": b"code"}, b"graph")))
    (entry.path / name).write_bytes(b"other")
    with pytest.raises(DamagedEntry):
        codecs.COMPILED.load(entry)


def test_no_field_of_what_is_stored_is_left_out() -> None:
    """A field that is added has to be in `compiled`, and so in the codec."""
    made = compiled(b"1", b"2", {"lib.so": b"3"}, b"4")
    for value in (made.lowered, made.engine):
        for field in dataclasses.fields(value):
            assert getattr(value, field.name) or field.name == "table", field.name


@given(
    st.lists(st.tuples(st.text(max_size=8), st.sampled_from(["float32", "int64", "bool"])), unique_by=lambda o: o[0])
)
def test_outputs_come_back_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, outputs: list[tuple[str, str]]
) -> None:
    """A safetensors file has an order of its own, and figures that cover all outputs stand under the first."""
    arrays = {name: np.zeros((2, 3), dtype) for name, dtype in outputs}
    made = codecs.Recorded(Baseline("trace", arrays, np.array([0, 1]), ("a", "b")), None)
    folder = tmp_path_factory.mktemp("entry")
    assert in_order(codecs.RECORDED.load(stored(folder / "r", codecs.RECORDED.dump(made)))) == in_order(made)
    corners = (arrays, dict(reversed(arrays.items())))
    assert in_order(codecs.CORNERS.load(stored(folder / "c", codecs.CORNERS.dump(corners)))) == in_order(corners)


def test_a_baseline_comes_back(tmp_path: Path) -> None:
    outputs = {"y": np.arange(6, dtype=np.int64).reshape(3, 2), "z": np.array([[True], [False], [True]])}
    for labels, classes in ((None, None), (np.array([0, -1, 1]), ("cat", "dog"))):
        made = codecs.Recorded(Baseline("trace", outputs, labels, ("a", "b", "c"), ("n",)), classes)
        back = codecs.RECORDED.load(stored(tmp_path / str(classes), codecs.RECORDED.dump(made)))
        assert back.classes == classes
        assert {n: a.dtype for n, a in back.baseline.outputs.items()} == {n: a.dtype for n, a in outputs.items()}
        for name, array in outputs.items():
            np.testing.assert_array_equal(back.baseline.outputs[name], array)
        np.testing.assert_array_equal(back.baseline.labels, labels)
        assert dataclasses.replace(back.baseline, outputs={}, labels=None) == dataclasses.replace(
            made.baseline, outputs={}, labels=None
        )
