"""Weights from files, and their digest."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model

from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.load import read_jobs
from trtpipe.model.load import load_model
from trtpipe.model.weights import load_weights, weights_digest

MODULE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A function that makes a job whose model takes its weights from a file."""
    (tmp_path / "weighed.py").write_text(MODULE)

    def make(weights: str) -> Job:
        raw = {
            "name": "t",
            "model": {"factory": "weighed:Net", "weights": weights},
            "inputs": {"x": {"shape": [1, 4]}},
            "outputs": {"y": {}},
            "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.9}},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(raw))
        return read_jobs(tmp_path / "job.yaml", paths_exist=False)[0]

    yield make
    sys.modules.pop("weighed", None)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights(job: Any, tmp_path: Path, suffix: str) -> None:
    state = {"fc.weight": torch.ones(3, 4), "fc.bias": torch.tensor([0.0, 1.0, 2.0])}
    path = tmp_path / f"w{suffix}"
    save_file(state, str(path)) if suffix == ".safetensors" else torch.save({"state_dict": state}, path)
    loaded = load_model(job(weights=str(path)))
    assert loaded.module(torch.ones(1, 4))[0].tolist() == [[4.0, 5.0, 6.0]]


def test_the_digest_follows_the_weights(job: Any, tmp_path: Path) -> None:
    digests = set()
    for value in (1.0, 2.0):
        path = tmp_path / f"{value}.safetensors"
        save_file({"fc.weight": torch.full((3, 4), value), "fc.bias": torch.zeros(3)}, str(path))
        digests |= {load_model(job(weights=str(path))).weights_digest for _ in range(2)}
    assert len(digests) == 2


def test_a_pickle_that_is_more_than_tensors_is_refused(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(torch.nn.Linear(4, 3), path)
    with pytest.raises(InputError) as caught:
        load_model(job(weights=str(path)))
    assert str(caught.value) == (
        "model.weights: must be a .safetensors file or a .pt file of tensors (got w.pt: Unsupported global: GLOBAL "
        "torch.nn.modules.linear.Linear). Save the state_dict, not the module."
    )


class Running:
    """A pickle that runs a command as it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_a_pickle_that_runs_something_is_refused_without_advice_to_let_it(job: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"fc.weight": torch.zeros(3, 4)}, "more": Running()}, tmp_path / "w.pt")
    with pytest.raises(InputError) as caught:
        load_model(job(weights=str(tmp_path / "w.pt")))
    assert str(caught.value) == (
        "model.weights: must be a .safetensors file or a .pt file of tensors (got w.pt: Unsupported GLOBAL "
        f"{os.system.__module__}.system). It would run that when it is read: save the state_dict, of tensors alone."
    )


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ([1, 2], "a list"),
        (torch.ones(2), "a Tensor"),
        (None, "a NoneType"),
        ({1: torch.ones(2)}, "a dict of other keys"),
    ],
    ids=["list", "tensor", "nothing", "numbered"],
)
def test_a_file_that_holds_something_else_than_a_state_dict(job: Any, tmp_path: Path, state: Any, got: str) -> None:
    path = tmp_path / "w.pt"
    torch.save(state, path)
    with pytest.raises(InputError) as caught:
        load_model(job(weights=str(path)))
    assert str(caught.value) == (
        f"model.weights: must hold tensors by their names in the model (got {got} in w.pt). "
        "Save the model's state_dict()."
    )


@pytest.mark.parametrize(("content", "why"), [(b"", "EOFError"), (b"broken\n", "pop from empty list")])
def test_a_file_of_weights_that_is_none_is_said(job: Any, tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(InputError, match=rf"\(got w\.pt: {why}\)\. Is it one, and all of it there\?$"):
        load_model(job(weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize(
    ("prefix", "step"),
    [
        ("module.", "Take 'module.' off the names: {k.removeprefix('module.'): v for k, v in state.items()}."),
        ("a.b.", "Take 'a.b.' off the names: {k.removeprefix('a.b.'): v for k, v in state.items()}."),
        ("fc.", "Check model.args."),
    ],
)
def test_a_prefix_of_all_names_is_named(job: Any, tmp_path: Path, prefix: str, step: str) -> None:
    path = tmp_path / "w.pt"
    names = ("fc.weight", "fc.bias") if prefix != "fc." else ("weight", "other")
    torch.save({prefix + name: torch.zeros(3) for name in names}, path)
    with pytest.raises(InputError, match=r"^model\.weights: must fit the model \(got w\.pt: ") as caught:
        load_model(job(weights=str(path)))
    assert str(caught.value).endswith(f"). {step}")


@pytest.mark.parametrize(
    "keys", [("state_dict",), ("model", "weights"), ("params",), ("nets", "generator"), ("a", "b", "c", "d")]
)
def test_a_checkpoint_is_searched_for_the_one_set_of_the_models_names(
    job: Any, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Beside an optimizer's state, another network and figures."""
    held: Any = {"fc.weight": torch.full((3, 4), 2.0), "fc.bias": torch.zeros(3)}
    for key in reversed(keys):
        held = {key: held, "optimizer": {"state": {0: torch.ones(2)}, "lr": 0.1}, "other": {"d.weight": torch.ones(1)}}
    torch.save({**held, "epoch": 3}, tmp_path / "w.pt")
    loaded = load_model(job(weights=str(tmp_path / "w.pt")))
    assert loaded.module(torch.ones(1, 4))[0].tolist() == [[8.0, 8.0, 8.0]]


@pytest.mark.parametrize(
    ("one", "other", "prefix"),
    [
        ("['state_dict']", "['state_dict_ema']", ""),
        ("['model']", "['model_ema']", ""),
        ("['model']", "['ema']['module']", ""),
        ("['state_dict']", "['swa']", "module."),
        ("['params']", "['params_ema']", ""),
    ],
)
def test_a_checkpoint_of_several_sets_of_weights_is_refused(
    job: Any, tmp_path: Path, one: str, other: str, prefix: str
) -> None:
    """Such as their moving average, which is what was evaluated."""
    names = {"fc.weight": torch.zeros(3, 4), "fc.bias": torch.zeros(3)}
    held: Any = {}
    for at, state in ((one, names), (other, {prefix + name: t + 1 for name, t in names.items()})):
        first, *rest = re.findall(r"'(\w+)'", at)
        held[first] = {rest[0]: state, "updates": 7} if rest else state
    torch.save({**held, "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(InputError) as caught:
        load_model(job(weights=str(tmp_path / "w.pt")))
    assert str(caught.value) == (
        f"model.weights: must hold the model's weights once (got w.pt with 2 sets of them: {one}, {other}). Save the "
        f"one that is meant: torch.save(torch.load('w.pt'){other}, ...)."
    )


def test_a_file_that_was_cut_says_so(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"fc.weight": torch.zeros(3, 4), "fc.bias": torch.zeros(3)}, path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InputError) as caught:
        load_model(job(weights=str(path)))
    assert "PytorchStreamReader failed" in str(caught.value)
    path.unlink()
    with pytest.raises(InputError) as caught:
        load_weights(torch.nn.Linear(4, 3), path)
    assert str(caught.value) == (
        f"model.weights: must be a file that can be read (got {path}: No such file or directory). Is all of it there?"
    )


@pytest.mark.parametrize("kind", ["sparse", "meta", "lazy"])
def test_weights_without_dense_values_are_named(kind: str) -> None:
    network = torch.nn.LazyLinear(2) if kind == "lazy" else torch.nn.Linear(3, 2)
    if kind == "sparse":
        network.weight = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    if kind == "meta":
        network = network.to("meta")
    with pytest.raises(InputError) as caught:
        weights_digest(network)
    said = str(caught.value)
    named = "bias" if kind != "sparse" else "weight"
    assert said.startswith(f"model: every weight must be a dense tensor with values (got {named}: ")
    assert said.endswith("). Make it one before the model is returned.")


@pytest.mark.parametrize("strides", [(1,), (0,), (7,)])
def test_a_weight_without_elements_has_a_digest(strides: tuple[int]) -> None:
    """Whatever its strides: ONNX files hold empty constants for what an operator leaves out."""
    network = torch.nn.Linear(3, 2)
    network.register_buffer("roi", torch.zeros(8).as_strided((0,), strides))
    other = torch.nn.Linear(3, 2)
    other.load_state_dict({n: v for n, v in network.state_dict().items() if n != "roi"})
    other.register_buffer("roi", torch.zeros(0))
    assert weights_digest(network) == weights_digest(other)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_in_the_place_of_weights_is_told_so(job: Any, tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(4, 3)).save(tmp_path / "w.pt")
    with pytest.raises(InputError) as raised:
        load_model(job("w.pt"))
    assert str(raised.value) == (
        "model.weights: must be a file of tensors (got w.pt, of torch.jit.save). Save the state_dict of the module "
        "that it was made of, and name the file in model.torchscript."
    )


def test_a_state_dict_of_numpy_arrays_is_told_so(job: Any, tmp_path: Path) -> None:
    torch.save({name: w.numpy() for name, w in torch.nn.Linear(4, 3).state_dict().items()}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"Make its NumPy arrays tensors, by torch.from_numpy, and save it again"):
        load_model(job("w.pt"))


def test_weights_of_another_shape(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"fc.weight": torch.ones(5, 4), "fc.bias": torch.zeros(5)}, str(path))
    with pytest.raises(InputError, match=r"model\.weights: must fit the model \(got w\.safetensors: (.|\n)*mismatch"):
        load_model(job(weights=str(path)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_levels_without_their_scale_are_refused(job: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """`load_state_dict` casts whatever it gets."""
    path = tmp_path / "w.pt"
    torch.save({"fc.weight": torch.ones(3, 4).to(dtype), "fc.bias": torch.zeros(3)}, path)
    with pytest.raises(InputError, match=r"got fc\.weight in .* which is float32 in the model; 1 such"):
        load_model(job(weights=str(path)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_floating_type_are_taken(job: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "w.pt"
    weight = torch.randn(3, 4).to(dtype)
    torch.save({"fc.weight": weight, "fc.bias": torch.zeros(3)}, path)
    loaded = load_model(job(weights=str(path))).module.state_dict()
    (found,) = (x for name, x in loaded.items() if name.endswith("fc.weight"))
    assert torch.equal(found, weight.float())


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, and a layer beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.inner, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9)
        self.out.weight = self.words.weight


def test_a_tensor_of_several_names_may_be_saved_under_one(tmp_path: Path) -> None:
    """As safetensors' `save_model` does."""
    one, other, path = Tied(0), Tied(1), tmp_path / "tied.safetensors"
    save_model(one, str(path))
    load_weights(other, path)
    assert other.out.weight is other.words.weight
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_a_tensor_that_no_name_of_it_has_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "tied.safetensors"
    save_file({k: v.clone() for k, v in Tied(0).state_dict().items() if k.startswith(("inner", "out.bias"))}, str(path))
    with pytest.raises(InputError, match=r'Missing key\(s\) in state_dict: "words.weight", "out.weight"'):
        load_weights(Tied(1), path)
