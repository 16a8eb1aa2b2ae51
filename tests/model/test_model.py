"""Loading a model: sources, bindings, and the messages of what can be wrong with them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nets
import numpy as np
import pytest
import torch

from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.load import read_jobs
from trtpipe.model import load
from trtpipe.model.bindings import bind, evaluating
from trtpipe.model.capture import capture
from trtpipe.model.load import load_model
from trtpipe.model.output_specs import output_specs
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, TensorSpec

MODULE = """
import collections

import torch


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = torch.nn.Linear(4, width)

    def forward(self, x):
        return self.fc(x)


def make(width=3):
    return Net(width)


def two(width=3):
    class Two(Net):
        def forward(self, x):
            return {"b": self.fc(x), "a": x.argmax(1), "c": x.to(torch.float16)}

    return Two(width)


Pair = collections.namedtuple("Pair", "scores boxes")


def named():
    class Named(Net):
        def forward(self, x):
            return Pair(x.sum(1), x)

    return Named(3)


def masked():
    class Masked(torch.nn.Module):
        def forward(self, left, mask=None, right=None):
            return left + right

    return Masked()


def pair():
    class Two(torch.nn.Module):
        def forward(self, left, right):
            return left - right

    return Two()


def typed(dtype):
    class Typed(torch.nn.Module):
        def forward(self, x):
            return (x > 0).to(getattr(torch, dtype))

    return Typed()


def number():
    return 3


broken = 3
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A function that makes a job whose model is in tmp_path/mynet.py; keywords replace parts of its model section."""
    (tmp_path / "mynet.py").write_text(MODULE)

    def make(outputs: tuple[str, ...] = ("y",), width: int = 4, **model: Any) -> Job:
        raw = {
            "name": "t",
            "model": {k: v for k, v in ({"factory": "mynet:make"} | model).items() if v is not None},
            "inputs": {"x": {"shape": ["N", width], "N": {"min": 1, "opt": 2, "max": 4}}},
            "outputs": {n: {} for n in outputs},
            "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.9}},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(raw))
        return read_jobs(tmp_path / "job.yaml", paths_exist=False)[0]

    yield make
    sys.modules.pop("mynet", None)


def test_a_factory_beside_the_job(job: Any, tmp_path: Path) -> None:
    loaded = load_model(job(args={"width": 6}))
    assert loaded.outputs == (TensorSpec("y", "float32", ("N", 6), {"N": DimRange(1, 2, 4)}),)
    assert not loaded.module.training
    assert not any(p.requires_grad for p in loaded.module.parameters())


def test_outputs_of_a_dict_are_taken_by_name(job: Any, tmp_path: Path) -> None:
    loaded = load_model(job(("a", "b"), factory="mynet:two"))
    a, b = loaded.module(torch.arange(8.0).reshape(2, 4))
    assert a.tolist() == [3, 3]
    assert b.shape == (2, 3)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"factory": "no_such_module:make"}, InputError, "model.factory: must name a module that can be imported"),
        ({"factory": "mynet:mkae"}, InputError, "model.factory: must be package.module:callable (got 'mynet:mkae'"),
        ({"factory": "mynet:broken"}, InputError, "model.factory: must be package.module:callable (got 'mynet:br"),
        ({"factory": "mynet:number"}, InputError, "model.factory: must return an nn.Module (got int from mynet:"),
        ({"args": {"widht": 3}}, InputError, "model.args: must fit the factory mynet:make (got "),
    ],
)
def test_messages(job: Any, tmp_path: Path, model: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        load_model(job(**model))
    assert str(raised.value).startswith(message)


def test_a_factory_may_take_its_arguments_apart(job: Any, tmp_path: Path) -> None:
    (tmp_path / "popping.py").write_text(
        "import torch\n\n\ndef make(cfg):\n    cfg.pop('deep').clear()\n    return torch.nn.Linear(4, cfg.pop('width'))\n"
    )
    args = {"cfg": {"width": 3, "deep": {"er": 1}}}
    made = job(factory="popping:make", args=args)
    for _ in range(2):
        assert load_model(made).module.network.out_features == 3
    assert made.model.args == args


def test_a_package_that_the_users_module_needs(job: Any, tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    with pytest.raises(InputError) as raised:
        load_model(job(factory="needy:make"))
    assert str(raised.value) == (
        "model.factory: importing needy raised ModuleNotFoundError: No module named 'surely_not_installed'\n"
        f"  File {tmp_path / 'needy.py'}, line 1, in <module>\n"
        "    import surely_not_installed"
    )


def test_a_factory_that_raises(job: Any, tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("import helper\ndef make(**args):\n    return helper.weights('absent.bin')\n")
    (tmp_path / "helper.py").write_text("def weights(path):\n    return open(path)\n")
    with pytest.raises(InputError) as raised:
        load_model(job(factory="raising:make"))
    assert str(raised.value) == (
        "model.factory: raising:make raised FileNotFoundError: [Errno 2] No such file or directory: 'absent.bin'\n"
        f"  File {tmp_path / 'raising.py'}, line 3, in make\n"
        "    return helper.weights('absent.bin')\n"
        f"  File {tmp_path / 'helper.py'}, line 2, in weights\n"
        "    return open(path)"
    )


def test_a_type_error_inside_the_factory_is_not_about_its_arguments(job: Any, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text("def make(**args):\n    return len(3)\n")
    with pytest.raises(InputError, match=r"^model\.factory: typed:make raised TypeError: object of type 'int' has no"):
        load_model(job(factory="typed:make"))


def test_more_outputs_than_named(job: Any, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"outputs: must be the tensors that the model returns \(got z, and it returns a dict of b: "
    ):
        load_model(job(("z",), factory="mynet:two"))
    with pytest.raises(
        InputError, match=r"outputs: must be the tensors that the model returns \(got y, z, and it returns float32"
    ):
        load_model(job(("y", "z")))


def test_an_output_cannot_be_called_like_an_input() -> None:
    """The job would be told to name what the next command refuses."""
    bound = nets.loaded(torch.nn.Identity(), outputs=("img",), out_shape=("N", 3, 8, 8)).module
    with pytest.raises(InputError) as caught:
        bound.outputs({"x": torch.zeros(1, 3, 8, 8), "y": torch.zeros(1)})
    assert str(caught.value).endswith(" x is an input's name too: name that input otherwise in the job.")


def test_an_input_that_the_model_cannot_take(job: Any, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"model: it fails on zeros of the declared inputs \(.*\) at mynet.*: RuntimeError: "
    ):
        load_model(job(width=5))


@pytest.mark.parametrize(("shape", "step"), [
    (["N", 3, "H", 8],
     "A range means every size in it, H 9 too. Make the model take them (pad or resize to the skip's size, "
     "x.shape[-2:], before a concat), or give each size a job of its own, as numbers in inputs.*.shape."),
    (["N", 3, 9, 8], "Change inputs.*.shape or dtype in the job, or that line of the model."),
])  # fmt: skip
def test_a_size_of_a_range_that_the_model_cannot_take(shape: list[Any], step: str) -> None:
    class Halved(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.nn.functional.interpolate(x[..., ::2, :], scale_factor=(2.0, 1.0))], 1)

    dims = {"N": DimRange(1, 2, 4), "H": DimRange(4, 8, 16)}
    spec = TensorSpec("x", "float32", tuple(shape), {n: r for n, r in dims.items() if n in shape})
    with pytest.raises(InputError) as caught:
        output_specs(bind(Halved(), (spec,), {}, ("y",)), (spec,), {"y": "float32"})
    assert str(caught.value).startswith("model: it fails on zeros of the declared inputs (x float32 [2, 3, 9, 8]) at ")
    assert str(caught.value).endswith(f" {step}")


def test_a_file_that_a_model_lacks_is_nothing_of_its_inputs() -> None:
    class Full(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OSError(28, "No space left on device", "/scratch/x")

    spec = TensorSpec("x", "float32", ("N", 3), {"N": DimRange(1, 2, 4)})
    with pytest.raises(InputError) as caught:
        output_specs(bind(Full(), (spec,), {}, ("y",)), (spec,), {"y": "float32"})
    assert str(caught.value).endswith(
        " It is about a file or device that the model uses, not about its inputs: see the line above."
    )


def test_an_exported_program(job: Any, tmp_path: Path) -> None:
    batch = torch.export.Dim("N", min=1, max=4)
    network = torch.nn.Linear(4, 3)
    torch.export.save(
        torch.export.export(network, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},)), tmp_path / "p.pt2"
    )
    loaded = load_model(job(factory=None, program=str(tmp_path / "p.pt2")))
    x = torch.ones(3, 4)
    torch.testing.assert_close(loaded.module(x)[0], network(x))


@pytest.mark.parametrize(("exported", "axis", "asked", "said"), [
    ((2, 6), "N", (2, 6), None), ((2, 6), "N", (3, 4), None), ((1, 6), "N", (1, 6), None), ((2, 6), 5, None, None),
    ((2, 6), "N", (1, 6), None),  # torch.export's own lower end
    ((3, 6), "N", (2, 6), "inputs.x.N: must be within what the program was exported for, 3 to 6 on axis 0 (got 2 to 6)"),
    ((1, 6), "N", (1, 7), "inputs.x.N: must be within what the program was exported for, 1 to 6 on axis 0 (got 1 to 7)"),
    ((1, 6), 7, None, "inputs.x.shape: must be within what the program was exported for, 1 to 6 on axis 0 (got 7)"),
    (None, 2, None, None), (None, "N", (2, 2), None),
    (None, 3, None, "inputs.x.shape: must be within what the program was exported for, 2 on axis 0 (got 3)"),
    (None, "N", (1, 4), "inputs.x.N: must be within what the program was exported for, 2 on axis 0 (got 1 to 4)"),
])  # fmt: skip
def test_a_program_is_built_only_for_sizes_it_was_exported_for(
    exported: Any, axis: Any, asked: Any, said: Any, job: Any, tmp_path: Path
) -> None:
    """Its own ranges are not checked when it runs: a size beyond them would go through unseen."""
    shapes = None if exported is None else ({0: torch.export.Dim("N", min=exported[0], max=exported[1])},)
    sample = torch.zeros(3 if exported == (3, 6) else 2, 4)
    program = torch.export.export(torch.nn.Linear(4, 3), (sample,), dynamic_shapes=shapes)
    dims = {} if asked is None else {"N": DimRange(asked[0], asked[0], asked[1])}
    specs = (TensorSpec("x", "float32", (axis, 4), dims),)
    if said is None:
        load._require_sizes(program, specs)
        return
    with pytest.raises(InputError) as caught:
        load._require_sizes(program, specs)
    assert str(caught.value) == f"{said}. Change it, or export the program for that."


def test_uint8_is_normalised_inside() -> None:
    spec = (TensorSpec("x", "uint8", (1, 2, 1, 1)),)
    module = bind(torch.nn.Identity(), spec, {"x": ((0.5, 0.25), (0.5, 1.0))}, ("y",))
    x = torch.tensor([255, 51], dtype=torch.uint8).reshape(1, 2, 1, 1)
    # (1 - 0.5) / 0.5 = 1 and (0.2 - 0.25) / 1 = -0.05
    assert module(x)[0].flatten().tolist() == pytest.approx([1.0, -0.05], abs=1e-6)


class Bytes(torch.nn.Module):
    """Bytes as PyTorch has them: `way` is what a model may do with them and not with floats."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.fc = way, torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "branch" and x.dtype == torch.uint8:
            x = x.float() / 255
        elif self.way == "wrap":
            x = (x + 100).float()
        elif self.way == "bits":
            x = (x & 15).float()
        elif self.way == "shifts":
            x = (((x << 4) | (x >> 4)) ^ torch.bitwise_right_shift(x, 1)).float()
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["branch", "wrap", "bits", "shifts", "floats alone"])
def test_uint8_is_given_as_it_is_where_the_network_takes_it(way: str, tmp_path: Path) -> None:
    spec = (TensorSpec("x", "uint8", ("N", 3, 2, 2), {"N": DimRange(1, 4, 8)}),)
    network = Bytes(way).eval()
    x = torch.arange(48, dtype=torch.uint8).reshape(4, 3, 2, 2) * 5
    module = bind(network, spec, {}, ("y",))
    (output,), notes = output_specs(module, spec, {"y": "float32"})
    expected = network(x.float() if way == "floats alone" else x)
    torch.testing.assert_close(module(x)[0], expected)
    said = ("inputs.x: the model takes no uint8, and is given float32 from 0 to 255",)
    assert notes == (said if way == "floats alone" else ())
    loaded = LoadedModel(module, spec, (output,), "0" * 64, "test")
    captured = capture(loaded)
    torch.testing.assert_close(captured.graph(x)[0], expected)
    if way in ("bits", "shifts"):  # the exporter had shifts of bytes in int8
        made = to_onnx(quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={}))
        with OrtRunner(made.data, as_written=True) as runner:
            np.testing.assert_allclose(
                runner.run({"x": x.numpy()})["y"], expected.detach().numpy(), rtol=1e-4, atol=1e-4
            )
    exported = torch.export.export(network, (x.float() if way == "floats alone" else x,))
    program = bind(evaluating(exported.module()), spec, {}, ("y",))
    output_specs(program, (replace(spec[0], shape=(4, 3, 2, 2), dims={}),), {"y": "float32"})
    torch.testing.assert_close(program(x)[0], expected)


def test_uint8_without_normalisation_keeps_its_range() -> None:
    spec = (TensorSpec("x", "uint8", (1, 1)),)
    assert bind(torch.nn.Identity(), spec, {}, ("y",))(torch.tensor([[200]], dtype=torch.uint8))[0].item() == 200.0


@pytest.mark.parametrize("names", [("scores", "boxes"), ("boxes", "scores")])
def test_outputs_of_a_named_tuple_are_taken_by_name(job: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    loaded = load_model(job(names, factory="mynet:named"))
    outputs = dict(zip(names, loaded.module(torch.ones(2, 4)), strict=True))
    assert outputs["scores"].shape == (2,)
    assert outputs["boxes"].shape == (2, 4)


def two_inputs(folder: Path, factory: str, names: tuple[str, str]) -> Job:
    (folder / "mynet.py").write_text(MODULE)
    spec = {"shape": ["N", 4], "N": {"min": 1, "opt": 2, "max": 4}}
    raw = {
        "name": "t",
        "model": {"factory": factory},
        "inputs": dict.fromkeys(names, spec),
        "outputs": {"y": {}},
        "check": {"arrays": "x.npz", "limits": {"cosine_min": 0.9}},
    }
    (folder / "job.yaml").write_text(json.dumps(raw))
    return read_jobs(folder / "job.yaml", paths_exist=False)[0]


@pytest.mark.parametrize("names", [("left", "right"), ("a", "b")])
def test_inputs_are_taken_in_order(tmp_path: Path, names: tuple[str, str]) -> None:
    try:
        assert load_model(two_inputs(tmp_path, "mynet:pair", names)).outputs[0].name == "y"
    finally:
        sys.modules.pop("mynet", None)


@pytest.mark.parametrize(
    ("factory", "names", "taken", "step"),
    [
        ("mynet:pair", ("right", "left"), "left, right", "Reorder or rename them."),
        ("mynet:pair", ("right", "b"), "left, right", "Reorder or rename them."),
        ("mynet:masked", ("left", "right"), "left, mask, right", "Wrap the model in a module whose forward takes (left, right)."),
    ],
)  # fmt: skip
def test_inputs_are_not_taken_in_another_order_than_forwards(
    tmp_path: Path, factory: str, names: tuple[str, str], taken: str, step: str
) -> None:
    try:
        with pytest.raises(InputError) as caught:
            load_model(two_inputs(tmp_path, factory, names))
    finally:
        sys.modules.pop("mynet", None)
    assert str(caught.value) == (
        f"inputs: must be in the order of the model's forward({taken}) (got {', '.join(names)}), which is given them "
        f"in order. {step}"
    )


KINDS = {"bool": 0, "int32": 1, "int64": 1, "float32": 2, "float16": 2}
#: Whole numbers that a binding holds each of, of those that an output of integers may hold.
HOLDS = {"int32": 2**31 - 1, "int64": 2**63 - 1, "float32": 2**24, "float16": 2**11}


@pytest.mark.parametrize("declared", list(KINDS))
@pytest.mark.parametrize("own", list(KINDS))
def test_an_output_has_the_declared_dtype_or_is_refused(job: Any, tmp_path: Path, own: str, declared: str) -> None:
    """In the ONNX file that is compiled, whatever the model returns."""
    import onnx

    made = job(factory="mynet:typed", args={"dtype": own})
    made = made.model_copy(update={"outputs": {"y": made.outputs["y"].model_copy(update={"dtype": declared})}})
    if KINDS[declared] < KINDS[own]:
        with pytest.raises(InputError) as caught:
            load_model(made)
        returned = "float32" if KINDS[own] == 2 else own
        legal = "float32 or float16" if KINDS[own] == 2 else f"{own} or a float type"
        assert str(caught.value) == (
            f"outputs.y.dtype: must be {legal} for what the model returns, {returned} (got {declared}). Change it, or "
            "round in the model."
        )
        return
    loaded = load_model(made)
    said = [note for note in loaded.notes if note.startswith("outputs.y")]
    assert bool(said) == (KINDS[own] == 1 and HOLDS[declared] < HOLDS[own])
    for note in said:
        assert note == (
            f"outputs.y: the model returns {own}, and {declared}, as it is bound, holds whole numbers up to "
            f"{HOLDS[declared]:,}. Where there may be larger ones, declare dtype: {own}"
        )
    captured = capture(loaded)
    program = quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={})
    graph = onnx.load_from_string(to_onnx(program).data).graph
    kind = onnx.helper.tensor_dtype_to_np_dtype(graph.output[0].type.tensor_type.elem_type)
    assert kind == np.dtype(declared)
    found = OrtRunner(to_onnx(program).data).run({"x": np.array([[-1, 0, 1, 2]], np.float32)})["y"]
    assert found.dtype == np.dtype(declared)
    assert found.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("word", ["class", "from", "in", "lambda", "None"])
def test_a_keyword_of_python_as_a_name(job: Any, tmp_path: Path, word: str) -> None:
    """torch.export writes code with the names of modules in it."""
    (tmp_path / f"heads_{word}.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__(); self.heads = nn.ModuleDict({{{word!r}: nn.Linear(4, 3)}})\n"
        "    def forward(self, x):\n"
        f"        return self.heads[{word!r}](x)\n"
    )
    with pytest.raises(InputError) as raised:
        load_model(job(factory=f"heads_{word}:Net", args={}))
    assert str(raised.value) == (
        "model.factory: no module, parameter or buffer may be named by a keyword of Python (got "
        f"heads.{word}), which torch.export cannot write. Name it another, as class_."
    )
