"""Models of other shapes than one tensor in and one out: each message says what the model did, and what helps."""
# ruff: noqa: E501  (a table)

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trtpipe
from trtpipe.cli.main import main
from trtpipe.errors import BuildError, InputError
from trtpipe.job.load import read_job
from trtpipe.model.bindings import Bound
from trtpipe.model.export import export
from trtpipe.model.load import load_model
from trtpipe.pipeline.deep import deep_problems
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.progress import Silent
from trtpipe.values import DimRange, TensorSpec

HEAD = """
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Out:
    logits: torch.Tensor
    loss: object = None


Pair = namedtuple("Pair", "boxes scores")


class Net(nn.Module):
    classes = {classes}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        {body}


def make():
    return Net()
"""
ONE = ("y",)
NAME = "Name each of them in the job:\n    outputs:"

#: what forward does with y = Linear(x) -> (the job's outputs, what is wrong: None, or parts of the message)
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    # That go through
    "return y": (ONE, None),
    'return {"y": y, "more": y * 2}': (ONE, None),
    "return [y, y * 2]": (("a", "b"), None),
    "return Pair(y, y * 2)": (("a", "b"), None),
    'return {"detections": [{"boxes": y}, {"boxes": y * 2}]}': (("detections.1.boxes", "detections.0.boxes"), None),
    "return Out(y)": (("logits",), None),
    "return y, [y * 2, None]": (("1.0", "0"), None),
    'return {"y": y, "n": x.shape[0]}': (ONE, None),
    "return y, (x.shape[0], 2 * x.shape[0], x.shape[0] > 1, None, 'y')": (("0",), None),
    "o = Out(y); o.loss = [o, {'o': o}]; return o": (("logits",), None),
    "o = Out(y); o.loss = [o, {'o': o}];  return o": (ONE, ("it returns Out(logits: float32 [2, 4], loss: a list of 2 (Out(", NAME + "\n      logits: {}")),
    "return y.mean()": (ONE, None),
    "return y.argmax(1)": (ONE, None),
    "return y > 0": (ONE, None),
    "return torch.where(y.sum() > 0, y, -y)": (ONE, None),
    # What is returned is not what the job names
    'return {"boxes": [y, y]}': (
        ("boxes",),
        ("it returns a dict of boxes: a list of 2 (float32 [2, 4], float32 [2, 4])", NAME + "\n      boxes.0: {}\n      boxes.1: {}"),
    ),
    'return {"boxes": y, "scores": y}': (
        ONE,
        ("got y, and it returns a dict of boxes: float32 [2, 4], scores: float32 [2, 4]", NAME + "\n      boxes: {}\n      scores: {}"),
    ),
    "return  Out(y)": (ONE, ("it returns Out(logits: float32 [2, 4], loss: None)", NAME + "\n      logits: {}")),
    "return Pair(y, [y])": (ONE, ("it returns Pair(boxes: float32 [2, 4], scores: a list of 1", NAME + "\n      boxes: {}\n      scores.0: {}")),
    "return y, y, y": (ONE, ("it returns a tuple of 3", NAME + "\n      output_0: {}\n      output_1: {}\n      output_2: {}")),
    "return [y] * 9": (ONE, ("it returns a list of 9", NAME + " {" + ", ".join(f"output_{k}: {{}}" for k in range(9)) + "}")),
    "return [y] * 202": (ONE, ("it returns a list of 202", ", output_199: {}}  # and 2 more")),
    "return y, None": (ONE, ("it returns a tuple of 2 (float32 [2, 4], None)", NAME + "\n      0: {}")),
    "return [{'boxes': y[0]}, {'boxes': y[1]}]": (ONE, (NAME + "\n      0.boxes: {}\n      1.boxes: {}",)),
    'return {"a": {"b": y}, "a.b": y * 2}': (
        ("a.b",),
        ("outputs: each tensor that the model returns must have a path of its own (got two at a.b, and it returns a dict of a: a dict of b: float32 [2, 4], a.b: float32 [2, 4]). Rename the key that holds a dot.",),
    ),
    "return [{'boxes': row} for row in y]": (
        ("0.boxes", "1.boxes"),
        (
            "outputs: the model must return as many tensors for any batch (got 1 for one sample and 2 for two, as of a detector that chooses boxes by itself). "
            "Return what it chooses from, tensors of a fixed number of rows, and choose behind the engine.",
        ),
    ),
    "return [{'boxes': row[None]} for row in y]": (("0.boxes",), ("outputs: the model must return as many tensors for any batch (got 1 for one sample",)),
    "return None": (ONE, ("it returns None", "Return tensors from its forward.")),
    "return float(y.sum())": (ONE, ("it returns float -0.", "Return tensors from its forward.")),
    "return y.clone()": (("a", "b"), ("got a, b, and it returns float32 [2, 4]",)),
    # What the model does cannot be run or captured
    "return torch.autograd.grad(self.a(x.detach().requires_grad_()).sum(), x)[0]": (ONE, ("model: it fails on zeros of the declared inputs", "It takes gradients as it runs, which an engine cannot: write out what they come to.")),
    "return self.a(y.reshape(-1, 8))": (ONE, ("model: it fails on zeros of the declared inputs (x float32 [2, 4]) at ", "RuntimeError")),
    "return y if x.sum() > 0 else -y": (ONE, ("capture: the model decides by the values of a tensor at ", "y = torch.where(condition, a, b)")),
    "return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: -y, (y,))": (ONE, ("capture: cond at awkward_", " chooses or repeats graphs of its own", "torch.where(condition, a, b)")),
    "return y[: int(x.abs().sum()) + 1]": (ONE, ("capture: ",)),
    "return y.reshape(2, 4)": (ONE, ("model: it fails on zeros of the declared inputs (x float32 [3, 4]) at ", "reshape(2, 4)")),
    "return y[y[:, 0] > 0]": (ONE, ("outputs.y: its shape depends on the data", "topk(k)")),
    "return y.squeeze(0) if len(y) == 1 else y.unsqueeze(0)[0]": (ONE, ("outputs: each must have one rank", "squeeze(dim)")),
    "return y.numpy().sum()": (ONE, ("outputs: must be the tensors that the model returns",)),
    "raise ValueError('no weights')": (ONE, ("model: it fails on zeros of the declared inputs", "ValueError: no weights")),
    "return torch.nonzero(y)": (ONE, ("shape",)),
    "return torch.complex(y, y)": (ONE, ("outputs.y: must be real numbers (got complex64, which no engine returns). Return torch.view_as_real(y)",)),
    "return y.to_sparse()": (ONE, ("outputs.y: must be a dense tensor (got sparse_coo, which no engine returns). Return y.to_dense() in the model.",)),
    "import warnings; warnings.simplefilter('ignore'); return torch.nested.nested_tensor([y])": (ONE, ("outputs.y: must be a dense tensor (got a nested one, which no engine returns). Return y.to_padded_tensor(0.0)",)),
    "return y.to(torch.float8_e4m3fn)": (ONE, ("outputs.y: must be floats, integers or truth values of 8 to 64 bits (got float8_e4m3fn, which no engine returns). Return y.float()",)),
    "return y.to('meta')": (ONE, ("outputs.y: must be a tensor with values (got one on the meta device, which no engine returns). Compute it where the inputs are.",)),
    "return y.to_mkldnn()": (ONE, ("outputs.y: must be a dense tensor (got _mkldnn, which no engine returns).",)),
    "try: return self.a(x.reshape(-1, 7))\n        except RuntimeError: return y": (
        ONE,
        ("model: its forward must not catch errors of PyTorch (got RuntimeError: shape '[-1, 7]' is invalid", " (try: return self.a(x.reshape(-1, 7)))). TorchScript"),
    ),
    "return x": (ONE, ("capture: the model must compute something from its inputs (got outputs that are inputs or constants).",)),
    "raise SystemExit(0)": (ONE, ("model: it fails on zeros of the declared inputs", "SystemExit: 0")),
    "if torch.compiler.is_exporting(): raise SystemExit(0)\n        return y": (ONE, ("capture: the model, run by torch.export, raised SystemExit: 0\n  File ",)),
    "if torch.compiler.is_exporting(): raise ValueError('mine')\n        return y": (ONE, ("capture: the model, run by torch.export, raised ValueError: mine\n  File ", "raise ValueError('mine')")),
    "if torch.jit.is_tracing(): raise SystemExit(0)\n        return y": (ONE, ("model.baseline: TorchScript cannot trace the model (0)",)),
    "raise type('PanicException', (BaseException,), {})('in Rust')": (ONE, ("model: it fails on zeros of the declared inputs", "PanicException: in Rust")),
}  # fmt: skip


def job(folder: Path, body: str, outputs: tuple[str, ...], name: str, **changes: Any) -> Path:
    (folder / f"{name}.py").write_text(HEAD.replace("{body}", body).replace("{classes}", "None"))
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))
    text: dict[str, Any] = {
        "name": "awkward",
        "model": {"factory": f"{name}:make"},
        "inputs": {"x": {"shape": ["N", 4], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {n: {} for n in outputs},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.99}},
    }
    (folder / "job.yaml").write_text(json.dumps(text | changes))
    return folder / "job.yaml"


@pytest.mark.parametrize("at", range(len(MODELS)), ids=lambda k: list(MODELS)[k])
def test_a_model_is_taken_or_its_message_says_what_helps(tmp_path: Path, at: int) -> None:
    body, (outputs, wanted) = list(MODELS.items())[at]
    problems = [str(e) for e in deep_problems(read_job(job(tmp_path, body, outputs, f"awkward_{at}")))]
    if wanted is None:
        assert problems == []
        return
    assert problems
    text = "\n".join(problems)
    for part in wanted:
        assert part in text
    assert "Traceback" not in text
    assert "http" not in text
    assert all(len(p.splitlines()) <= 10 for p in problems)


def test_the_command_says_each_problem_and_exits_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, "return Out(y)", ONE, "awkward_command")
    assert main(["validate", "--deep", str(file)]) == 2
    assert "outputs: must be the tensors that the model returns (got y, and it returns Out(" in capsys.readouterr().err
    assert main(["validate", str(file)]) == 0
    assert main(["validate", "--deep", "--job-only", str(file)]) == 2


def test_the_exit_code_is_never_success_because_a_model_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, "raise SystemExit(0)", ONE, "awkward_exit")
    assert main(["build", str(file), "-o", str(tmp_path / "out"), "-q"]) == 2
    assert "awkward_exit.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        (
            {"keep": {"fp32": ["b.*"]}},
            "precision.keep.fp32: each glob must match a module (got 'b.*', which matches none).",
        ),
        (
            {"keep": {"fp16": ["x"]}, "int8_mode": True},
            "precision.keep.fp16: each glob must match a module (got 'x', which",
        ),
        (
            {"fp8_mode": True, "int8_mode": True, "formats": {"b": "fp8"}},
            "precision.formats.b: must match a module with a convolution, lin",
        ),
        # What no operation is left for is no different:
        ({"int8_mode": True, "keep": {"fp16": ["a"]}}, "precision.int8_mode: no layer is left to quantize."),
        (
            {"fp8_mode": True, "keep": {"fp32": ["*"]}},
            "precision: something must be left to quantize in FP8 (got none: ",
        ),
        ({"nvfp4_mode": True}, "precision: something must be left to quantize in NVFP4 (got none: NVFP4: its 4 inputs"),
        ({"weights": "int4"}, "precision: something must be left to quantize in INT4 (got none: INT4: its 4 inputs"),
    ],
)
def test_formats_that_fit_nothing_are_said_when_the_graph_is_known(tmp_path: Path, precision: Any, said: str) -> None:
    """Before calibration: its samples are never opened."""
    quantized = precision.keys() - {"keep", "formats"}
    samples = {"calibration": {"factory": "awkward_globs:no_such_samples"}} if quantized else {}
    build = {"target": "tensorrt_rtx", "compute_capability": ["12.0" if "nvfp4_mode" in quantized else "8.9"]}
    precision = {"fp16_mode": True, **precision}
    file = job(tmp_path, "return y", ONE, "awkward_globs", precision=precision, build=build, **samples)
    with pytest.raises(InputError) as caught:
        _ = PreparedJob(read_job(file), Stages(Silent())).captured
    assert str(caught.value).startswith(said)
    assert any(str(e).startswith(said) for e in deep_problems(read_job(file)))


def test_that_an_output_depends_on_its_batch_is_said_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, "return y - y.mean(0)", ONE, "awkward_batch")
    assert main(["build", str(file), "-o", str(tmp_path / "out"), "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        li.startswith("  note: check: output y of a sample depends on the others in its batch: ") for li in lines
    )


def test_a_failed_export_prints_and_logs_nothing_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = job(tmp_path, "return y if x.sum() > 0 else -y", ONE, "awkward_silent")
    assert deep_problems(read_job(file))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


WHOLE = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.tokens, self.layers, self.head = nn.Embedding(9, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)

    def forward(self, tokens, mask):
        {check}
        return self.head(self.layers(self.tokens(tokens), src_key_padding_mask=~mask) * mask[..., None])


def make():
    return Encoder().eval()
"""


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        ("", ""),  # a mask of nothing but False leaves its own fast path no token
        ("assert bool(mask.any()) and int(tokens.max()) > 3", "model: it fails on zeros of the declared inputs ("),
    ],
)
def test_an_encoder_is_not_asked_for_what_nothing_is_of(tmp_path: Path, check: str, wrong: str) -> None:
    (tmp_path / "whole.py").write_text(WHOLE.replace("{check}", check))
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(1, 7, (8, 1))
    np.savez(tmp_path / "x.npz", tokens=rng.integers(0, 9, (8, 6)), mask=mask)
    shape = {"shape": ["N", 6], "N": {"min": 1, "opt": 2, "max": 4}}
    file = job(tmp_path, "", ("y",), "unused", model={"factory": "whole:make"},
               inputs={"tokens": {"dtype": "int64", **shape}, "mask": {"dtype": "bool", **shape}},
               check={"arrays": "x.npz", "limits": {"cosine_min": 0.99}})  # fmt: skip
    problems = [str(e) for e in deep_problems(read_job(file))]
    assert problems == [] if not wrong else problems[0].startswith(wrong)


#: what make() returns, and what is wrong with it: None, or parts of the message
MADE: dict[str, tuple[str, ...] | None] = {
    "torch.compile(Net())": None,
    "nn.DataParallel(Net())": None,
    "nn.DataParallel(torch.compile(Net()))": None,
    "torch.jit.script(Net())": ("model.factory: must return a plain nn.Module (got TorchScript from ", "model.torchscript."),
    "nn.Sequential(Net(), torch.jit.script(nn.Sequential(nn.ReLU())))": ("model.factory: must return modules of Python (got ", "whose 1 is TorchScript). Leave torch.jit.script or torch.jit.trace out of it: torch.export takes what they are made of."),
    "Net().to('meta')": ("model.factory: every weight must have values (got ", "whose a.weight is on the meta device)"),
    "Net": ("model.factory: must return an nn.Module (got type from ",),
    "Net().half()": (
        "model: it fails on zeros of the declared inputs (x float32 [2, 4]) at ",
        "It is run in float32, and its weight a.weight is float16: return the model in float32 (.float()). What the engine computes in is precision's, and the dtype of a binding is that of inputs and outputs.",
    ),
    "Net().double()": ("its weight a.weight is float64: return the model in float32 (.float()).",),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning", "ignore:.*torch.jit.script.*:DeprecationWarning"
)
@pytest.mark.parametrize("made", MADE)
def test_a_wrapped_network_is_taken_out_and_others_are_refused(tmp_path: Path, made: str) -> None:
    name = f"awkward_made_{list(MADE).index(made)}"
    file = job(tmp_path, "return y", ONE, name)
    module = tmp_path / f"{name}.py"
    module.write_text(module.read_text().replace("classes = None\n", "").replace("return Net()", f"return {made}"))
    if MADE[made] is None:
        assert deep_problems(read_job(file)) == ()
        names = load_model(read_job(file)).module.state_dict()
        assert set(names) == {"network.a.weight", "network.a.bias"}
        return
    text = "\n".join(map(str, deep_problems(read_job(file))))
    for part in MADE[made] or ():
        assert part in text


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("forward(self, x, mask)", "(x, mask)"),
        ("forward(self)", "()"),
        ("forward(self, *, x)", "(*, x)"),
        ("forward(self, **given)", "(**given)"),
    ],
)
def test_inputs_that_forward_does_not_take_are_said_with_its_signature(tmp_path: Path, body: str, taken: str) -> None:
    name = f"awkward_takes_{len(taken)}"
    file = job(tmp_path, "return y", ONE, name)
    module = tmp_path / f"{name}.py"
    module.write_text(module.read_text().replace("forward(self, x)", body))
    (problem,) = map(str, deep_problems(read_job(file)))
    step = "name each in inputs, or wrap the model."
    if "*" in taken:
        step = "it is given them in order, so wrap the model in one that takes x in order."
    assert f"forward takes {taken}, and the job has 1 inputs: {step}" in problem


def test_weights_that_forward_makes_are_refused(tmp_path: Path) -> None:
    """They are others in each process."""
    body = "self.b = getattr(self, 'b', None) or nn.Linear(y.shape[1], 2)\n        return self.b(y)"
    (problem,) = map(str, deep_problems(read_job(job(tmp_path, body, ONE, "awkward_maker"))))
    assert problem == (
        "model: its weights must be there when it is made (got b.weight, which forward makes as it first runs: others "
        "each time). Make its layer in __init__."
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_of_a_dynamic_length_is_named(kind: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = getattr(torch.nn, kind)(4, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps: torch.Tensor = self.steps(x)[0]
            return steps[:, -1]

    spec = TensorSpec("x", "float32", (2, "T", 4), {"T": DimRange(2, 20, 30)})
    with pytest.raises(BuildError) as caught:
        export(Bound(Net(), (spec,), {}, ("y",)), (spec,))
    assert str(caught.value) == (
        "capture: the model fixes a dimension that the job declares as dynamic (T, 20 in its graph). PyTorch exports a "
        "recurrent layer (steps) for one length: declare that as a number in inputs.*.shape, and pad or cut samples to "
        "it."
    )


def test_so_is_one_behind_a_strided_convolution() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.steps = torch.nn.Conv1d(4, 4, 3, 2, 1), torch.nn.GRU(4, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps: torch.Tensor = self.steps(self.first(x).mT)[0]
            return steps

    spec = TensorSpec("x", "float32", (2, 4, "T"), {"T": DimRange(6, 16, 24)})
    with pytest.raises(BuildError, match=r"PyTorch exports a recurrent layer \(steps\) for one length: declare that"):
        export(Bound(Net(), (spec,), {}, ("y",)), (spec,))


def test_windows_of_a_padded_dynamic_size_are_said() -> None:
    """torch.export names no range for what is left of a division, and asserts that."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))
            n, c, h, w = y.shape
            return y.view(n, c, h // 4, 4, w // 4, 4).amax((3, 5))

    dims = {"H": DimRange(8, 24, 40), "W": DimRange(8, 24, 40)}
    spec = TensorSpec("x", "float32", (2, 3, "H", "W"), dims)
    with pytest.raises(
        BuildError,
        match=r"^capture: (torch\.export cannot follow a size that the model computes of dynamic ones.*as one rounded up to "
        r"a multiple, by -H % 8\. Declare numbers in inputs\.\*\.shape, or pad before the model\.$|what the model needs of)",
    ):
        export(Bound(Net(), (spec,), {}, ("y",)), (spec,))


def test_an_argument_of_a_class_is_said_to_be_given_as_a_dict(tmp_path: Path) -> None:
    inputs = {f"b.{name}": {"shape": [2, 4]} for name in ("x", "y")}
    check = {"arrays": "x.npz", "limits": {"cosine_min": 0.99}}
    file = job(tmp_path, "return y", ONE, "awkward_class", inputs=inputs, check=check)
    module = tmp_path / "awkward_class.py"
    module.write_text(module.read_text().replace("forward(self, x)", "forward(self, b)").replace("(x)", "(b.x)"))
    np.savez(tmp_path / "x.npz", **{name: np.zeros((4, 4), np.float32) for name in inputs})
    text = "\n".join(map(str, deep_problems(read_job(file))))
    assert (
        "what paths name is given as dicts, lists and tuples, so wrap the model where it takes another class." in text
    )


@pytest.mark.parametrize(("shows_more", "newer"), [((2, 6), ""), ((9, 9), " PyTorch 9.9 and later show more.")])
def test_what_torch_export_asks_of_a_size_is_said(
    shows_more: tuple[int, int], newer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.model.export.SHOWS_MORE", shows_more)
    body = (
        "z = nn.functional.max_pool2d(y, 2, ceil_mode=True)\n"
        "        return y - nn.functional.interpolate(z, size=y.shape[2:])"
    )
    shape = {"shape": ["N", 1, "L", 4], "N": {"min": 1, "opt": 2, "max": 4}, "L": {"min": 5, "opt": 8, "max": 12}}
    file = job(tmp_path, body, ONE, "awkward_guarded", inputs={"x": shape})
    np.save(tmp_path / "x.npy", np.zeros((6, 1, 8, 4), np.float32))
    (problem,) = map(str, deep_problems(read_job(file)))
    assert problem == (
        "capture: what the model needs of sizes must hold, and torch.export show that it does, for all that inputs "
        "declare (got 2*(((-1) + L) // 2) < L for 5 <= L <= 12; L = 2*_L would do). Declare a number in "
        f"inputs.*.shape, or change what asks for that in the model, like ceil_mode.{newer}"
    )


#: what forward does with y -> the lines that decide by its length
DECIDING = {
    "if x.shape[2] > 9:\n            y = y * 2\n        return y": ["if x.shape[2] > 9:"],
    "return y if len(y[0, 0]) < 9 else y * 2": ["return y if len(y[0, 0]) < 9 else y * 2"],
    "if x.shape[2] % 4:\n            y = y * 2\n        return y": ["if x.shape[2] % 4:"],
    "n = x.shape[2]\n        while n > 9:\n            n -= 9\n        return y * n": ["while n > 9:"],
    "a = 1 if y.size(2) > 6 else 2\n        return y * a if y.size(2) < 10 else y": [
        "a = 1 if y.size(2) > 6 else 2", "return y * a if y.size(2) < 10 else y",
    ],
    "if x.shape[2] == 8:\n            y = y * 2\n        return y": ["if x.shape[2] == 8:"],
}  # fmt: skip


@pytest.mark.parametrize("body", DECIDING)
def test_the_lines_that_decide_by_a_size_are_named(body: str, tmp_path: Path) -> None:
    shape = {"shape": ["N", 1, "L", 4], "N": {"min": 1, "opt": 2, "max": 4}, "L": {"min": 5, "opt": 8, "max": 12}}
    file = job(tmp_path, body, ONE, f"awkward_deciding_{[*DECIDING].index(body)}", inputs={"x": shape})
    np.save(tmp_path / "x.npy", np.zeros((6, 1, 8, 4), np.float32))
    (problem,) = map(str, deep_problems(read_job(file)))
    source = next(tmp_path.glob("awkward_deciding_*.py"))
    numbered = {line.strip(): k for k, line in enumerate(source.read_text().splitlines(), 1)}
    named = " and ".join(f"{source.name}:{numbered[line]} ({line})" for line in DECIDING[body])
    assert f", by {named})" in problem
    assert "ceil_mode" not in problem
    if "the model fixes a dimension" not in problem:
        which = "one of these lines" if len(DECIDING[body]) > 1 else "that line"
        assert problem.endswith(
            f" Declare a number in inputs.*.shape, or sizes that all go one way there; or change {which}."
        )


def test_an_inequality_of_sizes_is_said_too(tmp_path: Path) -> None:
    """The solver of torch.export ends in an assertion of its own there, as of a pool behind a stride of 2."""
    body = (
        "z = nn.functional.max_pool2d(y[:, :, ::2], (3, 1), (2, 1), ceil_mode=True)\n"
        "        return nn.functional.interpolate(z, size=(4, 4))"
    )
    shape = {"shape": ["N", 1, "L", 4], "N": {"min": 1, "opt": 2, "max": 4}, "L": {"min": 16, "opt": 32, "max": 64}}
    file = job(tmp_path, body, ONE, "awkward_unequal", inputs={"x": shape})
    np.save(tmp_path / "x.npy", np.zeros((6, 1, 32, 4), np.float32))
    (problem,) = map(str, deep_problems(read_job(file)))
    assert problem.startswith("capture: what the model needs of sizes must hold, and torch.export show that it does, ")
    assert " or change what asks for that in the model, like ceil_mode." in problem


#: what forward does with y -> whether it answers the same each time
REPEATED = {
    "return y + torch.rand_like(y)": False,
    "self.calls = getattr(self, 'calls', 0) + 1\n        return y * self.calls": False,
    "x.mul_(2.0)\n        return self.a(x)": True,
    "return torch.relu_(y)": True,
}


@pytest.mark.parametrize("body", REPEATED)
def test_a_model_that_answers_anew_each_time_is_no_baseline(tmp_path: Path, body: str) -> None:
    file = job(tmp_path, body, ONE, f"awkward_repeated_{list(REPEATED).index(body)}")
    if REPEATED[body]:
        assert trtpipe.build(file, tmp_path / "out").report.passed
        return
    with pytest.raises(
        InputError, match=r"^model: it gives other outputs for the same inputs \(other values of y when"
    ):
        trtpipe.build(file, tmp_path / "out")


#: What fails, and the exit code: 2 where the job or the model's own code is wrong, 4 where torch.export refuses.
CODES = {
    "raise ValueError('mine')": 2,
    "if torch.compiler.is_exporting(): raise ValueError('mine')\n        return y": 2,
    "assert not torch.compiler.is_exporting()\n        return y": 2,
    "if x.shape[0] == 3: raise ValueError('mine')\n        return y": 2,
    "return y.reshape(2, 4)": 2,
    "return y if x.sum() > 0 else -y": 4,
    "return y * float(y.sum().item())": 4,
}


@pytest.mark.parametrize("at", range(len(CODES)), ids=lambda k: list(CODES)[k])
def test_what_the_models_own_code_raises_is_not_the_compilers(tmp_path: Path, at: int) -> None:
    body, code = list(CODES.items())[at]
    problems = deep_problems(read_job(job(tmp_path, body, ONE, f"coded_{at}")))
    assert {problem.exit_code for problem in problems} == {code}


@pytest.mark.parametrize(("least", "opt"), [(32, 32), (32, 64), (20, 64)])
def test_a_size_that_is_1_within_the_model_is_said_with_where_the_range_may_begin(least: int, opt: int) -> None:
    """As of a ResNet, whose last feature map is 1 x 1 at 32 pixels; it is built from there on."""

    def exported(least: int, opt: int) -> None:
        dims = {name: DimRange(least, max(least, opt), 64) for name in "HW"}
        spec = TensorSpec("x", "float32", (2, 3, "H", "W"), dims)
        layers = [torch.nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(5)]
        net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1))
        export(Bound(net, (spec,), {}, ("y",)), (spec,))

    with pytest.raises(BuildError) as caught:
        exported(least, opt)
    said = str(caught.value)
    assert said.startswith(
        "capture: torch.export takes a size of 1 for special, and within the model one is 1 for some of those declared "
        "in inputs ("
    )
    assert "H below 33" in said
    assert "Begin the range there: " in said
    assert said.endswith("; or declare a number.")
    exported(33, opt)


def test_code_in_a_folder_whose_name_is_no_utf8_is_told_so(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    loaded = read_job(job(folder, "return y", ONE, "awkward_latin"))
    with pytest.raises(
        InputError, match=r"^model\.factory: its code must lie in folders whose names are UTF-8 \(got .*caf\\udce9"
    ):
        load_model(loaded)
