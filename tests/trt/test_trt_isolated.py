"""The builder's own process: the same bytes from anywhere, errors and cancelling as in this process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import BuildError, Cancelled
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.trt import isolated
from trtpipe.trt.isolated import Isolated, build_isolated
from trtpipe.values import DimRange, OnnxModel, TensorSpec

ROOT = Path(__file__).parents[2]
BUILD = Build.model_validate_json("{}")


def network() -> OnnxModel:
    """Four quantized convolutions with residual adds and a dynamic batch: plans of such differ from build to build."""
    import numpy as np

    random = np.random.default_rng(0)
    constants, nodes, x = [], [], "x"

    def constant(name: str, value: object) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    zero = constant("zero", np.int8(0))
    for k in range(4):
        scale = constant(f"scale{k}", np.float32(0.05))
        weight = constant(f"w{k}", random.integers(-127, 128, (8, 8, 3, 3)).astype(np.int8))
        nodes += [
            helper.make_node("QuantizeLinear", [x, scale, zero], [f"q{k}"]),
            helper.make_node("DequantizeLinear", [f"q{k}", scale, zero], [f"d{k}"]),
            helper.make_node("DequantizeLinear", [weight, constant(f"ws{k}", np.float32(0.01))], [f"dw{k}"]),
            helper.make_node("Conv", [f"d{k}", f"dw{k}"], [f"c{k}"], pads=[1, 1, 1, 1]),
            helper.make_node("Add", [f"c{k}", f"d{k}"], [f"a{k}"]),
            helper.make_node("Relu", [f"a{k}"], ["y" if k == 3 else f"r{k}"]),
        ]
        x = f"r{k}"
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 8, 16, 16]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], constants)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()
    onnx.checker.check_model(data)
    dims = {"N": DimRange(1, 8, 32)}
    spec = [TensorSpec(n, "float32", ("N", 8, 16, 16), dims) for n in ("x", "y")]
    return OnnxModel(data, 20, (spec[0],), (spec[1],))


def test_the_same_bytes_every_time_and_from_anywhere(tmp_path: Path) -> None:
    engines = {build_isolated(network(), BUILD, progress=Silent()).data for _ in range(3)}
    assert len(engines) == 1
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_trt_isolated import BUILD, Silent, build_isolated, network\n"
        "sys.stdout.buffer.write(build_isolated(network(), BUILD, progress=Silent()).data)"
    )
    elsewhere = tmp_path / ("a" * 200)
    elsewhere.mkdir()
    command = [sys.executable, "-c", program, str(ROOT), str(Path(__file__).parent)]
    environment = {**os.environ, "FILLER": "x" * 20000}
    found = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, check=True).stdout
    assert found == engines.pop()


def test_any_path_reaches_the_builder(tmp_path: Path) -> None:
    """Whatever the encoding of this process, and whatever separates things elsewhere."""
    odd = tmp_path / os.fsdecode(b"d\xc3\xa9 \xff\n\x01 'b'")
    odd.mkdir()
    for name in ("trtpipe", "calib"):
        (odd / name).symlink_to(ROOT / name)
    program = (
        "import os, sys; odd, tests = sys.argv[1:]\n"
        "packages = [p for p in sys.path if p and not os.path.isdir(os.path.join(p, 'trtpipe'))]\n"
        "sys.path[:] = [odd, tests, *packages]\n"
        "from test_trt_isolated import BUILD, Silent, build_isolated, network\n"
        "import trtpipe; assert trtpipe.__file__.startswith(odd)\n"
        "print(sys.getfilesystemencoding(), len(build_isolated(network(), BUILD, progress=Silent()).data) > 0)"
    )
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("LC_", "LANG", "PYTHON"))}
    for locale, encoding in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ascii"), ({}, "utf-8"):
        command = [sys.executable, "-c", program, os.fsencode(odd), str(Path(__file__).parent)]
        ran = subprocess.run(command, cwd="/", env={**kept, **locale}, capture_output=True, text=True, check=False)
        assert ran.stdout == f"{encoding} True\n", ran.stderr


def test_errors_of_the_builder_are_raised_here() -> None:
    model = network()
    broken = OnnxModel(b"nothing", model.opset, model.inputs, model.outputs)
    with pytest.raises(BuildError):
        build_isolated(broken, BUILD, progress=Silent())


def test_a_builder_that_dies_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_BOOTSTRAP", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(BuildError) as caught:
        build_isolated(network(), BUILD, progress=Silent())
    assert str(caught.value) == (
        "build: TensorRT-RTX's process ended without an engine (SIGSEGV). What it printed is above; set "
        "build.log_level to verbose to see what it was doing."
    )


def test_the_builder_has_the_gpu_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where refit or strip_plan has it ask CUDA, it must see what this process sees, and nothing more of it."""
    for name, value in (("CUDA_VISIBLE_DEVICES", "1"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("OTHER", "x")):
        monkeypatch.setenv(name, value)
    given: dict[str, str] = {}
    real = subprocess.Popen

    def started(*arguments: Any, env: dict[str, str], **more: Any) -> Any:
        given.update(env)
        return real(*arguments, env=env, **more)

    monkeypatch.setattr("trtpipe.trt.isolated.subprocess.Popen", started)
    with Isolated():
        pass
    assert {n: v for n, v in given.items() if n.startswith("CUDA_")} == {
        "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    assert "OTHER" not in given


def test_cancelling_ends_the_builder() -> None:
    class Impatient(Silent):
        def cancelled(self) -> bool:
            return True

    with pytest.raises(Cancelled, match="build: cancelled by the user; nothing was written"):
        build_isolated(network(), BUILD, progress=Impatient())


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("now = libc.personality(0xFFFFFFFF)", "now = -1"),
        ("from trtpipe.trt.isolated import serve",
         "from trtpipe.trt import isolated; isolated._MAPS = isolated.Path('/no/maps'); serve = isolated.serve"),
    ],
)  # fmt: skip
def test_a_sandbox_that_forbids_fixed_addresses_is_in_the_notes(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers forbid the one, and may be without /proc."""
    assert line in isolated._BOOTSTRAP
    monkeypatch.setattr(isolated, "_BOOTSTRAP", isolated._BOOTSTRAP.replace(line, instead))
    assert isolated.RANDOMIZED in build_isolated(network(), BUILD, progress=Silent()).notes


def test_it_builds_while_this_process_does_something_else() -> None:
    steps: list[int] = []

    class Steps(Silent):
        def step(self, done: int, total: int | None, unit: str) -> None:
            steps.append(done)

    with Isolated() as builder:
        builder.start(network(), BUILD)
        while not steps:
            builder.look(Steps())
        engine = builder.finish(Silent())
    assert engine.data == build_isolated(network(), BUILD, progress=Silent()).data


def test_looking_raises_what_finishing_would() -> None:
    broken = OnnxModel(b"nothing", 20, network().inputs, network().outputs)

    def looking() -> None:
        with Isolated() as builder:
            builder.start(broken, BUILD)
            while True:
                builder.look(Silent())

    with pytest.raises(BuildError):
        looking()


def test_the_context_ends_a_process_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_BOOTSTRAP", "import time; time.sleep(1000)")
    large = OnnxModel(bytes(10_000_000), 20, (), ())
    with Isolated() as builder:
        builder.start(large, BUILD)
        assert builder._sender is not None
    assert not builder._sender.is_alive()
    assert builder._child.returncode == -9


class Told(Isolated):
    """Keeps what it sends."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def _send(self, *parts: bytes) -> None:
        self.parts += parts
        super()._send(*parts)


@pytest.fixture(scope="module")
def told() -> list[bytes]:
    with Told() as builder:
        builder.start(network(), BUILD)
        builder.finish(Silent())
        return builder.parts


@pytest.mark.parametrize("part", range(6), ids=["head", "libraries", "places", "sizes", "request", "model"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_parent_that_is_stopped_meanwhile_leaves_a_quiet_child(part: int, share: float, told: list[bytes]) -> None:
    assert len(told) == 6
    reader, writer = os.pipe()
    head = struct.pack("q", writer) + told[0][8:]
    given = b"".join([head, *told[1:]][:part]) + told[part][: int(share * len(told[part]))]
    command = [sys.executable, "-s", "-S", "-c", isolated._BOOTSTRAP]
    ended = subprocess.run(command, input=given, capture_output=True, pass_fds=(writer,), timeout=60, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    with os.fdopen(reader, "rb") as results:
        assert results.read() == b""


def test_a_start_that_is_interrupted_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated, "_libraries", interrupted)
    builder = Isolated()
    with pytest.raises(KeyboardInterrupt), builder:
        raise AssertionError("it must not be entered")
    assert builder._child.returncode is not None
