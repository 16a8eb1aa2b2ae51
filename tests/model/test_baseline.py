"""The baseline: traced, scripted or given, equal to the eager model on the check data or refused."""
# ruff: noqa: E501  (whole messages)

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.samples import Batch
from trtpipe.errors import BuildError, InputError
from trtpipe.model import baseline
from trtpipe.model.baseline import _named, record_baseline, script
from trtpipe.model.bindings import bind
from trtpipe.progress import Silent
from trtpipe.values import DimRange, LoadedModel, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
X = nets.images(5, 3, 8, 8).numpy()
BATCHES = [
    Batch({"x": X[:3]}, np.array([0, 1, 2]), ("a", "b", "c")),
    Batch({"x": X[3:]}, np.array([3, 4]), ("d", "e")),
]


@pytest.mark.parametrize("kind", ["trace", "script"])
def test_answers_are_eagers(kind: str) -> None:
    loaded = nets.residual()
    found = record_baseline(loaded, BATCHES, 5, batch_size=3, kind=kind, progress=Silent())  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = loaded.module(torch.from_numpy(X))[0].numpy()
    assert np.allclose(found.outputs["logits"], expected, atol=1e-5)
    assert found.kind == kind
    assert found.ids == ("a", "b", "c", "d", "e")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 3, 4]


def convolutions(module: torch.jit.ScriptModule) -> list[list[object]]:
    """The last four arguments of every traced convolution: benchmark, deterministic, cudnn_enabled, allow_tf32."""
    graph = module.inlined_graph  # its nodes do not outlive it
    nodes = graph.findAllNodes("aten::_convolution")
    return [[value.toIValue() for value in list(node.inputs())[-4:]] for node in nodes]


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("file", [False, True])
def test_a_trace_computes_float32_on_a_gpu_as_the_model_does(file: bool, tmp_path: Path) -> None:
    """A trace obeys cuDNN's switches of the time when it was recorded: with PyTorch's defaults that is TF32, found on
    an H200. Those of a file, too; in every method and submodule; and in what is saved of them."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.ReLU()), nn.ConvTranspose2d(4, 3, 2)
    )
    loaded = nets.loaded(network.eval(), ("N", 3, 9, 9), out_shape=("N", 3, 6, 6))
    x = torch.randn(2, 3, 9, 9)
    given = None
    if file:
        recorded = torch.jit.trace(network, x)
        assert convolutions(recorded) == [[False, False, True, True]] * 3
        given = str(tmp_path / "network.pt")
        recorded.save(given)
    module, _ = script(loaded, "trace", given)
    module.save(tmp_path / "saved.pt")
    for one in (module, torch.jit.load(tmp_path / "saved.pt")):
        assert convolutions(one) == [[False, True, True, False]] * 3
        with torch.inference_mode():
            got = one(x)
        assert torch.equal(got if file else got[0], network(x))


def test_a_torchscript_file(tmp_path: Path) -> None:
    loaded = nets.residual()
    path = tmp_path / "net.ts"
    torch.jit.script(loaded.module.network).save(str(path))
    found = record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent())
    assert found.kind == "torchscript"


def test_a_torchscript_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.ts"
    other = nets.settled(nets.Residual(), nets.images(16, 3, 8, 8, seed=9))
    nn.init.ones_(other.head.weight)
    torch.jit.script(other).save(str(path))
    with pytest.raises(
        InputError,
        match=r"^baseline: TorchScript \(torchscript\) computes something else than the eager .* on the check data "
        r"\(a largest difference of \S+, outputs up to \S+\)\. Check that both hold the same weights\.$",
    ):
        record_baseline(
            nets.residual(), BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent()
        )


class Decides(nn.Module):
    """Decides by values, by whether it is traced, or not at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, self.how = nn.Linear(192, 5), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x.flatten(1))
        if self.how == "traced":
            return -y if torch.jit.is_tracing() else y
        return y if x.shape[0] == 1 or y[0].sum() > y[1].sum() else -y


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "values",
            BuildError,
            r"^capture: the model decides by the values of a tensor at test_baseline\.py:.*torch\.where",
        ),
        (
            "traced",
            InputError,
            r"^baseline: TorchScript \(trace\) computes something .* Set model\.baseline to script\.$",
        ),
    ],
)
def test_a_script_is_advised_where_it_helps(how: str, kind: type[Exception], said: str) -> None:
    """No engine holds a decision by values, which a script has and a trace has not: that is said first."""
    torch.manual_seed(0)
    loaded = nets.loaded(Decides(how), out_shape=("N", 5))
    turned = [Batch({"x": X[:2][::step].copy()}, None, ("a", "b")) for step in (1, -1)]  # either way
    with pytest.raises(kind, match=re.compile(said, re.DOTALL)):
        record_baseline(loaded, turned, 4, batch_size=2, kind="trace", progress=Silent())


class Loops(nn.Module):
    """Goes through its batch row by row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, self.how = nn.Linear(192, 5), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1)
        if self.how == "index":
            return torch.stack([self.head(rows[i]) for i in range(x.shape[0])])
        return torch.stack([self.head(r) for r in (rows.unbind(0) if self.how == "unbind" else rows)])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["index", "unbind", "iterate"])
def test_a_loop_over_the_batch_is_said_as_that(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace holds for one batch alone, and so would a graph."""
    with pytest.raises(BuildError, match=r"^capture: the model fixes a dimension that the job declares as dynamic "):
        record_baseline(nets.loaded(Loops(how)), BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    monkeypatch.setattr(baseline, "export", lambda *_: None)
    with pytest.raises(InputError) as caught:
        record_baseline(nets.loaded(Loops(how)), BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    got = "it gives [[2, 5]] where the model gives [[3, 5]]" if how == "index" else "RuntimeError: Expected 2 elements"
    assert f"(got: {got}" in str(caught.value)
    assert str(caught.value).startswith(
        "baseline: TorchScript (trace) must hold for every size declared in inputs (got: "
    )
    assert str(caught.value).endswith(
        "). The model decides by a size, as a loop over its batch does: compute all of it at once, or set model.baseline "
        "to script."
    )


@pytest.mark.parametrize("classes", [1, 3, 20])
def test_a_torchscript_file_of_other_shapes_is_refused(tmp_path: Path, classes: int) -> None:
    """One class would be broadcast over the others."""
    loaded, path = nets.residual(), tmp_path / "net.ts"
    other = nets.Residual().eval()
    other.head = nn.Linear(other.head.in_features, classes)
    torch.jit.script(other).save(str(path))
    own = [[3, nets.Residual().head.out_features]]
    with pytest.raises(InputError) as caught:
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent())
    assert str(caught.value) == (
        f"baseline: outputs of torchscript must have the shapes that the eager model gives, {own} (got [[3, "
        f"{classes}]]). Check that both are the same model."
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [("program", "the same program, run again"), ("onnxruntime", "the network that it was converted to")],
)
def test_a_baseline_of_other_shapes_says_what_it_is_held_against(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "script", lambda loaded, *_: (nn.Sequential(loaded.module, nn.Flatten(0)), name))
    monkeypatch.setattr(baseline, "_run", lambda loaded, module, name, args: (module[0](*args)[0][:, :1],))
    with pytest.raises(InputError, match=rf"^baseline: outputs of {name} must have the shapes that {other} gives, "):
        record_baseline(nets.residual(), BATCHES, 5, batch_size=3, kind="trace", progress=Silent())


def test_no_sample_is_an_error() -> None:
    with pytest.raises(
        InputError, match=r"check: the data must hold one sample or more \(got none\)\. Check its path\."
    ):
        record_baseline(nets.residual(), [], 0, batch_size=3, kind="trace", progress=Silent())


def test_a_file_that_is_no_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "net.ts"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model\.torchscript: must be a TorchScript file"):
        record_baseline(
            nets.residual(), BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent()
        )


@pytest.mark.parametrize(("kind", "other"), [("trace", "script"), ("script", "trace")])
def test_what_torchscript_can_neither_trace_nor_script_is_told_of_programs(
    kind: Literal["trace", "script"], other: str
) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.mean((2, 3))
            return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: -y, (y,))  # type: ignore[no-any-return]

    with pytest.raises(InputError) as caught:
        script(nets.loaded(Branching(), out_shape=("N", 3)), kind, None)
    text = str(caught.value)
    assert text.startswith(f"model.baseline: TorchScript cannot {kind} the model (")
    assert f"). Nor can it {other} the model (" in text
    assert text.endswith(
        "). Change that line of the model, or give what torch.export.save wrote of it as model.program, which is its own "
        "baseline."
    )


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.mean((2, 3))
        x.zero_()
        return y


def test_a_model_that_writes_to_its_inputs_depends_on_no_other_sample() -> None:
    loaded = nets.loaded(Writes(), out_shape=("N", 3))
    baseline = record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    assert baseline.notes == ()
    assert all(sample.any() for sample in X)


class Scaled(nn.Module):
    def __init__(self, by: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.by, self.dtype = by, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.ones_like(x).mean((2, 3)) * self.by).to(self.dtype)


@pytest.mark.parametrize(
    ("network", "dtype", "message"),
    [
        (Scaled(7e4), "float16", "outputs.logits.dtype: must hold the model's outputs on the check data (got float16, "
         "and they reach 7e+04). Set float32."),
        (Scaled(3e9, torch.int64), "int32", "outputs.logits.dtype: must hold the model's outputs on the check data (got "
         "int32, and they reach 3e+09). Set int64."),
        (Scaled(-3e9, torch.int64), "int32", "outputs.logits.dtype: must hold the model's outputs on the check data (got "
         "int32, and they reach 3e+09). Set int64."),
        (Scaled(float("-inf")), "float32", "baseline: the model's outputs must be finite to be compared (got 15 of 15 "
         "values of output logits NaN or infinite). Leave out masking with -inf and log(0), or return the tensor before "
         "it."),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_compared_are_refused(network: nn.Module, dtype: str, message: str) -> None:
    loaded = nets.loaded(network, out_dtype=dtype, out_shape=("N", 3))
    with pytest.raises(InputError) as caught:
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["1.bias", "2.running_mean"])
def test_a_weight_or_buffer_that_is_not_finite_is_named(name: str, value: float) -> None:
    """But for -inf in a buffer, as masks have it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.BatchNorm1d(3)).eval()
    with torch.no_grad():
        network.state_dict()[name][0] = value
    loaded = nets.loaded(network, out_shape=("N", 3))
    named = f"The weight {name} holds NaN or infinity: take weights of another epoch."
    if name == "2.running_mean" and value < 0:
        named = "Leave out masking with -inf and log(0), or return the tensor before it."
    with pytest.raises(InputError, match=rf"NaN or infinite\)\. {re.escape(named)}$"):
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())


def test_an_output_that_depends_on_its_batch_is_noted() -> None:
    class Batched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.mean((2, 3))
            return y - y.mean(0, keepdim=True)

    loaded = nets.loaded(Batched(), out_shape=("N", 3))
    found = record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    off = float(np.abs(found.outputs["logits"][:3]).max())  # of one sample alone every output is 0
    assert found.notes == (
        f"check: output logits of a sample depends on the others in its batch: it differs by up to {off:.3g} between a "
        "batch of 3, as checked, and one of 1",
    )
    assert record_baseline(nets.residual(), BATCHES, 5, batch_size=3, kind="trace", progress=Silent()).notes == ()


#: What a row y [N, 3] of a batch may take of the others, and of where it is.
AMONG = {
    "the first": lambda y: y - y[:1],
    "the last": lambda y: y - 0.2 * y[-1:],
    "the one before": lambda y: y + 0.5 * y.roll(1, 0),
    "the one after": lambda y: torch.cat([y[1:], y[:1]]) + y,
    "all before": lambda y: y.cumsum(0),
    "the mirrored": lambda y: y + y.flip(0),
    "the mean": lambda y: y - y.mean(0, keepdim=True),
    "the spread": lambda y: y / (y.var(0, unbiased=False, keepdim=True) + 1e-3),
    "its pair": lambda y: y + y[(torch.arange(y.shape[0]) ^ 1).clamp(max=y.shape[0] - 1)],
    "its place": lambda y: y + torch.arange(y.shape[0])[:, None],
    "the largest": lambda y: y.amax(0, keepdim=True) + 0 * y,
    "none": lambda y: 2 * y,
}


@pytest.mark.parametrize("among", AMONG)
@pytest.mark.parametrize(("dims", "samples"), [
    (DimRange(1, 4, 8), 6), (DimRange(2, 4, 8), 4), (DimRange(2, 4, 8), 2), (DimRange(4, 4, 4), 4), (DimRange(4, 4, 4), 6),
    (DimRange(2, 2, 2), 1), (DimRange(4, 8, 8), 1), (DimRange(1, 4, 8), 1), (DimRange(1, 1, 1), 4),
])  # fmt: skip
def test_what_an_output_takes_of_its_batch_is_found_wherever_that_is(among: str, dims: DimRange, samples: int) -> None:
    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return AMONG[among](x.float())

    size: int | str = "N" if dims.min < dims.max else dims.max
    held = {"N": dims} if isinstance(size, str) else {}
    inputs = (TensorSpec("x", "float32", (size, 3), held),)
    module = bind(Head(), inputs, {}, ("y",))
    loaded = LoadedModel(module, inputs, (TensorSpec("y", "float32", (size, 3), held),), "w" * 64, "test")
    x = np.random.default_rng(0).normal(1.0, 1.0, (samples, 3)).astype(np.float32)
    batch = Batch({"x": x}, None, tuple(map(str, range(samples))))
    found = record_baseline(loaded, [batch], samples, batch_size=dims.opt, kind="trace", progress=Silent())
    assert found.mixed == (() if among == "none" or dims.max == 1 else ("y",))
    assert [n for n in found.notes if "depends on the others" in n] == list(found.notes)


@pytest.mark.parametrize(("count", "said"), [
    (1, "sample b[3]"), (2, "samples b[3], b[2]"), (3, "samples b[3], b[2], b[1]"), (5, "samples b[3], b[2], b[1] and 2 more"),
])  # fmt: skip
def test_samples_of_a_batch_are_no_range(count: int, said: str) -> None:
    """They are drawn: the first and the last of them are no ends of anything."""
    assert _named(tuple(f"b[{3 - k}]" for k in range(count))) == said


class Masked(nn.Module):
    """The mean of the steps that a mask has, of which each sample must have one; less its batch's, if `mixed`."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and not mask.any(1).all():
            raise ValueError("a sample has no step")
        y = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return y - y.mean(0, keepdim=True) if self.mixed else y


@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_that_is_filled_up_is_one_that_the_model_takes(mixed: bool) -> None:
    """Checked in the least batch, the model is run in a larger one: of masks an all-False row is none it may get."""
    dims = {"N": DimRange(2, 3, 8)}
    inputs = (TensorSpec("x", "float32", ("N", 4), dims), TensorSpec("mask", "bool", ("N", 4), dims))
    module = bind(Masked(mixed), inputs, {}, ("y",))
    loaded = LoadedModel(module, inputs, (TensorSpec("y", "float32", ("N", 1), dims),), "w" * 64, "test")
    arrays = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32), "mask": np.ones((2, 4), bool)}
    found = record_baseline(loaded, [Batch(arrays, None, ("a", "b"))], 2, batch_size=2, kind="trace", progress=Silent())
    assert found.mixed == (("y",) if mixed else ())
    assert any("between a batch of 2, as checked, and one of 2 copies of it" in note for note in found.notes) == mixed
