"""PyTorch models that are quantized already go down the line with their own scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from calib.table import CalibrationTable
from tests.support.nets import images
from tests.support.onnx_files import write_job
from tests.support.quantized_nets import converted, fake, saved, small, with_fake_quantizers
from trtpipe.errors import InputError
from trtpipe.job.load import JobErrors, read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.deep import deep_problems
from trtpipe.progress import Silent

OUTPUT = "tests.support.quantized_nets:quantized_output"
FACTORY = {"factory": "tests.support.quantized_nets:with_fake_quantizers", "quantized": True}


def integers(built: Any) -> tuple[list[float], list[Any], list[Any]]:
    """Scales of activations, INT8 weights and their scales in the graph that was compiled, in its order."""
    model = onnx.load(built.bundle.path / "model.onnx")
    known = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    known |= {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"}
    activations = [float(known[n.input[1]]) for n in model.graph.node if n.op_type == "QuantizeLinear"]
    weights = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in known]
    return activations, [known[n.input[0]] for n in weights], [known[n.input[1]] for n in weights]


def of_program(graph: torch.fx.GraphModule) -> tuple[list[float], list[Any], list[Any]]:
    """The same of what convert_pt2e gave."""
    held = dict(graph.named_buffers()) | dict(graph.named_parameters())
    tensor, channel = (
        [n for n in graph.graph.nodes if f"dequantize_{kind}" in str(n.target)]
        for kind in ("per_tensor", "per_channel")
    )
    weights, scales = ([held[str(n.args[k].target)].numpy() for n in channel] for k in (0, 1))
    return [float(n.args[1]) for n in tensor], weights, scales


@pytest.mark.parametrize("qat", [False, True])
def test_a_program_of_pt2e_is_taken_as_it_is(tmp_path: Path, qat: bool) -> None:
    saved(tmp_path / "net.pt2", qat=qat)
    job = read_job(write_job(tmp_path, "net", model={"program": "net.pt2"}, calibration=None))
    assert deep_problems(job) == ()
    built = build(job, tmp_path / "out", Silent(), diagnose_seconds=0)
    assert built.report.passed, built.report.problems
    expected, found = of_program(converted(qat=qat)), integers(built)
    assert found[0] == [float(np.float32(s)) for s in expected[0]]
    for theirs, ours in zip(expected[1] + expected[2], found[1] + found[2], strict=True):
        np.testing.assert_array_equal(theirs, ours)
    table = CalibrationTable.load(built.bundle.path / "calibration.json")
    assert table.algorithm == "given"
    assert set(table.amax) == {"conv:input", "head:input"}


def test_its_baseline_is_its_own_fp32_form(tmp_path: Path) -> None:
    from trtpipe.model.load import load_model

    saved(tmp_path / "net.pt2")
    job = read_job(write_job(tmp_path, "net", model={"program": "net.pt2"}, calibration=None))
    x = images(4, 3, 8, 8, seed=3)
    with torch.inference_mode():
        (found,), expected, quantized = load_model(job).module(x), small()(x), converted()(x)
    off = float((found - expected).abs().max())  # the weights alone are on the grid
    assert 0 < off < float((quantized - expected).abs().max())


def test_fake_quantizers_are_taken_as_they_are(tmp_path: Path) -> None:
    job = read_job(write_job(tmp_path, "net", model=FACTORY, calibration=None))
    assert deep_problems(job) == ()
    built = build(job, tmp_path / "out", Silent(), diagnose_seconds=0)
    assert built.report.passed, built.report.problems
    network: Any = with_fake_quantizers().requires_grad_(False)
    activations, weights, scales = integers(built)
    assert activations == [float(m.x.calculate_qparams()[0]) for m in (network.conv, network.head)]
    for module, ours, their in zip((network.conv, network.head), weights, scales, strict=True):
        scale = module.w.calculate_qparams()[0]
        np.testing.assert_array_equal(their, scale.numpy())
        exact = (module.layer.weight / scale.reshape(-1, *[1] * (ours.ndim - 1))).numpy()
        off = np.abs(ours - np.clip(np.round(exact), -128, 127))
        assert off.max() <= 1
        assert np.all(np.abs(np.abs(exact[off > 0]) % 1 - 0.5) < 1e-4)  # ties: amax / 127.5 makes one a channel
    assert int(min(w.min() for w in weights)) == -128  # their levels, not those that trtpipe would give


def graph() -> torch.nn.Module:
    """What convert_pt2e gives, which refuses eval()."""
    return converted()


def test_a_factory_returns_what_pt2e_gave(tmp_path: Path) -> None:
    model = {"factory": f"{__name__}:graph", "quantized": True}
    built = build(read_job(write_job(tmp_path, "net", model=model, calibration=None)), tmp_path / "out", Silent())
    assert built.report.passed, built.report.problems
    assert integers(built)[0] == [float(np.float32(s)) for s in of_program(converted())[0]]


def test_calibrated_anew_when_asked_for(tmp_path: Path) -> None:
    calibration = {"arrays": "x.npy", "batch_size": 8, "recalibrate": True}
    job = read_job(write_job(tmp_path, "net", model=FACTORY, calibration=calibration))
    built = build(job, tmp_path / "out", Silent(), diagnose_seconds=0)
    assert built.report.passed
    assert CalibrationTable.load(built.bundle.path / "calibration.json").samples


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {**FACTORY, "quantized": False}, "calibration": None},
            "calibration: must be given when precision.int8_mode is true (got none). Add calibration.images, or "
            "calibration.table.",
        ),
        (
            {"model": {"program": "net.pt2", "quantized": True}, "calibration": None},
            "model.quantized: must be given only with factory (got quantized with program). Remove quantized.",
        ),
        (
            {"model": FACTORY, "calibration": None, "precision": {"fp8_mode": True, "int8_mode": True}},
            "precision: must be int8_mode, without other number formats, for a model that is quantized to INT8 already "
            "(got int8_mode, fp8_mode). Set int8_mode, or calibration.recalibrate to start from its FP32 form.",
        ),
    ],
)
def test_the_job_says_so(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path / "net.pt2")
    with pytest.raises(JobErrors) as caught:
        read_job(write_job(tmp_path, "net", **sections))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"factory": "tests.support.quantized_nets:small", "quantized": True},
         "model.quantized: must be left out for a network without fake quantizers that are on (got true). "
         "Remove it."),
        ({"factory": OUTPUT, "args": {"enabled": False}, "quantized": True},
         "model.quantized: must be left out for a network without fake quantizers that are on (got true). Remove it."),
        ({"factory": OUTPUT, "quantized": False},
         "model.quantized: must be true for a network with fake quantizers (got false). Set it, and "
         "precision.int8_mode, or give the network without them."),
        ({**FACTORY, "args": {"seen": False}},
         "model.factory: conv.x has seen no data, so it has no scale. Run the model on samples, then save it."),
    ],
)  # fmt: skip
def test_models_that_have_no_scales(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    calibration = None if model.get("quantized") else {"arrays": "x.npy", "batch_size": 8}
    (problem,) = deep_problems(read_job(write_job(tmp_path, "net", model=model, calibration=calibration)))
    assert str(problem) == message


def test_one_at_an_output_alone_is_left_out_and_the_build_says_so(tmp_path: Path) -> None:
    model = {"factory": OUTPUT, "quantized": True}
    calibration = {"arrays": "x.npy", "batch_size": 8}
    built = build(read_job(write_job(tmp_path, "net", model=model, calibration=calibration)), tmp_path / "o", Silent())
    assert built.report.passed, built.report.problems
    note = "0.head (linear): its Q/DQ before an output of the model was left out, TensorRT fuses it with nothing"
    assert note in built.report.notes
    assert built.bundle.manifest.notes.count(note) == 1


def test_an_asymmetric_program_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "net.pt2", scheme=torch.per_tensor_affine)
    (problem,) = deep_problems(read_job(write_job(tmp_path, "net", model={"program": "net.pt2"}, calibration=None)))
    assert isinstance(problem, InputError)
    assert str(problem).startswith("model.program: dequantize_per_tensor must have the zero point 0 (got ")
    assert str(problem).endswith(
        "TensorRT takes symmetric INT8, one scale a tensor or one an output channel of a weight: quantize it so, or "
        "set calibration.recalibrate: true, which starts from its FP32 form."
    )


@pytest.mark.parametrize("model", [{"program": "net.pt2"}, {**FACTORY, "args": {"scheme": "affine"}}])
def test_any_quantization_is_recalibrated(model: dict[str, Any], tmp_path: Path) -> None:
    from trtpipe.model.load import load_model

    saved(tmp_path / "net.pt2", scheme=torch.per_tensor_affine)
    calibration = {"arrays": "x.npy", "batch_size": 8, "recalibrate": True}
    job = read_job(write_job(tmp_path, "net", model=model, calibration=calibration))
    assert deep_problems(job) == ()
    x = images(4, 3, 8, 8, seed=3)
    with torch.inference_mode():
        (found,), expected = load_model(job).module(x), small()(x)
    assert float((found - expected).abs().max()) < 0.03 * float(expected.abs().max())


def in_forward() -> torch.nn.Module:
    """A network that calls PyTorch's own function."""
    network: Any = small()
    plain = network.forward
    network.forward = lambda x: plain(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127))
    return network  # type: ignore[no-any-return]


def test_quantizing_in_forward_is_refused(tmp_path: Path) -> None:
    model = {"factory": f"{__name__}:in_forward", "quantized": True}
    (problem,) = deep_problems(read_job(write_job(tmp_path, "net", model=model, calibration=None)))
    assert str(problem) == (
        "capture: the model quantizes in its forward at test_quantized_torch.py:"
        f"{in_forward.__code__.co_firstlineno + 4} (network.forward = lambda x: plain(torch.fake_quantize_per_tensor_"
        "affine(x, 0.05, 0, -128, 127))), and a network's own scales are taken from fake quantizers that are modules. "
        "Make them modules (FakeQuantize of torchao, TensorQuantizer of ModelOpt), or quantize by PT2E (convert_pt2e) "
        "and give the exported file as model.program."
    )


def test_disabled_fake_quantizers_are_none() -> None:
    from trtpipe.model.quantizers import take_quantizers_off

    one = fake()
    one.disable_fake_quant()  # type: ignore[operator]
    network = take_quantizers_off(torch.nn.Sequential(one, torch.nn.Linear(3, 3)), "model.factory")
    assert isinstance(network[0], torch.nn.Identity)  # type: ignore[index]


class Twice(torch.nn.Module):
    """One fake quantizer under two names in one parent, and a block of both under two."""

    def __init__(self) -> None:
        super().__init__()
        self.one = fake()
        self.other = self.one
        self.block = torch.nn.Sequential(torch.nn.Linear(3, 3), self.one)
        self.same = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.other(x)) + self.block(self.one(x))  # type: ignore[no-any-return]


def test_a_fake_quantizer_of_several_names_is_taken_off_under_each() -> None:
    from trtpipe.model.quantizers import take_quantizers_off

    network = take_quantizers_off(Twice().eval(), "model.factory")
    assert network.one is network.other is network.block[1] is network.same[1]  # type: ignore[index]
    assert not [n for n, m in network.named_modules(remove_duplicate=False) if "FakeQuantize" in type(m).__name__]


class TensorQuantizer(torch.nn.Module):
    """NVIDIA ModelOpt 0.47's, by the names of its attributes (it was held against the real one by hand)."""

    def __init__(self, amax: Any, axis: int | None = None, bits: Any = 8, **more: Any) -> None:
        super().__init__()
        self.amax, self.axis, self.num_bits, self._disabled, self.unsigned, self.block_sizes = (
            None if amax is None else torch.tensor(amax), axis, bits, False, False, None,
        )  # fmt: skip
        for name, value in more.items():
            setattr(self, name, value)


#: Attributes, what is said of them, and whether recalibration takes them.
REFUSED: dict[str, tuple[dict[str, Any], str, bool]] = {
    "fp8": ({"amax": 1.0, "bits": (4, 3)}, "num_bits (4, 3)", True),
    "int4": ({"amax": 1.0, "bits": 4, "block_sizes": {-1: 128}}, "num_bits 4, blocks", True),
    "unsigned": ({"amax": 1.0, "unsigned": True}, "unsigned", True),
    "dynamic": ({"amax": None}, "dynamic", True),
    "off": ({"amax": 1.0, "_disabled": True, "pre_quant_scale": 2.0}, "disabled with pre_quant_scale", False),
    "rotated": ({"amax": 1.0, "rotate_is_enabled": True}, "a rotation", False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modelopts_quantizers_that_tensorrt_has_not(name: str) -> None:
    from trtpipe.model.quantizers import take_quantizers_off

    attributes, got, recalibrated = REFUSED[name]

    def taken_off(recalibrate: bool) -> torch.nn.Module:
        network = torch.nn.Sequential(TensorQuantizer(**attributes))
        return take_quantizers_off(network, "model.factory", recalibrate=recalibrate)

    with pytest.raises(InputError) as caught:  # one that is not used is of no matter
        taken_off(False)(torch.ones(2))
    step = "TensorRT takes symmetric " if recalibrated else "Give the model in FP32, which trtpipe then quantizes"
    assert str(caught.value).startswith(
        f"model.factory: 0 must quantize to symmetric INT8 with a fixed amax (got {got}). {step}"
    )
    assert ("calibration.recalibrate" in str(caught.value)) == recalibrated
    if recalibrated:
        taken_off(True)(torch.ones(2))
        return
    with pytest.raises(InputError, match="with a fixed amax"):
        taken_off(True)(torch.ones(2))


def test_modelopts_quantizers() -> None:
    from trtpipe.model.quantizers import Marked, take_quantizers_off

    channels = TensorQuantizer([[1.27], [2.54]], axis=0)
    smooth = TensorQuantizer(1.27, pre_quant_scale=torch.tensor([2.0, 0.5]))
    off = TensorQuantizer(1.27, _disabled=True)
    taken: Any = take_quantizers_off(torch.nn.Sequential(channels, smooth, off), "model.factory")
    assert isinstance(taken[0], Marked)
    assert (taken[0].scales, taken[0].axis) == (pytest.approx([0.01, 0.02]), 0)
    assert (taken[1].scales, taken[1].axis) == (pytest.approx([0.01]), -1)
    assert taken[1](torch.ones(3, 2)).tolist() == [[2.0, 0.5]] * 3
    assert isinstance(taken[2], torch.nn.Identity)


@pytest.mark.parametrize("kind", ["tensor subclass", "converted"])
def test_weights_that_are_no_floats_are_refused(kind: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from trtpipe.model.quantizers import take_quantizers_off

    network = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    if kind == "converted":
        network = torch.nn.Sequential(torch.ao.nn.quantized.FloatFunctional())
    else:
        quantize_(network, Int8WeightOnlyConfig())
    with pytest.raises(InputError, match=r"^model\.factory: 0.* (must be in floating|must be a fake quantizer)"):
        take_quantizers_off(network, "model.factory")(torch.ones(2, 64))
