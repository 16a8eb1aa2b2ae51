"""The plan of a hybrid module carried out by PyTorch on the CPU, with functions of PyTorch in the engines' place."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hybrids import BIAS, STEPS, hybrid

from trtpipe.bundle.hybrid import OperatorStep, to_bytes
from trtpipe.errors import InputError, MissingError
from trtpipe.progress import Silent
from trtpipe.runtime.hybrid_runner import DeviceRunner, HybridRunner
from trtpipe.trt.calls import Binding
from trtpipe.trt.monitor import Watch

ROOT = Path(__file__).resolve().parents[2]


class Doubling:
    """An engine's place: y = 2 x."""

    name = "doubling"
    device = "cpu"
    closed = 0

    def __init__(self, engine: bytes, **options: object) -> None:
        pass

    def __enter__(self) -> Doubling:
        return self

    def __exit__(self, *_: object) -> None:
        Doubling.closed += 1

    def run_tensors(self, inputs: Any, outputs: Any, /) -> list[torch.Tensor]:
        assert list(inputs) == ["x"]
        assert tuple(outputs) == ("y",)
        return [inputs["x"] * 2]


def test_its_engines_are_opened_with_the_options_of_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    class Engine(Doubling):
        notes = ("slower here",)

        def __init__(self, engine: bytes, **options: object) -> None:
            given.append(options)

    monkeypatch.setattr("trtpipe.runtime.hybrid_runner.DeviceRunner", Engine)
    with HybridRunner(to_bytes(hybrid()), version_compatible=True, without_lean_runtime=True) as opened:
        assert opened.notes == ("slower here",)
    assert given[0] == {"memory": "torch", "version_compatible": True, "without_lean_runtime": True}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HybridRunner]:
    """A function that makes a runner on the CPU with `Doubling` for its engines."""
    monkeypatch.setattr("trtpipe.runtime.hybrid_runner.DeviceRunner", Doubling)
    return lambda **changes: HybridRunner(to_bytes(hybrid(**changes)))


def with_op(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`STEPS` with another operation in the place of erfc."""
    return {"steps": (STEPS[0], OperatorStep(op=op, args=args, kwargs=kwargs, out="odd"), *STEPS[2:])}


def test_every_step_is_done_in_order(runner):
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    before = Doubling.closed
    with runner() as opened:
        assert opened.name == f"doubling, with PyTorch {torch.__version__}"
        found = opened.run({"image": x})
    from math import erfc

    wanted = 2 * (np.vectorize(erfc)(2 * x.astype(np.float64)) + 2 * BIAS)
    np.testing.assert_allclose(found["logits"], wanted, atol=1e-6)
    assert found["logits"].dtype == np.float32
    assert Doubling.closed == before + 2


def test_arguments_that_json_has_no_word_for(runner):
    ones = {"steps": (*STEPS[:2], OperatorStep(
        op="aten.full.default", args=([2, 3], {"float": "-inf"}),
        kwargs={"dtype": {"dtype": "float16"}, "device": {"device": "runner"}, "layout": {"layout": "strided"}},
        out="sum"), STEPS[3])}  # fmt: skip
    with runner(**ones) as opened:
        found = opened.run({"image": np.zeros((2, 3), np.float32)})
    assert found["logits"].dtype == np.float16
    assert (found["logits"] == -np.inf).all()


def test_an_operator_that_this_pytorch_lacks_or_that_writes_is_refused(runner):
    for op in ("aten.relu.out", "aten.no_such_thing.default", "aten.relu.no_such_overload"):
        with pytest.raises(InputError) as caught, runner(**with_op(op, {"value": "first"})):
            pass
        assert str(caught.value).startswith(
            f"engine: {op} must be an operator of PyTorch {torch.__version__} that writes to no argument (got "
        )


def test_an_operation_that_fails_is_named(runner):
    bad = with_op("aten.view.default", {"value": "first"}, [7, 7])
    with runner(**bad) as opened, pytest.raises(InputError) as caught:
        opened.run({"image": np.zeros((2, 3), np.float32)})
    assert str(caught.value).startswith(f"engine: aten.view.default failed in PyTorch {torch.__version__} (")
    assert str(caught.value).endswith("Use the PyTorch that the bundle was built with.")


def test_words_that_pytorch_does_not_have_are_refused(runner):
    bad = with_op("aten.full.default", [2, 3], 1.0, dtype={"dtype": "hub"})
    with runner(**bad) as opened, pytest.raises(InputError, match=r"dtype must be one of PyTorch's \(got 'hub'\)"):
        opened.run({"image": np.zeros((2, 3), np.float32)})


def test_inputs_and_order_of_use(runner):
    opened = runner()
    with pytest.raises(InputError, match=r"^engine: the runner is not open"):
        opened.run({"image": np.zeros((2, 3), np.float32)})
    with opened, pytest.raises(InputError, match=r"^inputs: must be image \(got x\)\. Name each one\."):
        opened.run({"x": np.zeros((2, 3), np.float32)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_pytorch_without_a_gpu_is_refused():
    with pytest.raises(MissingError) as caught, HybridRunner(to_bytes(hybrid())):
        pass
    assert str(caught.value) == (
        "engine: PyTorch with CUDA is not here, and some operations of a hybrid engine run in it "
        f"({torch.__version__}, which sees no GPU). Install it: pip install torch."
    )


def test_without_pytorch_it_says_what_to_install():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
sys.path[:0] = {paths!r}
from hybrids import hybrid
from trtpipe.bundle.hybrid import to_bytes
from trtpipe.runtime.hybrid_runner import HybridRunner
try:
    HybridRunner(to_bytes(hybrid())).__enter__()
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code.format(paths=[str(ROOT), str(ROOT / "tests" / "support")])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == (
        "engine: PyTorch with CUDA is not here, and some operations of a hybrid engine run in it (none). "
        "Install it: pip install torch.\n"
    ), done.stderr


class Calls:
    """An execution context on the CPU: y = 2 x, through the addresses that it was given."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()

    def choose(self, profile: int, shapes: Any, stream: int) -> bool:
        self.log.append((profile, shapes, stream))
        self.shape = shapes["x"]
        return True

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.shape

    def set_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute(self, stream: int) -> bool:
        count = int(np.prod(self.shape))
        x, y = (np.ctypeslib.as_array((ctypes.c_float * count).from_address(self.addresses[n])) for n in ("x", "y"))
        y[:] = 2 * x
        return stream == 7


def test_an_engine_reads_and_writes_tensors_where_they_are(monkeypatch):
    class Here(DeviceRunner):
        device = "cpu"
        _watch = Watch(Silent(), "error")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    runner, calls = Here(b""), Calls()
    ranges = (((1, 3), (1, 3), (2, 3)), ((3, 3), (4, 3), (8, 3)))
    runner.bindings = (Binding("x", "float32", (-1, 3), True, ranges), Binding("y", "float32", (-1, 3), False, ()))
    runner._engine, runner._idle, runner.profiles = object(), [SimpleNamespace(calls=calls, close=list)], 2
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()  # not contiguous: TensorRT reads rows
    (y,) = runner.run_tensors({"x": x}, ("y",))
    torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)
    assert calls.log == [(1, {"x": (4, 3)}, 7)]
    with pytest.raises(
        InputError, match=r"^inputs\.x: must be torch\.float32 \(got torch\.float16\)\. Build it again\.$"
    ):
        runner.run_tensors({"x": x.half()}, ("y",))
    with pytest.raises(InputError, match="shapes must be within a profile"):
        runner.run_tensors({"x": torch.zeros(9, 3)}, ("y",))
