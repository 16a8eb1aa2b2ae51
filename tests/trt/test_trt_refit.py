"""Other weights for a built engine. TensorRT's refitter is a stand-in, its network the real one of TensorRT-RTX."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import hypothesis
import pytest
import shipping
import trt_double
from hypothesis import strategies as st

from trtpipe.errors import InputError, MissingError
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.trt import driver, network, refit
from trtpipe.trt.builder import build_engine
from trtpipe.trt.driver import Driver
from trtpipe.trt.flavour import Flavour, load
from trtpipe.trt.monitor import Watch, make_logger
from trtpipe.trt.refit import mark_weights, refitted, weight_names

PLAN = trt_double.plan("tensorrt")


def test_names_are_those_that_onnx_reads():
    onnx = pytest.importorskip("onnx")
    import numpy as np
    from onnx import helper, numpy_helper

    arrays = {"w": np.float32, "half": np.float16, "double": np.float64, "levels": np.int8, "shape": np.int64}
    made = [numpy_helper.from_array(np.zeros((2, 3), kind), name) for name, kind in arrays.items()]
    made.append(numpy_helper.from_array(np.zeros(3, np.int8), "zero points"))
    for name, kind in (("e4m3", "FLOAT8E4M3FN"), ("int4", "INT4"), ("e2m1", "FLOAT4E2M1")):
        made.append(
            helper.make_tensor(
                name, getattr(onnx.TensorProto, kind), [2, 4], bytes(8 if name == "e4m3" else 4), raw=True
            )
        )
    graph = helper.make_graph([], "g", [], [], made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], doc_string="x" * 300)
    assert weight_names(model.SerializeToString()) == ("w", "half", "double", "levels", "e4m3", "int4", "e2m1")
    parsed = onnx.load_from_string(shipping.graph()).graph
    assert weight_names(shipping.graph()) == tuple(t.name for t in parsed.initializer)


@hypothesis.given(st.binary(max_size=40))
@hypothesis.settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_file_are_refused_or_hold_no_names(data):
    with contextlib.suppress(ValueError):
        assert all(isinstance(name, str) for name in weight_names(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x3a", "a protobuf message ends within a number"),
        (b"\x3a\x05ab", "a protobuf message ends within a field"),
        (b"\x3b", "a protobuf message has no fields of wire type 3"),
    ],
)
def test_bytes_that_are_no_message(data, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        weight_names(data)


class Network:
    def __init__(self, *refused):
        self.refused, self.marked = refused, []

    def mark_weights_refittable(self, name):
        self.marked.append(name)
        return name not in self.refused


def test_every_weight_is_marked_and_those_that_cannot_be_are_said(monkeypatch):
    names = ("a", "b", "c", "d", "e")
    monkeypatch.setattr(refit, "weight_names", lambda onnx: names)
    assert mark_weights(made := Network(), b"") == ()
    assert made.marked == list(names)
    assert mark_weights(Network("b"), b"") == ("build.refit: 1 of 5 weights cannot be changed: b",)
    assert mark_weights(Network("a", "b", "c", "d"), b"") == (
        "build.refit: 4 of 5 weights cannot be changed: a, b, c and 1 more",
    )
    with pytest.raises(InputError) as raised:
        mark_weights(Network(*names), b"")
    assert str(raised.value) == (
        "build.refit: individual needs a weight that TensorRT can change later (got none among 5). Use all, or leave "
        "it out."
    )


def test_the_real_network_takes_the_marks():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from trt_graphs import conv_model

    found, model = load("tensorrt_rtx"), conv_model()
    watch = Watch(Silent(), "error")
    logger = make_logger(found, watch)
    builder = found.module.Builder(logger)
    graph = network.create_network(found, builder, weakly_typed=False)
    parser = network.parse(found, graph, logger, model, watch)
    assert mark_weights(graph, model.data) == ()
    assert graph.are_weights_marked_refittable("weight")
    assert watch.errors(0) == ()
    del parser, graph, builder, logger


def test_individual_needs_a_gpu_with_tensorrt_rtx(monkeypatch):
    """Without a marked weight it built, and nothing could be changed; with one TensorRT-RTX 1.7.1 calls CUDA."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from trt_graphs import conv_model

    monkeypatch.setattr(driver, "probe", lambda: Driver(problem="libcuda.so.1 is not here"))
    with pytest.raises(MissingError, match=r"^build\.refit with TensorRT-RTX 1\.7\.1.*no usable NVIDIA GPU"):
        build_engine(conv_model(), Build(refit="individual"), progress=Silent())


class Trt:
    """TensorRT's runtime and refitter; each attribute is what one of their calls answers."""

    def __init__(self, **answers):
        self.seen = []
        self.answers = {
            "names": ["w"],
            "engine": True,
            "refittable": True,
            "weights": True,
            "refit": True,
            "plan": b"new",
        } | answers
        base = type("Base", (), {})
        engine = SimpleNamespace(
            refittable=self.answers["refittable"], serialize=lambda: self.say("serialize", self.answers["plan"])
        )
        self.runtime = runtime = SimpleNamespace(
            deserialize_cuda_engine=lambda plan: self.say("deserialize", engine if self.answers["engine"] else None),
            engine_host_code_allowed=False,
        )
        refitter = SimpleNamespace(
            refit_cuda_engine=lambda: self.say("refit", self.answers["refit"]),
            get_all_weights=lambda: self.answers["names"],
        )
        parser = SimpleNamespace(refit_from_bytes=lambda onnx: self.say(("weights", onnx), self.answers["weights"]))
        self.module = SimpleNamespace(
            ILogger=base,
            Runtime=lambda logger: runtime,
            Refitter=lambda engine, logger: refitter,
            OnnxParserRefitter=lambda refitter, logger: parser,
        )

    def say(self, what, answer):
        self.seen.append(what)
        return answer


@pytest.fixture
def tensorrt(monkeypatch):
    def use(**answers):
        trt = Trt(**answers)
        found = Flavour("tensorrt", trt.module, trt_double.VERSIONS["tensorrt"], frozenset())
        monkeypatch.setattr(refit.flavour, "load", lambda name: found)
        monkeypatch.setattr(driver, "probe", lambda: trt_double.GPU)
        return trt

    return use


def test_an_engine_is_loaded_refitted_and_serialized(tensorrt):
    trt = tensorrt()
    assert refitted(PLAN, b"onnx") == b"new"
    assert trt.seen == ["deserialize", ("weights", b"onnx"), "refit", "serialize"]
    assert trt.runtime.engine_host_code_allowed is False


def test_a_version_compatible_engine_may_run_the_code_that_it_brings(tensorrt):
    trt = tensorrt()
    assert refitted(PLAN, b"onnx", version_compatible=True) == b"new"
    assert trt.runtime.engine_host_code_allowed is True


def test_weights_that_were_not_marked_cannot_be_given(tensorrt):
    """The parser passes over them: the engine would go on with its old ones, beside the others' new ones."""
    tensorrt()
    assert refitted(PLAN, b"onnx", marked=("w",)) == b"new"
    with pytest.raises(InputError) as raised:
        refitted(PLAN, b"onnx", marked=("w", "e", "d", "c", "b"))
    assert str(raised.value) == (
        "engine: b, c, d and 1 more must be the engine's own, as TensorRT cannot change it there. Prepare the kit from "
        "the same model with other weights."
    )


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"engine": False}, r"^engine: TensorRT 10\.16\.1 cannot load the plan on NVIDIA L4 \(no error message\)"),
        ({"refittable": False}, r"^engine: no weight can be changed in it\. Build it with build\.refit: all, or indiv"),
        ({"weights": False}, r"^engine: the weights are not those of the graph that the engine was built from \(no "
         r"error message\)\. Prepare the kit from the same model with other weights\.$"),
        ({"refit": False}, r"^engine: the weights are not those of the graph"),
        ({"plan": None}, r"^engine: TensorRT 10\.16\.1 cannot serialize the refitted engine \(no error message\)\. "
         r"Build it again\.$"),
    ],
)  # fmt: skip
def test_what_tensorrt_refuses_is_said(tensorrt, answers, message):
    tensorrt(**answers)
    with pytest.raises(InputError, match=message):
        refitted(PLAN, b"onnx")


def test_a_plan_of_another_release_and_a_machine_without_a_gpu(tensorrt, monkeypatch):
    tensorrt()
    for compatible in (False, True):  # which lets another release load it, and not write it anew
        with pytest.raises(InputError, match=r"^engine: tensorrt must be 9\.9\.9\.0, which wrote the plan"):
            refitted(PLAN[:24] + bytes((9, 9, 9, 0)) + PLAN[28:], b"onnx", version_compatible=compatible)
    monkeypatch.setattr(driver, "probe", lambda: Driver(problem="no library"))
    with pytest.raises(MissingError, match=r"^refit: there is no usable NVIDIA GPU here \(no library\)"):
        refitted(PLAN, b"onnx")


def test_the_stand_ins_calls_are_tensorrts_own():
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    for kind, names in {
        "ICudaEngine": ("refittable", "serialize"), "Refitter": ("refit_cuda_engine", "get_all_weights"),
        "OnnxParserRefitter": ("refit_from_bytes",), "INetworkDefinition": ("mark_weights_refittable",),
        "Runtime": ("deserialize_cuda_engine", "engine_host_code_allowed"),
    }.items():  # fmt: skip
        for name in names:
            assert hasattr(getattr(trt, kind), name), f"{kind}.{name}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x3a\x05abc", "a protobuf message ends within a field"),
        (b"\xff", "a protobuf message ends within a number"),
        (b"\x03", "a protobuf message has no fields of wire type 3"),
    ],
)
def test_what_is_no_protobuf_message_is_said(data, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        weight_names(data)
