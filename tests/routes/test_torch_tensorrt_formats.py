"""FP8, INT4 and NVFP4 through the real Torch-TensorRT into real TensorRT-RTX engines, without a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from models import Attention, job, line
from test_hybrid_route import Odd, check_wiring, compiled

from trtpipe.job.sections import Precision
from trtpipe.progress import Silent
from trtpipe.quantization.formats import fp4_codes
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import modes_of
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.routes.torch_tensorrt import route
from trtpipe.routes.torch_tensorrt.converters import packed

#: Precision, how many layers of the network give each narrow type, and from where on a portable engine runs.
CASES = [
    (Precision(fp8_mode=True), {"FP8": 14}, "8.9"),
    (Precision(fp8_mode=True, int8_mode=True), {"FP8": 12, "INT8": 6}, "8.9"),
    (Precision(weights="int4"), {"INT4": 5}, None),
    (Precision(weights="nvfp4"), {"FP4": 5, "FP8": 5}, "12.0"),
    (Precision(nvfp4_mode=True), {"FP4": 8, "FP8": 5}, "12.0"),
]


@pytest.fixture(scope="module")
def net():
    return line(Attention().eval(), 16, 10)


def quantized(model, precision, half=None):
    narrow = Narrow(modes_of(precision), Statistics(model.amax, {}))
    return quantize(
        model.captured, int8=precision.int8_mode, half=half, keep=Keep(), amax=model.amax, ranges={}, narrow=narrow
    )


@pytest.mark.parametrize(("precision", "types", "floor"), CASES)
def test_each_format_reaches_the_network_and_the_engine(world, net, precision, types, floor):
    wanted = job("torch_tensorrt", "tensorrt_rtx", precision=precision.model_dump(), calibration={"arrays": "/x.npy"})
    engine = route.compile_engine(wanted, net.loaded, quantized(net, precision, torch.float16), Silent())
    assert {k: v for k, v in world.dtypes.items() if k in ("INT8", "FP8", "INT4", "FP4")} == types
    assert engine.data[:4] == b"vtrt"
    assert engine.minimum_compute_capability == floor
    said = f"portable engine: its number formats need compute capability {floor} or later, not Ampere's 8.0"
    assert (said in engine.notes) == (floor is not None)


def test_the_scales_of_fp8_are_the_tables(world, net):
    route.compile_engine(
        job("torch_tensorrt", "tensorrt_rtx"), net.loaded, quantized(net, Precision(fp8_mode=True)), Silent()
    )
    stays_wide = ("stem:input", "head:input")
    network = net.loaded.module.network
    modules = (network.conv, network.q, network.k, network.v, network.mlp, network.narrow)
    largest = [a for k, a in net.amax.items() if k not in stays_wide]
    largest += [float(m.weight.abs().max()) for m in modules]
    assert {s.item() for s in world.scales.values()} == {np.float32(a) / np.float32(448) for a in largest}


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_4_bits_are_packed_as_onnx_packs_them(dtype):
    import onnx_ir as ir

    values = torch.tensor([[-6.0, 1.0, 0.0, 3.0], [6.0, -1.0, 2.0, -4.0]])
    codes = values.to(torch.int8) if dtype is ml_dtypes.int4 else fp4_codes(values)
    kind = ir.DataType.INT4 if dtype is ml_dtypes.int4 else ir.DataType.FLOAT4E2M1
    assert packed(codes).numpy().tobytes() == ir.Tensor(values.numpy().astype(dtype), dtype=kind).tobytes()


class Cut(torch.nn.Module):
    """Linears around an operation without a converter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Conv2d(3, 128, 4, 4)
        self.a, self.b, self.c, self.d = (torch.nn.Linear(128, 128) for _ in range(4))
        self.odd = Odd()
        self.head = torch.nn.Linear(128, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x) * 6).flatten(2).transpose(1, 2)
        x = self.odd(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.head(torch.relu(self.d(torch.relu(self.c(x)))).mean(1))


@pytest.mark.parametrize("precision", [CASES[1][0], CASES[2][0], CASES[3][0]])
def test_a_hybrid_keeps_each_weight_in_its_own_engine(world, precision):
    model = line(Cut().eval(), 16, 5)
    program = quantized(model, precision)
    engine, module = compiled(world, model, program)
    assert [f.op for f in engine.fallback] == ["aten.erfc.default"]
    assert len(module.engines) == 2
    assert [len(part.bindings) for part in world.parts] == [2, 2]  # nothing but activations between them
    check_wiring(world.parts, engine, program.program.module(), 1e-5)
